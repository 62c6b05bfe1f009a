"""The picture of `hpcpar draw memory`: memory of a rank over a step, activations above the model state.

GiB  |      /|   - - planned
     |    _/ |_     activations
     |___/_____\\____
     | optimizer state, gradients, parameters
       F      B
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpcpar.cli.picture import (
    ACTIVATIONS,
    BACKWARD,
    COMMUNICATION,
    FORWARD,
    STATE_COLOURS,
    legend,
    new_figure,
    patches,
)
from hpcpar.planner.memory import STATE
from hpcpar.units import GiB, MiB

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from hpcpar.cli.draw_memory import StepMemory

BAND = 0.04
"""Height of the band of passes, of the picture's."""


def draw(found: StepMemory, step: int) -> Figure:
    """Return a figure of memory over the time of the step."""
    from hpcpar.cli.draw_memory import value_at

    unit, name = (GiB, "GiB") if found.peak_nbytes >= GiB else (MiB, "MiB")
    figure = new_figure(4.2)
    axes = figure.subplots()
    times = sorted({0.0, found.seconds, *(at for at, _ in (*found.activations, *found.gathered))})
    layers = [
        *(
            (what, [found.state[what]] * len(times), colour)
            for what, colour in zip(STATE, STATE_COLOURS, strict=True)
        ),
        ("activations", [value_at(found.activations, at) for at in times], ACTIVATIONS),
        ("gathered units", [value_at(found.gathered, at) for at in times], COMMUNICATION),
    ]
    under = [0.0] * len(times)
    milliseconds = [at * 1e3 for at in times]
    for _, values, colour in layers:
        over = [below + value / unit for below, value in zip(under, values, strict=True)]
        axes.fill_between(milliseconds, under, over, step="post", color=colour, linewidth=0)
        under = over
    handles: list[Artist] = [*patches({what: colour for what, values, colour in layers if any(values)})]
    if found.planned:
        handles.append(_draw_planned(axes, found, unit))
    top = max(under) * 1.12
    _draw_passes(axes, found, top)
    axes.set_xlim(0, found.seconds * 1e3)
    axes.set_ylim(0, top)
    axes.set_xlabel("ms; above: blue forward, orange backward")
    axes.set_ylabel(f"{name} of rank {found.rank}")
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(f"memory of rank {found.rank} in step {step}", fontsize=10, loc="left")
    legend(figure, handles, columns=3)
    return figure


def _draw_planned(axes: Axes, found: StepMemory, unit: int) -> Artist:
    """Draw what was planned as a dashed line, and return it."""
    base = sum(found.planned.get(what, 0.0) for what in STATE)
    outline = found.planned_activations or [(0.0, 0.0), (found.seconds, 0.0)]
    (line,) = axes.plot(
        [at * 1e3 for at, _ in outline],
        [(base + nbytes) / unit for _, nbytes in outline],
        color="black",
        linestyle="--",
        linewidth=1.2,
        label="planned for the fullest rank, without gathered units",
    )
    return line


def _draw_passes(axes: Axes, found: StepMemory, top: float) -> None:
    for span in found.passes:
        axes.broken_barh(
            [(span.start_s * 1e3, (span.stop_s - span.start_s) * 1e3)],
            (top * (1 - BAND), top * BAND),
            facecolor=FORWARD if span.name == "F" else BACKWARD,
            edgecolor="white",
            linewidth=0.3,
        )
