"""The picture of `hpcpar draw compare`: a row for each approach, bars of its memory, its bytes and its time.

                  GiB on the rank that needs most      GiB sent     seconds of a step
data parallel     |weights|grad|optimizer      |act|   |====        |===
ZeRO-3            |w|g|o|act|                          |======      |====
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from hpcpar.cli.picture import (
    ACTIVATIONS,
    COMMUNICATION,
    IDLE,
    MEASURED,
    STATE_COLOURS,
    Colour,
    legend,
    new_figure,
    patches,
    tidy_rows,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from hpcpar.cli.draw_compare import Compared, Figures

HATCH = "////"
"""Of measured bars."""


def draw(found: Sequence[Compared], title: str) -> Figure:
    """Return a figure with a row for each approach."""
    # Imported here, so that nothing but a picture waits for it.
    from matplotlib.patches import Patch

    from hpcpar.cli.draw_compare import HEADINGS, PURPOSES, purposes_of, unit_of

    is_measured = any(each.measured is not None for each in found)
    inches = 1.3 + len(found) * (0.46 if is_measured else 0.3)
    figure = new_figure(inches)
    memory, sent, time = figure.subplots(1, 3, sharey=True, width_ratios=(2.2, 1, 1))
    colour_of = dict(zip(PURPOSES, (*STATE_COLOURS, ACTIVATIONS, IDLE), strict=True))
    unit, name = unit_of(found)
    for row, each in enumerate(found):
        if each.planned is None:
            memory.text(0, row, f" cannot be: {_short(each.refused)}", va="center", fontsize=7)
        mark = "" if each.refused is None else "*"
        for figures, bar in bars_of(each, row):
            _draw_memory(memory, figures, bar, colour_of, unit, "" if bar.hatch else mark)
            ratio = "" if figures.twice is None else f" x{figures.twice[0]:.2f}"
            if figures.sent_nbytes is not None:
                _draw_bar(sent, figures.sent_nbytes / unit, bar, COMMUNICATION, ratio)
            if figures.step_s is not None:
                _draw_bar(time, figures.step_s, bar, MEASURED, "")
    is_over = any(each.planned is not None and each.refused is not None for each in found)
    over = "\n* more than a device has" if is_over else ""
    for axes, label in (
        (memory, f"{name} on the rank that needs most{over}"),
        (sent, f"{name} sent by a rank\nand ratio at twice the batch"),
        (time, "seconds of a step"),
    ):
        tidy_rows(axes, [each.name for each in found])
        axes.set_xlabel(label, fontsize=8)
        axes.tick_params(axis="x", labelsize=8)
        axes.margins(x=0.2)
        axes.set_xlim(left=0)
    handles = patches({HEADINGS[each]: colour_of[each] for each in purposes_of(found)})
    if is_measured:
        handles.append(Patch(facecolor="white", edgecolor="black", hatch=HATCH, label="measured"))
    legend(figure, handles)
    figure.suptitle(title, fontsize=10)
    return figure


class BarPlace(NamedTuple):
    """Middle and height of a bar in rows, and its hatching."""

    middle: float
    height: float
    hatch: str = ""


def bars_of(each: Compared, row: int) -> list[tuple[Figures, BarPlace]]:
    """Return the figures of a row, planned above measured, with the places of their bars."""
    if each.planned is None:
        return []
    if each.measured is None:
        return [(each.planned, BarPlace(row, 0.7))]
    return [(each.planned, BarPlace(row - 0.2, 0.36)), (each.measured, BarPlace(row + 0.2, 0.36, HATCH))]


def _short(text: str | None) -> str:
    """Return a reason as far as it fits."""
    return "" if text is None else text if len(text) < 60 else f"{text[:58]}…"


def _draw_memory(
    axes: Axes, figures: Figures, bar: BarPlace, colour_of: dict[str, Colour], unit: float, mark: str
) -> None:
    left = 0.0
    for purpose, colour in colour_of.items():
        width = figures.memory.get(purpose, 0) / unit
        axes.barh(
            bar.middle, width, left=left, height=bar.height, color=colour, hatch=bar.hatch, edgecolor="white"
        )
        left += width
    axes.text(left, bar.middle, f" {left:.3g}{mark}", va="center", fontsize=7)


def _draw_bar(axes: Axes, value: float, bar: BarPlace, colour: Colour, more: str) -> None:
    """Draw a bar with its figure, and more words."""
    axes.barh(bar.middle, value, height=bar.height, color=colour, hatch=bar.hatch, edgecolor="white")
    axes.text(value, bar.middle, f" {value:.3g}{more}", va="center", fontsize=7)
