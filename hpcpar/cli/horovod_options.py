"""The options of Horovod's launcher: each is a variable of the ranks, asks for nothing here, or is refused.

--cycle-time-ms 3.5        HOROVOD_CYCLE_TIME=3.5
--mpi, --no-autotune       it is so anyway
--gloo                     Error: --gloo: there is no Gloo here ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import click
from click.core import ParameterSource

from hpcpar.errors import ConfigError, HpcparError
from hpcpar.launch.horovod_settings import LOG_LEVELS
from hpcpar.units import MiB

Command = Callable[..., Any]

COUNT, AMOUNT = click.IntRange(min=0), click.FloatRange(min=0)
TIME = click.FloatRange(min=0, min_open=True)
LEVEL = click.Choice(LOG_LEVELS, case_sensitive=False)

# Option -> (variable, type or None for a flag, help).
KNOBS: dict[str, tuple[str, Any, str]] = {
    "--fusion-threshold-mb": (
        *("HOROVOD_FUSION_THRESHOLD", COUNT),
        "Most MiB of tensors that travel as one; 0: each alone.",
    ),
    "--cycle-time-ms": ("HOROVOD_CYCLE_TIME", AMOUNT, "How long requests are gathered before they are sent."),
    "--timeline-filename": ("HOROVOD_TIMELINE", str, "Write a Chrome trace into this file."),
    "--stall-check-warning-time-seconds": (
        *("HOROVOD_STALL_CHECK_TIME_SECONDS", TIME),
        "Name ranks that others wait for after this time.",
    ),
    "--stall-check-shutdown-time-seconds": (
        *("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", AMOUNT),
        "End the job after waiting for so long; 0: never.",
    ),
    "--log-level": ("HOROVOD_LOG_LEVEL", LEVEL, "Least serious message that is shown."),
    "--timeline-mark-cycles/--no-timeline-mark-cycles": (
        *("HOROVOD_TIMELINE_MARK_CYCLES", None),
        "Show the engine's cycles in the trace.",
    ),
    "--no-stall-check/--stall-check": (
        *("HOROVOD_STALL_CHECK_DISABLE", None),
        "Do not look for ranks that others wait for.",
    ),
    "--hierarchical-allreduce/--no-hierarchical-allreduce": (
        *("HOROVOD_HIERARCHICAL_ALLREDUCE", None),
        "Sum within nodes first.",
    ),
    "--hierarchical-allgather/--no-hierarchical-allgather": (
        *("HOROVOD_HIERARCHICAL_ALLGATHER", None),
        "Gather within nodes first.",
    ),
    "--mpi-threads-disable/--no-mpi-threads-disable": (
        *("MPI4PY_RC_THREADS", None),
        "Start MPI without support for threads.",
    ),
}
# Options for what there is not here: rank 0 says so, as of every variable HOROVOD_*.
WITHOUT_MEANING = ("cache-capacity", "num-nccl-streams", "thread-affinity", "gloo-timeout-seconds")

# Number of values -> options that ask for what is so here anyway, or for details of what is not asked for.
IDLE = {
    0: (
        *("--mpi", "--disable-cache", "--no-autotune", "--no-torus-allreduce"),
        "--log-without-timestamp --log-hide-timestamp",
    ),
    1: (
        *("--autotune-log-file", "--autotune-warmup-samples", "--autotune-steps-per-sample"),
        *("--autotune-bayes-opt-max-samples", "--autotune-gaussian-process-noise"),
        *("--slots-per-host", "--elastic-timeout", "--reset-limit"),
    ),
    2: ("--blacklist-cooldown-range",),
}
_FIXED = (
    "under MPI a job keeps the ranks that it was started with, so it cannot be elastic: give -np alone. What "
    "hvd.elastic can go on from there, its documentation says"
)
# Option for what cannot be done -> the number of its values, and the reason.
REFUSED = {
    "--autotune": (
        0,
        "nothing is tuned while a job runs: set --fusion-threshold-mb and --cycle-time-ms; "
        "`hpcpar bench tune` chooses the algorithms of collectives beforehand",
    ),
    "--torus-allreduce": (
        0,
        "that is NCCL's, and collectives here are hpcpar's own: --hierarchical-allreduce sums within nodes "
        "first",
    ),
    "--gloo": (0, "there is no Gloo here, MPI carries everything: leave it out, or say --mpi"),
    "--jsrun": (0, "ranks are started by srun or mpiexec here: see --launcher"),
    "--tcp": (
        0,
        "the network is MPI's to choose: set UCX_TLS=tcp,sm,self or FI_PROVIDER=tcp, or give Open MPI "
        "--mpi-args '--mca pml ob1 --mca btl tcp,sm,self'",
    ),
    "--log-with-timestamp --no-log-hide-timestamp": (
        0,
        'messages go to Python\'s logger "hpcpar": give it a handler with %(asctime)s in its format',
    ),
    "-prefix-timestamp --prefix-output-with-timestamp": (
        0,
        "that is the launcher's to do: Open MPI's does with --mpi-args --timestamp-output; or pipe the "
        "output through `ts`",
    ),
    "--min-np --min-num-proc": (1, _FIXED),
    "--host-discovery-script": (1, _FIXED),
}

# Section of a --config-file -> what its keys' options begin with.
SECTIONS = {
    "params": "",
    "autotune": "autotune-",
    "timeline": "timeline-",
    "stall_check": "stall-check-",
    "library_options": "",
    "logging": "log-",
}
_SWITCHES = {
    ("autotune", "enabled"): ("--autotune", "--no-autotune"),
    ("stall_check", "enabled"): ("--stall-check", "--no-stall-check"),
    ("logging", "with_timestamp"): ("--log-with-timestamp", "--log-without-timestamp"),
}


def horovod_options(command: Command) -> Command:
    """Take Horovod's options; each is named in the function by its variable."""
    for names, (count, reason) in REFUSED.items():
        command = _hidden(names, count, callback=_refusing(names, reason))(command)
    for names, count in ((names, count) for count, options in IDLE.items() for names in options):
        command = _hidden(names, count)(command)
    for name in WITHOUT_MEANING:
        variable = f"HOROVOD_{name.replace('-', '_').upper()}"
        command = click.option(f"--{name}", variable, type=COUNT, hidden=True)(command)
    for option, (variable, kind, text) in reversed(KNOBS.items()):
        command = click.option(option, variable, type=kind, default=None, help=f"{text} [{variable}]")(
            command
        )
    return click.option(
        "--config-file",
        metavar="FILE",
        is_eager=True,
        expose_value=False,
        callback=_take_config,
        help="Horovod's settings in YAML (needs PyYAML); options of the command line go before them.",
    )(command)


