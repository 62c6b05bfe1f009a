"""`hpcpar draw tp llama3-8b --tp 4`: row and column splits of a layer's weights, and what f and g send."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import click

from hpcpar.cli import picture
from hpcpar.planner.model_shapes import ModelShape
from hpcpar.planner.shapes import ITEMSIZE
from hpcpar.planner.traffic import (
    CollectiveCall,
    Microbatch,
    RegionEdge,
    TensorParallelCalls,
    call_nbytes,
    calls_nbytes,
)
from hpcpar.units import format_nbytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from hpcpar.comm import Communicator
    from hpcpar.planner.shapes import LlamaConfig
    from hpcpar.tensor_parallel import Split

NUMBER = click.IntRange(min=1)

LONGEST_SEQUENCE = 8192
"""Longest sequence that is taken where none is given, as `hpcpar plan` has it."""

NAMES = {"allreduce": "all-reduce", "allgather": "all-gather", "reduce_scatter": "reduce-scatter"}

PARTS = {
    "self_attn": "attention",
    "mlp.gate": "experts",
    "mlp.experts": "experts",
    "mlp.shared_experts": "shared expert",
    "mlp": "feed-forward",
}
"""Parts of a layer by the beginnings of its modules' names, longer ones first."""


class SplitWeight(NamedTuple):
    """A weight [outputs, inputs] of a layer of the model that runs.

    name     within the layer; of experts * stands for their numbers
    whole    shape of the whole; own: of one rank's shard
    split    None: each rank has all of it
    copies   experts with a weight of this name
    """

    name: str
    whole: tuple[int, ...]
    own: tuple[int, ...]
    split: Split | None
    copies: int = 1

    @property
    def direction(self) -> str:
        """Return "column", "row" or "whole"; columns of the product X·Wᵀ are outputs."""
        if self.split is None or not self.split.is_divided:
            return "whole"
        return "row" if self.split.dim else "column"

    @property
    def ranks_alike(self) -> int:
        """Ranks with the same shard: more than one where there are fewer heads than ranks."""
        if self.split is None or not self.split.is_divided:
            return 1
        return max(self.split.replicas) + 1

    @property
    def part(self) -> str:
        """Part of the layer, as of `RegionEdge`."""
        return next((part for start, part in PARTS.items() if f"{self.name}.".startswith(f"{start}.")), "")


class Edge(NamedTuple):
    """A region's edge: what its collectives are, of how many bytes, and what a rank sends for them.

    forward, backward   name of each collective and the bytes of its whole array
    sent_nbytes         by one rank, in forward and backward together
    """

    part: str
    name: str
    forward: list[tuple[str, int]]
    backward: list[tuple[str, int]]
    sent_nbytes: float


class DrawnLayer(NamedTuple):
    """A layer of one kind: its weights, and where its ranks communicate."""

    number: int
    weights: list[SplitWeight]
    edges: list[Edge]


@click.command()
@click.argument("model", default="llama3-8b")
@click.option("--tp", type=click.IntRange(min=2), default=4, help="Ranks that share each layer.")
@click.option("--sequence-parallel", is_flag=True, help="Divide norms and residuals by tokens, too.")
@click.option("--sequence", type=NUMBER, help="Tokens of a sequence [default: the model's, at most 8192].")
@click.option("--microbatch", type=NUMBER, default=1, help="Sequences.")
@click.option("--precision", type=click.Choice(list(ITEMSIZE)), default="bfloat16", help="Of the model.")
@picture.output_options()
def tp(
    model: str,
    tp: int,
    sequence_parallel: bool,
    sequence: int | None,
    microbatch: int,
    precision: str,
    output: picture.Output | None,
) -> None:
    """Draw how tensor parallelism splits a layer of MODEL over ranks, and which collectives it needs.

    MODEL is a preset, a Hugging Face config.json, or a TOML file of the trainer. Its layer is built on so
    many ranks, threads of this process, without memory for weights. f is before column-split layers and g
    after row-split ones; with sequence parallelism they are g and ḡ.

    Sources: Shoeybi et al. 2019, arXiv 1909.08053, figure 3; Korthikanti et al. 2022, arXiv 2205.05198,
    figure 5.
    """
    shape = ModelShape.named(model)
    tokens = sequence or min(shape.max_sequence, LONGEST_SEQUENCE)
    size = Microbatch(microbatch, tokens)
    layers = built(shape.as_llama(), tp, size, precision=precision, sequence_parallel=sequence_parallel)
    parallel = "tensor and sequence parallel" if sequence_parallel else "tensor parallel"
    title = f"{shape.name}, {parallel} over {tp} ranks: {microbatch} x {tokens} tokens in {precision}"
    click.echo(title)
    for layer in layers:
        click.echo(f"\n{weights_table(layer)}\n\n{edges_table(layer)}")
    click.echo("\nweights are [outputs, inputs]; column: outputs are divided, row: inputs are")
    picture.write(output, lambda: figure_of(layers, title))


