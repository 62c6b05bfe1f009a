"""Device memory of a rank of each pipeline stage, by purpose.

parameters, gradients, optimizer state   `memory.model_state_nbytes`; experts by their own ranks
activations                              chunks alive · layers · bytes of a layer (`activations`)
working memory                           a layer that is recomputed; logits and their gradient; with
                                         ZeRO-3 the gathered layers; the libraries' own
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

from hpcpar.pipeline_schedules.proof import chunks_by_stage
from hpcpar.planner.activations import LayerShape, layer_nbytes, llama_layer_nbytes
from hpcpar.planner.matrix_owners import Matrices, OwnMatrix, matrix_cost, most_owned
from hpcpar.planner.memory import GRADIENTS, MOMENTS, OPTIMIZER, StateWidths, model_state_nbytes
from hpcpar.planner.model_shapes import ModelShape
from hpcpar.planner.pipeline_time import small_schedule
from hpcpar.planner.shapes import ITEMSIZE, LlamaConfig, RecomputeMode
from hpcpar.planner.software import Software
from hpcpar.planner.stages import StageLayers, chunks_alive, stages_of, stages_of_ranks
from hpcpar.planner.strategy import Strategy

ACTIVATIONS, WORKING = "activations", "working memory"


@dataclass(frozen=True)
class StageMemory:
    """Bytes of one rank of pipeline rank `rank`.

    purposes      on the device: parameters, gradients, optimizer state, activations, working memory
    host_nbytes   in its node's memory
    chunks        activations of one chunk of each of its stages
    """

    rank: int
    purposes: Mapping[str, int]
    host_nbytes: int
    chunks: Sequence[int]

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return sum(self.purposes.values())


def memory_of_stages(
    model: ModelShape, strategy: Strategy, software: Software, *, each_kind: bool = False
) -> Iterator[StageMemory]:
    """Yield the memory of a rank of each pipeline rank, in order.

    each_kind   only of the first of those that hold alike: later ones keep no more chunks alive
    """
    stages = stages_of(model, strategy)
    # Most ranks hold alike: a pipeline of 64 has the first, the last and those between.
    kinds: dict[tuple[StageLayers, ...], tuple[dict[str, int], list[int], int]] = {}
    of_layers = _layers_activations(model, strategy, software)
    for rank, numbers in enumerate(stages_of_ranks(strategy)):
        held = tuple(stages[number] for number in numbers)
        if each_kind and held in kinds:
            continue
        if held not in kinds:
            state = state_nbytes(own_parameters(model, strategy, held), strategy, software)
            chunks = [_activations(model, stage, of_layers) for stage in held]
            kinds[held] = state, chunks, _working(model, strategy, software, held, of_layers)
        state, chunks, working = kinds[held]
        purposes = dict(state)
        offloaded = purposes.pop(OPTIMIZER) if strategy.offload is not None else 0
        purposes[ACTIVATIONS] = peak_activations(strategy, rank, chunks)
        purposes[WORKING] = purposes.get(WORKING, 0) + working
        if software.keeps_messages:
            purposes[WORKING] += _kept_messages(model, strategy, held, chunks_alive(strategy, rank))
        yield StageMemory(rank, purposes, offloaded if strategy.offload == "cpu" else 0, chunks)


class OwnParameters(NamedTuple):
    """Parameters of one rank before ZeRO: of its layers' matrices outside experts, of experts, all others.

    shards   of matrices and of experts: these over the most that one rank owns, which owns whole ones; None:
             they are cut evenly
    """

    matrices: int
    experts: int
    others: int
    shards: tuple[Fraction, Fraction] | None = None

    @property
    def dense(self) -> int:
        """All outside experts."""
        return self.matrices + self.others


def own_parameters(model: ModelShape, strategy: Strategy, held: Sequence[StageLayers]) -> OwnParameters:
    """Return the parameters of one rank with these stages."""
    layout = strategy.layout
    matrices = experts = others = 0
    for layer, _ in model.layer_kinds:
        own, of_experts = model.layer_parameters(layer, layout.tp)
        count = sum(stage.count(layer, model) for stage in held)
        matrices += count * (own - model.norm_parameters)
        experts += count * of_experts
        others += count * model.norm_parameters
    for stage in held:
        others += model.embedding_parameters // layout.tp if stage.embeds else 0
        if stage.heads:
            # A tied projection on another rank than the embedding is a second copy of it.
            tied = model.tie_embeddings and not any(each.embeds for each in held)
            head = model.vocab_size * model.hidden_size if tied else model.head_parameters
            others += head // layout.tp + model.final_norm_parameters
    found = OwnParameters(matrices, own_experts(model, strategy, experts), others)
    if strategy.optimizer != "muon" or strategy.zero_stage not in (1, 2):
        return found
    dense, mixtures = matrices_of(model, strategy, held)
    if (layout.ep, layout.etp) == (1, layout.tp):  # the same ranks own both
        both = _shards(dense + mixtures, strategy.shard_ranks)
        return found._replace(shards=(both, both))
    shards = _shards(dense, strategy.shard_ranks), _shards(mixtures, strategy.expert_shards)
    return found._replace(shards=shards)


def _shards(matrices: Matrices, owners: int) -> Fraction:
    """Return the elements of all matrices over those of the rank that owns most."""
    _, most = most_owned(matrices, owners)
    return Fraction(sum(matrix.elements * count for matrix, count in matrices), most or 1) or Fraction(owners)


def matrices_of(
    model: ModelShape, strategy: Strategy, held: Sequence[StageLayers]
) -> tuple[Matrices, Matrices]:
    """Return the matrices of a rank with these stages that Muon steps on: outside experts, and of experts."""
    layout, dense, experts = strategy.layout, Counter[OwnMatrix](), Counter[OwnMatrix]()
    for layer, _ in model.layer_kinds:
        count = sum(stage.count(layer, model) for stage in held)
        for product in (*model.attention_products, *model.feed_forward_products(layer)):
            found, copies, parts = dense, 1, 1 if product.split == "whole" else layout.tp
            if product.copies > 1:
                found, copies, parts = experts, -(-product.copies // layout.ep), layout.etp
            for shape in product.shapes:
                found[OwnMatrix(matrix_cost(shape), math.prod(shape) // parts, parts > 1)] += count * copies
    return tuple(dense.items()), tuple(experts.items())


def own_experts(model: ModelShape, strategy: Strategy, parameters: int) -> int:
    """Return the experts' parameters of the rank with most experts, of those of all experts."""
    if model.experts is None:
        return 0
    layout, count = strategy.layout, model.experts.count
    return parameters // count * -(-count // layout.ep) // layout.etp


