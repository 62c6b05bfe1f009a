"""`hpcpar draw experts --ranks 4`: the load of each expert, and who sends how many rows to whom."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from hpcpar.algorithms.topology import MessageCost
from hpcpar.cli import picture
from hpcpar.cli.bench import NOT_NEGATIVE
from hpcpar.cli.draw_context import COLOURS
from hpcpar.errors import LayoutError
from hpcpar.expert_parallel.dispatch import Dispatch, RowMessage, between_nodes, prove, rows_sent, seconds
from hpcpar.partition import bounds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NUMBER = click.IntRange(min=1)

BAR = 40
"""Characters of the busiest expert's bar."""


class DispatchWay(NamedTuple):
    """Rows of a layer's forward and backward, in one stage or in two.

    sent      rows from each rank to each other
    between   of them, those that each rank sends to other nodes
    time_s    by the price of the links
    """

    name: str
    sent: Sequence[Sequence[int]]
    between: Sequence[int]
    time_s: float


class DrawnExperts(NamedTuple):
    """A routing, and the ways of its rows, proved."""

    title: str
    dispatch: Dispatch
    ways: tuple[DispatchWay, DispatchWay]


@click.command()
@click.option("--ranks", type=NUMBER, default=4, help="Ranks that divide the experts.")
@click.option("--nodes", type=NUMBER, default=2, help="Nodes that divide the ranks.")
@click.option("--experts", "count", type=NUMBER, default=8, help="Experts on all ranks.")
@click.option("--per-token", type=NUMBER, default=2, help="Experts of a token.")
@click.option("--tokens", type=click.IntRange(min=0), default=64, help="Tokens of each rank.")
@click.option(
    "--skew", type=NOT_NEGATIVE, default=0.5, help="Expert e is as likely as 1/(e + 1) to this power."
)
@click.option("--seed", type=int, default=0, help="Of the routing, which is drawn.")
@click.option("--sum-on-node", is_flag=True, help="Outputs on one node come home as their sum.")
@click.option("--row-bytes", type=NUMBER, default=8192, help="Of a token: 4096 values in bfloat16.")
@click.option("--alpha-intra", type=NOT_NEGATIVE, default=1e-6, help="Seconds per message.")
@click.option("--beta-intra", type=NOT_NEGATIVE, default=1e-11, help="Seconds per byte.")
@click.option("--alpha-inter", type=NOT_NEGATIVE, default=5e-6, help="Seconds per message.")
@click.option("--beta-inter", type=NOT_NEGATIVE, default=4e-11, help="Seconds per byte.")
@picture.output_options()
def experts(output: picture.Output | None, **given: Any) -> None:
    """Draw expert parallelism: loads of experts, and who sends what to whom in one stage and in two.

    A row is a token on its way to one of its experts, or an output on its way home; in two stages a token
    goes to each node once. Rows are those of a layer's forward and backward. Each way is proved first: every
    row comes to its expert once, and its output home once.
    """
    drawn = planned(**given)
    click.echo(f"{drawn.title}\n\n{load_chart(drawn.dispatch)}\n\n{table(drawn)}")
    picture.write(output, lambda: figure_of(drawn))


def planned(
    ranks: int, nodes: int, count: int, per_token: int, tokens: int, skew: float, seed: int, **given: Any
) -> DrawnExperts:
    """Draw a routing by chance, prove both ways of its rows and price them."""
    if per_token > count:
        raise LayoutError(f"--per-token={per_token}, but there are --experts={count}; give {count} or fewer")
    if nodes > ranks:
        raise LayoutError(f"--nodes={nodes} for --ranks={ranks}: each node has one at least")
    draw = random.Random(seed)
    routing = tuple(tuple(chosen(draw, count, per_token, skew) for _ in range(tokens)) for _ in range(ranks))
    node_of = tuple(
        node for node, (start, stop) in enumerate(bounds(ranks, nodes)) for _ in range(start, stop)
    )
    one, two = (Dispatch(routing, count, node_of, stages) for stages in (1, 2))
    title = (
        f"{tokens * ranks:,} tokens of {per_token} of {count} experts on {words(ranks, 'rank')} of "
        f"{words(nodes, 'node')}{', outputs summed on nodes' if given['sum_on_node'] else ''}"
    )
    return DrawnExperts(title, one, (way("one stage", one, **given), way("two stages", two, **given)))


def chosen(draw: random.Random, count: int, per_token: int, skew: float) -> tuple[int, ...]:
    """Choose different experts, the first ones more often; by the largest of scores with Gumbel noise."""
    scores = [-skew * math.log(e + 1) - math.log(-math.log(1 - draw.random() or 0.5)) for e in range(count)]
    return tuple(sorted(range(count), key=lambda expert: -scores[expert])[:per_token])


def way(
    name: str,
    dispatch: Dispatch,
    sum_on_node: bool,
    row_bytes: int,
    alpha_intra: float,
    beta_intra: float,
    alpha_inter: float,
    beta_inter: float,
) -> DispatchWay:
    """Prove the way of a dispatch, count its rows and price them."""
    there, back = dispatch.messages, dispatch.returns(sum_on_node=sum_on_node)
    prove(dispatch, there, back)
    nodes = dispatch.nodes
    links = MessageCost(alpha_intra, beta_intra), MessageCost(alpha_inter, beta_inter)

    def leaving(rank: int, messages: Sequence[RowMessage]) -> int:
        return between_nodes([each for each in messages if each.sender == rank], nodes)

    # Gradients of outputs go the way of tokens, and those of tokens the way of outputs.
    sent = [
        [2 * (one + other) for one, other in zip(*rows, strict=True)]
        for rows in zip(rows_sent(there, dispatch.size), rows_sent(back, dispatch.size), strict=True)
    ]
    return DispatchWay(
        name,
        sent,
        [2 * (leaving(rank, there) + leaving(rank, back)) for rank in range(dispatch.size)],
        2 * sum(seconds(messages, nodes, row_bytes, *links) for messages in (there, back)),
    )


