"""The picture of `hpcpar draw context`: the mask by rank, and who sends how much to whom, beside the ring.

    query                      exchange            ring
    0  ▓                       to 0  1             to 0  1
    1  ░▓                      0  ·  8             0  ·  16
    2  ░▓▓                     1  16 ·             1  16 ·
    3  ▓░░▓
       0  1  2  3 key

A row's colour is the rank that has the query; full where the rank has the key, too, light where it is sent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpcpar.cli.picture import LABELLED_RANKS, draw_sent, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from hpcpar.cli.draw_context import DrawnPlan
    from hpcpar.context_parallel.context_traffic import ContextTraffic

CELLS = 512
"""Rows and columns of the mask, at most; a cell is then of several tokens."""

LIGHT = 0.65
"""How much of white is in the colour of a pair whose key is another rank's."""


def draw(drawn: DrawnPlan) -> Figure:
    """Return a figure of the mask, and of what each rank sends to each."""
    figure = new_figure(3.7)
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
    places = np.arange(0, length, -(-length // CELLS))
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
    from hpcpar.cli.draw_context import group_name

    handles = [
        Patch(
            color=tuple(colour), label=f"{'rank' if drawn.inner == 1 else 'ranks'} {group_name(drawn, rank)}"
        )
        for rank, colour in enumerate(colours)
    ]
    if len(handles) <= LABELLED_RANKS:
        axes.legend(handles=handles, fontsize=7, loc="upper right")


def _draw_sends(axes: Axes, method: str, traffic: ContextTraffic, most: int) -> None:
    import numpy as np

    sent = np.array(traffic.forward) + np.array(traffic.backward)
    draw_sent(axes, sent.tolist(), darkest=max(1, most) * 1.3, written=_short)
    if len(sent) <= LABELLED_RANKS:
        names = [f"{rank} ({_short(values)})" for rank, values in enumerate(traffic.of_ranks)]
        axes.set_yticks(range(len(sent)), names, fontsize=8)
    total = f"{_short(sum(traffic.of_ranks))} values,\nforward and backward"
    axes.set_title(f"{method}: {total}", fontsize=9)


def _short(values: int) -> str:
    for unit, letter in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if values >= unit:
            return f"{values / unit:.3g} {letter}"
    return str(values)
