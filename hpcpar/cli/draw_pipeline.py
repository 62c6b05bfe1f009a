"""`hpcpar draw pipeline 1f1b --ranks 4 --microbatches 8`: who does what when, proved, priced and drawn."""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from hpcpar.cli import picture
from hpcpar.errors import ScheduleError
from hpcpar.pipeline_schedules import schedule_registry, text
from hpcpar.pipeline_schedules.action import Kind
from hpcpar.pipeline_schedules.pipeline_schedule import Schedule
from hpcpar.pipeline_schedules.pipeline_simulation import Durations, predicted, schedule_of, simulate
from hpcpar.pipeline_schedules.proof import Proof, prove
from hpcpar.pipeline_schedules.text_chart import text_chart
from hpcpar.pipeline_schedules.timetable import Timed, Timetable, read_timetable, trace_json

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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
    times_s = [given.pop(name) for name in ("forward", "backward", "weight", "hop")]
    asked = ScheduleOptions(**given, durations=Durations(*times_s))
    drawn = all_that_can(asked) if every else [priced(made(name, asked), asked) for name in schedules]
    if measured is not None:
        drawn += as_measured(measured, asked.memory_limit, alone=not drawn)
    for each in drawn:
        click.echo(chart(each))
    if output is not None and output.path.suffix in DATA:
        write_data(drawn, output.path)
        click.echo(f"written: {output.path}")
    else:
        picture.write(output, lambda: figure_of(panels_of(drawn), until_s=until))


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


def panels_of(drawn: Sequence[Drawn]) -> list[Panel]:
    return [
        Panel(
            heading(each),
            each.timetable,
            [peak / stages_per_rank(each.schedule) for peak in each.proof.peaks],
        )
        for each in drawn
    ]


# --- the picture ----------------------------------------------------------------------------------


KIND_COLOURS: dict[Kind, picture.Colour] = {"F": picture.FORWARD, "B": picture.BACKWARD, "W": picture.WEIGHTS}

KIND_NAMES: dict[Kind, str] = {"F": "forward", "B": "backward", "W": "weights' gradients, where apart"}

RANK_INCHES = 0.21
HEAD_INCHES = 0.42  # a panel's title and what is between panels
CHART_INCHES = 7.4  # what is left for the bars, roughly, after the names beside them
FONT_POINTS = 6.5
DIGIT_POINTS = 5.0  # what a digit takes, and some air


class Panel(NamedTuple):
    """Timetable with its title, and for each rank, if known, how many microbatches it keeps."""

    title: str
    timetable: Timetable
    peaks: Sequence[float] | None = None


def figure_of(panels: Sequence[Panel], *, until_s: float | None = None) -> Figure:
    """Return a figure of all panels, each from its own first start on.

    Stages of one rank have one colour in several shades, the first stage the fullest; grey is idle.

    until_s   where the axis of time ends; None: where the longest panel does

        1f1b: 2 ranks, 2 stages, 3 microbatches: bubble rate 25.00%, cost 12 s
        rank 0 |0|1|···|  0  |2|  1  |·|  2  |   2 alive
        rank 1   |0|  0  |1|  1  |2|  2  |       1 alive

    A bar's colour is its kind, the number in it the microbatch.
    """
    inches = sum(HEAD_INCHES + RANK_INCHES * len(panel.timetable.rows) for panel in panels)
    figure = picture.new_figure(0.8 + inches)
    heights = [max(1, len(panel.timetable.rows)) for panel in panels]
    all_axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    if until_s is None:
        until_s = max((panel.timetable.seconds for panel in panels), default=0.0) or 1.0
    for axes, panel in zip(all_axes, panels, strict=True):
        _draw_panel(axes, panel, until_s)
    all_axes[-1].set_xlim(0, until_s)
    all_axes[-1].set_xlabel("seconds")
    _legend(figure, panels)
    return figure


def _draw_panel(axes: Axes, panel: Panel, until_s: float) -> None:
    rows = panel.timetable.rows
    origin_s = min((each.start_s for row in rows for each in row), default=0.0)
    for rank, row in enumerate(rows):
        from_zero = [Timed(each.action, each.start_s - origin_s, each.end_s - origin_s) for each in row]
        _draw_row(axes, rank, from_zero, until_s)
    if panel.peaks is not None:
        for rank, peak in enumerate(panel.peaks):
            axes.text(
                1.005,
                rank,
                f"{peak:.3g} alive",
                transform=axes.get_yaxis_transform(),
                va="center",
                fontsize=FONT_POINTS + 1,
            )
    rate = f"bubble rate {panel.timetable.bubble_rate:.2%}, cost {panel.timetable.cost_s:.4g} s"
    axes.set_title(f"{panel.title}: {rate}", fontsize=9, loc="left", pad=3)
    picture.tidy_rows(axes, [f"rank {rank}" for rank in range(len(rows))])


def _draw_row(axes: Axes, rank: int, row: Sequence[Timed], until_s: float) -> None:
    """Draw one rank's bars over a grey one of its span."""
    stages = sorted({each.action.stage for each in row})
    bars: dict[picture.Colour, list[tuple[float, float]]] = defaultdict(list)
    for (stage, kind, microbatch), start_s, end_s in row:
        seen_s = min(end_s, until_s) - start_s
        if start_s >= until_s:
            break
        bars[picture.shade(KIND_COLOURS[kind], stages.index(stage), len(stages))].append((start_s, seen_s))
        number = str(microbatch)
        if seen_s * 72 * CHART_INCHES / until_s > DIGIT_POINTS * len(number):
            middle_s = start_s + seen_s / 2
            axes.text(middle_s, rank, number, ha="center", va="center_baseline", fontsize=FONT_POINTS)
    for colour, places in bars.items():
        axes.broken_barh(places, (rank - 0.42, 0.84), facecolor=colour, edgecolor="white", linewidth=0.4)
    if bars:
        span = (row[0].start_s, min(row[-1].end_s, until_s) - row[0].start_s)
        axes.broken_barh([span], (rank - 0.42, 0.84), facecolor=picture.IDLE, linewidth=0, zorder=0.5)


def _legend(figure: Figure, panels: Sequence[Panel]) -> None:
    kinds = {each.action.kind for panel in panels for row in panel.timetable.rows for each in row}
    colours = {name: KIND_COLOURS[kind] for kind, name in KIND_NAMES.items() if kind in kinds}
    colours["idle"] = picture.IDLE
    several = any(len({e.action.stage for e in row}) > 1 for panel in panels for row in panel.timetable.rows)
    notes = ["paler: later stages of the rank"] if several else []
    if any(panel.peaks is not None for panel in panels):
        notes.append("alive: microbatches whose activations the rank keeps, at most")
    picture.legend(figure, picture.patches(colours), columns=4, title="; ".join(notes))
