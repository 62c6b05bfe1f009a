"""Bus bandwidth against size, with the memory-copy ceiling drawn in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcpar.bench.measure import COPY, MEMORY_COPY, Row
from hpcpar.units import format_nbytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

OUTSTANDING = {
    "chosen": "tab:red",
    "prepared": "tab:orange",
    "mpi": "black",
    "gloo": "tab:blue",
    "horovod": "tab:purple",
}
"""Whom the picture is about; all others are thin lines behind them."""

PANEL_INCHES = (7.0, 4.4)


def draw(rows: Sequence[Row], facts: Mapping[str, Any], path: Path) -> None:
    """One panel for each collective into a file (PNG, SVG or PDF, by its name).

    The dashed line is a plain copy within memory on all ranks at once: bytes copied per second on each
    rank, each of them read once and written once. A byte that is sent is copied at least once.
    """
    # Imported here, so that nothing but a picture waits for it.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    collectives = [name for name in dict.fromkeys(row.collective for row in rows) if name != COPY]
    width, height = PANEL_INCHES
    across = 1 if len(collectives) < 3 else 2
    down = max(1, -(-len(collectives) // across))
    figure = Figure(figsize=(width * across, height * down), layout="constrained")
    FigureCanvasAgg(figure)
    for at, collective in enumerate(collectives, 1):
        _panel(figure.add_subplot(down, across, at), collective, rows)
    figure.suptitle(f"{facts.get('ranks')} ranks on {facts.get('nodes')} node(s), {facts.get('mpi')}")
    figure.savefig(path, dpi=120)


def _panel(axes: Axes, collective: str, rows: Sequence[Row]) -> None:
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
            *zip(*ceiling, strict=True), label="memory copy", linestyle="--", color="tab:gray", linewidth=1.5
        )
    sizes = sorted({row.nbytes for row in rows if row.collective == collective})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    shown = sizes[:: -(-len(sizes) // 7)]  # as many as have room for their labels
    axes.set_xticks(shown)
    axes.set_xticklabels([format_nbytes(nbytes) for nbytes in shown])
    axes.minorticks_off()
    axes.set_xlabel("whole array")
    axes.set_ylabel("busbw (GB/s)")
    axes.set_title(collective)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7, ncols=2, loc="lower right")


def lines(rows: Sequence[Row], collective: str) -> dict[str, list[tuple[int, float]]]:
    """For each candidate (bytes, busbw) in rising order: its better place where there are two."""
    found: dict[str, dict[int, float]] = {}
    for row in rows:
        if row.collective == collective and row.busbw_gb_per_s > 0:
            by_size = found.setdefault(row.algorithm, {})
            by_size[row.nbytes] = max(by_size.get(row.nbytes, 0.0), row.busbw_gb_per_s)
    return {name: sorted(by_size.items()) for name, by_size in found.items()}
