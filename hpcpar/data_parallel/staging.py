"""Staging buffers of ZeRO-2 and ZeRO-3: memory that a bucket's gradients lie in until they are reduced.

    waiting ── assign ──> gradients are copied or written in ── reduce-scatter ──> finish ──> buffer is free

Two buffers take turns: one is sent while the other is filled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hpcpar.data_parallel.buckets import Bucket
from hpcpar.data_parallel.flat_parameters import allocate_flat
from hpcpar.data_parallel.parameters import Layout, view_as
from hpcpar.errors import OperationError
from hpcpar.units import MiB

if TYPE_CHECKING:
    from hpcpar.comm import Communicator
    from hpcpar.comm.compiled import Handle

STAGING_BUFFERS = 2

STAGING_BUCKET_BYTES = 4 * MiB
"""Default size of a bucket that needs staging memory beside the shards."""


class StagingBuffer:
    """Memory for one bucket's gradients at a time, and the bucket that has it."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.owner: BucketInFlight | None = None
        self._flats: dict[tuple[int, torch.dtype], Tensor] = {}

    def flat(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return the start of its memory; always the same object, by which compiled calls are found."""
        key = numel, dtype
        if key not in self._flats:
            self._flats[key] = self.memory[: numel * dtype.itemsize].view(dtype)
        return self._flats[key]


@dataclass
class BucketInFlight:
    """State of one bucket in the current backward.

    shard      this rank's part of the average, over all backwards so far
    layouts    by member, shape and strides of its gradient
    filled     the shard holds an average
    missing    number of members whose gradient has not come, and still may
    arrived    members whose gradient has come and lies in `.grad` still
    taken      members whose gradient lies in the staging buffer
    given_up   members that get none in this backward
    flat       the buffer's memory while the bucket has one
    handle     the reduce-scatter under way
    """

    bucket: Bucket
    shard: Tensor
    layouts: Mapping[int, Layout]
    filled: bool = False
    missing: int = 0
    arrived: list[int] = field(default_factory=list)
    taken: set[int] = field(default_factory=set)
    given_up: set[int] = field(default_factory=set)
    staging: StagingBuffer | None = None
    flat: Tensor | None = None
    handle: Handle | None = None

    def __post_init__(self) -> None:
        self._ranges = self.bucket.ranges

    def begin_backward(self) -> None:
        """Expect a gradient of every member."""
        self.missing = len(self.bucket.members)
        self.taken.clear()
        self.given_up.clear()

    def is_settled(self, member: int) -> bool:
        """True if a member's gradient has come, or will not come in this backward."""
        return member in self.taken or member in self.arrived or member in self.given_up

    def assign(self, buffer: StagingBuffer) -> None:
        """Give the bucket a free buffer."""
        buffer.owner, self.staging = self, buffer
        self.flat = buffer.flat(self.bucket.numel, self.shard.dtype)

    def view(self, member: int) -> Tensor:
        """Return the memory of a member's gradient."""
        assert self.flat is not None, "the bucket has a buffer"
        return view_as(self.flat, *self._ranges[member], self.layouts[member])

    def holds(self, member: int, gradient: Tensor | None) -> bool:
        """True if backward made a member's gradient where it belongs."""
        if self.flat is None or gradient is None or gradient.layout is not torch.strided:
            return False
        return gradient.data_ptr() == self.view(member).data_ptr()

    def fill_up(self) -> Tensor:
        """Put zeros where no gradient has come, and return the whole bucket."""
        assert self.flat is not None, "the bucket has a buffer"
        for member in self.bucket.members:
            if member not in self.taken:
                self.flat[slice(*self._ranges[member])] = 0
        if self.bucket.padding:
            self.flat[-self.bucket.padding :] = 0
        return self.flat

    def finish(self) -> StagingBuffer:
        """Wait for the reduce-scatter, add its result to the shard, and return the buffer, which is free."""
        assert self.handle is not None, "it is under way"
        assert self.staging is not None, "it was sent from there"
        arrived = self.handle.wait()
        if self.filled:
            self.shard.add_(arrived)
        else:
            self.shard.copy_(arrived)
        self.filled = True
        buffer = self.staging
        buffer.owner = self.staging = self.flat = self.handle = None
        return buffer


def allocate_staging(
    dp_comm: Communicator, states: Sequence[BucketInFlight], devices: Sequence[torch.device]
) -> list[StagingBuffer]:
    """Return buffers as large as the largest bucket. Collective."""
    if len(set(devices)) > 1:
        raise OperationError(
            f"parameters of one optimizer lie on {', '.join(map(str, set(devices)))}; use one"
        )
    nbytes = max((state.bucket.numel * state.shard.dtype.itemsize for state in states), default=0)
    count = min(STAGING_BUFFERS, len(states))
    return [StagingBuffer(allocate_flat(nbytes, torch.uint8, devices[0], dp_comm)) for _ in range(count)]
