"""The picture of `hpcpar draw experts`: loads of experts, and who sends how many rows to whom, both ways.

rows                one stage           two stages
▇                   to 0  1  2  3       to 0  1  2  3
▇ ▅                 0  ·  8 │8  8       0  ·  8 │9  ·
▇ ▅ ▂               1  8  · │8  8       1  8  · │·  9
0 1 2 expert        ────────┼─────      ────────┼─────
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpcpar.cli.picture import draw_sent, new_figure, rank_colour

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from hpcpar.cli.draw_experts import DispatchWay, DrawnExperts
    from hpcpar.expert_parallel.dispatch import Dispatch


def draw(drawn: DrawnExperts) -> Figure:
    """Return a figure of loads, and of rows from rank to rank."""
    figure = new_figure(3.7)
    loads, one, two = figure.subplots(1, 3, width_ratios=(1.25, 1, 1))
    _draw_loads(loads, drawn.dispatch)
    most = max(1, *(max(map(max, each.sent)) for each in drawn.ways))
    for axes, each in zip((one, two), drawn.ways, strict=True):
        _draw_rows(axes, each, drawn.dispatch.nodes, most)
    one.set_ylabel("from rank")
    figure.suptitle(drawn.title, fontsize=10)
    return figure


def _draw_loads(axes: Axes, dispatch: Dispatch) -> None:
    from hpcpar.cli.draw_experts import balance

    loads = dispatch.loads
    colours = [rank_colour(rank) for rank in dispatch.owners]
    axes.bar(range(len(loads)), loads, color=colours)
    mean = sum(loads) / len(loads)
    axes.axhline(mean, color="black", linewidth=0.8, linestyle="--")
    axes.text(len(loads) - 0.5, mean, "mean", ha="right", va="bottom", fontsize=7)
    axes.set_xlabel("expert; a colour for each rank")
    axes.set_ylabel("rows")
    axes.set_title(balance(loads).replace("; ", "\n", 1), fontsize=8)


def _draw_rows(axes: Axes, way: DispatchWay, nodes: tuple[int, ...], most: int) -> None:
    draw_sent(axes, way.sent, darkest=most * 1.8, written="{:,}".format)
    for rank in range(1, len(way.sent)):
        if nodes[rank] != nodes[rank - 1]:
            axes.axhline(rank - 0.5, color="black", linewidth=1)
            axes.axvline(rank - 0.5, color="black", linewidth=1)
    axes.set_xlabel("to rank; lines divide nodes")
    rows, between = sum(map(sum, way.sent)), sum(way.between)
    axes.set_title(f"{way.name}: {rows:,} rows,\n{between:,} between nodes", fontsize=9)
