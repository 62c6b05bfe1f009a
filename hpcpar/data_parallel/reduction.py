"""Reductions of a bucket: whole on every rank (all-reduce), or each rank's shard (reduce-scatter)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from hpcpar.data_parallel.buckets import Bucket
from hpcpar.data_parallel.replica_comms import ReplicaComms

if TYPE_CHECKING:
    from hpcpar.comm import Communicator


class Pending(Protocol):
    """A reduction under way."""

    def wait(self) -> Any:
        """Return when it is complete."""


class Reduction(Protocol):
    """Reduction of buckets, which start in the same order on all ranks."""

    def start(self, flat: Tensor, bucket: Bucket) -> Pending:
        """Begin to replace a bucket, whose memory is `flat`, by its reduction over all ranks."""

    def start_map(self, bits: Any) -> Pending:
        """Begin to or the maps of used parameters, which ends the round."""


@dataclass(frozen=True, eq=False)
class _Scattering:
    """A reduce-scatter of a bucket.

    is_copy   of a copy, of which only the own shard is left when it is done
    across    ranks with the same shard, over which that is then averaged
    """

    handle: Pending
    averages: dict[Bucket, Tensor]
    bucket: Bucket
    is_copy: bool
    across: Communicator | None

    def wait(self) -> None:
        own = self.handle.wait()
        if self.is_copy:
            self.averages[self.bucket] = own.clone()
        if self.across is not None:
            self.across.allreduce(self.averages[self.bucket], "average")


class Averaging:
    """Averages over the ranks of a communicator, or over those with a copy of a bucket's parameters.

    scattered   each rank keeps its own shard alone; what then lies in the rest of the bucket means nothing
    dtype       what sums are worked out and kept in; None: as the gradients are
    """

    def __init__(
        self,
        comms: Communicator | ReplicaComms,
        algorithm: str | None = None,
        *,
        scattered: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._comms = ReplicaComms.given(comms, ())
        self._algorithm = algorithm
        self._scattered = scattered
        self._dtype = dtype
        self._averages: dict[Bucket, Tensor] = {}

    def start(self, flat: Tensor, bucket: Bucket) -> Pending:
        of = self._comms.shard_comm if self._scattered else self._comms.of
        comm, share = of(bucket.replicas), self._comms.share(bucket.replicas)
        data = flat if self._dtype in (None, flat.dtype) else flat.to(self._dtype)
        if share != 1:
            data.mul_(share)
        if not self._scattered:
            self._averages[bucket] = data
            return comm.start_allreduce(data, "average", algorithm=self._algorithm)
        self._averages[bucket] = data[slice(*bucket.shard_range(comm.rank, comm.size))]
        handle = comm.start_reduce_scatter(data, "average", counts=bucket.counts, algorithm=self._algorithm)
        return _Scattering(
            handle, self._averages, bucket, data is not flat, self._comms.across(bucket.replicas)
        )

    def start_map(self, bits: Any) -> Pending:
        # An algorithm that was named for the scatter is none of the all-reduce.
        algorithm = None if self._scattered else self._algorithm
        return self._comms.dp_comm.start_allreduce(bits, "or", algorithm=algorithm)

    @property
    def averages(self) -> list[Tensor]:
        """Memory of the averages of all buckets that were started."""
        return list(self._averages.values())

    def average(self, bucket: Bucket) -> Tensor:
        """Return this rank's part of the bucket's last average, flat; complete once waited for."""
        return self._averages[bucket]
