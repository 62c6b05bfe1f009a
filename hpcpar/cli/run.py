"""`hpcpar run -n 4 train.py --lr 0.1`: start a job, see it to its end, tell the truth about it."""

from __future__ import annotations

import shlex

import click

from hpcpar.errors import HpcparError
from hpcpar.launch import supervise


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("-n", "--ranks", type=click.IntRange(min=1), required=True, help="How many ranks to start.")
@click.option(
    "--launcher",
    type=click.Choice(["auto", "srun", "mpiexec"]),
    default="auto",
    show_default=True,
    help="auto: srun inside a Slurm allocation, else mpiexec.",
)
@click.option("--options", default="", help="More words for the launcher, in one string.")
@click.argument("program", nargs=-1, type=click.UNPROCESSED)
def run(ranks: int, launcher: str, options: str, program: tuple[str, ...]) -> int:
    """Start PROGRAM (script.py, -m module, -c code, or a command) on several ranks.

    Returns the job's exit status, and 1 where the launcher says 0 although a rank was lost.
    """
    try:
        return supervise.run(
            ranks,
            program[1:] if program[:1] == ("--",) else program,
            say=lambda line: click.echo(line, err=True),
            launcher=launcher,
            options=shlex.split(options),
        )
    except HpcparError as error:
        raise click.ClickException(str(error)) from error
