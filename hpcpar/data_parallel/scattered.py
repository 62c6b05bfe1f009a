"""Gradients that exist in shards only: ZeRO-2's, and those of ZeRO-3's units.

    backward    dW5   dW4   dW3   dW2   dW1   dW0
    bucket 0   [dW5 │ dW4] full ─> reduce-scatter ─ ─ ─> shard 0 += average of the own part
    bucket 1               [dW3 │ dW2] full ─> reduce-scatter ─ ─ ─> shard 1 += …
    memory      room A       room B       room A again

A gradient is made in its bucket's room, or copied there as soon as it is there, and freed. There are two
rooms, as large as the largest bucket: while one is under way the other is filled. Every backward sends; what
has arrived is added to the shard, so with several microbatches the shards accumulate and no whole gradient
ever exists.
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
from hpcpar.data_parallel.gradients import require_new_gradients
from hpcpar.data_parallel.parameters import Layout, layout_of, offer_rooms, view_as, watch_gradients
from hpcpar.data_parallel.replicas import TOLD_NBYTES, Writes
from hpcpar.errors import BufferTypeError, GradientOrderError, OperationError
from hpcpar.units import MiB

if TYPE_CHECKING:
    from hpcpar.comm import Communicator
    from hpcpar.comm.compiled import Handle

ROOMS = 2
ROOM_BYTES = 4 * MiB
"""Usual size of a bucket that has to have room beside the shards."""


class Room:
    """Memory that a bucket's gradients lie in on their way, and the bucket that it is lent to."""

    def __init__(self, memory: Tensor) -> None:
        self.octets = memory
        self.tenant: _Passage | None = None
        self._flats: dict[tuple[int, torch.dtype], Tensor] = {}

    def flat(self, numel: int, dtype: torch.dtype) -> Tensor:
        """The first of its memory as so many elements; always the same tensor, which calls are known by."""
        key = numel, dtype
        if key not in self._flats:
            self._flats[key] = self.octets[: numel * dtype.itemsize].view(dtype)
        return self._flats[key]


@dataclass
class _Passage:
    """A bucket on its way through the current backward.

    shard      this rank's part of the average, over all backwards so far
    filled     whether the shard holds anything yet
    missing    members whose gradient has not come, and still may
    given_up   members that get none in this backward
    arrived    members whose gradient has come and lies in `.grad` still
    flat       the room's memory while the bucket has one
    handle     the reduce-scatter under way
    """

    bucket: Bucket
    shard: Tensor
    filled: bool = False
    missing: int = 0
    arrived: list[int] = field(default_factory=list)
    taken: set[int] = field(default_factory=set)
    given_up: set[int] = field(default_factory=set)
    room: Room | None = None
    flat: Tensor | None = None
    handle: Handle | None = None


