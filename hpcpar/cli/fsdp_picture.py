"""The picture of `hpcpar draw fsdp`: a row for each unit, with its gather, its use and where it is freed.

layer 0   |~~|FFFF|            ~~~|BBBB|
layer 1     ~~~~~~|FFFF|   ~~~|BBBB|           ~ gather under way
layer 2         ~~~~~~~|FFFF|BBBB|
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpcpar.cli.picture import (
    ACTIVATIONS,
    BACKWARD,
    COMMUNICATION,
    FORWARD,
    IDLE,
    draw_spans,
    legend,
    new_figure,
    patches,
    tidy_rows,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from hpcpar.cli.draw_fsdp import FsdpStep
    from hpcpar.cli.picture import Colour

WAITED: Colour = ACTIVATIONS
"""Colour of standing still for a gather."""

HELD: dict[str, Colour] = {"": IDLE, "F": FORWARD, "B": BACKWARD}


def draw(found: FsdpStep, step: int) -> Figure:
    """Return a figure with a row for each unit."""
    from hpcpar.cli.draw_fsdp import LARGEST, parts_of

    names = found.names[:LARGEST]
    figure = new_figure(1.4 + 0.34 * len(names))
    axes = figure.subplots()
    for unit in found.units:
        if unit.unit not in names:
            continue
        row = names.index(unit.unit)
        parts = parts_of(unit, found.passes)
        for kind in HELD:  # all of it first
            draw_spans(axes, row, parts[kind], HELD[kind])
        draw_spans(axes, row, [(unit.gather.start_s, unit.gather.stop_s)], IDLE, height=0.2)
        draw_spans(axes, row, unit.in_flight, COMMUNICATION, height=0.4)
        draw_spans(axes, row, [unit.waited], WAITED, height=0.4)
    tidy_rows(axes, names)
    axes.set_xlim(0, found.seconds * 1e3)
    axes.set_xlabel("ms")
    hidden = f"{found.hidden_s / found.in_flight_s:.0%}" if found.in_flight_s else "none"
    axes.set_title(
        f"step {step} of rank {found.rank}: {len(found.units)} gathers, "
        f"{found.in_flight_s * 1e3:.1f} ms under way, {hidden} of it hidden",
        fontsize=10,
        loc="left",
    )
    colours = {
        "all-gather under way": COMMUNICATION,
        "stands still for it": WAITED,
        "held in forward": FORWARD,
        "in backward": BACKWARD,
        "memory allocated": IDLE,
    }
    legend(figure, patches(colours))
    return figure
