"""`hpcpar draw pipeline 1f1b --ranks 4 --microbatches 8`: who does what when, proved, priced and drawn."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click

from hpcpar.cli import picture, schedule_picture
from hpcpar.errors import HpcparError, ScheduleError
from hpcpar.pipeline_schedules import schedule_registry, text
from hpcpar.pipeline_schedules.action import Kind
from hpcpar.pipeline_schedules.pipeline_schedule import Schedule
from hpcpar.pipeline_schedules.pipeline_simulation import Durations, predicted, schedule_of, simulate
from hpcpar.pipeline_schedules.proof import Proof, prove
from hpcpar.pipeline_schedules.text_chart import text_chart
from hpcpar.pipeline_schedules.timetable import Timetable, read_timetable, trace_json

NUMBER = click.IntRange(min=1)
SECONDS = click.FloatRange(min=0)
FILE = click.Path(path_type=Path, dir_okay=False)

RANKS = 4
MICROBATCHES = 8

DATA = (".csv", ".txt", ".json")
"""Files that are no pictures."""

COLOURS: dict[Kind, str] = {"F": "blue", "B": "yellow", "W": "green"}


class Drawn(NamedTuple):
    """Schedule with its proof and its times, priced or measured."""

    title: str
    schedule: Schedule
    proof: Proof
    timetable: Timetable


class ScheduleOptions(NamedTuple):
    """Arguments of a schedule; None takes the schedule's default.

    durations   of all stages of a rank together, so that schedules with other numbers of stages do the same
    """

    ranks: int | None
    microbatches: int | None
    stages_per_rank: int | None
    memory_limit: int | None
    durations: Durations


@click.command()
@click.argument("schedules", nargs=-1, metavar="[SCHEDULE|FILE]...")
@click.option("--all", "every", is_flag=True, help="All of the catalogue that can be made so.")
@click.option("--ranks", type=NUMBER, help=f"Of the pipeline; {RANKS} unless a file says.")
@click.option("--microbatches", type=NUMBER, help=f"Of a step; {MICROBATCHES} unless a file says.")
@click.option("--stages-per-rank", type=NUMBER, help="As the schedule allows.")
@click.option("--memory-limit", type=NUMBER, help="Chunks of activations that a rank may keep at once.")
@click.option("--forward", type=SECONDS, default=1.0, help="Seconds of F on a rank.")
@click.option("--backward", type=SECONDS, default=1.0, help="Of B without the W.")
@click.option("--weight", type=SECONDS, default=1.0, help="Of W; a whole B has both.")
@click.option("--hop", type=SECONDS, default=0.0, help="From one rank to another.")
@click.option(
    "--measured",
    type=FILE,
    help="A run's timetable (JSON), drawn below; alone, below what its actions' times let expect.",
)
@picture.output_options(
    "A picture (.svg, .png, .pdf); of one schedule also its trace (.json) or its text (.csv, .txt)."
)
@click.option("--until", type=click.FloatRange(min=0, min_open=True), help="Where a picture's time ends.")
def pipeline(
    schedules: tuple[str, ...],
    every: bool,
    measured: Path | None,
    output: picture.Output | None,
    until: float | None,
    **given: Any,
) -> None:
    """Draw pipeline schedules: who does the forward (F) and backward (B, W) of which microbatch when.

    SCHEDULE is a name (1f1b, interleaved, zb-v ...), FILE a schedule as text: for each rank a line of
    actions such as 0F0 0B0, or torch's CSV. Without either, all names are listed. Each schedule is
    proved first: it is complete, it does not deadlock, it keeps to the memory limit.

    Seconds are those of one microbatch through all layers of a rank; where it has several stages, each
    takes its part of them. A chunk is what one stage keeps of one microbatch.
    """
    if not (schedules or every or measured):
        click.echo(listing())
        return
    if schedules and every:
        raise click.UsageError("--all draws every name: leave the names out")
    try:
        times_s = [given.pop(name) for name in ("forward", "backward", "weight", "hop")]
        asked = ScheduleOptions(**given, durations=Durations(*times_s))
        drawn = all_that_can(asked) if every else [priced(made(name, asked), asked) for name in schedules]
        if measured is not None:
            drawn += as_measured(measured, asked.memory_limit, alone=not drawn)
    except (HpcparError, OSError) as error:
        raise click.ClickException(str(error)) from error
    for each in drawn:
        click.echo(chart(each))
    if output is not None and output.path.suffix in DATA:
        try:
            write_data(drawn, output.path)
        except (HpcparError, OSError) as error:
            raise click.ClickException(str(error)) from error
        click.echo(f"written: {output.path}")
    else:
        picture.write(output, lambda: schedule_picture.draw(panels_of(drawn), until_s=until))


def listing() -> str:
    """List every method of the registry, one per line."""
    width = max(map(len, schedule_registry.METHODS))
    return "\n".join(
        f"{name:<{width}}  {method.summary}" for name, method in schedule_registry.METHODS.items()
    )


def made(name: str, asked: ScheduleOptions) -> Schedule:
    """Make the registry's schedule of this name, or read a file's; ScheduleError where there is neither."""
    path = Path(name)
    if path.suffix and not path.exists():
        raise ScheduleError(f"there is no file {path}")
    if name in schedule_registry.METHODS or not path.exists():
        placement = schedule_registry.find(name).place(asked.ranks or RANKS, asked.stages_per_rank)
        return schedule_registry.make(
            name,
            asked.ranks or RANKS,
            asked.microbatches or MICROBATCHES,
            stages_per_rank=asked.stages_per_rank,
            memory_limit=asked.memory_limit,
            durations=shared(asked.durations, placement.per_rank),
        )
    schedule = text.read(path)
    for what, wanted, found in (
        ("ranks", asked.ranks, schedule.ranks),
        ("microbatches", asked.microbatches, schedule.microbatches),
        ("stages-per-rank", asked.stages_per_rank, stages_per_rank(schedule)),
    ):
        if wanted not in (None, found):
            raise ScheduleError(f"{path} has {found} {what}, but --{what} is {wanted}: leave the option out")
    return schedule


def all_that_can(asked: ScheduleOptions) -> list[Drawn]:
    """Make all schedules that can be made so; name the others with their reason on stderr."""
    drawn = []
    for name in schedule_registry.METHODS:
        try:
            drawn.append(priced(made(name, asked), asked))
        except ScheduleError as error:
            click.echo(f"{name} is left out: {error}", err=True)
    return drawn


def priced(schedule: Schedule, asked: ScheduleOptions) -> Drawn:
    proof = prove(schedule, memory_limit=asked.memory_limit)
    durations = shared(asked.durations, stages_per_rank(schedule))
    return Drawn(schedule.name, schedule, proof, simulate(schedule, durations))


def shared(of_rank: Durations, stages: int) -> Durations:
    """Divide a rank's durations evenly among its stages; a hop is as long for each."""
    forward_s, backward_s, weight_s = (of_all[0] / stages for of_all in of_rank.of_stages(1))
    return Durations(forward_s, backward_s, weight_s, of_rank.hop_s)