def _hidden(names: str, count: int, **options: Any) -> Callable[[Command], Command]:
    shape: dict[str, Any] = {"nargs": count} if count else {"is_flag": True}
    return click.option(*names.split(), expose_value=False, hidden=True, **shape, **options)


def _refusing(names: str, reason: str) -> Callable[[click.Context, click.Parameter, Any], None]:
    def refuse(context: click.Context, parameter: click.Parameter, value: Any) -> None:
        if context.get_parameter_source(parameter.name or "") is ParameterSource.COMMANDLINE:
            raise click.ClickException(f"{names.split()[-1]}: {reason}")

    return refuse


def variables(knobs: dict[str, Any]) -> dict[str, str]:
    """Return the ranks' variables for the options that were given."""
    given = {name: value for name, value in knobs.items() if value is not None}
    mebibytes = given.pop("HOROVOD_FUSION_THRESHOLD", None)
    if mebibytes is not None:
        given["HOROVOD_FUSION_THRESHOLD"] = mebibytes * MiB
    without_threads = given.pop("MPI4PY_RC_THREADS", None)
    if without_threads is not None:
        given["MPI4PY_RC_THREADS"] = not without_threads
    return {name: f"{int(v) if isinstance(v, bool) else v}" for name, v in sorted(given.items())}


def _take_config(context: click.Context, parameter: click.Parameter, path: str | None) -> None:
    """Parse a file's settings as words of a command line; options that are given override them."""
    if path is None or context.resilient_parsing:
        return
    try:
        words = list(config_words(path))
    except HpcparError as error:
        raise click.ClickException(str(error)) from error
    inner = context.command.make_context(context.info_name, [*words, "program"])
    unknown = inner.params["program"][0]
    if unknown != "program":
        raise click.ClickException(f"--config-file {path}: there is no setting for {unknown}")
    context.default_map = {
        name: value
        for name, value in inner.params.items()
        if inner.get_parameter_source(name) is ParameterSource.COMMANDLINE and name != "program"
    }


def config_words(path: str) -> Iterator[str]:
    """Yield the options that a file in the form of Horovod's --config-file stands for.

    errors   ConfigError where there is no PyYAML, and for what is no such file
    """
    try:
        yaml = import_module("yaml")
    except ImportError as error:
        raise ConfigError("--config-file needs PyYAML: `pip install pyyaml`, or write the options") from error
    try:
        with open(path, encoding="utf-8") as file:
            config = yaml.safe_load(file) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"--config-file {path} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"--config-file {path} is no list of sections: {', '.join(SECTIONS)}")
    for section, settings in config.items():
        if section == "controller":
            yield f"--{settings}".lower()
        elif section not in SECTIONS or not isinstance(settings, dict | None):
            raise ConfigError(f"--config-file {path}: {section!r} is no section of {', '.join(SECTIONS)}")
        else:
            for key, value in (settings or {}).items():
                yield from _words_of(section, key, value)


def _words_of(section: str, key: str, value: Any) -> Iterator[str]:
    if value is None:
        return
    option = f"{SECTIONS[section]}{key}".replace("_", "-")
    if isinstance(value, bool):
        yield _SWITCHES.get((section, key), (f"--{option}", f"--no-{option}"))[not value]
    else:
        yield from (f"--{option}", str(value))
