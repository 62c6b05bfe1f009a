"""SyncBatchNorm over the ranks of a process set, whose engine brings their calls together by name."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hpcpar.data_parallel.batch_norm import CommonBatchNorm, converted
from hpcpar.horovod.process_sets import ProcessSet, global_process_set
from hpcpar.horovod.torch.mpi_ops import Sum, allgather, allreduce


class SyncBatchNorm(CommonBatchNorm):
    """`torch.nn.BatchNorm1d`, `2d` and `3d` whose batch is that of all ranks of `process_set`.

    Input [B, C] or [B, C, ...], on CPU or GPU, the same C and the same calls on every rank. Outputs,
    running statistics and gradients are those of one process's BatchNorm on the batches put together;
    gradients of weight and bias are this rank's part of the sum, to be reduced like all others.

    Forward and backward are collective where the batch is what normalizes: in training, and without running
    statistics in evaluation, too. If the input needs a gradient on one rank, then on all. Else, on one rank,
    and on ranks outside of the process set nothing is exchanged.
    Raises ValueError on every rank when all batches together have fewer than 2 values per channel.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_set: ProcessSet = global_process_set,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype)
        self.batches: _Members = _Members(process_set)

    @classmethod
    def convert_sync_batchnorm(
        cls, module: nn.Module, process_set: ProcessSet = global_process_set
    ) -> nn.Module:
        """Put such layers in the place of all BatchNorm in a model, as hpcpar.SyncBatchNorm does."""
        return converted(
            module,
            lambda features, eps, momentum, affine, tracks: cls(
                features, eps, momentum, affine, tracks, process_set
            ),
        )

    @property
    def process_set(self) -> ProcessSet:
        """The ranks whose batches are put together."""
        return self.batches.process_set


class _Members:
    """Keeps a process set out of copies and pickles of the layer: it holds what is this process's own."""

    def __init__(self, process_set: ProcessSet) -> None:
        self.process_set = process_set

    def are_several(self) -> bool:
        included = self.process_set.included()
        if included is None:
            raise ValueError(
                "SyncBatchNorm was to normalize by the batch before hvd.init(), or on a process set that is "
                "not registered: it has to know the ranks"
            )
        return included and (self.process_set.size() or 1) > 1

    def gathered(self, moments: torch.Tensor, name: str) -> torch.Tensor:
        found: torch.Tensor = allgather(moments, name, self.process_set)
        return found

    def summed(self, sums: torch.Tensor, name: str) -> torch.Tensor:
        found: torch.Tensor = allreduce(sums, name=name, op=Sum, process_set=self.process_set)
        return found

    def __deepcopy__(self, memo: Any) -> _Members:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        ranks = None if self.process_set is global_process_set else self.process_set.ranks
        return _members_of, (ranks,)


def _members_of(ranks: list[int] | None) -> _Members:
    """Unpickle: all ranks, or a process set that has to be registered again."""
    return _Members(global_process_set if ranks is None else ProcessSet(ranks))
