"""Bytes that a run must send, by communicator and collective: what its counts are held to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpcpar.autograd import Recompute
from hpcpar.data_parallel import DistributedOptimizer, allreduce_nbytes
from hpcpar.data_parallel.traffic import NORM_NBYTES
from hpcpar.models import Llama
from hpcpar.models.tensor_traffic import Pass, expected_tensor_traffic
from hpcpar.tensor_parallel import TensorParallel, split_over

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
    model: Llama,
    optimizer: DistributedOptimizer,
    tp: TensorParallel,
    losses: Communicator,
    passes: Passes,
    *,
    recompute: Recompute,
    start_nbytes: int,
) -> Theory:
    """Of the communicators that this rank is in.

    losses         where losses are summed
    recompute      as the model was built with
    start_nbytes   of the parameters' broadcast; 0: there was none
    """
    dp = optimizer.dp_comm
    total: Counter[tuple[Communicator, str]] = Counter()
    total[dp, "broadcast"] += start_nbytes
    looks = 1 if optimizer.scaler.dynamic else 0
    gradients = optimizer.expected_traffic(
        passes.steps,
        backwards=len(passes.trained),
        forwards=passes.evaluations * len(passes.held_out),
        norms=looks,
        loads=passes.loads,
    )
    total.update({(dp, collective): nbytes for collective, nbytes in gradients.items()})
    total.update(_norms(model, optimizer, passes.steps, looks=looks))
    total.update(
        expected_tensor_traffic(
            model.config,
            tp,
            next(model.parameters()).dtype,
            trained=passes.steps * [Pass(each, passes.sequence) for each in passes.trained],
            evaluated=passes.evaluations * [Pass(each, passes.sequence) for each in passes.held_out],
            recompute=recompute,
        )
    )
    summed = [STEP_LOSS_NBYTES * steps for steps in passes.stretches]
    for nbytes in summed + [HELD_OUT_LOSS_NBYTES] * passes.evaluations:
        total[losses, "allreduce"] += allreduce_nbytes(losses, nbytes, dtype="float64")
    return total


def _norms(
    model: Llama, optimizer: DistributedOptimizer, steps: int, *, looks: int
) -> Counter[tuple[Communicator, str]]:
    """Gradient norms: on dp a number for each kind of parameters, by whom they are split over; then on those.

    looks   in each step, at whether gradients are finite: a number each time, on dp counted already
    """
    over = split_over(model)
    kinds = {over.get(name, ()) for name in optimizer.synchronizer.names}
    total: Counter[tuple[Communicator, str]] = Counter()
    for comm in (comm for kind in kinds for comm in kind):
        once = allreduce_nbytes(comm, NORM_NBYTES, dtype="float64")
        total[comm, "allreduce"] += steps * (1 + looks) * once
    if optimizer.zero_stage:
        dp = optimizer.dp_comm
        total[dp, "allreduce"] += steps * allreduce_nbytes(dp, len(kinds) * NORM_NBYTES, dtype="float64")
    return total
