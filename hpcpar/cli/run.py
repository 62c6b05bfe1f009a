"""`hpcpar run -n 4 train.py --lr 0.1`: start a job, see it to its end, tell the truth about it.

The options of Horovod's launcher are understood under its names, or refused with the reason.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

import hpcpar
from hpcpar.cli.horovod_options import horovod_options, variables
from hpcpar.errors import ConfigError, HpcparError
from hpcpar.launch import supervise
from hpcpar.launch.horovod_settings import start_limit_s
from hpcpar.launch.hosts import Host, parse_hosts, read_hostfile, ssh_variables
from hpcpar.launch.launch_command import LaunchOptions, under


def _check_build(context: click.Context, parameter: click.Parameter, asked: bool) -> None:
    if asked and not context.resilient_parsing:
        from hpcpar.cli.doctor.print import print_build

        print_build()
        context.exit()


def _print_version(context: click.Context, parameter: click.Parameter, asked: bool) -> None:
    if asked and not context.resilient_parsing:
        from hpcpar.horovod.alias import INTERFACE_VERSION

        click.echo(f"hpcpar {hpcpar.__version__}, in the place of Horovod {INTERFACE_VERSION}")
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
@click.option("--binding-args", default="", help="The same, about cores.")
@click.option("--as-horovod", is_flag=True, help="`import horovod` means hpcpar's: for an unchanged script.")
@click.option("--as-torch", is_flag=True, help="torch.distributed's backend is hpcpar's, whatever it names.")
@click.option("--output-filename", metavar="DIR", help="Each rank writes DIR/rank.<rank>/stdout and stderr.")
@click.option(
    "--network-interfaces",
    "--network-interface",
    multiple=True,
    help="For MPI's traffic: eth0,eth1, or several times (mpiexec).",
)
@click.option("-p", "--ssh-port", type=click.IntRange(1, 65535), help="Where mpiexec's ssh connects to.")
@click.option("-i", "--ssh-identity-file", metavar="FILE", help="The private key for it.")
@click.option(
    "--start-timeout",
    type=click.FloatRange(min=0, min_open=True),
    help="Seconds that srun may wait for nodes. [HOROVOD_START_TIMEOUT]",
)
@click.option(
    "--max-np", "--max-num-proc", "most", type=click.IntRange(min=1), help="No more ranks than so many."
)
@click.option(
    "--restarts",
    type=click.IntRange(min=0),
    default=0,
    help="Start a job that fails again, so often, while its attempts save checkpoints.",
)
@click.option("--verbose", is_flag=True, help="Show the variables that the options set, too.")
@click.option(
    "-v", "--version", is_flag=True, is_eager=True, expose_value=False, callback=_print_version, hidden=True
)
@click.option(
    "-cb",
    "--check-build",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_check_build,
    help="Show frameworks, controllers and tensor operations, and stop.",
)
@horovod_options
@click.argument("program", nargs=-1, type=click.UNPROCESSED)
def run(
    ranks: int | None,
    most: int | None,
    restarts: int,
    as_horovod: bool,
    as_torch: bool,
    verbose: bool,
    program: tuple[str, ...],
    **given: Any,
) -> int:
    """Start PROGRAM (script.py, -m module, -c code, or a command) on several ranks.

    Without -n there are as many ranks as the hosts have slots. Options of horovodrun that ask for what is
    so here anyway are taken, too (--mpi, --no-autotune, …); those for what cannot be done say why.

    Returns the job's exit status, and 1 where the launcher says 0 although a rank was lost.
    """
    try:
        argv = program_words(program, as_horovod=as_horovod, as_torch=as_torch)
        options = launch_options(given)
        size = ranks or sum(host.slots for host in options.hosts)
        if not size:
            raise ConfigError("how many ranks? say -n 4, or name hosts with their slots: -H node1:2,node2:2")
        if most is not None and most < size:
            raise ConfigError(f"--max-np {most}, but {size} ranks were asked for: give -np alone")
        if verbose:
            for name, value in options.variables.items():
                say(f"hpcpar run: {name}={value}")
        status = supervise.run(size, argv, options, restarts=restarts, say=say)
        if status and not as_horovod and misses_horovod(program):
            say("hpcpar run: the program imports horovod, which is not there: --as-horovod has hpcpar be it")
        return status
    except HpcparError as error:
        raise click.ClickException(str(error)) from error


def say(line: str) -> None:
    click.echo(line, err=True)


def launch_options(given: dict[str, Any]) -> LaunchOptions:
    """Take the options of a launch out of `given`; Horovod's, which remain, are variables of the ranks."""
    take = given.pop
    interfaces = ",".join(take("network_interfaces")).split(",")
    ssh = ssh_variables(take("ssh_port"), take("ssh_identity_file"))
    limit_s = take("start_timeout")
    return LaunchOptions(
        launcher=take("launcher"),
        words=(*launcher_words(take("options")), *launcher_words(take("binding_args"))),
        hosts=host_list(take("hosts"), take("hostfile")),
        interfaces=tuple(dict.fromkeys(filter(None, interfaces))),
        start_limit_s=start_limit_s() if limit_s is None else limit_s,
        output_directory=take("output_filename"),
        variables={**variables(given), **ssh},
    )


def launcher_words(options: str) -> list[str]:
    """ "-host 'a b'" -> ["-host", "a b"]"""
    try:
        return shlex.split(options)
    except ValueError as error:
        raise ConfigError(f"--options {options!r} cannot be divided into words: {error}") from error


def program_words(program: Sequence[str], *, as_horovod: bool, as_torch: bool) -> Sequence[str]:
    """Return the program without the `--` before it; ConfigError for an unknown option."""
    if program[:1] == ("--",):
        program = program[1:]
    elif program and program[0].startswith("-") and program[0] not in ("-m", "-c"):
        # Not -mmodule in one word: click looks for options of ours in its letters.
        raise ConfigError(
            f"there is no option {program[0]}: `hpcpar run --help` lists them, and Horovod's too; "
            "a module is two words, -m module"
        )
    if program and program[0].endswith(".toml"):
        raise ConfigError(
            f"{program[0]} is no program, but may be what one reads: "
            f"`hpcpar run -n 2 -- -m hpcpar train {program[0]}`"
        )
    if as_horovod and as_torch:
        raise ConfigError("--as-horovod and --as-torch were both given: a program is written for one of them")
    if as_torch:
        return under("hpcpar.torch_backend", program)
    return under("hpcpar.horovod", program) if as_horovod else program


def misses_horovod(program: Sequence[str]) -> bool:
    """True if the program is a script with an import of horovod, and there is no such package."""
    script = next((word for word in program[:2] if word.endswith(".py")), None)
    try:
        text = Path(script).read_text("utf-8", errors="replace") if script else ""
    except OSError:
        return False
    is_imported = re.search(r"^\s*(import|from)\s+horovod\b", text, re.MULTILINE)
    return is_imported is not None and find_spec("horovod") is None


def host_list(hosts: str, hostfile: str) -> tuple[Host, ...]:
    if hosts and hostfile:
        raise ConfigError("both --hosts and --hostfile were given: give one of them")
    if hostfile:
        return read_hostfile(hostfile)
    return parse_hosts(hosts) if hosts else ()
