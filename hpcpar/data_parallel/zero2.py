"""ZeRO-2: each rank keeps its shard of the average gradients (also the gradients of ZeRO-3's units).

    backward    dW5   dW4   dW3   dW2   dW1   dW0
    bucket 0   [dW5 │ dW4] full ─> reduce-scatter ─ ─ ─> shard 0 += average of the own part
    bucket 1               [dW3 │ dW2] full ─> reduce-scatter ─ ─ ─> shard 1 += …
    memory      buffer A     buffer B     buffer A again

Backward writes a gradient into its bucket's staging buffer, or the hook copies it there and frees it. Two
staging buffers, as large as the largest bucket, take turns: one is sent while the other is filled. Every
backward sends. The shards accumulate over microbatches, so no rank ever holds all whole gradients.
source   Rajbhandari et al. 2020, ZeRO, arXiv 1910.02054, section 5.2
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Variable

from hpcpar.autograd.held_parameter import hold, own_gradient, release, set_own_gradient
from hpcpar.data_parallel.buckets import Bucket
from hpcpar.data_parallel.parameters import Layout, layout_of, offer_grad_buffers, view_as, watch_gradients
from hpcpar.data_parallel.reducer import require_new_gradients
from hpcpar.data_parallel.replicas import TOLD_NBYTES, Writes
from hpcpar.errors import BufferTypeError, GradientOrderError, OperationError
from hpcpar.units import MiB

if TYPE_CHECKING:
    from hpcpar.comm import Communicator
    from hpcpar.comm.compiled import Handle

STAGING_BUFFERS = 2
STAGING_BUCKET_BYTES = 4 * MiB
"""Usual size of a bucket that has to have buffer beside the shards."""


class StagingBuffer:
    """Memory that a bucket's gradients lie in on their way, and the bucket that it is lent to."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.owner: BucketInFlight | None = None
        self._flats: dict[tuple[int, torch.dtype], Tensor] = {}

    def flat(self, numel: int, dtype: torch.dtype) -> Tensor:
        """The first of its memory as so many elements; always the same tensor, which calls are known by."""
        key = numel, dtype
        if key not in self._flats:
            self._flats[key] = self.memory[: numel * dtype.itemsize].view(dtype)
        return self._flats[key]


@dataclass
class BucketInFlight:
    """A bucket on its way through the current backward.

    shard      this rank's part of the average, over all backwards so far
    filled     whether the shard holds anything yet
    missing    members whose gradient has not come, and still may
    given_up   members that get none in this backward
    arrived    members whose gradient has come and lies in `.grad` still
    flat       the buffer's memory while the bucket has one
    handle     the reduce-scatter under way
    """

    bucket: Bucket
    shard: Tensor
    filled: bool = False
    missing: int = 0
    arrived: list[int] = field(default_factory=list)
    taken: set[int] = field(default_factory=set)
    given_up: set[int] = field(default_factory=set)
    staging: StagingBuffer | None = None
    flat: Tensor | None = None
    handle: Handle | None = None