def state_nbytes(own: OwnParameters, strategy: Strategy, software: Software) -> dict[str, int]:
    """Return the bytes of model state by purpose, of a rank with so many parameters before ZeRO."""
    of_matrices, of_others = state_widths(strategy.precision, software, strategy.optimizer)
    stage, state = strategy.zero_stage, Counter[str]()
    of_layers, of_experts = own.shards or (strategy.shard_ranks, strategy.expert_shards)
    state.update(model_state_nbytes(own.matrices, of_matrices, stage=stage, ranks=of_layers))
    state.update(model_state_nbytes(own.others, of_others, stage=stage, ranks=strategy.shard_ranks))
    if stays_gathered(strategy, software):
        state[GRADIENTS] = own.dense * of_others.gradients
        state[WORKING] = own.dense * ITEMSIZE["bfloat16"]
    elif strategy.keeps_gathered:
        state[WORKING] = (own.dense + own.experts) * _gathered_width(strategy)
    state.update(model_state_nbytes(own.experts, of_matrices, stage=stage, ranks=of_experts))
    return dict(state)


def state_widths(precision: str, software: Software, optimizer: str) -> tuple[StateWidths, StateWidths]:
    """Return the bytes of a value, gradient and optimizer state: of the layers' matrices, of all others."""
    of_matrices, of_others = (
        StateWidths.of(_storage(precision, software), moments=moments, moment_dtype=software.moment_dtype)
        for moments in MOMENTS[optimizer]
    )
    if software.gradient_bytes is not None:
        of_matrices = replace(of_matrices, gradients=software.gradient_bytes)
        of_others = replace(of_others, gradients=software.gradient_bytes)
    return of_matrices, of_others


def stays_gathered(strategy: Strategy, software: Software) -> bool:
    """Return True where ZeRO-3 gathers and reduces once a step, as its pipeline has many microbatches."""
    return software.gathered_in_pipeline and strategy.zero_stage == 3 and strategy.layout.pp > 1


def _gathered_width(strategy: Strategy) -> int:
    return 2 if strategy.precision in ("bfloat16", "float16", "float8") else 4


def _storage(precision: str, software: Software) -> str:
    if software.float32_parameters:
        return "float32"
    return "bfloat16" if precision == "float8" else precision


def _layers_activations(
    model: ModelShape, strategy: Strategy, software: Software
) -> Mapping[int, tuple[int, int]]:
    """Return the bytes of a layer of each kind: with the strategy's recomputation, and without."""
    found = {}
    for layer, _ in model.layer_kinds:
        plain = layer_activations(model, strategy, software, layer, "none")
        mode = strategy.recompute.mode
        kept = plain if mode == "none" else layer_activations(model, strategy, software, layer, mode)
        found[layer] = kept, plain
    return found


def _activations(model: ModelShape, stage: StageLayers, of_layers: Mapping[int, tuple[int, int]]) -> int:
    """Return the bytes of one chunk of a stage."""
    nbytes = 0
    for layer, (kept, plain) in of_layers.items():
        count = stage.plain_count(layer, model)
        nbytes += (stage.count(layer, model) - count) * kept + count * plain
    return nbytes


