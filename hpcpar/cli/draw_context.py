"""`hpcpar draw context --ranks 4 --length 32`: who attends to what, and who sends what to whom."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from hpcpar.cli import picture
from hpcpar.context_parallel import METHODS, Mask
from hpcpar.context_parallel.context_plan import ContextPlan, balanced, moves_of, positions_of, prove
from hpcpar.context_parallel.context_traffic import ContextTraffic, HeadSizes, traffic
from hpcpar.errors import LayoutError
from hpcpar.partition import bounds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NUMBER = click.IntRange(min=1)

CELLS = 32
"""Rows and columns of the mask as text, at most; a cell is then of several tokens."""

COLOURS = ("blue", "yellow", "green", "magenta", "cyan", "red", "white")

NAMES = "0123456789abcdefghijklmnopqrstuvwxyz"
"""Ranks in one character each; later ones begin again."""


class DrawnPlan(NamedTuple):
    """A plan, proved, and what travels by a method; `plan` is of ranks that exchange keys.

    shares   places in the sequence that each rank holds
    areas    pairs of query and key that each rank computes, counted for each head
    ring     traffic of the ring with the same mask and as many ranks
    """

    title: str
    plan: ContextPlan
    inner: int
    shares: Sequence[Sequence[int]]
    areas: Sequence[int]
    traffic: ContextTraffic
    ring: ContextTraffic

    @property
    def owners(self) -> list[int]:
        """Rank that exchanges keys and has those of each place."""
        owners = [0] * self.plan.mask.length
        for rank, share in enumerate(self.plan.shares):
            for place in positions_of(share):
                owners[place] = rank
        return owners


def lengths(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    """Read numbers of tokens, as in 5,3,8."""
    try:
        return None if value is None else tuple(int(word) for word in value.split(","))
    except ValueError as error:
        raise click.BadParameter(f"{value!r}: give the tokens of each document, as in 5,3,8") from error


@click.command()
@click.option("--method", type=click.Choice(METHODS), default="exchange", help="How keys travel.")
@click.option("--ranks", type=NUMBER, default=4, help="Ranks that share each sequence.")
@click.option("--length", type=NUMBER, help="Tokens of the sequence; 32, or those of all documents.")
@click.option("--window", type=NUMBER, help="Tokens that a query sees, itself included.")
@click.option("--documents", callback=lengths, metavar="N,N,...", help="Tokens of each packed document.")
@click.option("--full", is_flag=True, help="Queries see later keys, too: not causal.")
@click.option("--inner", type=NUMBER, help="Ranks that exchange heads, of a method with two levels.")
@click.option("--keep", is_flag=True, help="Keep other ranks' keys for backward.")
@click.option("--heads", type=NUMBER, default=8, help="Of queries.")
@click.option("--kv-heads", type=NUMBER, help="Of keys and values; as many as of queries.")
@click.option("--head-size", type=NUMBER, default=64, help="Values of a token in a head.")
@picture.output_options()
def context(output: picture.Output | None, **given: Any) -> None:
    """Draw context parallelism: who attends to what, who sends what to whom, beside the ring.

    A row of the mask is a query and a column a key. The row's colour and name are the rank that has the
    query, a cell's character is the rank that has the key. Values are those of one sequence and layer. Each
    plan is proved first: every pair is computed once, and all that it needs is sent and comes home.
    """
    drawn = planned(**given)
    click.echo(f"{drawn.title}\n\n{mask_chart(drawn)}\n\n{table(drawn)}")
    picture.write(output, lambda: figure_of(drawn))


def planned(method: str, ranks: int, inner: int | None, keep: bool, **given: Any) -> DrawnPlan:
    """Make the plan, prove it and count what travels."""
    mask, heads = (
        mask_of(**{name: given[name] for name in ("length", "window", "documents", "full")}),
        heads_of(given),
    )
    inner = ranks_of_heads(method, ranks, inner)
    plan, ring = balanced(mask, ranks // inner), balanced(mask, ranks)
    prove(plan, *moves_of(plan, method))
    shares = []
    for share in plan.shares:
        held = positions_of(share)
        shares += [held[start:stop] for start, stop in bounds(len(held), inner)]
    return DrawnPlan(
        f"{method}: {mask_words(mask)} on {ranks} {'rank' if ranks == 1 else 'ranks'}",
        plan,
        inner,
        shares,
        [area * heads.queries // inner for area in plan.areas for _ in range(inner)],
        traffic(plan, method, heads, inner=inner, keep=keep),
        traffic(ring, "ring", heads, keep=keep),
    )


def mask_of(length: int | None, window: int | None, documents: tuple[int, ...] | None, full: bool) -> Mask:
    if length is None:
        length = 32 if documents is None else sum(documents)
    return Mask(length, not full, window, documents)


def mask_words(mask: Mask) -> str:
    """Say what the mask is, as in "16 tokens, causal, window of 4, 3 documents"."""
    words = [f"{mask.length:,} tokens", "causal" if mask.causal else "full"]
    words += [f"window of {mask.window:,}"] if mask.window is not None else []
    words += [f"{len(mask.documents)} documents"] if mask.documents is not None else []
    return ", ".join(words)


def heads_of(given: dict[str, Any]) -> HeadSizes:
    heads = HeadSizes(given["heads"], given["kv_heads"] or given["heads"], given["head_size"])
    if heads.queries % heads.keys:
        raise LayoutError(
            f"--heads={heads.queries} is not a multiple of --kv-heads={heads.keys}: each serves as many"
        )
    return heads


def ranks_of_heads(method: str, ranks: int, inner: int | None) -> int:
    """Return how many ranks exchange heads; LayoutError for an --inner that does not fit."""
    if "+" not in method:
        if inner is not None:
            raise LayoutError(f"--inner={inner} is for methods with two levels; {method} has one")
        return ranks if method == "ulysses" else 1
    if inner is None:
        raise LayoutError(
            f"{method} has two levels: say by --inner how many ranks exchange heads, as of a node"
        )
    if ranks % inner:
        raise LayoutError(f"--inner={inner} ranks that exchange heads do not divide --ranks={ranks}")
    return inner


def mask_chart(drawn: DrawnPlan) -> str:
    """Draw the mask, a line for each query or for as many as a cell has: its first query and first key."""
    length, owners = drawn.plan.mask.length, drawn.owners
    step = -(-length // CELLS)
    places = range(0, length, step)
    width = len(f"{length - 1:,}")
    holders = [group_name(drawn, owner) for owner in owners]
    wide = max(map(len, holders))
    of_cell = f", each cell {step} x {step} tokens" if step > 1 else ""
    lines = [f"{'query':>{width + wide + 6}}    keys of rank{of_cell}"]
    for query in places:
        seen = drawn.plan.mask.keys(query)
        cells = " ".join(
            NAMES[owners[key] * drawn.inner % len(NAMES)] if seen.start <= key < seen.stop else "·"
            for key in places
        )
        colour = COLOURS[owners[query] % len(COLOURS)]
        lines.append(f"rank {holders[query]:<{wide}} {query:>{width},}    " + click.style(cells, fg=colour))
    return "\n".join(lines)


def group_name(drawn: DrawnPlan, owner: int) -> str:
    """Name the ranks that have an owner's keys together: one, or those that exchange heads."""
    first = owner * drawn.inner
    return str(first) if drawn.inner == 1 else f"{first}-{first + drawn.inner - 1}"


