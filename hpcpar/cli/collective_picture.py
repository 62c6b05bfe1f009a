"""The picture of `hpcpar draw allreduce --output FILE`: what each rank holds before each step and at the end.

    before step 0      before step 1      …      at the end
    rank 0 |a|a|a|     rank 0 |a|a|ac|           rank 0 |abc|abc|abc|
    rank 1 |b|b|b|     …                         …

A row is a rank, a cell a chunk; its stripes have the colours of the ranks whose contributions are in it. An
arrow is a message that is on its way next. All of it comes from the proof of the schedule. A GIF shows one
step after the other.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from hpcpar.algorithms.draw import rows_of, time_text, title
from hpcpar.algorithms.prove import Memory, memories
from hpcpar.algorithms.registry import Algorithm
from hpcpar.algorithms.step import Space
from hpcpar.algorithms.topology import Nodes
from hpcpar.cli.picture import rank_colour, save
from hpcpar.errors import OperationError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LARGEST = 10
"""Ranks that differ in colour."""

COLUMNS = 4
FRAME_MS = 900


class Arrow(NamedTuple):
    """A chunk on its way: (rank, space, place) of its ends."""

    start: tuple[int, Space, int]
    end: tuple[int, Space, int]


class Moment(NamedTuple):
    """Memory of all ranks between two steps, and the messages of the next one."""

    name: str
    memories: Sequence[Memory]
    arrows: Sequence[Arrow]


def moments(algorithm: Algorithm, size: int, *, root: int = 0, nodes: Nodes | None = None) -> list[Moment]:
    """Prove the schedule, and return its states, a step apart; OperationError for too many ranks to see."""
    if size > LARGEST:
        raise OperationError(
            f"a picture shows {LARGEST} ranks at most, not {size}; without --output it is text"
        )
    schedules = [algorithm.generate(rank, size, root=root, nodes=nodes) for rank in range(size)]
    seen = memories(algorithm, size, root, nodes=nodes)
    rows = rows_of(schedules)
    sent = [(rank, send) for rank, steps in enumerate(schedules) for step in steps for send in step.sends]
    count = 1 + max((row for of_rank in rows for row in of_rank.values()), default=-1)
    arrows: list[list[Arrow]] = [[] for _ in range(count + 1)]
    for rank, steps in enumerate(schedules):
        for number, step in enumerate(steps):
            for receive in step.receives:
                # The k-th message from a to b meets the k-th receive that b posts from a.
                send = next(each for each in sent if (each[0], each[1].to) == (receive.source, rank))
                sent.remove(send)
                arrows[rows[rank][number]] += [
                    Arrow((receive.source, send[1].space, place), (rank, receive.space, into))
                    for place, into in zip(send[1].chunks, receive.chunks, strict=True)
                ]
    names = [*(f"before step {row}" for row in range(count)), "at the end"]
    done = [[sum(at < row for at in of_rank.values()) for of_rank in rows] for row in range(count + 1)]
    return [
        Moment(name, [seen[rank][done[row][rank]] for rank in range(size)], arrows[row])
        for row, name in enumerate(names)
    ]


def draw(algorithm: Algorithm, size: int, path: Path, *, root: int = 0, nodes: Nodes | None = None) -> None:
    """Draw into a file (PNG, SVG, PDF, or GIF with a frame for each step, by its name).

    errors   OperationError for too many ranks to see; ValueError for another format
    """
    # Imported here, so that nothing but a picture waits for it.
    from matplotlib.figure import Figure

    found = moments(algorithm, size, root=root, nodes=nodes)
    chunks = algorithm.chunks(size, 1, nodes)
    heading = f"{title(algorithm, size, root, chunks)}; time {time_text(algorithm, size)}"
    if path.suffix == ".gif":
        _animate(found, heading, path)
        return
    lines = -(-len(found) // COLUMNS)
    columns = -(-len(found) // lines)
    figure = Figure(figsize=(2.9 * columns, (0.5 + 0.34 * size) * lines + 0.7), dpi=110, layout="constrained")
    panels = figure.subplots(lines, columns, squeeze=False).ravel()
    for axes in panels[len(found) :]:
        axes.set_axis_off()
    for axes, moment in zip(panels, found, strict=False):
        _draw_moment(axes, moment)
    _head(figure, heading, size)
    save(figure, path)


def _animate(found: Sequence[Moment], heading: str, path: Path) -> None:
    from matplotlib.figure import Figure
    from PIL import Image

    size, frames = len(found[0].memories), []
    for moment in found:
        figure = Figure(figsize=(7.0, 1.3 + 0.5 * size), dpi=110, layout="constrained")
        _draw_moment(figure.subplots(), moment)
        _head(figure, heading, size)
        drawn = io.BytesIO()
        figure.savefig(drawn, format="png")
        frames.append(Image.open(drawn).convert("RGB").quantize(64))
    durations = [FRAME_MS] * (len(frames) - 1) + [3 * FRAME_MS]
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=durations, loop=0)


def _head(figure: Figure, heading: str, size: int) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(color=rank_colour(rank), label=f"of rank {rank}") for rank in range(size)]
    figure.suptitle(heading, fontsize=9)
    figure.legend(handles=handles, fontsize=8, ncols=min(size, 5), loc="outside lower center")


def _draw_moment(axes: Axes, moment: Moment) -> None:
    """Draw the cells of all ranks, space beside space, and the messages that leave next."""
    from matplotlib.patches import FancyArrowPatch

    spaces = [(space, len(values)) for space, values in moment.memories[0].items() if values]
    offsets: dict[Space, float] = {}
    width = 0.0
    for space, places in spaces:
        offsets[space] = width
        if len(spaces) > 1:
            axes.text(width + places / 2, -0.62, space, ha="center", va="bottom", fontsize=7)
        width += places + 0.6
    for rank, memory in enumerate(moment.memories):
        for space, _ in spaces:
            for place, value in enumerate(memory[space]):
                _draw_cell(axes, offsets[space] + place, rank, 0 if value is None else value.ranks)
    for (source, space, place), (rank, into, at) in moment.arrows:
        start, end = (offsets[space] + place + 0.5, source), (offsets[into] + at + 0.5, rank)
        axes.add_patch(
            FancyArrowPatch(
                start,
                end,
                connectionstyle="arc3,rad=0.25",
                arrowstyle="-|>",
                mutation_scale=9,
                color="black",
                lw=0.9,
            )
        )
    axes.set_xlim(-0.1, width - 0.5)
    axes.set_ylim(len(moment.memories) - 0.45, -0.55)
    axes.set_yticks(
        range(len(moment.memories)), [f"rank {rank}" for rank in range(len(moment.memories))], fontsize=8
    )
    axes.set_xticks([])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_title(moment.name, fontsize=9, loc="left", pad=14 if len(spaces) > 1 else 3)


def _draw_cell(axes: Axes, left: float, rank: int, contributions: int) -> None:
    """Draw a chunk: a stripe for each rank whose contribution is in it."""
    from matplotlib.patches import Rectangle

    ranks = [each for each in range(contributions.bit_length()) if contributions >> each & 1]
    for number, each in enumerate(ranks):
        stripe = 0.92 / len(ranks)
        axes.add_patch(
            Rectangle((left + 0.04 + number * stripe, rank - 0.4), stripe, 0.8, color=rank_colour(each))
        )
    axes.add_patch(Rectangle((left + 0.04, rank - 0.4), 0.92, 0.8, fill=False, edgecolor="0.6", lw=0.6))