def peak_activations(
    strategy: Strategy, rank: int, chunks: Sequence[int], *, of_last: int = 0, saved_only: bool = False
) -> int:
    """Return the most bytes that a pipeline rank keeps at once.

    chunks       bytes of a chunk of each of its stages. Of a long schedule whose stages differ: the most
                 chunks that it keeps, of the mean size
    of_last      more bytes of a chunk of the last stage, whose backward follows at once but in GPipe
    saved_only   only what autograd saved, without what a deferred W needs
    """
    schedule = None
    if strategy.layout.pp > 1 and (saved_only or len(set(chunks)) > 1):
        schedule = small_schedule(strategy)
    if schedule is None:
        return chunks_alive(strategy, rank) * sum(chunks) // len(chunks) + of_last
    of_stage = dict(zip(stages_of_ranks(strategy)[rank], chunks, strict=True))
    last = strategy.stages - 1

    def nbytes(alive: Mapping[int, int]) -> int:
        of_ends = alive.get(last, 0) if strategy.schedule == "gpipe" else min(alive.get(last, 0), 1)
        return sum(of_stage[stage] * count for stage, count in alive.items()) + of_ends * of_last

    return max(map(nbytes, chunks_by_stage(schedule, rank, saved_only=saved_only)))


def layer_activations(
    model: ModelShape, strategy: Strategy, software: Software, layer: int, mode: RecomputeMode
) -> int:
    """Return the bytes that a rank keeps of one microbatch for one layer."""
    layout = strategy.layout
    sequence = strategy.sequence // layout.cp
    if not model.gated:
        shape = LayerShape(sequence, strategy.microbatch, model.hidden_size, model.heads)
        kept = "selective" if mode == "none" and software.fused_attention else mode
        of_halves = layer_nbytes(
            shape, layout.tp, sequence_parallel=strategy.sequence_parallel, recompute=kept
        )
        return int(of_halves * strategy.itemsize / 2)
    if mode == "selective" and software.selective == "product":
        return _every_second_product(model, strategy)
    return llama_layer_nbytes(_as_llama(model, layer), strategy, mode, software.rows_over_mean(layout))


def _kept_messages(model: ModelShape, strategy: Strategy, held: Sequence[StageLayers], alive: int) -> int:
    """Return the bytes of the pipeline's messages on a rank, beside the inputs that are among activations."""
    inputs, outputs = sum(not stage.embeds for stage in held), sum(not stage.heads for stage in held)
    message = strategy.itemsize * strategy.own_tokens * model.hidden_size
    if strategy.sequence_parallel:
        message //= strategy.layout.tp
    return ((inputs + outputs) * strategy.microbatches + (outputs - inputs) * alive // len(held)) * message


def _every_second_product(model: ModelShape, strategy: Strategy) -> int:
    """Return the bytes of a layer's input, attention's output, and of queries, values, gate and down."""
    tp = strategy.layout.tp
    residual = 2 * model.hidden_size // (tp if strategy.sequence_parallel else 1)
    split = (2 * model.heads + model.kv_heads) * model.head_size + model.ffn_size
    return 2 * strategy.own_tokens * (residual + split // tp)


@lru_cache(maxsize=64)
def _as_llama(model: ModelShape, layer: int) -> LlamaConfig:
    """Return a model of one layer like `layer`."""
    experts = model.experts_of(layer)
    head = model.head_size
    if model.latent is not None:
        head = 2 * -(-model.core_width // (4 * model.heads))
    return LlamaConfig(
        *(model.vocab_size, model.hidden_size, 1, model.heads, model.kv_heads),
        head_size=head,
        ffn_size=model.ffn_size,
        dropout=model.dropout,
        qk_norm=model.qk_norm,
        experts=None if experts is None else replace(experts, first_dense=0),
    )


def _working(
    model: ModelShape,
    strategy: Strategy,
    software: Software,
    held: Sequence[StageLayers],
    of_layers: Mapping[int, tuple[int, int]],
) -> int:
    layers = [layer for layer, _ in model.layer_kinds if any(stage.count(layer, model) for stage in held)]
    nbytes = software.workspace_nbytes
    if strategy.recompute.mode == "full":
        nbytes += max((of_layers[layer][1] for layer in layers), default=0)
    if any(stage.heads for stage in held):
        logits = strategy.own_tokens * model.vocab_size // strategy.layout.tp
        nbytes += logits * software.logit_bytes + 4 * strategy.own_tokens * model.hidden_size
    if strategy.zero_stage == 3:
        # Two gathered layers, of which one is fetched ahead, and the gradients of one.
        width = _gathered_width(strategy)
        gathered = (0 if strategy.keeps_gathered else 2 * width) + (software.gradient_bytes or width)
        nbytes += gathered * max((_layer_share(model, strategy, layer) for layer in layers), default=0)
    return nbytes


def _layer_share(model: ModelShape, strategy: Strategy, layer: int) -> int:
    """Return the parameters of one layer on one rank, gathered."""
    dense, experts = model.layer_parameters(layer, strategy.layout.tp)
    return dense + own_experts(model, strategy, experts)