def table(drawn: DrawnPlan) -> str:
    """Tabulate tokens, pairs and values sent to each rank, forward and backward, beside the ring's sum."""
    ranks = range(len(drawn.shares))
    there, back = drawn.traffic
    head = ["", "tokens", "pairs", *(f"to {rank}" for rank in ranks), "forward", "backward", "sent", "ring"]
    rows = [
        [
            f"rank {rank}",
            *(f"{number:,}" for number in (len(drawn.shares[rank]), drawn.areas[rank])),
            *("" if to == rank else f"{there[rank][to] + back[rank][to]:,}" for to in ranks),
            *(f"{number:,}" for number in (sum(there[rank]), sum(back[rank]))),
            *(f"{of.of_ranks[rank]:,}" for of in (drawn.traffic, drawn.ring)),
        ]
        for rank in ranks
    ]
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = [
        "  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in [head, *rows]
    ]
    return "\n".join([*lines, "", *map(spans_line, ranks, drawn.shares), "", ratio(drawn)])


def spans_line(rank: int, held: Sequence[int]) -> str:
    """Name the places that a rank holds, as spans."""
    starts = [place for place, before in zip(held, [None, *held], strict=False) if place - 1 != before]
    stops = [place + 1 for place, after in zip(held, [*held[1:], None], strict=False) if place + 1 != after]
    spans = [f"{a:,}" if a == b - 1 else f"{a:,} to {b - 1:,}" for a, b in zip(starts, stops, strict=True)]
    shown = ", ".join(spans if len(spans) <= 8 else [*spans[:8], f"and {len(spans) - 8} more"])
    return f"rank {rank} holds {shown or 'no token'}"


