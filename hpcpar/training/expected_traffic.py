"""Bytes that a run must send by theory, by communicator and collective; its counts are compared with them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from hpcpar.comm.preemption import QUESTION_NBYTES
from hpcpar.context_parallel import ContextParallel, Mask
from hpcpar.context_parallel.block import wide
from hpcpar.context_parallel.context_traffic import HeadSizes, totals
from hpcpar.data_parallel import DistributedOptimizer
from hpcpar.models import Llama, LlamaStages
from hpcpar.parameter_info import info_of
from hpcpar.pipeline_parallel.mailbox import ANNOUNCEMENT_NBYTES
from hpcpar.planner.shapes import Part, dtype_name
from hpcpar.planner.traffic import (
    NORM_NBYTES,
    Microbatch,
    allreduce_nbytes,
    calls_nbytes,
    pipeline_nbytes,
    rank_boundaries,
    tensor_parallel_calls,
)
from hpcpar.tensor_parallel import TensorParallel, split_over
from hpcpar.training.pipelined import PipelinedModel

if TYPE_CHECKING:
    from hpcpar.comm import Communicator
    from hpcpar.training.parallelize import ParallelLlama
    from hpcpar.training.training_step import WholeModel

ExpectedTraffic = Mapping[tuple["Communicator", str], int]
"""(communicator, collective) -> bytes that all of its ranks together must send."""

STEP_LOSS_NBYTES, HELD_OUT_LOSS_NBYTES, TARGETS_NBYTES = 8, 16, 8
"""A sum; a sum and its tokens; a number of targets."""


@dataclass(frozen=True)
class Passes:
    """Numbers of passes, steps and loads of a run on this rank.

    trained       sequences in each microbatch of a step
    held_out      sequences in each microbatch of an evaluation
    intervals     steps after each of which losses are summed
    loads         of checkpoints
    announces     the first messages between stages tell their shapes
    """

    trained: Sequence[int]
    evaluations: int
    held_out: Sequence[int]
    intervals: Sequence[int]
    loads: int
    announces: bool = True

    @property
    def steps(self) -> int:
        return sum(self.intervals)


def expected_traffic(
    parallel: ParallelLlama,
    worker: WholeModel | PipelinedModel,
    losses: Communicator,
    passes: Passes,
    *,
    start_nbytes: Mapping[Communicator, int],
    preemption: Communicator | None = None,
) -> ExpectedTraffic:
    """Count the bytes of every communicator that this rank is in, but of exchanged rows of experts.

    losses         where losses are summed
    start_nbytes   of the parameters' broadcast, by communicator
    preemption     where ranks ask each other between steps whether to stop
    """
    model, optimizer, sequences = parallel.model, worker.optimizer, parallel.sequences
    pipelined = worker if isinstance(worker, PipelinedModel) else None
    total: Counter[tuple[Communicator, str]] = Counter()
    total.update({(comm, "broadcast"): nbytes for comm, nbytes in start_nbytes.items()})
    looks = 1 if optimizer.scaler.dynamic else 0
    # In stage 2 a backward of one of several stages sends all gradients, most of them zeros.
    stages = len(pipelined.model.stages) if pipelined is not None and optimizer.zero_stage == 2 else 1
    gradients = optimizer.traffic_by_comm(
        passes.steps,
        backwards=len(passes.trained) * stages,
        forwards=passes.evaluations * len(passes.held_out),
        norms=looks,
        loads=passes.loads,
    )
    total.update(gradients)
    pp = None if pipelined is None else pipelined.pipeline.comm
    total.update(_norms(model, optimizer, pp, passes.steps, looks=looks))
    own_tokens = sequences.own_length(parallel.config.train.sequence)
    if own_tokens is not None:  # else it depends on the documents in a sequence
        total.update(_tensor_parallel(parallel, passes, own_tokens))
        if sequences.context is not None and sequences.context.comm.size > 1:
            total.update(_context_parallel(parallel, sequences.context, passes))
        if pipelined is not None:
            total.update(_pipeline(pipelined, parallel.tp, passes, own_tokens))
    summed = [STEP_LOSS_NBYTES * steps for steps in passes.intervals]
    for nbytes in summed + [HELD_OUT_LOSS_NBYTES] * passes.evaluations:
        total[losses, "allreduce"] += allreduce_nbytes(losses, nbytes, dtype="float64")
    if sequences.global_tokens is None:  # each step counts the targets of its batch
        dp = optimizer.dp_comm
        total[dp, "allreduce"] += passes.steps * allreduce_nbytes(dp, TARGETS_NBYTES, dtype="int64")
    if preemption is not None:
        questions = max(0, passes.steps - 1)
        total[preemption, "allreduce"] += questions * allreduce_nbytes(
            preemption, QUESTION_NBYTES, dtype="uint8"
        )
    has_capacity = model.config.experts is not None and model.config.experts.capacity_factor is not None
    if own_tokens is None or has_capacity:  # a part would be compared with all that tp sends
        return {key: nbytes for key, nbytes in total.items() if key[0] is not parallel.tp.comm}
    return total


def _tensor_parallel(
    parallel: ParallelLlama, passes: Passes, sequence: int
) -> Counter[tuple[Communicator, str]]:
    """Count the bytes on the tp axis, and among its ranks that share a key-value head."""
    model, tp, experts = parallel.model, parallel.tp, parallel.experts
    parameter = next(model.parameters())
    on_axis, on_sharers = tensor_parallel_calls(
        model.config,
        tp,
        trained=passes.steps * [Microbatch(each, sequence) for each in passes.trained],
        evaluated=passes.evaluations * [Microbatch(each, sequence) for each in passes.held_out],
        recompute=parallel.config.recompute,
        parts=_parts(model),
        split_experts=experts is not None and experts.split,
    )
    found = {tp.comm: on_axis}
    if on_sharers:
        found[tp.sharers(model.config.key_value_heads).same] = on_sharers
    total: Counter[tuple[Communicator, str]] = Counter()
    for comm, calls in found.items():
        sent = calls_nbytes(comm, calls, parameter.dtype, on_device=parameter.is_cuda)
        total.update({(comm, collective): nbytes for collective, nbytes in sent.items()})
    return total


def _parts(model: Llama | LlamaStages) -> list[Part]:
    if isinstance(model, Llama):
        return [Part.whole(model.config.layers)]
    return [stage.part for stage in model.stages.values()]


def _context_parallel(
    parallel: ParallelLlama, cp: ContextParallel, passes: Passes
) -> Counter[tuple[Communicator, str]]:
    """Count the bytes of keys and values, their gradients, and exchanged heads.

    What is recomputed fetches them again; of the attention core alone the outputs are not sent home again.
    """
    model, tp, recompute = parallel.model, parallel.tp, parallel.config.recompute
    config = model.config
    sent = totals(
        cp.plan(Mask(parallel.config.train.sequence)),
        cp.method,
        HeadSizes(config.heads // tp.size, max(1, config.key_value_heads // tp.size), config.head_width),
        cp.comm.rank,
        inner=cp.inner.size,
        multiple=cp.multiple,
    )
    numbers = [number for part in _parts(model) for number in part.layers]
    again = Counter(recompute.of_layer(number, config.layers) for number in numbers)
    trained, held_out = passes.steps * sum(passes.trained), passes.evaluations * sum(passes.held_out)
    forwards = len(numbers) * (trained + held_out)
    recomputed = trained * (again["selective"] + again["full"])
    backwards = len(numbers) * trained
    dtype = next(model.parameters()).dtype
    gradient_type = dtype if cp.narrow else wide(dtype)
    fetches, returns = ("allgather", "reduce_scatter") if cp.method == "allgather" else ("send", "send")
    total: Counter[tuple[Communicator, str]] = Counter()
    heads = (forwards + backwards) * (sent.there + sent.home) + recomputed * sent.there
    total[cp.inner, "alltoall"] += dtype.itemsize * (heads + trained * again["full"] * sent.home)
    fetched = forwards + recomputed + (0 if cp.keep else backwards)
    total[cp.outer, fetches] += dtype.itemsize * fetched * sent.keys
    total[cp.outer, returns] += gradient_type.itemsize * backwards * sent.gradients
    return total


def _pipeline(
    worker: PipelinedModel, tp: TensorParallel, passes: Passes, sequence: int
) -> Counter[tuple[Communicator, str]]:
    """Count the bytes of activations and their gradients between stages, and of tied weights' gradients.

    A receiver that does not know an activation's shape from an earlier pass gets an announcement first.
    """
    model, schedule, comm = worker.model, worker.pipeline.schedule, worker.pipeline.comm
    homes = [schedule.rank_of_stage[stage] for stage in range(schedule.stages)]
    tokens = sequence // (tp.size if tp.sequence_parallel else 1)
    total: Counter[tuple[Communicator, str]] = Counter()
    total[comm, "send"] += pipeline_nbytes(
        homes,
        token_nbytes=model.config.hidden_size * next(model.parameters()).dtype.itemsize,
        trained_tokens=passes.steps * sum(passes.trained) * tokens,
        evaluated_tokens=passes.evaluations * sum(passes.held_out) * tokens,
    )
    if passes.announces:
        announced = (len(passes.trained) if passes.steps else 0) + len(passes.held_out)
        total[comm, "send"] += rank_boundaries(homes) * announced * ANNOUNCEMENT_NBYTES
    for name, over in worker.tied.comms.items():
        parameter = model.tied_parameters()[name]
        assert parameter is not None, "this rank has a copy"
        nbytes, dtype = _tied_gradient(worker.optimizer, parameter)
        total[over, "allreduce"] += passes.steps * allreduce_nbytes(
            over, nbytes, dtype=dtype_name(dtype), on_device=parameter.is_cuda
        )
    return total


def _tied_gradient(optimizer: DistributedOptimizer, tied: nn.Parameter) -> tuple[int, torch.dtype]:
    """Return bytes and type of what this rank adds to the other copies' gradients: all, or its shard."""
    if optimizer.zero_stage < 2:
        return tied.nbytes, tied.dtype
    for block, shard in zip(optimizer.blocks, optimizer.reducer.flats, strict=True):
        if any(optimizer.reducer.parameters[member] is tied for member in block.bucket.members):
            own = sum(piece.end - piece.offset for piece in block.shard.pieces)
            return own * shard.element_size(), shard.dtype
    raise AssertionError("a tied parameter is in a bucket of its own")


