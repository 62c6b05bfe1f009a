"""Bytes that a run must send, by communicator and collective: what its counts are held to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from torch import nn

from hpcpar.autograd import Recompute
from hpcpar.comm.preemption import QUESTION_NBYTES
from hpcpar.data_parallel import DistributedOptimizer, allreduce_nbytes
from hpcpar.data_parallel.traffic import NORM_NBYTES
from hpcpar.models import Llama, LlamaStages
from hpcpar.models.tensor_traffic import Pass, expected_tensor_traffic
from hpcpar.pipeline_parallel.mailbox import ANNOUNCEMENT_NBYTES
from hpcpar.tensor_parallel import TensorParallel, split_over
from hpcpar.training.pipelined import PipelinedModel

if TYPE_CHECKING:
    from hpcpar.comm import Communicator

Theory = Mapping[tuple["Communicator", str], int]
"""(communicator, collective) -> bytes that all of its ranks together have to send."""

STEP_LOSS_NBYTES, HELD_OUT_LOSS_NBYTES = 8, 16
"""A sum; a sum and its tokens."""


@dataclass(frozen=True)
class Passes:
    """What a run does on this rank, in numbers.

    trained       sequences in each microbatch of a step
    held_out      sequences in each microbatch of an evaluation
    sequence      tokens in a sequence
    stretches     steps after each of which losses are summed
    loads         of checkpoints
    """

    trained: Sequence[int]
    evaluations: int
    held_out: Sequence[int]
    sequence: int
    stretches: Sequence[int]
    loads: int

    @property
    def steps(self) -> int:
        return sum(self.stretches)


def expected_traffic(
    model: Llama | LlamaStages,
    optimizer: DistributedOptimizer,
    tp: TensorParallel,
    losses: Communicator,
    passes: Passes,
    *,
    recompute: Recompute,
    start_nbytes: int,
    worker: PipelinedModel | None = None,
    preemption: Communicator | None = None,
) -> Theory:
    """Of the communicators that this rank is in.

    losses         where losses are summed
    recompute      as the model was built with
    start_nbytes   of the parameters' broadcast; 0: there was none
    worker         where layers are divided over a pipeline
    preemption     where ranks ask each other between steps whether to stop
    """
    dp = optimizer.dp_comm
    total: Counter[tuple[Communicator, str]] = Counter()
    total[dp, "broadcast"] += start_nbytes
    looks = 1 if optimizer.scaler.dynamic else 0
    stages = 1 if worker is None else len(worker.model.stages)
    gradients = optimizer.expected_traffic(
        passes.steps,
        backwards=len(passes.trained) * stages,
        forwards=passes.evaluations * len(passes.held_out),
        norms=looks,
        loads=passes.loads,
    )
    total.update({(dp, collective): nbytes for collective, nbytes in gradients.items()})
    pp = None if worker is None else worker.pipeline.comm
    total.update(_norms(model, optimizer, pp, passes.steps, looks=looks))
    total.update(
        expected_tensor_traffic(
            model.config,
            tp,
            next(model.parameters()).dtype,
            trained=passes.steps * [Pass(each, passes.sequence) for each in passes.trained],
            evaluated=passes.evaluations * [Pass(each, passes.sequence) for each in passes.held_out],
            recompute=recompute,
            parts=None if worker is None else [stage.part for stage in worker.model.stages.values()],
            on_device=next(model.parameters()).is_cuda,
        )
    )
    if worker is not None:
        total.update(_pipeline(worker, tp, passes))
    summed = [STEP_LOSS_NBYTES * steps for steps in passes.stretches]
    for nbytes in summed + [HELD_OUT_LOSS_NBYTES] * passes.evaluations:
        total[losses, "allreduce"] += allreduce_nbytes(losses, nbytes, dtype="float64")
    if preemption is not None:
        questions = max(0, passes.steps - 1)
        total[preemption, "allreduce"] += questions * allreduce_nbytes(
            preemption, QUESTION_NBYTES, dtype="uint8"
        )
    return total


def _pipeline(
    worker: PipelinedModel, tp: TensorParallel, passes: Passes
) -> Counter[tuple[Communicator, str]]:
    """Activations and their gradients over boundaries between ranks; and gradients of tied weights.

    An activation is b·s·h values, with sequence parallelism this rank's part of s. Where its shape is not
    known from an earlier pass, it is announced.
    """
    model, schedule, comm = worker.model, worker.pipeline.schedule, worker.pipeline.comm
    dtype = next(model.parameters()).dtype
    homes = [schedule.rank_of_stage[stage] for stage in range(schedule.stages)]
    crossings = sum(one != other for one, other in pairwise(homes))
    tokens = passes.sequence // (tp.size if tp.sequence_parallel else 1)

    def nbytes(sequences: Sequence[int]) -> int:
        return crossings * sum(sequences) * tokens * model.config.hidden_size * dtype.itemsize

    total: Counter[tuple[Communicator, str]] = Counter()
    total[comm, "send"] += 2 * passes.steps * nbytes(passes.trained)
    total[comm, "send"] += passes.evaluations * nbytes(passes.held_out)
    announced = (len(passes.trained) if passes.steps else 0) + len(passes.held_out)
    total[comm, "send"] += crossings * announced * ANNOUNCEMENT_NBYTES
    for name, over in worker.tied.comms.items():
        parameter = model.tied_parameters()[name]
        assert parameter is not None, "this rank has a copy"
        kind = str(parameter.dtype).removeprefix("torch.")
        total[over, "allreduce"] += passes.steps * allreduce_nbytes(
            over, parameter.nbytes, dtype=kind, on_device=parameter.is_cuda
        )
    return total


def _norms(
    model: nn.Module, optimizer: DistributedOptimizer, pp: Communicator | None, steps: int, *, looks: int
) -> Counter[tuple[Communicator, str]]:
    """Gradient norms: on dp a number for each kind of parameters, by whom they are split over; then on those.

    looks   in each step, at whether gradients are finite: a number each time, on dp counted already
    """
    over = split_over(model)
    kinds = {over.get(name, ()) for name in optimizer.reducer.names}
    total: Counter[tuple[Communicator, str]] = Counter()
    for comm in dict.fromkeys([*(comm for kind in kinds for comm in kind), *([] if pp is None else [pp])]):
        once = allreduce_nbytes(comm, NORM_NBYTES, dtype="float64")
        total[comm, "allreduce"] += steps * (1 + looks) * once
    if optimizer.zero_stage:
        dp = optimizer.dp_comm
        total[dp, "allreduce"] += steps * allreduce_nbytes(dp, len(kinds) * NORM_NBYTES, dtype="float64")
    return total