def ratio(drawn: DrawnPlan) -> str:
    """Compare the values of all ranks with the ring's, and the busiest rank with the mean."""
    ours, ring = sum(drawn.traffic.of_ranks), sum(drawn.ring.of_ranks)
    if not ring:
        return "one rank sends nothing"
    most = max(drawn.areas) * len(drawn.areas) / max(1, sum(drawn.areas))
    beside = f"{ours / ring:.2f} of the ring's {ring:,}"
    return f"all ranks send {ours:,} values, {beside}; the busiest computes {most:.2f} of the mean"


# --- the picture ----------------------------------------------------------------------------------


PIXELS = 512
"""Rows and columns of the mask, at most; a cell is then of several tokens."""

LIGHT = 0.65
"""How much of white is in the colour of a pair whose key is another rank's."""


def figure_of(drawn: DrawnPlan) -> Figure:
    """Return a figure of the mask, and of what each rank sends to each.

        query                      exchange            ring
        0  ▓                       to 0  1             to 0  1
        1  ░▓                      0  ·  8             0  ·  16
        2  ░▓▓                     1  16 ·             1  16 ·
        3  ▓░░▓
           0  1  2  3 key

    A row's colour is the rank that has the query: full where the rank has the key, too, else light.
    """
    figure = picture.new_figure(3.7)
    mask, ours, ring = figure.subplots(1, 3, width_ratios=(1.25, 1, 1))
    _draw_mask(mask, drawn)
    most = max(max(map(max, (*each.forward, *each.backward))) for each in (drawn.traffic, drawn.ring))
    method = drawn.title.partition(":")[0]
    _draw_sends(ours, method, drawn.traffic, 2 * most)
    _draw_sends(ring, "ring", drawn.ring, 2 * most)
    ours.set_ylabel("from rank")
    figure.suptitle(drawn.title, fontsize=10)
    return figure


def _draw_mask(axes: Axes, drawn: DrawnPlan) -> None:
    import numpy as np
    from matplotlib import colormaps
    from matplotlib.patches import Patch

    length, owners = drawn.plan.mask.length, np.array(drawn.owners)
    places = np.arange(0, length, -(-length // PIXELS))
    seen = np.array([drawn.plan.mask.keys(place) for place in places.tolist()])
    allowed = (seen[:, :1] <= places) & (places < seen[:, 1:])
    colours = np.array([colormaps["tab10"](rank % 10)[:3] for rank in range(drawn.plan.size)])
    own = colours[owners[places]]
    is_own = owners[places][:, None] == owners[places]
    pixels = np.where(is_own[..., None], own[:, None], own[:, None] * (1 - LIGHT) + LIGHT)
    pixels[~allowed] = 1
    axes.imshow(pixels, extent=(0, length, length, 0), interpolation="nearest")
    axes.set_xlabel("key")
    axes.set_ylabel("query")
    title = "full colour: own keys;\npale: keys of other ranks"
    axes.set_title(title if drawn.plan.size > 1 else "each rank computes this\nin its heads", fontsize=9)
    handles = [
        Patch(
            color=tuple(colour), label=f"{'rank' if drawn.inner == 1 else 'ranks'} {group_name(drawn, rank)}"
        )
        for rank, colour in enumerate(colours)
    ]
    if len(handles) <= picture.LABELLED_RANKS:
        axes.legend(handles=handles, fontsize=7, loc="upper right")


def _draw_sends(axes: Axes, method: str, traffic: ContextTraffic, most: int) -> None:
    import numpy as np

    sent = np.array(traffic.forward) + np.array(traffic.backward)
    picture.draw_sent(axes, sent.tolist(), darkest=max(1, most) * 1.3, written=_short)
    if len(sent) <= picture.LABELLED_RANKS:
        names = [f"{rank} ({_short(values)})" for rank, values in enumerate(traffic.of_ranks)]
        axes.set_yticks(range(len(sent)), names, fontsize=8)
    total = f"{_short(sum(traffic.of_ranks))} values,\nforward and backward"
    axes.set_title(f"{method}: {total}", fontsize=9)


def _short(values: int) -> str:
    for unit, letter in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if values >= unit:
            return f"{values / unit:.3g} {letter}"
    return str(values)
