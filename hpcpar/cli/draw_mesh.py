"""`hpcpar draw mesh --pp 2 --dp 2 --tp 2 --nodes 2`: which rank is where on the axes of a layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from hpcpar.cli import picture
from hpcpar.errors import LayoutError
from hpcpar.planner.layout import AXES, Layout, crossing_reason, placement

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NUMBER = click.IntRange(min=1)

LISTED = 4
"""Groups of an axis that are listed."""


@click.command()
@click.option("--pp", type=NUMBER, default=1, help="Stages of the pipeline.")
@click.option("--dp", type=NUMBER, default=1, help="Ranks of data parallelism.")
@click.option("--cp", type=NUMBER, default=1, help="Ranks that share each sequence.")
@click.option("--tp", type=NUMBER, default=1, help="Ranks that share each layer.")
@click.option("--ep", type=NUMBER, default=1, help="Ranks that divide the experts.")
@click.option("--etp", type=NUMBER, default=1, help="Ranks that each expert is split over.")
@click.option("--dp-shard", type=NUMBER, help="dp ranks that share a set of ZeRO's shards (HSDP).")
@click.option("--nodes", type=NUMBER, default=1, help="Nodes that the ranks fill one after another.")
@picture.output_options("A picture (.svg, .png, .pdf): a cube of the axes, three of them at most.")
def mesh(nodes: int, output: picture.Output | None, **degrees: Any) -> None:
    """Draw a layout: a rank of the mesh at its coordinates, and the groups that communicate on each axis.

    Ranks of the job are ordered so that tp, then cp, then dp stay inside a node if they can.
    """
    layout = Layout(**degrees)
    if layout.size % nodes:
        raise LayoutError(f"--nodes={nodes} do not divide the {layout.size} ranks of {layout}")
    homes = nodes_of(layout, nodes)
    click.echo(f"{layout}: {layout.size} ranks on {nodes} {'node' if nodes == 1 else 'nodes'}\n")
    click.echo(f"{table(layout, homes)}\n\n{groups_text(layout)}")
    reason = crossing_reason(homes, layout)
    if reason is not None:
        click.echo(f"\n{reason}")
    picture.write(output, lambda: figure_of(layout, homes))


def nodes_of(layout: Layout, nodes: int) -> list[int]:
    """Return the node of each rank of the mesh, where the job's ranks fill the nodes one after another."""
    homes = [rank * nodes // layout.size for rank in range(layout.size)]
    return [homes[rank] for rank in placement(homes, layout)]


def table(layout: Layout, homes: Sequence[int]) -> str:
    """Draw a block for each cp coordinate, one beside another for pp: rows are dp, columns tp."""
    several = len(set(homes)) > 1
    cells = [f"{rank} n{home}" if several else str(rank) for rank, home in enumerate(homes)]
    width = max(len(cell) for cell in (*cells, "tp99"))
    blocks = []
    for cp in range(layout.cp):
        heads, lines = [], [[] for _ in range(layout.dp + 1)]  # type: list[str], list[list[str]]
        for pp in range(layout.pp):
            name = " ".join(f"{axis}{at}" for axis, at in (("pp", pp), ("cp", cp)) if layout.degree(axis) > 1)
            lines[0].append(" ".join(f"{f'tp{tp}':>{width}}" for tp in range(layout.tp)))
            for dp in range(layout.dp):
                ranks = [((pp * layout.dp + dp) * layout.cp + cp) * layout.tp + tp for tp in range(layout.tp)]
                lines[dp + 1].append(" ".join(f"{cells[rank]:>{width}}" for rank in ranks))
            heads.append(name)
        labels = ["", *(_row_name(layout, dp) for dp in range(layout.dp))]
        wide = max(map(len, labels))
        head = " " * wide + "".join(
            f"   {name:<{len(part)}}" for name, part in zip(heads, lines[0], strict=True)
        )
        rows = [
            f"{label:>{wide}}" + "".join(f"   {part}" for part in line)
            for label, line in zip(labels, lines, strict=True)
        ]
        blocks.append("\n".join(line.rstrip() for line in ([head, *rows] if any(heads) else rows)))
    return "\n\n".join(blocks)


def _row_name(layout: Layout, dp: int) -> str:
    if layout.shard_ranks is None or layout.dp_shard is None:
        return f"dp{dp}"
    return f"dp{dp} set{dp // layout.dp_shard}"


def groups_text(layout: Layout) -> str:
    """List the groups of each axis above 1: the ranks that communicate on it."""
    axes = [*AXES, "ep", "edp"] if layout.ep > 1 else list(AXES)
    named = [(axis, layout.groups(axis)) for axis in axes if layout.degree(axis) > 1]
    if layout.shard_ranks is not None:
        named.append(("dp_shard", layout.shard_groups()))
    lines = []
    for axis, groups in named:
        shown = "  ".join(_group(group) for group in groups[:LISTED])
        more = f"  and {len(groups) - LISTED} more" if len(groups) > LISTED else ""
        lines.append(f"{axis:<9} {len(groups)} x {len(groups[0])} ranks:  {shown}{more}")
    return "\n".join(lines) or "one rank"


def _group(ranks: Sequence[int]) -> str:
    names = [str(rank) for rank in ranks]
    return ",".join(names if len(names) <= 8 else [*names[:3], "…", names[-1]])


# --- the picture ----------------------------------------------------------------------------------


Point = tuple[float, float]

SIDE, DEPTH = 1.0, (0.42, 0.30)
"""Width of a cube; where its back is, to the right and up."""

GAP = 1.35
"""Distance of neighbours, in widths."""

LARGEST = 8
"""Ranks along an axis that are drawn."""


def figure_of(layout: Layout, homes: Sequence[int]) -> Figure:
    """Return a figure of the ranks as cubes.

    homes    node of each rank
    errors   LayoutError for more than three axes, or more ranks than can be seen

        dp
       ↗
      +----+----+
     / 2  / 3  /|
    +----+----+ +
    | 0  | 1  |/       → tp      ↓ pp
    +----+----+
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
    figure = picture.new_figure(4.6)
    panel = figure.subplots()
    places = []
    for rank in range(layout.size):
        at = layout.coordinates(rank)
        x, z, y = (0 if axis is None else getattr(at, axis) for axis in (across, back, down))
        places.append((z, -y, x, rank))
    for z, minus_y, x, rank in sorted(places, key=lambda place: (-place[0], place[1], place[2])):
        left = x * GAP * SIDE + z * DEPTH[0] * 2.2
        bottom = minus_y * GAP * SIDE * 1.25 + z * DEPTH[1] * 2.2
        _cube(panel, (left, bottom), picture.rank_colour(homes[rank]), str(rank))
    panel.set_aspect("equal")
    panel.autoscale_view()
    _arrows(panel, across, back, down)
    panel.set_axis_off()
    panel.set_title(f"{layout}: {layout.size} ranks", fontsize=10)
    nodes = sorted(set(homes))
    if len(nodes) <= 10:
        picture.legend(figure, picture.patches({f"node {node}": picture.rank_colour(node) for node in nodes}))
    return figure


def _cube(axes: Axes, at: Point, colour: tuple[float, float, float], name: str) -> None:
    from matplotlib.patches import Polygon

    (x, y), (right, up), side = at, DEPTH, SIDE
    faces = (
        ([(x, y), (x + side, y), (x + side, y + side), (x, y + side)], picture.shade(colour, 1, 3)),
        (
            [
                (x, y + side),
                (x + side, y + side),
                (x + side + right, y + side + up),
                (x + right, y + side + up),
            ],
            picture.shade(colour, 2, 3),
        ),
        (
            [
                (x + side, y),
                (x + side + right, y + up),
                (x + side + right, y + side + up),
                (x + side, y + side),
            ],
            picture.shade(colour, 0, 3),
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
