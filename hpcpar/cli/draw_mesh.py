"""`hpcpar draw mesh --pp 2 --dp 2 --tp 2 --nodes 2`: which rank is where on the axes of a layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from hpcpar.cli import mesh_picture, picture
from hpcpar.errors import HpcparError, LayoutError
from hpcpar.planner.layout import AXES, Layout, crossing_reason, placement

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
    try:
        layout = Layout(**degrees)
        if layout.size % nodes:
            raise LayoutError(f"--nodes={nodes} do not divide the {layout.size} ranks of {layout}")
        homes = nodes_of(layout, nodes)
        click.echo(f"{layout}: {layout.size} ranks on {nodes} {'node' if nodes == 1 else 'nodes'}\n")
        click.echo(f"{table(layout, homes)}\n\n{groups_text(layout)}")
        reason = crossing_reason(homes, layout)
        if reason is not None:
            click.echo(f"\n{reason}")
    except HpcparError as error:
        raise click.ClickException(str(error)) from error
    picture.write(output, lambda: mesh_picture.draw(layout, homes))


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