def built(
    config: LlamaConfig, tp: int, size: Microbatch, *, precision: str, sequence_parallel: bool
) -> list[DrawnLayer]:
    """Build a layer of each kind on `tp` ranks; see which shard the first rank has, and what a layer sends.

    errors   LayoutError for heads, an ffn or a sequence that do not divide
    """
    # torch is imported by this command alone.
    import torch

    from hpcpar.comm import run_loopback
    from hpcpar.models import Llama, parallel_layers
    from hpcpar.tensor_parallel import TensorParallel
    from hpcpar.tensor_parallel.split import require_divisible

    first = 0 if config.experts is None else config.experts.first_dense
    short = replace(config, layers=first + 1)
    if sequence_parallel:
        require_divisible(size.tokens, tp, "sequence")

    def work(comm: Communicator) -> list[DrawnLayer]:
        axis = TensorParallel(comm, sequence_parallel=sequence_parallel)
        with torch.device("meta"):
            model = Llama(short, parallel_layers(short, axis), seed=None)
        calls = TensorParallelCalls(short, axis, size, split_experts=True)
        return [
            DrawnLayer(
                number,
                list(weights_of(model.model.layers.get_submodule(str(number)))),
                [edge_of(region, comm, precision) for region in calls.regions(number)],
            )
            for number in sorted({0, first})
        ]

    return run_loopback(tp, work)[0]


def weights_of(layer: object) -> Iterator[SplitWeight]:
    """Yield a layer's matrices, those of experts once."""
    from torch import nn

    from hpcpar.tensor_parallel import split_of

    assert isinstance(layer, nn.Module)
    found: dict[str, SplitWeight] = {}
    for name, parameter in layer.named_parameters():
        if parameter.dim() != 2:
            continue
        name = re.sub(r"\.\d+\.", ".*.", name.removesuffix(".weight"))
        own, split = tuple(parameter.shape), split_of(parameter)
        whole = own if split is None else split.whole_shape(own)
        copies = found[name].copies + 1 if name in found else 1
        found[name] = SplitWeight(name, whole, own, split, copies)
    yield from found.values()


def edge_of(region: RegionEdge, comm: Communicator, precision: str) -> Edge:
    """Price a region's collectives as the planner does, in the algorithms of this communicator."""
    sent = calls_nbytes(comm, Counter(region.forward + region.backward), precision)

    def named(calls: Sequence[CollectiveCall]) -> list[tuple[str, int]]:
        return [(NAMES[call.collective], call_nbytes(call, precision)) for call in calls]

    return Edge(
        region.part,
        region.name,
        named(region.forward),
        named(region.backward),
        sum(sent.values()) / comm.size,
    )


def words(calls: Sequence[tuple[str, int]]) -> list[str]:
    """Return a line for each collective, equal ones counted."""
    return [
        f"{f'{count} x ' if count > 1 else ''}{name} {format_nbytes(nbytes)}"
        for (name, nbytes), count in Counter(calls).items()
    ] or ["identity"]


def weights_table(layer: DrawnLayer) -> str:
    """Tabulate the matrices of a layer: whole shape, split dimension, shape on a rank."""
    lines = [f"{'layer ' + str(layer.number):<29}{'whole':>15}   {'split':<8}{'on a rank':>16}"]
    for each in layer.weights:
        notes = [f"{each.copies} experts"] if each.copies > 1 else []
        if each.ranks_alike > 1:
            notes.append(f"each on {each.ranks_alike} ranks, which sum its gradients")
        lines.append(
            f"{each.name:<29}{list(each.whole)!s:>15}   {each.direction:<8}{list(each.own)!s:>16}"
            f"   {', '.join(notes)}".rstrip()
        )
    return "\n".join(lines)


def edges_table(layer: DrawnLayer) -> str:
    """Tabulate the collectives at the edges of a layer's parts, and what a rank sends for them."""
    lines = [f"{'':<18}{'forward':<28}{'backward':<28}{'a rank sends':>12}"]
    for edge in layer.edges:
        if not edge.forward and not edge.backward:
            continue
        forward, backward = words(edge.forward), words(edge.backward)
        for place in range(max(len(forward), len(backward))):
            one, other = (each[place] if place < len(each) else "" for each in (forward, backward))
            name, sent = ("", "") if place else (f"{edge.part} {edge.name}", format_nbytes(edge.sent_nbytes))
            lines.append(f"{name:<18}{one:<28}{other:<28}{sent:>12}".rstrip())
    total = format_nbytes(sum(edge.sent_nbytes for edge in layer.edges))
    return "\n".join([*lines, f"{'the layer':<74}{total:>12}"])


# --- the picture ----------------------------------------------------------------------------------


PANEL = 2.15
"""Inches of each part's panel, upwards."""

LONGEST, SHORTEST = 1.0, 0.30
"""Inches of the largest dim of a matrix, and at least of any."""

BOX = 1.65
"""Inches of an edge's text."""

NAMED = 8
"""Ranks that the legend names."""


