"""`hpcpar train config.toml [key=value …] [--resume]`: a training run, this process being one rank."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpcpar import errors
from hpcpar.launch import slurm
from hpcpar.launch.signals import SIGNALS, EarlySignals

if TYPE_CHECKING:
    from hpcpar.comm import Communicator
    from hpcpar.comm.preemption import Preemption
    from hpcpar.training import Outcome, Run

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


@click.command()
@click.argument("config", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--resume", is_flag=True, help="Go on from the newest checkpoint in output.directory, if any.")
def train(config: Path, overrides: tuple[str, ...], resume: bool) -> int:
    """Train the model that the TOML file CONFIG describes, on all ranks of the job.

    KEY=VALUE overrides a key of the file, as in train.steps=100. Start it under mpiexec or srun, or
    by `hpcpar run -n 4 -- -m hpcpar train CONFIG`; alone it trains on one rank.

    SIGUSR1 or SIGTERM has it save a checkpoint after the step and end with status 75: start it again.
    So has Ctrl-C, with status 130, and a second one ends it at once. --resume goes on.
    A Slurm job that was put back into the queue goes on from its newest checkpoint by itself.
    """
    # What follows takes seconds, on many nodes minutes, in which a signal shall not end the job.
    with ExitStack() as stack:
        early = EarlySignals(SIGNALS)
        stack.callback(early.close)
        try:
            import hpcpar
            import hpcpar.training  # torch with it

            world = hpcpar.init(sets_threads=True)
        except KeyboardInterrupt:
            click.echo("hpcpar train: Ctrl-C before the run began", err=True)
            return INTERRUPTED
        return _train(config, overrides, resume, world, early, stack)


def _train(
    config: Path,
    overrides: tuple[str, ...],
    resume: bool,
    world: Communicator,
    early: EarlySignals,
    stack: ExitStack,
) -> int:
    from hpcpar.cli.console import own_console
    from hpcpar.training import parse_stages, runs
    from hpcpar.training.config import read_text

    logging.basicConfig(level=logging.WARNING, format=f"[{world.rank}/{world.size}] %(message)s")
    restarts = slurm.restarts()
    if restarts and not resume and world.rank == 0:
        click.echo(f"Slurm started this job again (SLURM_RESTART_COUNT={restarts}): as with --resume")
    text = ""
    try:
        with world.together(f"reading {config}"):
            if world.rank == 0:
                text = read_text(config)
        configs = parse_stages(world.broadcast_object(text), source=str(config), overrides=overrides)
        preemption = _preemption(configs[0].train.preemptible, world, early, stack)
    except ASKED_WRONGLY as error:
        _say_once(error, world)
        return CANNOT_WORK
    stages = runs(configs, world, resume=resume or restarts > 0, console=own_console(), preemption=preemption)
    steps_done = 0
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


def _preemption(wanted: bool, world: Communicator, early: EarlySignals, stack: ExitStack) -> Preemption:
    """Handle signals as the configuration says from here on, and the one that came early. Collective."""
    from hpcpar.comm.preemption import Preemption

    heard = early.close()
    preemption = stack.enter_context(Preemption(world, SIGNALS if wanted else ()))
    if heard is not None and wanted:
        preemption.request(heard.name)
    elif heard is not None:
        os.kill(os.getpid(), heard)
    return preemption
