"""The picture of `hpcpar draw balance`: a panel for each run, a line for each layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hpcpar.cli.picture import new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from hpcpar.cli.draw_balance import RunBalance

LIMIT = 1.5
"""Load over the mean that is drawn as a line: with more, a rank lags by half a step."""


def draw(found: Sequence[RunBalance]) -> Figure:
    """Return a figure with a panel for each run."""
    figure = new_figure(3.6)
    panels = figure.subplots(1, len(found), sharey=True, squeeze=False)[0]
    for axes, run in zip(panels, found, strict=True):
        _panel(axes, run)
    panels[0].set_ylabel("load of the fullest expert / mean load")
    return figure


def _panel(axes: Axes, run: RunBalance) -> None:
    for place, layer in enumerate(run.layers):
        axes.plot(run.steps, run.of_layer(place), linewidth=0.9, label=f"layer {layer}")
    axes.axhline(LIMIT, color="black", linestyle="--", linewidth=0.8)
    axes.set_title(run.name, fontsize=10)
    axes.set_xlabel("step")
    axes.set_ylim(bottom=1.0)
    if len(run.layers) <= 8:
        axes.legend(fontsize=7, loc="upper right")