def figure_of(layers: Sequence[DrawnLayer], title: str) -> Figure:
    """Return a figure with a panel for each part of a layer.

    X ── f ──  │0│1│2│3│  ──  |===0===|  ── g ── Z
               │ │ │ │ │      |===1===|
               columns        |===2===|
    """
    panels = [
        (layer, part)
        for layer in layers
        for part in dict.fromkeys(each.part for each in layer.weights)
        # Attention is the same in all layers.
        if not (part == "attention" and layer is not layers[0])
    ]
    figure = picture.new_figure(0.75 + PANEL * len(panels))
    for axes, (layer, part) in zip(figure.subplots(len(panels), 1, squeeze=False)[:, 0], panels, strict=True):
        weights = [each for each in layer.weights if each.part == part]
        _draw_part(axes, part, weights, [edge for edge in layer.edges if edge.part == part])
    figure.suptitle(title, fontsize=10)
    size = max(each.split.size for layer in layers for each in layer.weights if each.split is not None)
    named = {f"rank {rank}": picture.rank_colour(rank) for rank in range(min(size, NAMED))} | {
        "on every rank": picture.IDLE
    }
    picture.legend(figure, picture.patches(named), title="weights as in X·W: inputs down, outputs across")
    return figure


def _draw_part(axes: Axes, part: str, weights: Sequence[SplitWeight], edges: Sequence[Edge]) -> None:
    axes.set_xlim(0, picture.WIDTH_INCHES)
    axes.set_ylim(0, PANEL)
    axes.set_aspect("equal")
    axes.set_axis_off()
    axes.text(0.05, PANEL - 0.05, part, fontsize=10, fontweight="bold", va="top")
    largest = max(max(each.whole) for each in weights)
    middle = PANEL / 2 - 0.1
    at = 0.1
    axes.text(at, middle, "X", ha="center", va="center", fontsize=11)
    at += 0.2
    enter, *leave = edges
    at = _edge(axes, at, middle, enter) + 0.2
    before = [each for each in weights if each.direction != "row"]
    for each in before:
        at = _matrix(axes, at, middle, each, largest) + 0.18
    for each in weights:
        if each.direction == "row":
            at = _matrix(axes, at + 0.1, middle, each, largest) + 0.2
    for edge in leave:
        at = _edge(axes, at, middle, edge) + 0.2
    axes.text(at, middle, "Z", ha="center", va="center", fontsize=11)


def _edge(axes: Axes, at: float, middle: float, edge: Edge) -> float:
    """Draw a box with the collectives of an edge; return where it ends."""
    from matplotlib.patches import FancyBboxPatch

    lines = ["forward:", *words(edge.forward), "backward:", *words(edge.backward)]
    if edge.name:
        lines.insert(0, "")
    height = 0.17 * len(lines) + 0.1
    axes.add_patch(
        FancyBboxPatch(
            (at + 0.05, middle - height / 2),
            BOX - 0.1,
            height,
            boxstyle="round,pad=0.03",
            fill=False,
            edgecolor=picture.COMMUNICATION,
        )
    )
    axes.text(
        at + BOX / 2,
        middle + height / 2 - 0.03,
        edge.name,
        ha="center",
        va="top",
        fontsize=11,
        fontweight="bold",
    )
    axes.text(at + BOX / 2, middle, "\n".join(lines), ha="center", va="center", fontsize=8, linespacing=1.25)
    return at + BOX


def _matrix(axes: Axes, at: float, middle: float, weight: SplitWeight, largest: int) -> float:
    """Draw Wᵀ, inputs down and outputs across, with each rank's part in its colour; return where it ends.

    Sides grow as the square roots of the dims, so that the narrow projections of keys and values are seen.
    """
    from matplotlib.patches import Rectangle

    outputs, inputs = weight.whole
    width, height = (max(SHORTEST, LONGEST * math.sqrt(dim / largest)) for dim in (outputs, inputs))
    bottom = middle - height / 2
    if weight.direction == "whole" or weight.split is None:
        axes.add_patch(Rectangle((at, bottom), width, height, facecolor=picture.IDLE, edgecolor="white"))
    else:
        for rank, part in enumerate(weight.split.parts):
            if weight.split.replicas[rank]:
                continue
            for start, stop in part:
                begin, long = start / weight.split.length, (stop - start) / weight.split.length
                if weight.direction == "column":
                    place, sides = (at + begin * width, bottom), (long * width, height)
                else:
                    place, sides = (at, bottom + (1 - begin - long) * height), (width, long * height)
                axes.add_patch(
                    Rectangle(
                        place, *sides, facecolor=picture.rank_colour(rank), edgecolor="white", linewidth=0.5
                    )
                )
    name = "router" if weight.name == "mlp.gate" else weight.name.rpartition(".")[2].removesuffix("_proj")
    copies = f" x {weight.copies}" if weight.copies > 1 else ""
    axes.text(at + width / 2, bottom + height + 0.05, name + copies, ha="center", va="bottom", fontsize=8)
    told = [str(outputs), f"x {inputs}"]
    if weight.ranks_alike > 1:
        told.append(f"each on {weight.ranks_alike}")
    axes.text(at + width / 2, bottom - 0.05, "\n".join(told), ha="center", va="top", fontsize=7, color="0.3")
    return at + width
