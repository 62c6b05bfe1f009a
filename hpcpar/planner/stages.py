"""Layers of each pipeline stage, the stages of each rank, and the microbatches that a rank keeps alive."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from hpcpar.errors import LayoutError
from hpcpar.partition import bounds
from hpcpar.pipeline_schedules.schedule_registry import METHODS
from hpcpar.planner.model_shapes import ModelShape
from hpcpar.planner.strategy import Strategy


@dataclass(frozen=True)
class StageLayers:
    """One stage of the pipeline.

    dense, mixture   number of its layers of either kind
    embeds, heads    it has the embedding, the output projection
    plain            number of its layers, the last ones, that recompute nothing as only earlier ones do
    """

    dense: int
    mixture: int
    embeds: bool
    heads: bool
    plain: int = 0

    @property
    def layers(self) -> int:
        return self.dense + self.mixture

    def count(self, layer: int, model: ModelShape) -> int:
        """Number of its layers of the kind of the model's layer `layer`."""
        return self.dense if model.experts_of(layer) is None else self.mixture

    def plain_count(self, layer: int, model: ModelShape) -> int:
        """Number of those of them that recompute nothing, though earlier layers do."""
        mixtures = min(self.plain, self.mixture)
        return self.plain - mixtures if model.experts_of(layer) is None else mixtures


def stages_of(model: ModelShape, strategy: Strategy) -> list[StageLayers]:
    """Divide the layers among the stages, so that the most loaded one has least.

    Equally, where they divide; else the last stage has fewer, as its output projection weighs what it does.
    errors   LayoutError for more stages than layers
    """
    stages = strategy.stages
    if stages > model.layers:
        raise LayoutError(
            f"{strategy.layout.pp} pipeline ranks with {strategy.chunks_per_rank} stages each are {stages} "
            f"stages, but {model.name} has {model.layers} layers; take at most {model.layers} stages"
        )
    counts = _layers_by_stage(model, strategy.sequence, strategy.layers_of_stages, stages)
    first_dense = model.layers if model.experts is None else model.experts.first_dense
    found, start = [], 0
    for number, count in enumerate(counts):
        dense = min(max(first_dense - start, 0), count)
        start += count
        again = start if strategy.recompute.layers is None else strategy.recompute.layers
        plain = min(max(start - again, 0), count)
        found.append(StageLayers(dense, count - dense, number == 0, number == stages - 1, plain))
    return found


@lru_cache(maxsize=1024)
def _layers_by_stage(
    model: ModelShape, sequence: int, told: tuple[int, ...] | None, stages: int
) -> Sequence[int]:
    if told is not None:
        if len(told) != stages or sum(told) != model.layers:
            raise LayoutError(
                f"layers of each stage: {', '.join(map(str, told))}: {sum(told)} in {len(told)} stages, but "
                f"{model.name} has {model.layers} and the pipeline {stages}"
            )
        return told
    if model.layers % stages == 0 or stages == 1:
        return [model.layers // stages] * stages
    layer = model.flops_per_token(sequence, backward=False) - model.head_product.flops
    head = model.head_product.flops * model.layers / layer
    best = min(
        range(1, model.layers - stages + 2),
        key=lambda last: (max(-(-(model.layers - last) // (stages - 1)), last + head), -last),
    )
    rest = [stop - start for start, stop in bounds(model.layers - best, stages - 1)]
    return [*rest, best]


def stages_of_ranks(strategy: Strategy) -> tuple[tuple[int, ...], ...]:
    """Return the stages that each pipeline rank holds."""
    if strategy.layout.pp == 1:
        return ((0,),)
    return METHODS[strategy.schedule].place(strategy.layout.pp, strategy.stages_per_rank).stages


def chunks_alive(strategy: Strategy, rank: int) -> int:
    """Return the chunks (a microbatch's activations of one stage) that pipeline rank `rank` keeps at most.

    The closed forms of the schedules; tests compare them with `pipeline_schedules.peak_chunks`.
    """
    p, m, v = strategy.layout.pp, strategy.microbatches, strategy.chunks_per_rank
    if p == 1:
        return 1
    rounds = max(1, m // p)  # of interleaved: the largest and the smallest have so many microbatches
    largest, smallest = -(-m // rounds), m // rounds
    most = {
        "naive": v,
        "gpipe": m * v,
        "1f1b": p - rank,
        "eager-1f1b": 2 * (p - rank) - 1,
        "interleaved": min(2 * (p - rank - 1), 2 * smallest) + (v - 1) * largest + 1,
        "zb-h1": p,
        "zb-h2": 2 * p - 1,
        "zb-v": 2 * p,
        "dualpipe-v": 2 * p + 1,
        "automatic": strategy.memory_limit or p,
    }[strategy.schedule]
    return min(m * v, most)
