"""The picture of `hpcpar draw tp`: each part of a layer from left to right, a colour for each rank.

X ── f ──  │0│1│2│3│  ──  |===0===|  ── g ── Z
           │ │ │ │ │      |===1===|
           columns        |===2===|
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hpcpar.cli.picture import COMMUNICATION, IDLE, WIDTH_INCHES, legend, new_figure, patches, rank_colour

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from hpcpar.cli.draw_tp import DrawnLayer, Edge, SplitWeight

PANEL = 2.15
"""Inches of each part's panel, upwards."""

LONGEST, SHORTEST = 1.0, 0.30
"""Inches of the largest dim of a matrix, and at least of any."""

BOX = 1.65
"""Inches of an edge's text."""

NAMED = 8
"""Ranks that the legend names."""


def draw(layers: Sequence[DrawnLayer], title: str) -> Figure:
    """Return a figure with a panel for each part of a layer."""
    panels = [
        (layer, part)
        for layer in layers
        for part in dict.fromkeys(each.part for each in layer.weights)
        # Attention is the same in all layers.
        if not (part == "attention" and layer is not layers[0])
    ]
    figure = new_figure(0.75 + PANEL * len(panels))
    for axes, (layer, part) in zip(figure.subplots(len(panels), 1, squeeze=False)[:, 0], panels, strict=True):
        weights = [each for each in layer.weights if each.part == part]
        _draw_part(axes, part, weights, [edge for edge in layer.edges if edge.part == part])
    figure.suptitle(title, fontsize=10)
    size = max(each.split.size for layer in layers for each in layer.weights if each.split is not None)
    named = {f"rank {rank}": rank_colour(rank) for rank in range(min(size, NAMED))} | {"on every rank": IDLE}
    legend(figure, patches(named), title="weights as in X·W: inputs down, outputs across")
    return figure


def _draw_part(axes: Axes, part: str, weights: Sequence[SplitWeight], edges: Sequence[Edge]) -> None:
    axes.set_xlim(0, WIDTH_INCHES)
    axes.set_ylim(0, PANEL)
    axes.set_aspect("equal")
    axes.set_axis_off()
    axes.text(0.05, PANEL - 0.05, part, fontsize=10, fontweight="bold", va="top")
    largest = max(max(each.whole) for each in weights)
    middle = PANEL / 2 - 0.1
    at = 0.1
    axes.text(at, middle, "X", ha="center", va="center", fontsize=11)
    at += 0.2
    enter, *leave = edges
    at = _edge(axes, at, middle, enter) + 0.2
    before = [each for each in weights if each.direction != "row"]
    for each in before:
        at = _matrix(axes, at, middle, each, largest) + 0.18
    for each in weights:
        if each.direction == "row":
            at = _matrix(axes, at + 0.1, middle, each, largest) + 0.2
    for edge in leave:
        at = _edge(axes, at, middle, edge) + 0.2
    axes.text(at, middle, "Z", ha="center", va="center", fontsize=11)


def _edge(axes: Axes, at: float, middle: float, edge: Edge) -> float:
    """Draw a box with the collectives of an edge; return where it ends."""
    from matplotlib.patches import FancyBboxPatch

    from hpcpar.cli.draw_tp import words

    lines = ["forward:", *words(edge.forward), "backward:", *words(edge.backward)]
    if edge.name:
        lines.insert(0, "")
    height = 0.17 * len(lines) + 0.1
    axes.add_patch(
        FancyBboxPatch(
            (at + 0.05, middle - height / 2),
            BOX - 0.1,
            height,
            boxstyle="round,pad=0.03",
            fill=False,
            edgecolor=COMMUNICATION,
        )
    )
    axes.text(
        at + BOX / 2,
        middle + height / 2 - 0.03,
        edge.name,
        ha="center",
        va="top",
        fontsize=11,
        fontweight="bold",
    )
    axes.text(at + BOX / 2, middle, "\n".join(lines), ha="center", va="center", fontsize=8, linespacing=1.25)
    return at + BOX


def _matrix(axes: Axes, at: float, middle: float, weight: SplitWeight, largest: int) -> float:
    """Draw Wᵀ, inputs down and outputs across, with each rank's part in its colour; return where it ends.

    Sides grow as the square roots of the dims, so that the narrow projections of keys and values are seen.
    """
    from matplotlib.patches import Rectangle

    outputs, inputs = weight.whole
    width, height = (max(SHORTEST, LONGEST * math.sqrt(dim / largest)) for dim in (outputs, inputs))
    bottom = middle - height / 2
    if weight.direction == "whole" or weight.split is None:
        axes.add_patch(Rectangle((at, bottom), width, height, facecolor=IDLE, edgecolor="white"))
    else:
        for rank, part in enumerate(weight.split.parts):
            if weight.split.replicas[rank]:
                continue
            for start, stop in part:
                begin, long = start / weight.split.length, (stop - start) / weight.split.length
                if weight.direction == "column":
                    place, sides = (at + begin * width, bottom), (long * width, height)
                else:
                    place, sides = (at, bottom + (1 - begin - long) * height), (width, long * height)
                axes.add_patch(
                    Rectangle(place, *sides, facecolor=rank_colour(rank), edgecolor="white", linewidth=0.5)
                )
    name = "router" if weight.name == "mlp.gate" else weight.name.rpartition(".")[2].removesuffix("_proj")
    copies = f" x {weight.copies}" if weight.copies > 1 else ""
    axes.text(at + width / 2, bottom + height + 0.05, name + copies, ha="center", va="bottom", fontsize=8)
    told = [str(outputs), f"x {inputs}"]
    if weight.ranks_alike > 1:
        told.append(f"each on {weight.ranks_alike}")
    axes.text(at + width / 2, bottom - 0.05, "\n".join(told), ha="center", va="top", fontsize=7, color="0.3")
    return at + width
