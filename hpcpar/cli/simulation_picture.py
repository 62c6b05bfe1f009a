"""The picture of `hpcpar bench simulate`: time against bytes, and against ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from hpcpar.algorithms.simulate import AlgorithmTime, Crossover
from hpcpar.cli.picture import new_figure
from hpcpar.units import format_nbytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Found = Mapping[int, Sequence[AlgorithmTime]]


def draw(collective: str, by_size: Found, by_ranks: Found, crossovers: Sequence[Crossover] = ()) -> Figure:
    """Return a figure with two panels.

    by_size      what every algorithm takes for each size, at one number of ranks
    by_ranks     for each number of ranks, at one size
    crossovers   the sizes where the fastest algorithm changes, drawn as upright lines
    """
    figure = new_figure(4.6)
    against_bytes, against_ranks = figure.subplots(1, 2, sharey=True)
    ranks = next(iter(by_size.values()))[0].ranks
    nbytes = next(iter(by_ranks.values()))[0].nbytes
    _panel(against_bytes, by_size, format_nbytes)
    _panel(against_ranks, by_ranks, lambda n: f"{n:,}")
    against_bytes.set(title=f"{collective} on {ranks:,} ranks", xlabel="whole array", ylabel="seconds")
    against_ranks.set(title=f"{collective} of {format_nbytes(nbytes)}", xlabel="ranks")
    for change in crossovers:
        against_bytes.axvline(change.nbytes, color="0.5", linestyle=":", linewidth=1)
    handles, names = against_bytes.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", fontsize=8, ncols=4)
    return figure


def _panel(axes: Axes, found: Found, written: Callable[[int], str]) -> None:
    """Draw a line for each algorithm, over a broad grey one for the fastest."""
    places = list(found)
    least = [min(one.seconds for one in each) for each in found.values()]
    axes.plot(places, least, color="0.85", linewidth=7, label="fastest")
    for line in zip(*found.values(), strict=True):
        dashed = "--" if line[0].algorithm.startswith(("hierarchical", "leaders")) else "-"
        axes.plot(places, [one.seconds for one in line], dashed, label=line[0].algorithm, linewidth=1.6)
    ticks = places[:: max(1, len(places) // 5)]
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(ticks)
    axes.set_xticklabels([written(place) for place in ticks])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
