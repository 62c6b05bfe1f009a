"""`hpcpar run -n 4 train.py --lr 0.1`: start a job, see it to its end, tell the truth about it.

The options of Horovod's launcher that have a meaning here are understood under its names.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import click

from hpcpar.errors import ConfigError, HpcparError
from hpcpar.launch import node_copies, supervise
from hpcpar.launch.hosts import Host, parse_hosts, read_hostfile
from hpcpar.launch.knobs import LOG_LEVELS
from hpcpar.launch.supervise import Wishes
from hpcpar.units import MiB

Command = Callable[..., Any]

# Option of Horovod's launcher -> (variable, type, what it does).
KNOBS: dict[str, tuple[str, Any, str]] = {
    "--fusion-threshold-mb": (
        "HOROVOD_FUSION_THRESHOLD",
        click.IntRange(min=0),
        "Most MiB of tensors that travel as one; 0: each alone.",
    ),
    "--cycle-time-ms": (
        "HOROVOD_CYCLE_TIME",
        click.FloatRange(min=0),
        "How long requests are gathered before they are sent.",
    ),
    "--timeline-filename": ("HOROVOD_TIMELINE", str, "Write a Chrome trace into this file."),
    "--stall-check-warning-time-seconds": (
        "HOROVOD_STALL_CHECK_TIME_SECONDS",
        click.FloatRange(min=0, min_open=True),
        "Name ranks that others wait for after this time.",
    ),
    "--stall-check-shutdown-time-seconds": (
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
        click.FloatRange(min=0),
        "End the job after waiting for so long; 0: never.",
    ),
    "--log-level": (
        "HOROVOD_LOG_LEVEL",
        click.Choice(LOG_LEVELS, case_sensitive=False),
        "Least serious message that is shown.",
    ),
}
FLAGS = {
    "--timeline-mark-cycles": ("HOROVOD_TIMELINE_MARK_CYCLES", "Show the engine's cycles in the trace."),
    "--no-stall-check": ("HOROVOD_STALL_CHECK_DISABLE", "Do not look for ranks that others wait for."),
    "--hierarchical-allreduce": ("HOROVOD_HIERARCHICAL_ALLREDUCE", "Sum within nodes first."),
    "--hierarchical-allgather": ("HOROVOD_HIERARCHICAL_ALLGATHER", "Gather within nodes first."),
}


def knob_options(command: Command) -> Command:
    """Horovod's settings as options; each is named in the function by its variable."""
    for option, (variable, text) in reversed(FLAGS.items()):
        command = click.option(option, variable, is_flag=True, help=f"{text} [{variable}]")(command)
    for option, (variable, kind, text) in reversed(KNOBS.items()):
        command = click.option(option, variable, type=kind, help=f"{text} [{variable}]")(command)
    return command


