"""ZeRO-2: each rank keeps its shard of the average gradients (also the gradients of ZeRO-3's units).

    backward    dW5   dW4   dW3   dW2   dW1   dW0
    bucket 0   [dW5 │ dW4] full ─> reduce-scatter ─ ─ ─> shard 0 += average of the own part
    bucket 1               [dW3 │ dW2] full ─> reduce-scatter ─ ─ ─> shard 1 += …
    memory      buffer A     buffer B     buffer A again

Backward writes a gradient into its bucket's staging buffer, or the hook copies it there and frees it. Two
staging buffers, as large as the largest bucket, take turns: one is sent while the other is filled. Every
backward sends. The shards accumulate over microbatches, so no rank ever holds all whole gradients. Where
shards are cut over some of the ranks (HSDP), those of the others are averaged in once, by `synchronize`.
source   Rajbhandari et al. 2020, ZeRO, arXiv 1910.02054, section 5.2
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.autograd import Variable

from hpcpar.autograd.held_parameter import hold, own_gradient, release, set_own_gradient
from hpcpar.data_parallel.buckets import Bucket
from hpcpar.data_parallel.gradient_reducer import GradientReducer
from hpcpar.data_parallel.parameters import Layout, layout_of
from hpcpar.data_parallel.replica_comms import ReplicaComms
from hpcpar.data_parallel.staging import BucketInFlight, StagingBuffer, allocate_staging
from hpcpar.errors import GradientOrderError, OperationError

if TYPE_CHECKING:
    from hpcpar.comm import Communicator


class ShardedGradients(GradientReducer):
    """Average gradients over their replicas in every backward; each rank keeps its shards.

    names, parameters   those that get gradients; collective, the same on every rank
    buckets             of these parameters, padded for the ranks that have copies; they leave in this order
    dtype               of the sums and of the shards; None: of the gradients
    layouts             of the parameters; None: as they lie now
    replicated          every rank has the parameters themselves

    shards   of each bucket this rank's part of the sum of all averages since the last `zero`
    """

    def __init__(
        self,
        names: Sequence[str],
        parameters: Sequence[Tensor],
        buckets: Sequence[Bucket],
        comms: Communicator | ReplicaComms,
        *,
        dtype: torch.dtype | None = None,
        algorithm: str | None = None,
        layouts: Sequence[Layout] | None = None,
        replicated: bool = True,
    ) -> None:
        written = list(zip(names, parameters, strict=True)) if replicated else []
        super().__init__(names, parameters, comms, written)
        self.buckets = tuple(buckets)
        self._algorithm = algorithm
        types = [dtype or parameters[bucket.members[0]].dtype for bucket in buckets]
        devices = [parameters[bucket.members[0]].device for bucket in buckets]
        lengths = [self._shard_length(bucket) for bucket in buckets]
        laid = dict(enumerate(map(layout_of, parameters) if layouts is None else layouts))
        self._states = [
            BucketInFlight(bucket, torch.zeros(length, dtype=dtype, device=device), laid)
            for bucket, length, dtype, device in zip(buckets, lengths, types, devices, strict=True)
        ]
        self._coming = self._states
        self._state_of = {member: state for state in self._states for member in state.bucket.members}
        self.staging = allocate_staging(self.comms.shard_comm(None), self._states, devices)
        self.used = [0] * len(self.parameters)
        self.on_bucket_done: Callable[[Bucket], None] | None = None
        """Called when the bucket's last gradient of a backward has been taken: its parameters are done."""
        self.before_backward: Callable[[], None] | None = None
        """Called before a backward sends anything; where it raises, nothing has begun."""
        self._in_backward = False
        self._next = self._backwards = 0
        self._had = [False] * len(self.parameters)
        self._waiting_nbytes = self.peak_waiting_nbytes = 0
        self._watch()

    def _shard_length(self, bucket: Bucket) -> int:
        comm = self.comms.shard_comm(bucket.replicas)
        start, stop = bucket.shard_range(comm.rank, comm.size)
        return stop - start

    # --- as a reducer ------------------------------------------------------------------------

    @property
    def shards(self) -> list[Tensor]:
        return [state.shard for state in self._states]

    @property
    def flats(self) -> list[Tensor]:
        return self.shards

    @property
    def round_open(self) -> bool:
        return self._backwards > 0

    def synchronize(self) -> None:
        self._require_new_gradients()
        self.complete_backward()
        self._finish_all()
        self._average_across()
        maps = self._maps_of(self._had)
        for each, bits in zip(self._sets, maps, strict=True):
            each.comm.allreduce(bits, "or")
        self._read_maps(maps)
        self._had = [bool(used) for used in self.used]
        for parameter, is_used in zip(self.parameters, self.used, strict=True):
            if is_used:
                hold(parameter)
        self._backwards = 0
        self.synchronized = True
        self._require_same_writes(maps)

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
        self.unapplied = 1.0
        if set_to_none:
            self._had = [False] * len(self.parameters)
            self.used = [0] * len(self.parameters)
        self._sent.clear()
        self.synchronized = self.used_up = False

    def has_taken(self, index: int) -> bool:
        return index in self._state_of[index].taken or index in self._state_of[index].arrived

    def forget(self, index: int) -> None:
        self._had[index] = False
        self.used[index] = 0
        release(self.parameters[index])

    # --- a backward -------------------------------------------------------------------------------

    def expect_backward(self, buckets: Container[Bucket] | None = None) -> None:
        """Begin a backward; at its end, gradients that it did not bring count as zero.

        buckets   of which gradients may come, as of one stage of several; the same on every rank. None: all
        """
        if not self._in_backward:
            self._open_backward(buckets)
            Variable._execution_engine.queue_callback(self.end_backward)

    def complete_backward(self) -> None:
        """Bring zeros, or gradients set by hand, to a backward that only other ranks had. Collective."""
        if not self._backwards:
            self._open_backward()
        self._take_those_set_by_hand()
        self.end_backward()

    def _open_backward(self, buckets: Container[Bucket] | None = None) -> None:
        if self.before_backward is not None:
            self.before_backward()
        # A bucket has one staging buffer: what an earlier backward sent must have arrived.
        self._finish_all()
        if self.unapplied != 1.0:
            for shard in self.shards:
                shard.mul_(self.unapplied)
            self.unapplied = 1.0
        self._in_backward = True
        self._backwards += 1
        self.synchronized = False
        self._next = 0
        self._coming = [state for state in self._states if buckets is None or state.bucket in buckets]
        for state in self._states:
            state.begin_backward()

    def expect_no_more(self, members: Iterable[int]) -> None:
        """Count missing gradients of these parameters as zero: the backward under way brings no more."""
        for index in members:
            state = self._state_of[index]
            if not state.is_settled(index):
                state.given_up.add(index)
                state.missing -= 1
        self._launch_ready()

    def _on_gradient(self, index: int) -> None:
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
        if not state.holds(index, own_gradient(self.parameters[index])):
            self._waiting_nbytes += _gradient_nbytes(self.parameters[index])
        self.peak_waiting_nbytes = max(self.peak_waiting_nbytes, self._waiting_nbytes)
        self._launch_ready()
        self.dp_comm.poke()

    def _take_those_set_by_hand(self) -> None:
        """Take gradients that no backward has brought, but somebody who wrote to `.grad`."""
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
        """Count what has not come as zero, and send the remaining buckets."""
        if not self._in_backward:
            return
        for state in self._coming[self._next :]:
            state.missing = 0
        self._launch_ready()
        self._in_backward = False

    def _launch_ready(self) -> None:
        # Buckets leave in index order on every rank, whatever order the hooks fire in; otherwise rank 0
        # could be reducing bucket 3 against rank 1's bucket 2.
        while self._next < len(self._coming):
            state = self._coming[self._next]
            if state.staging is None and (state.arrived or not state.missing):
                state.assign(self._free_buffer())
            self._copy_in(state)
            if state.missing:
                break
            flat = state.fill_up()
            if self.on_bucket_done is not None:
                self.on_bucket_done(state.bucket)
            self._note_sent(state.bucket, flat)
            share = self.comms.share(state.bucket.replicas)
            if share != 1:
                flat.mul_(share)
            state.handle = self.comms.shard_comm(state.bucket.replicas).start_reduce_scatter(
                flat, "average", counts=state.bucket.counts, algorithm=self._algorithm
            )
            self._next += 1
        # A bucket further ahead may take a buffer, unless the one whose turn is next would have to wait.
        for state in self._coming[self._next + 1 :]:
            if state.arrived:
                if state.staging is None:
                    free = [buffer for buffer in self.staging if buffer.owner is None]
                    if len(free) <= (self._coming[self._next].staging is None):
                        continue
                    state.assign(free[0])
                self._copy_in(state)

    def _free_buffer(self) -> StagingBuffer:
        for buffer in self.staging:
            if buffer.owner is None:
                return buffer
        # Buckets left in order, so the first of those under way is done first.
        first = next(state for state in self._states if state.handle is not None)
        return first.finish()

    def _grad_buffer(self, index: int) -> Tensor | None:
        self.expect_backward()
        state = self._state_of[index]
        if state.is_settled(index):
            return None
        if state.flat is None:
            if state is not self._coming[self._next]:
                return None
            state.assign(self._free_buffer())
        place = state.view(index)
        return place if place.dtype == self.parameters[index].dtype else None

    def _copy_in(self, state: BucketInFlight) -> None:
        if state.flat is None:
            return
        for index in state.arrived:
            parameter = self.parameters[index]
            gradient = own_gradient(parameter)
            assert gradient is not None, "its hook has been called"
            self._require_dense(index, gradient)
            if not state.holds(index, gradient):
                state.view(index).copy_(gradient.detach())
                self._waiting_nbytes -= _gradient_nbytes(parameter)
            set_own_gradient(parameter, None)
            state.taken.add(index)
        state.arrived.clear()

    def _average_across(self) -> None:
        """Average the shards over the ranks that have the same ones: once for all backwards."""
        shards = [(state.shard, self.comms.across(state.bucket.replicas)) for state in self._states]
        for handle in [comm.start_allreduce(shard, "average") for shard, comm in shards if comm is not None]:
            handle.wait()

    def _finish_all(self) -> None:
        for state in self._states:
            if state.handle is not None:
                state.finish()


def _gradient_nbytes(parameter: Tensor) -> int:
    gradient = own_gradient(parameter)
    return 0 if gradient is None or gradient.layout is not torch.strided else gradient.nbytes
