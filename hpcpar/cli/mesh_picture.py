"""The picture of `hpcpar draw mesh`: the ranks as cubes, a direction for each axis, a colour for each node.

    dp
   ↗
  +----+----+
 / 2  / 3  /|
+----+----+ +
| 0  | 1  |/       → tp      ↓ pp
+----+----+
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hpcpar.cli.picture import legend, new_figure, patches, rank_colour, shade
from hpcpar.errors import LayoutError
from hpcpar.planner.layout import AXES, Layout

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Point = tuple[float, float]

SIDE, DEPTH = 1.0, (0.42, 0.30)
"""Width of a cube; where its back is, to the right and up."""

GAP = 1.35
"""Distance of neighbours, in widths."""

LARGEST = 8
"""Ranks along an axis that are drawn."""


def draw(layout: Layout, homes: Sequence[int]) -> Figure:
    """Return a figure of the ranks as cubes.

    homes    node of each rank
    errors   LayoutError for more than three axes, or more ranks than can be seen
    """
    axes_used = [axis for axis in AXES if layout.degree(axis) > 1]
    if len(axes_used) > 3:
        raise LayoutError(
            f"a picture shows three axes, and {layout} has {len(axes_used)}; the table shows all"
        )
    largest = max((layout.degree(axis) for axis in axes_used), default=1)
    if largest > LARGEST:
        raise LayoutError(f"a picture shows {LARGEST} ranks along an axis, not {largest}")
    # The innermost axis goes to the right, the next one back, the outermost down.
    across, back, down = (*reversed(axes_used), None, None, None)[:3]
    figure = new_figure(4.6)
    panel = figure.subplots()
    places = []
    for rank in range(layout.size):
        at = layout.coordinates(rank)
        x, z, y = (0 if axis is None else getattr(at, axis) for axis in (across, back, down))
        places.append((z, -y, x, rank))
    for z, minus_y, x, rank in sorted(places, key=lambda place: (-place[0], place[1], place[2])):
        left = x * GAP * SIDE + z * DEPTH[0] * 2.2
        bottom = minus_y * GAP * SIDE * 1.25 + z * DEPTH[1] * 2.2
        _cube(panel, (left, bottom), rank_colour(homes[rank]), str(rank))
    panel.set_aspect("equal")
    panel.autoscale_view()
    _arrows(panel, across, back, down)
    panel.set_axis_off()
    panel.set_title(f"{layout}: {layout.size} ranks", fontsize=10)
    nodes = sorted(set(homes))
    if len(nodes) <= 10:
        legend(figure, patches({f"node {node}": rank_colour(node) for node in nodes}))
    return figure


def _cube(axes: Axes, at: Point, colour: tuple[float, float, float], name: str) -> None:
    from matplotlib.patches import Polygon

    (x, y), (right, up), side = at, DEPTH, SIDE
    faces = (
        ([(x, y), (x + side, y), (x + side, y + side), (x, y + side)], shade(colour, 1, 3)),
        (
            [
                (x, y + side),
                (x + side, y + side),
                (x + side + right, y + side + up),
                (x + right, y + side + up),
            ],
            shade(colour, 2, 3),
        ),
        (
            [
                (x + side, y),
                (x + side + right, y + up),
                (x + side + right, y + side + up),
                (x + side, y + side),
            ],
            shade(colour, 0, 3),
        ),
    )
    for corners, face in faces:
        axes.add_patch(Polygon(corners, facecolor=face, edgecolor="white", linewidth=0.8))
    axes.text(x + (side + right) / 2, y + side + up / 2, name, ha="center", va="center", fontsize=10)


def _arrows(axes: Axes, across: str | None, back: str | None, down: str | None) -> None:
    from matplotlib.patches import FancyArrowPatch

    start = (-1.5, 0.4)
    for axis, (right, up) in ((across, (0.7, 0.0)), (back, (0.5, 0.4)), (down, (0.0, -0.7))):
        if axis is not None:
            end = (start[0] + right, start[1] + up)
            axes.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=12, color="0.3"))
            axes.text(
                start[0] + 1.25 * right, start[1] + 1.25 * up, axis, ha="center", va="center", fontsize=9
            )
    axes.set_xlim(left=start[0] - 0.2)
