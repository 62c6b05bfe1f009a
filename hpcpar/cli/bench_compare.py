"""`hpcpar bench compare`: what each approach to parallelism costs, measured on one model."""

from __future__ import annotations

import json
from pathlib import Path

import click

from hpcpar.errors import HpcparError


@click.command()
@click.argument("words", nargs=-1, metavar="[CONFIG] [KEY=VALUE]...")
@click.option("--steps", type=click.IntRange(min=1), default=8, help="That count; their median is shown.")
@click.option("--only", multiple=True, metavar="NAME", help="This approach; may be given several times.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write JSON lines too.")
def compare(words: tuple[str, ...], steps: int, only: tuple[str, ...], json_file: Path | None) -> int:
    """Train one model by each approach that these ranks can take; print memory, bytes, calls, time.

    CONFIG is a file of `hpcpar train` [default: the preset tiny, 16 sequences of 128 tokens]. Start it on
    several ranks: `hpcpar run -n 4 -- -m hpcpar bench compare`. Above each measured line is what the planner
    says; its time needs a description of this machine (`hpcpar bench fit … --machine own`).
    """
    import hpcpar
    from hpcpar.cli.bench import require_writable
    from hpcpar.cli.draw_compare import of_records, table
    from hpcpar.training import comparison
    from hpcpar.training.config import read_text

    world = hpcpar.init(sets_threads=True)
    source = words[0] if words and "=" not in words[0] else None
    try:
        with world.together("looking where to write"):
            if world.rank == 0:
                require_writable(json_file)
        text = comparison.MODEL
        if source is not None:
            with world.together(f"reading {source}"):
                text = read_text(Path(source)) if world.rank == 0 else ""
            text = world.broadcast_object(text)
        found = comparison.compare(
            text,
            source or "the model of bench compare",
            words if source is None else words[1:],
            world,
            steps=steps,
            only=only,
            say=click.echo if world.rank == 0 else lambda text: None,
        )
    except HpcparError as error:
        if world.rank == 0:
            click.echo(f"hpcpar bench compare: {error}", err=True)
        return 2
    if world.rank == 0:
        records = [each.as_record() for each in found]
        title, compared = of_records(records)
        click.echo(f"\n{title}\n\n{table(compared)}")
        if json_file is not None:
            json_file.write_text("".join(json.dumps(each) + "\n" for each in records), encoding="utf-8")
    return 0
