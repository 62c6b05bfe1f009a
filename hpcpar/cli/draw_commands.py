"""`hpcpar draw ring --size 4`: the steps of a collective; `pipeline`, `context`, `experts`, …"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from hpcpar.algorithms import draw as drawing
from hpcpar.algorithms import registry
from hpcpar.algorithms.prove import Memory, memories
from hpcpar.algorithms.registry import Algorithm
from hpcpar.algorithms.step import Space
from hpcpar.algorithms.topology import Nodes
from hpcpar.cli import Commands, LazyGroup, picture
from hpcpar.errors import HpcparError, OperationError, did_you_mean

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COMMANDS: Commands = {
    "steps": ("draw_commands", "The steps of a collective: `draw ring`, `draw allreduce --output ring.gif`."),
    "pipeline": ("draw_pipeline", "Pipeline schedules: proved, priced and drawn: `draw pipeline 1f1b`."),
    "context": ("draw_context", "Context parallelism: who attends to what, and who sends what to whom."),
    "experts": ("draw_experts", "Expert parallelism: loads of experts, and who sends how many rows to whom."),
    "balance": ("draw_balance", "Runs of models with experts: how evenly these were loaded, step by step."),
    "mesh": ("draw_mesh", "A layout: which rank is where, and who communicates."),
    "tp": ("draw_tp", "Tensor parallelism: how a layer's weights are split, and what f and g send."),
    "zero": ("draw_zero", "Stages of ZeRO: memory of the model state on each rank, and traffic."),
    "compare": ("draw_compare", "Approaches on as many ranks: memory, bytes and time, planned and measured."),
    "overlap": ("draw_overlap", "A step of a run: communication that it hid behind computing."),
    "fsdp": ("draw_fsdp", "A step of a run: gather, use and free of ZeRO-3's units."),
    "memory": ("draw_memory", "A step of a run: memory of a rank over time, measured and planned."),
    "activations": ("draw_activations", "What a layer keeps for backward, measured beside the formulas."),
}


class Drawings(LazyGroup):
    """Group of drawings; words that name none go to `steps`: an algorithm, its options, or nothing."""

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        if not args or args[0] not in (*self.lazy, *context.help_option_names):
            args = ["steps", *args]
        return super().parse_args(context, args)

    def invoke(self, context: click.Context) -> Any:
        """Call the command; an error that its user can mend ends it with a line, not with a stack."""
        try:
            return super().invoke(context)
        except BrokenPipeError:
            raise  # nobody reads on: click ends the command in silence
        except (HpcparError, OSError) as error:
            raise click.ClickException(str(error)) from error


@click.group(cls=Drawings, lazy=COMMANDS, context_settings={"show_default": True})
def draw() -> None:
    """Draw collectives, kinds of parallelism, and the time and memory of runs."""


@click.command()
@click.argument("algorithm", required=False)
@click.option("--size", type=click.IntRange(min=1), default=4, help="Ranks.")
@click.option(
    "--collective", default=None, help="Of which collective, where several have an algorithm of this name."
)
@click.option("--root", type=click.IntRange(min=0), default=0, help="For rooted collectives.")
@click.option("--ranks-per-node", type=click.IntRange(min=1), default=1, help="For hierarchical ones.")
@picture.output_options(
    "A picture of what each rank holds after each step (.png, .svg, .pdf), or an animation (.gif)."
)
def steps(
    algorithm: str | None,
    size: int,
    collective: str | None,
    root: int,
    ranks_per_node: int,
    output: picture.Output | None,
) -> None:
    """Draw the steps of ALGORITHM (ring, binomial, rabenseifner, ...); without one, list them all.

    ALGORITHM may be a collective, too (allreduce, broadcast, ...): then its first algorithm is drawn. Below
    stands the time: α is the latency of a message, S the size of the vector, β the time to send a byte and γ
    the time to add one.
    """
    if algorithm is None:
        click.echo(listing(collective))
        return
    if collective is None and algorithm in registry.ALGORITHMS:
        collective, algorithm = algorithm, next(iter(registry.ALGORITHMS[algorithm]))
    if not root < size:
        raise OperationError(f"root {root} of {size} ranks does not exist: 0 to {size - 1} do")
    found = registry.find(collective or collective_with(algorithm), algorithm)
    nodes = tuple(rank // ranks_per_node for rank in range(size))
    drawn = drawing.draw(found, size, root=root, nodes=nodes)
    others = ", ".join(name for name in registry.ALGORITHMS[found.collective] if name != found.name)
    click.echo(f"{drawn}\n{drawing.legend(drawn)}\n")
    click.echo(f"time: {drawing.time_text(found, size)}, each rank on a node of its own")
    click.echo(f"other algorithms of {found.collective}: {others}" if others else "")
    is_animation = output is not None and output.path.suffix == ".gif"
    shown = frames if is_animation else figure_of
    picture.write(output, lambda: shown(found, size, root=root, nodes=nodes))


def collective_with(algorithm: str) -> str:
    """Return the first collective, in the registry's order, that has an algorithm of this name."""
    for collective, algorithms in registry.ALGORITHMS.items():
        if algorithm in algorithms:
            return collective
    names = {name for algorithms in registry.ALGORITHMS.values() for name in algorithms}
    hint = did_you_mean(algorithm, (*sorted(names), *registry.ALGORITHMS, *COMMANDS))
    raise OperationError(f"no collective has an algorithm {algorithm!r}; {hint}there are:\n{listing(None)}")