class ScatteredGradients:
    """Averages gradients over `dp_comm` in every backward, each rank its shards; see the top of the file.

    names, parameters   those that get gradients; collective, the same on every rank
    buckets             of these parameters, padded for the ranks of `dp_comm`; they leave in this order
    dtype               of the sums and of the shards; None: of the gradients
    layouts             of the parameters; None: as they lie now
    replicated          every rank has the parameters themselves

    shards   of each bucket this rank's part of the sum of all averages since the last `zero`
    used     of each parameter, whether it got a gradient on any rank, as of the last `synchronize`;
             none after `zero`
    peak_waiting_nbytes   the most that gradients took at once which had come and were in no room yet
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
        self._passages = [
            _Passage(bucket, torch.zeros(length, dtype=dtype, device=device))
            for bucket, length, dtype, device in zip(buckets, lengths, types, devices, strict=True)
        ]
        self._of = {member: passage for passage in self._passages for member in passage.bucket.members}
        self._places = {
            member: (start, stop)
            for bucket in buckets
            for member, start, stop in zip(bucket.members, bucket.edges[:-1], bucket.edges[1:], strict=True)
        }
        self._layouts = [layout_of(p) for p in parameters] if layouts is None else list(layouts)
        self._rooms = self._make_rooms(types, devices)
        self.used: list[int] = [0] * len(self.parameters)
        self._writes = Writes(self.names, self.parameters, dp_comm) if replicated else Writes([], [])
        self.used_up = False
        """Nothing may be added to the averages before the next `zero`."""
        self.synchronized = False
        self.gone: Callable[[Bucket], None] | None = None
        """Called when the bucket's last gradient of a backward has been taken: its parameters are done."""
        self.opening: Callable[[], None] | None = None
        """Called before a backward sends anything; where it raises, nothing has begun."""
        self._accumulating = False
        self._in_backward = False
        self._next = self._backwards = 0
        self._had = [False] * len(self.parameters)
        self._waiting_nbytes = self.peak_waiting_nbytes = 0
        self._hooks = [
            *watch_gradients(self.parameters, self._on_gradient),
            *offer_rooms(self.parameters, self._room_for),
        ]

    def _make_rooms(self, types: Sequence[torch.dtype], devices: Sequence[torch.device]) -> list[Room]:
        nbytes = max(
            (bucket.numel * dtype.itemsize for bucket, dtype in zip(self.buckets, types, strict=True)),
            default=0,
        )
        if len(set(devices)) > 1:
            raise OperationError(
                f"parameters of one optimizer lie on {', '.join(map(str, set(devices)))}; use one"
            )
        rooms = min(ROOMS, len(self.buckets))
        if devices and devices[0].type != "cpu":
            return [Room(torch.empty(nbytes, dtype=torch.uint8, device=devices[0])) for _ in range(rooms)]
        return [Room(self.dp_comm.allocate_shared(nbytes, torch.uint8)) for _ in range(rooms)]

    # --- as a synchronizer ------------------------------------------------------------------------

    @property
    def shards(self) -> list[Tensor]:
        return [passage.shard for passage in self._passages]

    @property
    def rooms(self) -> Sequence[Room]:
        """Memory for buckets on their way."""
        return self._rooms

    @property
    def room_nbytes(self) -> int:
        """Bytes of the rooms: what this takes beside the shards."""
        return sum(room.octets.nbytes for room in self._rooms)

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
        self._harvest_all()
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
        self._harvest_all()
        for passage in self._passages:
            passage.filled = not set_to_none
            if passage.filled:
                passage.shard.zero_()
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
        return index in self._of[index].taken or index in self._of[index].arrived

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
        if self.opening is not None:
            self.opening()
        self._harvest_all()
        self._in_backward = True
        self._backwards += 1
        self.synchronized = False
        self._next = 0
        for passage in self._passages:
            passage.missing = len(passage.bucket.members)
            passage.taken.clear()
            passage.given_up.clear()

    def expect_no_more(self, members: Iterable[int]) -> None:
        """The backward under way brings these no gradients but those that have come: others count as zero."""
        for index in members:
            passage = self._of[index]
            if not (index in passage.taken or index in passage.arrived or index in passage.given_up):
                passage.given_up.add(index)
                passage.missing -= 1
        self._accept()

    def _on_gradient(self, index: int) -> None:
        """Autograd has made `.grad` of parameter `index`, or was given None, or another hook has taken it."""
        self.expect_backward()
        passage = self._of[index]
        if index in passage.taken or index in passage.arrived:
            raise GradientOrderError(
                f"rank {self.dp_comm.rank}: {self.names[index]} got a second gradient in one backward, as "
                "with torch.utils.checkpoint's use_reentrant=True; pass use_reentrant=False. Or an error "
                "ended the backward before, and this is the next: call the optimizer's zero_grad() in between"
            )
        if index in passage.given_up:
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
        passage.arrived.append(index)
        passage.missing -= 1
        if not self._is_in_room(index):
            self._waiting_nbytes += _gradient_nbytes(self.parameters[index])
        self.peak_waiting_nbytes = max(self.peak_waiting_nbytes, self._waiting_nbytes)
        self._accept()
        self.dp_comm.poke()

    def _take_those_set_by_hand(self) -> None:
        """Gradients that no backward has brought, but somebody who wrote to `.grad`."""
        for index, parameter in enumerate(self.parameters):
            if own_gradient(parameter) is None or index in self._of[index].arrived:
                continue
            if not self._in_backward:
                raise OperationError(
                    f"the gradient of {self.names[index]} was set after a backward whose gradients have been "
                    "sent already; set those of all parameters, or let backward make them all"
                )
            self._had[index] = True
            self._of[index].arrived.append(index)

    def end_backward(self) -> None:
        """Whatever has not come by now counts as zero, and leaves."""
        if not self._in_backward:
            return
        for passage in self._passages[self._next :]:
            passage.missing = 0
        self._accept()
        self._in_backward = False

    def _accept(self) -> None:
        """Take gradients into rooms, and send what is complete: in index order on every rank."""
        while self._next < len(self._passages):
            passage = self._passages[self._next]
            if passage.room is None and (passage.arrived or not passage.missing):
                self._lodge(passage, self._free_room())
            self._take(passage)
            if passage.missing:
                break
            self._send(passage)
            self._next += 1
        # One further ahead may come in where nobody has to wait for it.
        for passage in self._passages[self._next + 1 :]:
            if passage.arrived:
                if passage.room is None:
                    room = next((room for room in self._rooms if room.tenant is None), None)
                    if room is None or self._is_last_room(room):
                        continue
                    self._lodge(passage, room)
                self._take(passage)

    def _is_last_room(self, room: Room) -> bool:
        """Whether the bucket whose turn is next would have to wait if this room were given away."""
        return self._passages[self._next].room is None and not any(
            other.tenant is None for other in self._rooms if other is not room
        )

    def _free_room(self) -> Room:
        for room in self._rooms:
            if room.tenant is None:
                return room
        # Those under way left in order: the first of them is done first.
        first = next(passage for passage in self._passages if passage.handle is not None)
        return self._harvest(first)

    def _room_for(self, index: int) -> Tensor | None:
        """Where backward may put a gradient, so that `_take` need not copy it; None where it has to wait."""
        self.expect_backward()
        passage = self._of[index]
        if index in passage.taken or index in passage.arrived or index in passage.given_up:
            return None
        if passage.flat is None:
            if passage is not self._passages[self._next]:
                return None
            self._lodge(passage, self._free_room())
        assert passage.flat is not None, "it has a room"
        place = self._place(passage.flat, index)
        return place if place.dtype == self.parameters[index].dtype else None

    def _place(self, flat: Tensor, index: int) -> Tensor:
        return view_as(flat, *self._places[index], self._layouts[index])

    def _is_in_room(self, index: int) -> bool:
        """Whether a gradient that has come was made where it is to lie."""
        flat, gradient = self._of[index].flat, own_gradient(self.parameters[index])
        if flat is None or gradient is None or gradient.layout is not torch.strided:
            return False
        return gradient.data_ptr() == self._place(flat, index).data_ptr()

    def _lodge(self, passage: _Passage, room: Room) -> None:
        room.tenant = passage
        passage.room = room
        passage.flat = room.flat(passage.bucket.numel, passage.shard.dtype)

    def _take(self, passage: _Passage) -> None:
        """Copy the gradients that have come into the bucket's room, and free them."""
        if passage.flat is None:
            return
        for index in passage.arrived:
            parameter = self.parameters[index]
            gradient = own_gradient(parameter)
            assert gradient is not None, "its hook has been called"
            if gradient.layout is not torch.strided:
                raise BufferTypeError(
                    f"the gradient of {self.names[index]} is {gradient.layout}, but buckets hold dense ones; "
                    "build the layer with sparse=False"
                )
            if not self._is_in_room(index):
                self._place(passage.flat, index).copy_(gradient.detach())
                self._waiting_nbytes -= _gradient_nbytes(parameter)
            set_own_gradient(parameter, None)
            passage.taken.add(index)
        passage.arrived.clear()

    def _send(self, passage: _Passage) -> None:
        assert passage.flat is not None, "it has a room"
        for member in passage.bucket.members:
            if member not in passage.taken:
                passage.flat[slice(*self._places[member])] = 0
        if passage.bucket.padding:
            passage.flat[-passage.bucket.padding :] = 0
        if self.gone is not None:
            self.gone(passage.bucket)
        passage.handle = self.dp_comm.start_reduce_scatter(passage.flat, "average", algorithm=self._algorithm)

    def _harvest(self, passage: _Passage) -> Room:
        """Wait for a bucket under way and add what has come to its shard; its room is free again."""
        assert passage.handle is not None, "it is under way"
        assert passage.room is not None, "it came from there"
        arrived = passage.handle.wait()
        if passage.filled:
            passage.shard.add_(arrived)
        else:
            passage.shard.copy_(arrived)
        passage.filled = True
        room = passage.room
        room.tenant = passage.room = passage.flat = passage.handle = None
        return room

    def _harvest_all(self) -> None:
        for passage in self._passages:
            if passage.handle is not None:
                self._harvest(passage)


def _gradient_nbytes(parameter: Tensor) -> int:
    gradient = own_gradient(parameter)
    return 0 if gradient is None or gradient.layout is not torch.strided else gradient.nbytes