class ShardedGradients:
    """Averages gradients over `dp_comm` in every backward, each rank its shards; see the top of the file.

    names, parameters   those that get gradients; collective, the same on every rank
    buckets             of these parameters, padded for the ranks of `dp_comm`; they leave in this order
    dtype               of the sums and of the shards; None: of the gradients
    layouts             of the parameters; None: as they lie now
    replicated          every rank has the parameters themselves

    shards   of each bucket this rank's part of the sum of all averages since the last `zero`
    used     of each parameter, whether it got a gradient on any rank, as of the last `synchronize`;
             none after `zero`
    peak_waiting_nbytes   the most that gradients took at once which had come and were in no buffer yet
    """

    def __init__(
        self,
        names: Sequence[str],
        parameters: Sequence[Tensor],
        buckets: Sequence[Bucket],
        dp_comm: Communicator,
        *,
        dtype: torch.dtype | None = None,
        algorithm: str | None = None,
        layouts: Sequence[Layout] | None = None,
        replicated: bool = True,
    ) -> None:
        self.names = list(names)
        self.parameters = list(parameters)
        self.buckets = tuple(buckets)
        self.dp_comm = dp_comm
        self._algorithm = algorithm
        types = [dtype or parameters[bucket.members[0]].dtype for bucket in buckets]
        devices = [parameters[bucket.members[0]].device for bucket in buckets]
        lengths = [bucket.numel // dp_comm.size for bucket in buckets]
        self._states = [
            BucketInFlight(bucket, torch.zeros(length, dtype=dtype, device=device))
            for bucket, length, dtype, device in zip(buckets, lengths, types, devices, strict=True)
        ]
        self._state_of = {member: state for state in self._states for member in state.bucket.members}
        self._ranges = {
            member: (start, stop)
            for bucket in buckets
            for member, start, stop in zip(bucket.members, bucket.edges[:-1], bucket.edges[1:], strict=True)
        }
        self._layouts = [layout_of(p) for p in parameters] if layouts is None else list(layouts)
        self._staging = self._allocate_staging(types, devices)
        self.used: list[int] = [0] * len(self.parameters)
        self._writes = Writes(self.names, self.parameters, dp_comm) if replicated else Writes([], [])
        self.used_up = False
        """Nothing may be added to the averages before the next `zero`."""
        self.synchronized = False
        self.on_bucket_done: Callable[[Bucket], None] | None = None
        """Called when the bucket's last gradient of a backward has been taken: its parameters are done."""
        self.before_backward: Callable[[], None] | None = None
        """Called before a backward sends anything; where it raises, nothing has begun."""
        self._accumulating = False
        self._in_backward = False
        self._next = self._backwards = 0
        self._had = [False] * len(self.parameters)
        self._waiting_nbytes = self.peak_waiting_nbytes = 0
        self._hooks = [
            *watch_gradients(self.parameters, self._on_gradient),
            *offer_grad_buffers(self.parameters, self._buffer_for),
        ]

    def _allocate_staging(
        self, types: Sequence[torch.dtype], devices: Sequence[torch.device]
    ) -> list[StagingBuffer]:
        nbytes = max(
            (bucket.numel * dtype.itemsize for bucket, dtype in zip(self.buckets, types, strict=True)),
            default=0,
        )
        if len(set(devices)) > 1:
            raise OperationError(
                f"parameters of one optimizer lie on {', '.join(map(str, set(devices)))}; use one"
            )
        count = min(STAGING_BUFFERS, len(self.buckets))
        if devices and devices[0].type != "cpu":
            return [
                StagingBuffer(torch.empty(nbytes, dtype=torch.uint8, device=devices[0])) for _ in range(count)
            ]
        return [StagingBuffer(self.dp_comm.allocate_shared(nbytes, torch.uint8)) for _ in range(count)]

    # --- as a reducer ------------------------------------------------------------------------

    @property
    def shards(self) -> list[Tensor]:
        return [state.shard for state in self._states]

    @property
    def staging(self) -> Sequence[StagingBuffer]:
        """Memory for buckets on their way."""
        return self._staging

    @property
    def staging_nbytes(self) -> int:
        """Bytes of the buffers: what this takes beside the shards."""
        return sum(buffer.memory.nbytes for buffer in self._staging)

    @property
    def round_open(self) -> bool:
        """Whether there are gradients that no `synchronize` has waited for."""
        return self._backwards > 0

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """For all microbatches but the last. Here every backward sends: the shards accumulate."""
        outer, self._accumulating = self._accumulating, True
        try:
            yield
        finally:
            self._accumulating = outer

    def synchronize(self) -> None:
        """Wait until all shards are averages; collective, once after the last backward before a step."""
        require_new_gradients(accumulating=self._accumulating, synchronized=self.synchronized)
        self.complete_backward()
        self._finish_all()
        bits = np.concatenate([np.packbits(np.array(self._had, dtype=bool)), self._writes.digest()])
        self.dp_comm.allreduce(bits, "or")
        self.used = np.unpackbits(bits, count=len(self.parameters)).tolist()
        self._had = [bool(used) for used in self.used]
        for parameter, is_used in zip(self.parameters, self.used, strict=True):
            if is_used:
                hold(parameter)
        self._backwards = 0
        self.synchronized = True
        self._writes.require_same(bits[-TOLD_NBYTES:])

    def next_step(self) -> None:
        """A step has been taken."""
        self.synchronized = False
        self._writes.next_step()

    def zero(self, *, set_to_none: bool = True) -> None:
        """Forget all gradients; what is under way is awaited first, with all other ranks.

        set_to_none   False: parameters that had one are stepped on with zeros, if no other comes
        """
        self.end_backward()
        self._finish_all()
        for state in self._states:
            state.filled = not set_to_none
            if state.filled:
                state.shard.zero_()
        for parameter, had in zip(self.parameters, self._had, strict=True):
            set_own_gradient(parameter, None)
            if set_to_none or not had:
                release(parameter)
        self._backwards = 0
        if set_to_none:
            self._had = [False] * len(self.parameters)
            self.used = [0] * len(self.parameters)
        self.synchronized = self.used_up = False

    def has_taken(self, index: int) -> bool:
        """Whether the backward under way, or the last one, has brought a gradient to be averaged."""
        return index in self._state_of[index].taken or index in self._state_of[index].arrived

    def forget(self, index: int) -> None:
        """Step as if a parameter had got no gradient, on any rank; once the shards are averages."""
        self._had[index] = False
        self.used[index] = 0
        release(self.parameters[index])

    def close(self) -> None:
        """Take the hooks off the parameters."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for parameter in self.parameters:
            release(parameter)

    # --- a backward -------------------------------------------------------------------------------

    def expect_backward(self) -> None:
        """A backward has begun: at its end, whatever it did not bring counts as zero."""
        if not self._in_backward:
            self._open_backward()
            Variable._execution_engine.queue_callback(self.end_backward)

    def complete_backward(self) -> None:
        """Bring zeros, or gradients set by hand, to a backward that only other ranks had. Collective."""
        if not self._backwards:
            self._open_backward()
        self._take_those_set_by_hand()
        self.end_backward()

    def _open_backward(self) -> None:
        if self.before_backward is not None:
            self.before_backward()
        self._finish_all()
        self._in_backward = True
        self._backwards += 1
        self.synchronized = False
        self._next = 0
        for state in self._states:
            state.missing = len(state.bucket.members)
            state.taken.clear()
            state.given_up.clear()

    def expect_no_more(self, members: Iterable[int]) -> None:
        """The backward under way brings these no gradients but those that have come: others count as zero."""
        for index in members:
            state = self._state_of[index]
            if not (index in state.taken or index in state.arrived or index in state.given_up):
                state.given_up.add(index)
                state.missing -= 1
        self._launch_ready()

    def _on_gradient(self, index: int) -> None:
        """Autograd has made `.grad` of parameter `index`, or was given None, or another hook has taken it."""
        self.expect_backward()
        state = self._state_of[index]
        if index in state.taken or index in state.arrived:
            raise GradientOrderError(
                f"rank {self.dp_comm.rank}: {self.names[index]} got a second gradient in one backward, as "
                "with torch.utils.checkpoint's use_reentrant=True; pass use_reentrant=False. Or an error "
                "ended the backward before, and this is the next: call the optimizer's zero_grad() in between"
            )
        if index in state.given_up:
            raise GradientOrderError(
                f"rank {self.dp_comm.rank}: {self.names[index]} got a gradient from a backward within the "
                "backward, as with torch.utils.checkpoint's use_reentrant=True, when its unit's was over; "
                "pass use_reentrant=False"
            )
        if own_gradient(self.parameters[index]) is None:
            self.expect_no_more([index])
            return
        self._had[index] = True
        hold(self.parameters[index])
        state.arrived.append(index)
        state.missing -= 1
        if not self._is_in_buffer(index):
            self._waiting_nbytes += _gradient_nbytes(self.parameters[index])
        self.peak_waiting_nbytes = max(self.peak_waiting_nbytes, self._waiting_nbytes)
        self._launch_ready()
        self.dp_comm.poke()

    def _take_those_set_by_hand(self) -> None:
        """Gradients that no backward has brought, but somebody who wrote to `.grad`."""
        for index, parameter in enumerate(self.parameters):
            if own_gradient(parameter) is None or index in self._state_of[index].arrived:
                continue
            if not self._in_backward:
                raise OperationError(
                    f"the gradient of {self.names[index]} was set after a backward whose gradients have been "
                    "sent already; set those of all parameters, or let backward make them all"
                )
            self._had[index] = True
            self._state_of[index].arrived.append(index)

    def end_backward(self) -> None:
        """Whatever has not come by now counts as zero, and leaves."""
        if not self._in_backward:
            return
        for state in self._states[self._next :]:
            state.missing = 0
        self._launch_ready()
        self._in_backward = False

    def _launch_ready(self) -> None:
        """Take gradients into buffers, and send what is complete: in index order on every rank."""
        while self._next < len(self._states):
            state = self._states[self._next]
            if state.staging is None and (state.arrived or not state.missing):
                self._assign_buffer(state, self._free_buffer())
            self._copy_in(state)
            if state.missing:
                break
            self._send(state)
            self._next += 1
        # One further ahead may come in where nobody has to wait for it.
        for state in self._states[self._next + 1 :]:
            if state.arrived:
                if state.staging is None:
                    buffer = next((buffer for buffer in self._staging if buffer.owner is None), None)
                    if buffer is None or self._is_last_buffer(buffer):
                        continue
                    self._assign_buffer(state, buffer)
                self._copy_in(state)

    def _is_last_buffer(self, buffer: StagingBuffer) -> bool:
        """Whether the bucket whose turn is next would have to wait if this buffer were given away."""
        return self._states[self._next].staging is None and not any(
            other.owner is None for other in self._staging if other is not buffer
        )

    def _free_buffer(self) -> StagingBuffer:
        for buffer in self._staging:
            if buffer.owner is None:
                return buffer
        # Those under way left in order: the first of them is done first.
        first = next(state for state in self._states if state.handle is not None)
        return self._finish_bucket(first)

    def _buffer_for(self, index: int) -> Tensor | None:
        """Where backward may put a gradient, so that `_take` need not copy it; None where it has to wait."""
        self.expect_backward()
        state = self._state_of[index]
        if index in state.taken or index in state.arrived or index in state.given_up:
            return None
        if state.flat is None:
            if state is not self._states[self._next]:
                return None
            self._assign_buffer(state, self._free_buffer())
        assert state.flat is not None, "it has a buffer"
        place = self._view(state.flat, index)
        return place if place.dtype == self.parameters[index].dtype else None

    def _view(self, flat: Tensor, index: int) -> Tensor:
        return view_as(flat, *self._ranges[index], self._layouts[index])

    def _is_in_buffer(self, index: int) -> bool:
        """Whether a gradient that has come was made where it is to lie."""
        flat, gradient = self._state_of[index].flat, own_gradient(self.parameters[index])
        if flat is None or gradient is None or gradient.layout is not torch.strided:
            return False
        return gradient.data_ptr() == self._view(flat, index).data_ptr()

    def _assign_buffer(self, state: BucketInFlight, buffer: StagingBuffer) -> None:
        buffer.owner = state
        state.staging = buffer
        state.flat = buffer.flat(state.bucket.numel, state.shard.dtype)

    def _copy_in(self, state: BucketInFlight) -> None:
        """Copy the gradients that have come into the bucket's buffer, and free them."""
        if state.flat is None:
            return
        for index in state.arrived:
            parameter = self.parameters[index]
            gradient = own_gradient(parameter)
            assert gradient is not None, "its hook has been called"
            if gradient.layout is not torch.strided:
                raise BufferTypeError(
                    f"the gradient of {self.names[index]} is {gradient.layout}, but buckets hold dense ones; "
                    "build the layer with sparse=False"
                )
            if not self._is_in_buffer(index):
                self._view(state.flat, index).copy_(gradient.detach())
                self._waiting_nbytes -= _gradient_nbytes(parameter)
            set_own_gradient(parameter, None)
            state.taken.add(index)
        state.arrived.clear()

    def _send(self, state: BucketInFlight) -> None:
        assert state.flat is not None, "it has a buffer"
        for member in state.bucket.members:
            if member not in state.taken:
                state.flat[slice(*self._ranges[member])] = 0
        if state.bucket.padding:
            state.flat[-state.bucket.padding :] = 0
        if self.on_bucket_done is not None:
            self.on_bucket_done(state.bucket)
        state.handle = self.dp_comm.start_reduce_scatter(state.flat, "average", algorithm=self._algorithm)

    def _finish_bucket(self, state: BucketInFlight) -> StagingBuffer:
        """Wait for a bucket under way and add what has come to its shard; its buffer is free again."""
        assert state.handle is not None, "it is under way"
        assert state.staging is not None, "it came from there"
        arrived = state.handle.wait()
        if state.filled:
            state.shard.add_(arrived)
        else:
            state.shard.copy_(arrived)
        state.filled = True
        buffer = state.staging
        buffer.owner = state.staging = state.flat = state.handle = None
        return buffer

    def _finish_all(self) -> None:
        for state in self._states:
            if state.handle is not None:
                self._finish_bucket(state)


def _gradient_nbytes(parameter: Tensor) -> int:
    gradient = own_gradient(parameter)
    return 0 if gradient is None or gradient.layout is not torch.strided else gradient.nbytes