def listing(collective: str | None) -> str:
    """List every collective's algorithms, one collective per line."""
    chosen = {
        name: algorithms
        for name, algorithms in registry.ALGORITHMS.items()
        if collective is None or name == collective
    }
    if not chosen:
        known = ", ".join(registry.ALGORITHMS)
        raise click.ClickException(f"there is no collective {collective!r}; there are {known}")
    width = max(len(name) for name in chosen)
    return "\n".join(f"{name:<{width}}  {'  '.join(algorithms)}" for name, algorithms in chosen.items())


# --- the picture ----------------------------------------------------------------------------------


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
    rows = drawing.rows_of(schedules)
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
    halves = drawing.halves_of(schedules, seen) if algorithm.collective == "allreduce" else {}
    names = [*(f"before step {row}" for row in range(count)), "at the end"]
    done = [[sum(at < row for at in of_rank.values()) for of_rank in rows] for row in range(count + 1)]
    return [
        Moment(name, [seen[rank][done[row][rank]] for rank in range(size)], arrows[row], halves.get(row, ""))
        for row, name in enumerate(names)
    ]


def figure_of(algorithm: Algorithm, size: int, *, root: int = 0, nodes: Nodes | None = None) -> Figure:
    """Return a figure with a panel for each moment; each half of an all-reduce begins a line.

    errors   OperationError for too many ranks to see

        before step 0      before step 1      …      at the end
        rank 0 |a|a|a|     rank 0 |a|a|ac|           rank 0 |abc|abc|abc|
        rank 1 |b|b|b|     …                         …

    A row is a rank, a cell a chunk; its stripes have the colours of the ranks whose contributions are in it.
    An arrow is a message that is on its way next. All of it comes from the proof of the schedule.
    """
    found = moments(algorithm, size, root=root, nodes=nodes)
    begins = [place for place, each in enumerate(found) if each.half] or [0]
    lines = [
        found[first : min(first + COLUMNS, stop)]
        for start, stop in zip(begins, [*begins[1:], len(found)], strict=True)
        for first in range(start, stop, COLUMNS)
    ]
    figure = picture.new_figure((0.5 + 0.34 * size) * len(lines) + 0.7)
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
    """Return a figure for each moment, in order; errors as of `figure_of`."""
    found, half = [], ""
    for moment in moments(algorithm, size, root=root, nodes=nodes):
        half = moment.half or half  # each frame says it
        found.append(picture.new_figure(1.3 + 0.5 * size))
        _draw_moment(found[-1].subplots(), moment._replace(half=half))
        _head(found[-1], algorithm, size, root, nodes)
    return found


def _head(figure: Figure, algorithm: Algorithm, size: int, root: int, nodes: Nodes | None) -> None:
    chunks = algorithm.chunks(size, 1, nodes)
    heading = f"{drawing.title(algorithm, size, root, chunks)}; time {drawing.time_text(algorithm, size)}"
    figure.suptitle(heading, fontsize=9)
    ranks = {f"of rank {rank}": picture.rank_colour(rank) for rank in range(size)}
    picture.legend(figure, picture.patches(ranks), columns=min(size, 5))


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
        corner = (left + 0.04 + number * stripe, rank - 0.4)
        axes.add_patch(Rectangle(corner, stripe, 0.8, color=picture.rank_colour(each)))
    axes.add_patch(Rectangle((left + 0.04, rank - 0.4), 0.92, 0.8, fill=False, edgecolor="0.6", lw=0.6))
