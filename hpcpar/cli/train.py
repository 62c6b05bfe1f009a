"""`hpcpar train config.toml [key=value …] [--resume]`: a training run, this process being one rank."""

from __future__ import annotations

import logging
from pathlib import Path

import click

from hpcpar.errors import CheckpointError, ConfigError, DataError, LayoutError, PeerFailedError

CANNOT_WORK = 2
"""Exit status when the run was asked for in a way that cannot work."""


@click.command()
@click.argument("config", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--resume", is_flag=True, help="Go on from the newest checkpoint in output.directory, if any.")
def train(config: Path, overrides: tuple[str, ...], resume: bool) -> int:
    """Train the model that the TOML file CONFIG describes, on all ranks of the job.

    KEY=VALUE overrides a key of the file, as in train.steps=100. Start it under mpiexec or srun, or
    by `hpcpar run -n 4 -- -m hpcpar train CONFIG`; alone it trains on one rank.
    """
    from rich.console import Console

    import hpcpar
    from hpcpar.training import Run, parse
    from hpcpar.training.config import read_text

    world = hpcpar.init()
    logging.basicConfig(level=logging.WARNING, format=f"[{world.rank}/{world.size}] %(message)s")
    text = ""
    try:
        with world.together(f"reading {config}"):
            if world.rank == 0:
                text = read_text(config)
        told = parse(world.broadcast_object(text), source=str(config), overrides=overrides)
        run = Run(told, world, resume=resume, console=Console())
    except (CheckpointError, ConfigError, DataError, LayoutError, PeerFailedError) as error:
        # Every rank has met the same error, so one of them says it and all leave.
        if world.rank == 0:
            click.echo(f"hpcpar train: {error}", err=True)
        return CANNOT_WORK
    run.train()
    return 0
