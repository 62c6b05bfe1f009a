"""`hpcpar train config.toml [key=value …] [--resume]`: a training run, this process being one rank.

`--recipe NAME` takes a file that comes with the package; `--dry-run` prints what a run needs, `--show` its
configuration, `--keys` all keys that there are.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpcpar import errors
from hpcpar.launch import restart, slurm
from hpcpar.launch.signals import SIGNALS, SignalListener

if TYPE_CHECKING:
    from hpcpar.comm import Communicator
    from hpcpar.comm.preemption import Preemption
    from hpcpar.training import Config, Outcome, Run

LIST = "list of recipes"
"""Value of --recipe without a name."""

ALL_TABLES = ""
"""Value of --keys without a table."""

CANNOT_WORK = 2
"""Exit status when the run was asked for in a way that cannot work."""

FAILED = 1
"""Exit status when the run went wrong on its way."""

INTERRUPTED = 130
"""Exit status after Ctrl-C, as a shell has it."""

ASKED_WRONGLY = (
    *(errors.CheckpointError, errors.ConfigError, errors.DataError, errors.LayoutError, errors.MismatchError),
    *(errors.OffloadError, errors.OperationError, errors.PeerFailedError, errors.ScheduleError),
    errors.SharedMemoryError,
)
"""Errors that every rank meets while a run is built, for all have the same configuration."""


class Keys(click.Command):
    """Command that tells how a key is set to those who write it as an option."""

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(context, args)
        except click.NoSuchOption as error:
            from hpcpar.training.config import known_keys
            from hpcpar.training.usual_names import OF_OTHERS

            name = error.option_name.lstrip("-").replace("-", "_")
            keys = [key for key in known_keys() if name in (key, key.rpartition(".")[2])]
            if not keys and name not in OF_OTHERS:
                raise
            raise click.UsageError(
                f"there is no option {error.option_name}; a key is set without dashes: "
                f"{' or '.join(f'{key}=…' for key in keys or [OF_OTHERS[name]])}",
                context,
            ) from None


@click.command(cls=Keys)
@click.argument("words", nargs=-1, metavar="[CONFIG] [KEY=VALUE]...")
@click.option("--resume", is_flag=True, help="Go on from the newest checkpoint in output.directory, if any.")
@click.option(
    "--recipe",
    is_flag=False,
    flag_value=LIST,
    metavar="[NAME]",
    help="In place of CONFIG: how a known model was trained, scaled to 8 ranks; or a recipe's file. Without "
    "NAME: list them.",
)
@click.option("--full", is_flag=True, help="With --recipe: the run at its published size.")
@click.option("--dry-run", is_flag=True, help="Print memory by purpose and bytes by axis; start nothing.")
@click.option("--machine", help="With --dry-run: a machine of the planner, or its file [default: h100-dgx].")
@click.option(
    "--show", is_flag=True, help="Print the configuration, and where values come from; start nothing."
)
@click.option(
    "--keys",
    is_flag=False,
    flag_value=ALL_TABLES,
    metavar="[TABLE]",
    help="Print all keys, or those of a table, with type, default and meaning.",
)
def train(
    words: tuple[str, ...],
    resume: bool,
    recipe: str | None,
    full: bool,
    dry_run: bool,
    machine: str | None,
    show: bool,
    keys: str | None,
) -> int:
    """Train the model that the TOML file CONFIG describes, on all ranks of the job.

    KEY=VALUE overrides a key of the file, as in train.steps=100. Start it under mpiexec or srun, or
    by `hpcpar run -n 4 -- -m hpcpar train CONFIG`; alone it trains on one rank.

    SIGUSR1 or SIGTERM has it save a checkpoint after the step and end with status 75: start it again.
    So has Ctrl-C, with status 130, and a second one ends it at once. --resume goes on.
    A Slurm job that was put back into the queue goes on from its newest checkpoint by itself.
    """
    if recipe == LIST:
        from hpcpar.training import recipes

        click.echo(recipes.listing())
        return 0
    if keys is not None:
        return _print_keys(keys)
    asked = _asked(words, recipe, full)
    if show:
        return _show(asked)
    if dry_run or machine:
        return _dry_run(asked, machine)
    # What follows takes seconds, on many nodes minutes, in which a signal shall not end the job.
    with SignalListener(SIGNALS) as listener:
        try:
            import hpcpar
            import hpcpar.training  # torch with it

            world = hpcpar.init(sets_threads=True)
        except KeyboardInterrupt:
            click.echo("hpcpar train: Ctrl-C before the run began", err=True)
            return INTERRUPTED
        status = _train(asked, resume, world, listener)
        listener.close(ignore=True)  # nothing is left that a signal could stop
        return status


@dataclass(frozen=True)
class Asked:
    """The file or the recipe that was asked for, and changes to it."""

    source: str
    overrides: tuple[str, ...]
    recipe: str | None = None
    full: bool = False

    def stages(self, world: Communicator | None = None) -> tuple[Config, ...]:
        """Return the configuration of each stage. Collective: rank 0 reads a file for all."""
        from hpcpar.training import parse_stages, recipes
        from hpcpar.training.config import read_text

        if self.recipe is not None:
            return recipes.recipe(self.recipe, full=self.full, overrides=self.overrides).stages
        if world is None:
            text = read_text(Path(self.source))
        else:
            text = ""
            with world.together(f"reading {self.source}"):
                if world.rank == 0:
                    text = read_text(Path(self.source))
            text = world.broadcast_object(text)
        return parse_stages(text, source=self.source, overrides=self.overrides)


def _asked(words: tuple[str, ...], recipe: str | None, full: bool) -> Asked:
    """Return what the command line names; a click.UsageError where it names none or two."""
    if recipe is not None:
        return Asked(f"recipe {recipe}", words, recipe, full)
    if full:
        raise click.UsageError("--full is the published size of a recipe; name one: --recipe NAME --full")
    if not words:
        raise click.UsageError("Missing argument 'CONFIG': a TOML file, or --recipe NAME in its place.")
    return Asked(words[0], words[1:])


def _print_keys(table: str) -> int:
    """Print the keys of the configuration; return the exit status."""
    from hpcpar.cli.console import own_console
    from hpcpar.training.described_keys import keys_table

    try:
        own_console().print(keys_table(table))
    except errors.ConfigError as error:
        click.echo(f"hpcpar train --keys: {error}", err=True)
        return CANNOT_WORK
    return 0


def _show(asked: Asked) -> int:
    """Print the configuration as TOML; return the exit status."""
    from hpcpar.training.resolved_config import resolved_toml

    try:
        click.echo(resolved_toml(asked.stages(), asked.source, asked.overrides))
    except errors.HpcparError as error:
        click.echo(f"hpcpar train: {error}", err=True)
        return CANNOT_WORK
    return 0


def _dry_run(asked: Asked, machine: str | None) -> int:
    """Print the planner's account of a run; return the exit status."""
    from hpcpar.training import recipes
    from hpcpar.training.dry_run import describe

    try:
        about = None
        if asked.recipe is not None:
            about = recipes.recipe(asked.recipe, full=asked.full, overrides=asked.overrides)
            machine = machine or (about.machine if asked.full else None)
        else:
            machine = machine or "h100-dgx"
        click.echo(describe(asked.stages(), machine, about))
    except errors.HpcparError as error:
        click.echo(f"hpcpar train: {error}", err=True)
        return CANNOT_WORK
    return 0


