"""The picture of `hpcpar draw balance`: a panel for each run, a line for each layer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hpcpar.cli.picture import save

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from hpcpar.cli.draw_balance import RunBalance

LIMIT = 1.5
"""Load over the mean that is drawn as a line: with more, a rank lags by half a step."""


def draw(found: Sequence[RunBalance], path: Path) -> None:
    """Draw into a file (PNG, SVG or PDF, by its name); ValueError for another format."""
    # Imported here, so that nothing but a picture waits for it.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2 * len(found), 3.6), dpi=100, layout="constrained")
    panels = figure.subplots(1, len(found), sharey=True, squeeze=False)[0]
    for axes, run in zip(panels, found, strict=True):
        _panel(axes, run)
    panels[0].set_ylabel("load of the fullest expert / mean load")
    save(figure, path)


def _panel(axes: Axes, run: RunBalance) -> None:
    for place, layer in enumerate(run.layers):
        axes.plot(run.steps, run.of_layer(place), linewidth=0.9, label=f"layer {layer}")
    axes.axhline(LIMIT, color="black", linestyle="--", linewidth=0.8)
    axes.set_title(run.name, fontsize=10)
    axes.set_xlabel("step")
    axes.set_ylim(bottom=1.0)
    if len(run.layers) <= 8:
        axes.legend(fontsize=7, loc="upper right")