def stages_per_rank(schedule: Schedule) -> int:
    return max(len(schedule.stages_of(rank)) for rank in range(schedule.ranks))


def as_measured(path: Path, memory_limit: int | None, *, alone: bool) -> list[Drawn]:
    """Prove and draw a run's timetable like any schedule.

    alone   nothing is beside it: what was to be expected of its actions' times comes first
    """
    timetable = read_timetable(path)
    schedule = schedule_of(timetable, path.stem)
    proof = prove(schedule, memory_limit=memory_limit)
    drawn = [Drawn(f"measured: {path.name}", schedule, proof, timetable)]
    if alone:
        drawn.insert(0, Drawn("predicted", schedule, proof, predicted(timetable)))
    return drawn


def chart(drawn: Drawn) -> str:
    columns = shutil.get_terminal_size(fallback=(160, 24)).columns
    return f"{heading(drawn)}\n\n" + text_chart(
        drawn.timetable,
        width=columns,
        peaks=drawn.proof.peaks,
        paint=lambda kind, cell: click.style(cell, fg=COLOURS[kind]),
    )


def heading(drawn: Drawn) -> str:
    counts = (
        (drawn.proof.ranks, "rank"),
        (drawn.proof.stages, "stage"),
        (drawn.proof.microbatches, "microbatch"),
    )
    plural = {"microbatch": "microbatches"}
    words = [f"{n} {one if n == 1 else plural.get(one, one + 's')}" for n, one in counts]
    return f"{drawn.title}: {', '.join(words)}"


def write_data(drawn: Sequence[Drawn], path: Path) -> None:
    """Write one schedule as text, or its trace; ScheduleError for several."""
    if len(drawn) != 1:
        raise ScheduleError(
            f"{path} has room for one schedule, not for {len(drawn)}; .svg, .png and .pdf have"
        )
    if path.suffix == ".json":
        path.write_text(trace_json(drawn[0].timetable), encoding="utf-8")
    else:
        text.write(drawn[0].schedule, path)


def panels_of(drawn: Sequence[Drawn]) -> list[schedule_picture.Panel]:
    return [
        schedule_picture.Panel(
            heading(each),
            each.timetable,
            [peak / stages_per_rank(each.schedule) for peak in each.proof.peaks],
        )
        for each in drawn
    ]
