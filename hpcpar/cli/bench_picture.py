"""The picture of `hpcpar bench collectives`: bus bandwidth against size, with the memory-copy ceiling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hpcpar.bench.measure import COPY, MEMORY_COPY, ResultRow
from hpcpar.cli.picture import ACTIVATIONS, FORWARD, MEASURED, new_figure
from hpcpar.units import format_nbytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

OUTSTANDING = {"chosen": ACTIVATIONS, "mpi": "black", "gloo": FORWARD}
"""Candidates with a colour and a thick line; all others are thin."""

PANEL_INCHES = 3.6


def draw(rows: Sequence[ResultRow], facts: Mapping[str, Any]) -> Figure:
    """Return a figure with a panel for each collective.

    The dashed line is a copy within memory on all ranks at once, in bytes copied per second on each rank:
    a byte that is sent is copied at least once.
    """
    collectives = [name for name in dict.fromkeys(row.collective for row in rows) if name != COPY]
    across = 1 if len(collectives) < 3 else 2
    down = max(1, -(-len(collectives) // across))
    figure = new_figure(PANEL_INCHES * down)
    for at, collective in enumerate(collectives, 1):
        _panel(figure.add_subplot(down, across, at), collective, rows)
    figure.suptitle(f"{facts.get('ranks')} ranks on {facts.get('nodes')} node(s), {facts.get('mpi')}")
    return figure


def _panel(axes: Axes, collective: str, rows: Sequence[ResultRow]) -> None:
    for name, points in lines(rows, collective).items():
        outstanding = OUTSTANDING.get(name)
        axes.plot(
            *zip(*points, strict=True),
            label=name,
            color=outstanding,
            linewidth=2.2 if outstanding else 0.8,
            zorder=3 if outstanding else 2,
            marker="o" if outstanding else None,
            markersize=3,
        )
    ceiling = lines(rows, COPY).get(MEMORY_COPY)
    if ceiling:
        axes.plot(
            *zip(*ceiling, strict=True), label="memory copy", linestyle="--", color=MEASURED, linewidth=1.5
        )
    sizes = sorted({row.nbytes for row in rows if row.collective == collective})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    shown = sizes[:: -(-len(sizes) // 6)]  # at most six labels fit
    axes.set_xticks(shown, [format_nbytes(nbytes) for nbytes in shown], fontsize=8)
    axes.minorticks_off()
    axes.set_xlabel("whole array")
    axes.set_ylabel("busbw (GB/s)")
    axes.set_title(collective)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7, ncols=2, loc="lower right")


def lines(rows: Sequence[ResultRow], collective: str) -> dict[str, list[tuple[int, float]]]:
    """Return (bytes, busbw) of each candidate in rising order, from the better of its two places."""
    found: dict[str, dict[int, float]] = {}
    for row in rows:
        if row.collective == collective and row.busbw_gb_per_s > 0:
            by_size = found.setdefault(row.algorithm, {})
            by_size[row.nbytes] = max(by_size.get(row.nbytes, 0.0), row.busbw_gb_per_s)
    return {name: sorted(by_size.items()) for name, by_size in found.items()}
