"""Activations of a layer by who shares it and what is computed anew, as bars: measured beside the formula.

    none               ▐██████████████████████████████████████
                       ▐▒▒▒▒▒░░░░░░░░░░░░▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓
    TP+SP+selective    ▐█████
                       ▐▒▒░░░
    full               ▐██

source   Korthikanti et al. 2022, arXiv 2205.05198, table 2 and figure 7
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hpcpar.bench.layer_activations import MeasuredActivations, title
from hpcpar.cli.picture import ACTIVATIONS, MEASURED, legend, new_figure, patches, shade
from hpcpar.planner.activations import ACTIVATION_KINDS, LayerShape
from hpcpar.units import MiB

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {
    kind: shade(ACTIVATIONS, place, len(ACTIVATION_KINDS)) for place, kind in enumerate(ACTIVATION_KINDS)
}

BAR_INCHES = 0.62
HEIGHT = 0.36


def draw(found: Sequence[MeasuredActivations], shape: LayerShape, tp: int) -> Figure:
    """Return a figure with two bars for each technique."""
    figure = new_figure(1.5 + BAR_INCHES * len(found))
    axes = figure.add_subplot()
    for place, each in enumerate(found):
        _draw_bars(axes, place, each)
    axes.set_yticks(range(len(found)), [each.way for each in found])
    axes.invert_yaxis()
    axes.set_xlabel("MiB on each rank")
    axes.grid(axis="x", alpha=0.3)
    axes.margins(x=0.34)  # room for the formulas
    axes.set_xlim(left=0)
    axes.set_axisbelow(True)
    axes.set_title(title(shape, tp), fontsize=9)
    parts = {f"formula: {part}": colour for part, colour in COLOURS.items()}
    legend(figure, patches({"measured": MEASURED} | parts), columns=3)
    return figure


def _draw_bars(axes: Axes, place: int, shown: MeasuredActivations) -> None:
    axes.barh(place - HEIGHT / 2, shown.nbytes / MiB, height=HEIGHT, color=MEASURED)
    left = 0.0
    for part, nbytes in shown.parts.items():
        axes.barh(
            place + HEIGHT / 2,
            nbytes / MiB,
            left=left / MiB,
            height=HEIGHT,
            color=COLOURS[part],
            edgecolor="white",
            linewidth=0.6,
        )
        left += nbytes
    axes.text(
        max(shown.nbytes, shown.formula_nbytes) / MiB,
        place,
        f"  measured {shown.nbytes / MiB:.3g} MiB\n  {shown.formula} = {shown.formula_nbytes / MiB:.3g} MiB",
        va="center",
        fontsize=8,
    )