def _train(asked: Asked, resume: bool, world: Communicator, listener: SignalListener) -> int:
    from hpcpar.cli.console import own_console
    from hpcpar.training import runs

    logging.basicConfig(level=logging.WARNING, format=f"[{world.rank}/{world.size}] %(message)s")
    for starter, variable, number in (
        ("Slurm", "SLURM_RESTART_COUNT", slurm.restarts()),
        ("hpcpar run", restart.COUNT, restart.count()),
    ):
        if number and not resume:
            resume = True
            if world.rank == 0:
                click.echo(f"{starter} started this job again ({variable}={number}): as with --resume")
    try:
        configs = asked.stages(world)
        preemption = _preemption(configs[0].train.preemptible, world, listener)
    except ASKED_WRONGLY as error:
        _say_once(error, world)
        return CANNOT_WORK
    steps_done = 0
    with preemption:
        stages = runs(configs, world, resume=resume, console=own_console(), preemption=preemption)
        while (result := _train_next(stages, world, preemption)) is not None:
            if isinstance(result, int):
                return result
            steps_done = result.steps
        is_left = steps_done < configs[-1].train.last_step  # also where the next stage is for another job
        return preemption.exit_status if is_left and preemption.has_agreed else 0


def _train_next(stages: Iterator[Run], world: Communicator, preemption: Preemption) -> Outcome | int | None:
    """Build and train the next stage; return its outcome, or the exit status; None = there is none."""
    from hpcpar.training import Preempted

    try:
        run = next(stages, None)
        if run is None:
            return None
    except ASKED_WRONGLY as error:
        _say_once(error, world)
        return CANNOT_WORK
    except KeyboardInterrupt:
        world.end_job("Ctrl-C before the first step: nothing is there to be saved yet", INTERRUPTED)
        return INTERRUPTED
    except OSError as error:
        # What one of several ranks met alone the others do not know of.
        if world.size > 1:
            raise
        _say_once(error, world)
        return CANNOT_WORK
    try:
        with preemption.interruptible():
            outcome = run.train()
            return preemption.exit_status if isinstance(outcome, Preempted) else outcome
    except (errors.CheckpointError, errors.DivergenceError) as error:
        _say_once(error, world)
        return FAILED
    except (errors.OffloadError, OSError) as error:  # such as a full disk's
        if world.size > 1:
            raise
        _say_once(error, world)
        return FAILED


def _say_once(error: Exception, world: Communicator) -> None:
    if world.rank == 0:
        click.echo(f"hpcpar train: {error}", err=True)


def _preemption(wanted: bool, world: Communicator, listener: SignalListener) -> Preemption:
    """Handle signals as the configuration says from here on, and the one that came early. Collective."""
    from hpcpar.comm.preemption import Preemption

    if wanted:
        return Preemption(world, listener)
    listener.close()
    if listener.heard is not None:
        os.kill(os.getpid(), listener.heard)
    return Preemption(world, ())
