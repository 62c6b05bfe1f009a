"""Memory of a rank by stage of ZeRO, as bars: measured beside the formula.

                 parameters  gradients  optimizer state       beyond the model state, at most
    ZeRO-0      ▐███████████▒▒▒▒▒▒▒▒▒▒▒░░░░░░░░░░░░░░░░░░░░░
    ZeRO-2      ▐███████████▒▒▒░░░░░//
    ZeRO-3      ▐███▒▒▒░░░░░//\\\\

source   Rajbhandari et al. 2020, ZeRO, arXiv 1910.02054, figure 1
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpcpar.cli.picture import STATE_COLOURS, legend, new_figure, patches
from hpcpar.planner.memory import STATE
from hpcpar.units import MiB, format_nbytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Record = Mapping[str, Any]
"""A line of the benchmark: what it says of itself, and a memory report as plain values."""

COLOURS = dict(zip(STATE, STATE_COLOURS, strict=True))

BEYOND = {
    "peak_staging_nbytes": ("gradients on their way", "//", COLOURS["gradients"]),
    "peak_gathered_nbytes": ("units in flight", "\\\\", COLOURS["parameters"]),
    "peak_offload_nbytes": ("blocks from disk", "..", COLOURS["optimizer state"]),
}
"""What a rank needs beside the model state, at most: its name, hatching and colour."""

BAR_INCHES = 0.62


@dataclass(frozen=True)
class Bar:
    """One way of training, on the rank that needs most; bytes in memory by part.

    state    measured; of what a node's ranks have in common the rank's share
    theory   by the formula, of what is in memory
    beyond   at most, during a step
    disk     of the formula, what is in files
    """

    label: str
    formula: str
    state: dict[str, float]
    theory: dict[str, float]
    beyond: dict[str, float]
    disk_nbytes: int = 0

    @property
    def text(self) -> str:
        on_disk = f", and {format_nbytes(self.disk_nbytes)} on disk" if self.disk_nbytes else ""
        return f"{self.formula}: {format_nbytes(sum(self.state.values()))}{on_disk}"


def bar(record: Record) -> Bar:
    worst = record["worst"]
    sharers = worst["sharers"]
    state, theory = {}, {}
    for what in STATE:
        line = worst["state"][what]
        in_memory = line["device_nbytes"] + line["host_nbytes"]
        state[what] = in_memory + line["common_nbytes"] / sharers
        # A line is in one place as a whole.
        theory[what] = 0.0 if line["disk_nbytes"] else line["formula_nbytes"]
        if line["common_nbytes"]:
            theory[what] /= sharers
    variant = record.get("variant", "plain")
    label = f"ZeRO-{record['stage']}" + ("" if variant == "plain" else f", {variant}")
    beyond = {name: worst[key] for key, (name, _, _) in BEYOND.items() if worst[key]}
    on_disk = sum(line["disk_nbytes"] for line in worst["state"].values())
    return Bar(label, record["formula"], state, theory, beyond, on_disk)


def draw(records: Sequence[Record]) -> Figure:
    """Return a figure with a bar for each line."""
    bars = [bar(record) for record in records]
    figure = new_figure(1.5 + BAR_INCHES * max(1, len(bars)))
    axes = figure.add_subplot()
    for place, each in enumerate(bars):
        _draw_bar(axes, place, each)
    axes.set_yticks(range(len(bars)), [each.label for each in bars])
    axes.invert_yaxis()
    axes.set_xlabel("MiB on the rank that needs most")
    axes.grid(axis="x", alpha=0.3)
    axes.margins(x=0.28)  # room for the formulas
    axes.set_xlim(left=0)
    axes.set_axisbelow(True)
    if bars:
        _legend(figure, bars)
        axes.set_title(_title(records[0]), fontsize=9)
    return figure


def _draw_bar(axes: Axes, place: int, shown: Bar) -> None:
    left = theory = 0.0
    for what in STATE:
        axes.barh(place, shown.state[what] / MiB, left=left / MiB, height=0.6, color=COLOURS[what])
        axes.barh(
            place,
            shown.theory[what] / MiB,
            left=theory / MiB,
            height=0.74,
            fill=False,
            edgecolor="black",
            linewidth=1.0,
        )
        left += shown.state[what]
        theory += shown.theory[what]
    for name, hatch, colour in BEYOND.values():
        if name in shown.beyond:
            axes.barh(
                place,
                shown.beyond[name] / MiB,
                left=left / MiB,
                height=0.6,
                color="white",
                edgecolor=colour,
                hatch=hatch,
                linewidth=0.8,
            )
            left += shown.beyond[name]
    axes.text(
        max(left, theory) / MiB,
        place,
        f"  {shown.text}",
        va="center",
        fontsize=8,
    )


def _legend(figure: Figure, bars: Iterable[Bar]) -> None:
    from matplotlib.patches import Patch

    there = {name for each in bars for name in each.beyond}
    handles = [
        *patches(COLOURS),
        Patch(fill=False, edgecolor="black", label="formula"),
        *(
            Patch(facecolor="white", edgecolor=colour, hatch=hatch, label=f"{name}, at most")
            for name, hatch, colour in BEYOND.values()
            if name in there
        ),
    ]
    legend(figure, handles, columns=4)


def _title(record: Record) -> str:
    return (
        f"Model state measured on {record.get('reported_ranks')} ranks: a Llama of "
        f"{record['parameters'] / 1e6:.1f} M parameters, {record.get('precision')}, "
        f"{record.get('optimizer')}"
    )
