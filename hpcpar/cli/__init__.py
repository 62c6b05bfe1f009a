"""The command line: `hpcpar run`, `train`, `compare`, `example`, `export`, `checkpoint`, `serve`,
`doctor`, `plan`, `draw` and `bench`.

A command's module is imported when the command is called, so that `hpcpar run` and `hpcpar draw`
start at once, without torch or MPI. A command returns its exit status, or None for 0.
"""

from __future__ import annotations

import importlib
import io
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import click

import hpcpar
from hpcpar.errors import MissingExtraError, did_you_mean, naming_extras

Commands = Mapping[str, tuple[str, str]]
"""name -> (module of hpcpar.cli that has a command of this name, what it does)"""

COMMANDS: Commands = {
    "run": ("run", "Start a program on several ranks with srun or mpiexec."),
    "train": ("train", "Train a model as a TOML file says."),
    "compare": ("compare", "Compare runs: what differs, and what came of it."),
    "example": ("example", "List examples, or write one into this directory."),
    "export": ("export", "Make a checkpoint a model of Hugging Face's transformers."),
    "checkpoint": ("checkpoint", "List, describe and verify checkpoints."),
    "serve": ("serve", "Have a trained model answer, with vLLM."),
    "doctor": ("doctor", "Look at MPI, launcher, cores, GPUs and torch; say what to mend."),
    "plan": ("plan_command", "Rank layouts for a model on a machine: memory, time, why not."),
    "draw": ("draw_commands", "Draw the steps of a collective, pipeline schedules, or what layers keep."),
    "bench": ("bench", "Measure collectives, choose by measurement, fit and simulate."),
}


class LazyGroup(click.Group):
    """Group that knows its commands' names and imports the one that is called."""

    def __init__(self, *arguments: Any, lazy: Commands, **others: Any) -> None:
        super().__init__(*arguments, **others)
        self.lazy = lazy

    def list_commands(self, context: click.Context) -> list[str]:
        return list(self.lazy)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in self.lazy:
            return None
        module, _ = self.lazy[name]
        command = getattr(importlib.import_module(f"hpcpar.cli.{module}"), name)
        assert isinstance(command, click.Command), f"hpcpar.cli.{module}.{name} is no click command"
        return command

    def resolve_command(
        self, context: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in self.lazy and not args[0].startswith("-"):
            raise click.UsageError(
                f"there is no command {args[0]!r}; {did_you_mean(args[0], self.lazy)}"
                f"`{context.command_path} --help` lists them",
                context,
            )
        return super().resolve_command(context, args)

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in self.lazy.items()])


@click.group(cls=LazyGroup, lazy=COMMANDS, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(hpcpar.__version__, message="hpcpar %(version)s")
def group() -> None:
    """Train PyTorch models over plain MPI."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the command `hpcpar`; exits with the command's status.

    click is not left to catch what is raised: in a rank, an error or an interrupt that ended as a
    quiet `sys.exit` would leave the other ranks waiting, where the exception hook ends the job.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # what the locale cannot write, as on stderr
    words = None if arguments is None else list(arguments)
    try:
        with naming_extras():
            status = group.main(args=words, prog_name="hpcpar", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except MissingExtraError as error:
        sys.exit(f"Error: {error}")  # ends a job as an exception does: comm/failure.py notes the status
    except click.Abort:
        raise KeyboardInterrupt from None
    sys.exit(status if isinstance(status, int) else 0)
