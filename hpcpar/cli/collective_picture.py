"""The picture of `hpcpar draw allreduce --output FILE`: what each rank holds before each step and at the end.

    before step 0      before step 1      …      at the end
    rank 0 |a|a|a|     rank 0 |a|a|ac|           rank 0 |abc|abc|abc|
    rank 1 |b|b|b|     …                         …

A row is a rank, a cell a chunk; its stripes have the colours of the ranks whose contributions are in it. An
arrow is a message that is on its way next. All of it comes from the proof of the schedule. A GIF shows one
step after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, NamedTuple

from hpcpar.algorithms.draw import halves_of, rows_of, time_text, title
from hpcpar.algorithms.prove import Memory, memories
from hpcpar.algorithms.registry import Algorithm
from hpcpar.algorithms.step import Space
from hpcpar.algorithms.topology import Nodes
from hpcpar.cli.picture import legend, new_figure, patches, rank_colour
from hpcpar.errors import OperationError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LARGEST = 10
"""Ranks that differ in colour."""

COLUMNS = 4


class ChunkArrow(NamedTuple):
    """A chunk on its way: (rank, space, place) of its ends."""

    start: tuple[int, Space, int]
    end: tuple[int, Space, int]


class Moment(NamedTuple):
    """Memory of all ranks between two steps, and the messages of the next one.

    half   of an all-reduce, where it begins with this moment
    """

    name: str
    memories: Sequence[Memory]
    arrows: Sequence[ChunkArrow]
    half: str = ""


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
    arrows: list[list[ChunkArrow]] = [[] for _ in range(count + 1)]
    for rank, steps in enumerate(schedules):
        for number, step in enumerate(steps):
            for receive in step.receives:
                # The k-th message from a to b meets the k-th receive that b posts from a.
                send = next(each for each in sent if (each[0], each[1].to) == (receive.source, rank))
                sent.remove(send)
                arrows[rows[rank][number]] += [
                    ChunkArrow((receive.source, send[1].space, place), (rank, receive.space, into))
                    for place, into in zip(send[1].chunks, receive.chunks, strict=True)
                ]
    halves = halves_of(schedules, seen) if algorithm.collective == "allreduce" else {}
    names = [*(f"before step {row}" for row in range(count)), "at the end"]
    done = [[sum(at < row for at in of_rank.values()) for of_rank in rows] for row in range(count + 1)]
    return [
        Moment(name, [seen[rank][done[row][rank]] for rank in range(size)], arrows[row], halves.get(row, ""))
        for row, name in enumerate(names)
    ]


def draw(algorithm: Algorithm, size: int, *, root: int = 0, nodes: Nodes | None = None) -> Figure:
    """Return a figure with a panel for each moment; each half of an all-reduce begins a line.

    errors   OperationError for too many ranks to see
    """
    found = moments(algorithm, size, root=root, nodes=nodes)
    begins = [place for place, each in enumerate(found) if each.half] or [0]
    lines = [
        found[first : min(first + COLUMNS, stop)]
        for start, stop in zip(begins, [*begins[1:], len(found)], strict=True)
        for first in range(start, stop, COLUMNS)
    ]
    figure = new_figure((0.5 + 0.34 * size) * len(lines) + 0.7)
    panels = figure.subplots(len(lines), max(map(len, lines)), squeeze=False)
    for row, line in zip(panels, lines, strict=True):
        for axes, moment in zip_longest(row, line):
            if moment is None:
                axes.set_axis_off()
            else:
                _draw_moment(axes, moment)
    _head(figure, algorithm, size, root, nodes)
    return figure


def frames(algorithm: Algorithm, size: int, *, root: int = 0, nodes: Nodes | None = None) -> list[Figure]:
    """Return a figure for each moment, in order; errors as of `draw`."""
    found, half = [], ""
    for moment in moments(algorithm, size, root=root, nodes=nodes):
        half = moment.half or half  # each frame says it
        found.append(new_figure(1.3 + 0.5 * size))
        _draw_moment(found[-1].subplots(), moment._replace(half=half))
        _head(found[-1], algorithm, size, root, nodes)
    return found


def _head(figure: Figure, algorithm: Algorithm, size: int, root: int, nodes: Nodes | None) -> None:
    chunks = algorithm.chunks(size, 1, nodes)
    heading = f"{title(algorithm, size, root, chunks)}; time {time_text(algorithm, size)}"
    figure.suptitle(heading, fontsize=9)
    ranks = {f"of rank {rank}": rank_colour(rank) for rank in range(size)}
    legend(figure, patches(ranks), columns=min(size, 5))


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
    name = f"{moment.half}: {moment.name}" if moment.half else moment.name
    axes.set_title(name, fontsize=9, loc="left", pad=14 if len(spaces) > 1 else 3)


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