def _norms(
    model: nn.Module, optimizer: DistributedOptimizer, pp: Communicator | None, steps: int, *, looks: int
) -> Counter[tuple[Communicator, str]]:
    """Count the bytes of gradient norms.

    With shards there is, on dp and on the ranks with copies of experts, a number for each group of parameters
    that are split over the same communicators; and then one on each of those communicators and on pp.

    looks   checks in each step for non-finite gradients, of a number each; those on dp are counted elsewhere
    """
    over, reducer = split_over(model), optimizer.reducer
    kinds = {
        (over.get(name, ()), optimizer.replica_comms.shard_comm(info_of(parameter).replicas))
        for name, parameter in zip(reducer.names, reducer.parameters, strict=True)
    }
    total: Counter[tuple[Communicator, str]] = Counter()
    for comm in dict.fromkeys([*(comm for kind, _ in kinds for comm in kind), *([] if pp is None else [pp])]):
        # What is split over further ones is added over those later, by itself.
        sums = len({kind[kind.index(comm) :] for kind, _ in kinds if comm in kind}) or 1
        for numbers in (sums, *([1] * looks)):
            nbytes = allreduce_nbytes(comm, numbers * NORM_NBYTES, dtype="float64")
            total[comm, "allreduce"] += steps * nbytes
    if optimizer.zero_stage:
        for comm, number in Counter(over_comm for _, over_comm in kinds).items():
            nbytes = allreduce_nbytes(comm, number * NORM_NBYTES, dtype="float64")
            total[comm, "allreduce"] += steps * nbytes
    return total