def words(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def load_chart(dispatch: Dispatch) -> str:
    """Draw a bar for each expert's rows, in the colour of its rank's node, and say how even they are."""
    loads, most = dispatch.loads, max(1, *dispatch.loads)
    width = max(4, len(f"{most:,}"))
    lines = [f"expert  rank  {'rows':>{width}}"]
    for expert, (rank, load) in enumerate(zip(dispatch.owners, loads, strict=True)):
        bar = "  " + "█" * round(BAR * load / most) if load else ""
        colour = COLOURS[dispatch.nodes[rank] % len(COLOURS)]
        lines.append(f"{expert:>6}  {rank:>4}  {load:>{width},}{click.style(bar, fg=colour)}")
    return "\n".join([*lines, "", balance(loads)])


def balance(loads: Sequence[int]) -> str:
    """Say how even loads are: the busiest over the mean, coefficient of variation, idle experts."""
    mean = sum(loads) / len(loads)
    if not mean:
        return "no rows"
    variation = math.sqrt(sum((load - mean) ** 2 for load in loads) / len(loads)) / mean
    return (
        f"the busiest expert has {max(loads) / mean:.2f} of the mean; coefficient of variation "
        f"{variation:.2f}; {loads.count(0)} idle"
    )


def table(drawn: DrawnExperts) -> str:
    """Tabulate the rows from each rank to each other, of both ways beside each other, and their sums."""
    ranks = range(drawn.dispatch.size)
    head, cells = [""], [[f"rank {rank}"] for rank in ranks]
    for each in drawn.ways:
        head += ["", *(f"to {rank}" for rank in ranks), "between nodes"]
        for rank, row in enumerate(cells):
            row += ["", *("" if to == rank else f"{each.sent[rank][to]:,}" for to in ranks)]
            row.append(f"{each.between[rank]:,}")
    widths = [max(map(len, column)) for column in zip(head, *cells, strict=True)]
    lines = [
        "  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in [head, *cells]
    ]
    second = sum(widths[: 3 + len(ranks)]) + 2 * (3 + len(ranks))
    above = f"{'':{widths[0] + 4}}{drawn.ways[0].name}".ljust(second) + f"  {drawn.ways[1].name}"
    return "\n".join([above, *lines, "", *map(total, drawn.ways)])


def total(of: DispatchWay) -> str:
    rows, between = sum(map(sum, of.sent)), sum(of.between)
    return f"{of.name}: {rows:,} rows, {between:,} of them between nodes; {of.time_s * 1e6:,.1f} µs"


# --- the picture ----------------------------------------------------------------------------------


def figure_of(drawn: DrawnExperts) -> Figure:
    """Return a figure of loads, and of rows from rank to rank.

    rows                one stage           two stages
    ▇                   to 0  1  2  3       to 0  1  2  3
    ▇ ▅                 0  ·  8 │8  8       0  ·  8 │9  ·
    ▇ ▅ ▂               1  8  · │8  8       1  8  · │·  9
    0 1 2 expert        ────────┼─────      ────────┼─────
    """
    figure = picture.new_figure(3.7)
    loads, one, two = figure.subplots(1, 3, width_ratios=(1.25, 1, 1))
    _draw_loads(loads, drawn.dispatch)
    most = max(1, *(max(map(max, each.sent)) for each in drawn.ways))
    for axes, each in zip((one, two), drawn.ways, strict=True):
        _draw_rows(axes, each, drawn.dispatch.nodes, most)
    one.set_ylabel("from rank")
    figure.suptitle(drawn.title, fontsize=10)
    return figure


def _draw_loads(axes: Axes, dispatch: Dispatch) -> None:
    loads = dispatch.loads
    colours = [picture.rank_colour(rank) for rank in dispatch.owners]
    axes.bar(range(len(loads)), loads, color=colours)
    mean = sum(loads) / len(loads)
    axes.axhline(mean, color="black", linewidth=0.8, linestyle="--")
    axes.text(len(loads) - 0.5, mean, "mean", ha="right", va="bottom", fontsize=7)
    axes.set_xlabel("expert; a colour for each rank")
    axes.set_ylabel("rows")
    axes.set_title(balance(loads).replace("; ", "\n", 1), fontsize=8)


def _draw_rows(axes: Axes, way: DispatchWay, nodes: tuple[int, ...], most: int) -> None:
    picture.draw_sent(axes, way.sent, darkest=most * 1.8, written="{:,}".format)
    for rank in range(1, len(way.sent)):
        if nodes[rank] != nodes[rank - 1]:
            axes.axhline(rank - 0.5, color="black", linewidth=1)
            axes.axvline(rank - 0.5, color="black", linewidth=1)
    axes.set_xlabel("to rank; lines divide nodes")
    rows, between = sum(map(sum, way.sent)), sum(way.between)
    axes.set_title(f"{way.name}: {rows:,} rows,\n{between:,} between nodes", fontsize=9)