def _check_build(context: click.Context, parameter: click.Parameter, asked: bool) -> None:
    if asked and not context.resilient_parsing:
        from hpcpar.cli.doctor import print_build

        print_build()
        context.exit()


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option(
    "-n", "-np", "--ranks", "--num-proc", "ranks", type=click.IntRange(min=1), help="How many ranks."
)
@click.option("-H", "--hosts", default="", help="Where to start them: host1:2,host[3-4]:2 (host:slots).")
@click.option("--hostfile", "-hostfile", default="", help="The same in a file: `host slots=2` or `host:2`.")
@click.option(
    "--launcher",
    type=click.Choice(["auto", "srun", "mpiexec"]),
    default="auto",
    show_default=True,
    help="auto: srun inside a Slurm allocation, else mpiexec.",
)
@click.option("--options", "--mpi-args", default="", help="More words for the launcher, in one string.")
@click.option("--as-horovod", is_flag=True, help="`import horovod` means hpcpar's: for an unchanged script.")
@click.option("--output-filename", metavar="DIR", help="Each rank writes DIR/rank.<rank>/stdout and stderr.")
@click.option(
    "--network-interfaces", "--network-interface", default="", help="For MPI's traffic: eth0,eth1 (mpiexec)."
)
@click.option(
    "--start-timeout",
    type=click.FloatRange(min=0, min_open=True),
    help="Seconds that srun may wait for nodes.",
)
@click.option(
    "--broadcast-env", is_flag=True, help="Start the ranks from copies of this Python on the nodes."
)
@click.option(
    "--broadcast-to", metavar="DIR", default="", help="The same, and where the copies go (see below)."
)
@click.option("--verbose", is_flag=True, help="Show the variables that the options set, too.")
@click.option(
    "--check-build",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_check_build,
    help="Show frameworks, controllers and tensor operations, and stop.",
)
@knob_options
@click.argument("program", nargs=-1, type=click.UNPROCESSED)
def run(
    ranks: int | None,
    hosts: str,
    hostfile: str,
    launcher: str,
    options: str,
    as_horovod: bool,
    output_filename: str | None,
    network_interfaces: str,
    start_timeout: float | None,
    broadcast_env: bool,
    broadcast_to: str,
    verbose: bool,
    program: tuple[str, ...],
    **knobs: Any,
) -> int:
    """Start PROGRAM (script.py, -m module, -c code, or a command) on several ranks.

    Without -n there are as many ranks as the hosts have slots. Horovod's --config-file is not read:
    hpcpar needs no YAML package; write the options.

    With --broadcast-env every node first gets a copy of the Python environment on its own disk, in DIR,
    $SLURM_TMPDIR, $TMPDIR or /tmp, and the ranks start from there: thousands that import from a shared file
    system at once wait for it long. The copies are removed when the job is over.

    Returns the job's exit status, and 1 where the launcher says 0 although a rank was lost.
    """
    try:
        argv = program_words(program, as_horovod)
        places = host_list(hosts, hostfile)
        wishes = Wishes(
            hosts=places,
            interfaces=tuple(filter(None, network_interfaces.split(","))),
            start_limit_s=start_timeout,
            output_directory=output_filename,
            variables=variables(knobs),
        )
        if verbose:
            for name, value in wishes.variables.items():
                say(f"hpcpar run: {name}={value}")
        start: Callable[..., int] = supervise.run
        if broadcast_env or broadcast_to:
            start = partial(node_copies.run, wanted=broadcast_to)
        return start(
            ranks or number_of(places),
            argv,
            say=say,
            launcher=launcher,
            options=launcher_words(options),
            wishes=wishes,
        )
    except HpcparError as error:
        raise click.ClickException(str(error)) from error


def say(line: str) -> None:
    click.echo(line, err=True)


def launcher_words(options: str) -> list[str]:
    """ "-host 'a b'" -> ["-host", "a b"]"""
    try:
        return shlex.split(options)
    except ValueError as error:
        raise ConfigError(f"--options {options!r} cannot be divided into words: {error}") from error


def program_words(program: Sequence[str], as_horovod: bool) -> Sequence[str]:
    """The program without what only separates it from the options; ConfigError for an unknown option."""
    if program[:1] == ("--",):
        program = program[1:]
    elif program and program[0].startswith("-") and program[0] not in ("-m", "-c"):
        # Not -mmodule in one word: click looks for options of ours in its letters.
        raise ConfigError(
            f"there is no option {program[0]}: `hpcpar run --help` lists them, and Horovod's too; "
            "a module is two words, -m module"
        )
    return supervise.under_horovod(program) if as_horovod else program


def host_list(hosts: str, hostfile: str) -> tuple[Host, ...]:
    if hosts and hostfile:
        raise ConfigError("both --hosts and --hostfile were given: give one of them")
    if hostfile:
        return read_hostfile(hostfile)
    return parse_hosts(hosts) if hosts else ()


def number_of(hosts: Sequence[Host]) -> int:
    if not hosts:
        raise ConfigError("how many ranks? say -n 4, or name hosts with their slots: -H node1:2,node2:2")
    return sum(host.slots for host in hosts)


def variables(knobs: dict[str, Any]) -> dict[str, str]:
    """HOROVOD_* variables for the options that were given."""
    given = {name: value for name, value in knobs.items() if value is not None and value is not False}
    mebibytes = given.pop("HOROVOD_FUSION_THRESHOLD", None)
    if mebibytes is not None:
        given["HOROVOD_FUSION_THRESHOLD"] = mebibytes * MiB
    return {name: "1" if value is True else f"{value}" for name, value in sorted(given.items())}
