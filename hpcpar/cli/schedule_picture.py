"""The picture of `hpcpar draw pipeline`: pipeline schedules one above the other, along one axis of time.

    1f1b: 2 ranks, 2 stages, 3 microbatches: bubble rate 25.00%, cost 12 s
    rank 0 |0|1|···|  0  |2|  1  |·|  2  |   2 alive
    rank 1   |0|  0  |1|  1  |2|  2  |       1 alive

A bar's colour is its kind, the number in it the microbatch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from hpcpar.cli.picture import (
    BACKWARD,
    FORWARD,
    IDLE,
    WEIGHTS,
    Colour,
    legend,
    new_figure,
    patches,
    shade,
    tidy_rows,
)
from hpcpar.pipeline_schedules.action import Kind
from hpcpar.pipeline_schedules.timetable import Timed, Timetable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS: dict[Kind, Colour] = {"F": FORWARD, "B": BACKWARD, "W": WEIGHTS}

NAMES: dict[Kind, str] = {"F": "forward", "B": "backward", "W": "weights' gradients, where apart"}

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


def draw(panels: Sequence[Panel], *, until_s: float | None = None) -> Figure:
    """Return a figure of all panels, each from its own first start on.

    Stages of one rank have one colour in several shades, the first stage the fullest; grey is idle.

    until_s   where the axis of time ends; None: where the longest panel does
    """
    inches = sum(HEAD_INCHES + RANK_INCHES * len(panel.timetable.rows) for panel in panels)
    figure = new_figure(0.8 + inches)
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
    tidy_rows(axes, [f"rank {rank}" for rank in range(len(rows))])


def _draw_row(axes: Axes, rank: int, row: Sequence[Timed], until_s: float) -> None:
    """Draw one rank's bars over a grey one of its span."""
    stages = sorted({each.action.stage for each in row})
    bars: dict[Colour, list[tuple[float, float]]] = defaultdict(list)
    for (stage, kind, microbatch), start_s, end_s in row:
        seen_s = min(end_s, until_s) - start_s
        if start_s >= until_s:
            break
        bars[shade(COLOURS[kind], stages.index(stage), len(stages))].append((start_s, seen_s))
        number = str(microbatch)
        if seen_s * 72 * CHART_INCHES / until_s > DIGIT_POINTS * len(number):
            middle_s = start_s + seen_s / 2
            axes.text(middle_s, rank, number, ha="center", va="center_baseline", fontsize=FONT_POINTS)
    for colour, places in bars.items():
        axes.broken_barh(places, (rank - 0.42, 0.84), facecolor=colour, edgecolor="white", linewidth=0.4)
    if bars:
        span = (row[0].start_s, min(row[-1].end_s, until_s) - row[0].start_s)
        axes.broken_barh([span], (rank - 0.42, 0.84), facecolor=IDLE, linewidth=0, zorder=0.5)


def _legend(figure: Figure, panels: Sequence[Panel]) -> None:
    kinds = {each.action.kind for panel in panels for row in panel.timetable.rows for each in row}
    colours = {name: COLOURS[kind] for kind, name in NAMES.items() if kind in kinds} | {"idle": IDLE}
    several = any(len({e.action.stage for e in row}) > 1 for panel in panels for row in panel.timetable.rows)
    notes = ["paler: later stages of the rank"] if several else []
    if any(panel.peaks is not None for panel in panels):
        notes.append("alive: microbatches whose activations the rank keeps, at most")
    title = "; ".join(notes)
    legend(figure, patches(colours), columns=4, title=title)
