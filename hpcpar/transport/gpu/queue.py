"""A stream of ours on a GPU, with the memory and the events that work in it needs.

Whatever is done to device memory is given to a `Queue`, and done later, in the order in which it was given;
nothing here waits for the GPU. A queue *follows* the stream in which the caller made its array, and *leads*
the one in which the caller goes on, so that neither side ever blocks the host.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

from hpcpar.transport.buffers import octets_at
from hpcpar.transport.gpu.cuda_driver import CudaDriver
from hpcpar.transport.gpu.kernels import Kernels
from hpcpar.transport.interface import Octets

INTERPROCESS_EVENTS = 64
"""Events of a queue, used in turn. One that is recorded again too early makes a peer wait longer, never less,
and for nothing that waits for that peer: whoever waits for an event does so after it was recorded."""


class DeviceOctets:
    """Bytes of device memory: slices share them, and what is assigned to them is copied in the queue.

    owner   what keeps the memory: a user's array, or a piece of scratch
    """

    __slots__ = ("address", "owner", "queue", "size")

    def __init__(self, address: int, size: int, queue: Queue, owner: object = None) -> None:
        self.address = address
        self.size = size
        self.queue = queue
        self.owner = owner

    def __getitem__(self, part: slice) -> DeviceOctets:
        start, stop, _ = part.indices(self.size)
        return DeviceOctets(self.address + start, max(0, stop - start), self.queue, self.owner)

    def __setitem__(self, part: Any, source: DeviceOctets) -> None:
        """Copy. Between two queues, which only ranks of one process have, it is over on return."""
        target = self if part is ... else self[part]
        if not target.size:
            return
        self.queue.copy(target.address, source.address, target.size)
        if source.queue is not self.queue:
            self.queue.synchronize()


def as_pointer(octets: DeviceOctets) -> Octets:
    """The bytes as NumPy has them, for MPI, which wants an address: to look at them ends the process."""
    return octets_at(octets.address, octets.size)


class Mark:
    """A place in a queue: past once all that was given before is done."""

    def __init__(self, queue: Queue, event: int) -> None:
        self._queue = queue
        self._event: int | None = event

    def is_past(self) -> bool:
        if self._event is None:
            return True
        if self._queue.cuda.is_complete(self._event):
            self._queue.events.append(self._event)
            self._event = None
        return self._event is None


class Queue:
    """A stream of ours on one GPU, with memory and events of its own; for one thread at a time.

    Whoever starts a call in a thread, or goes on with one, calls `use` first.

    events   free ones, that stay within the process
    """

    def __init__(self, cuda: CudaDriver, ordinal: int, kernels: Callable[[int], Kernels]) -> None:
        self.cuda = cuda
        self.ordinal = ordinal
        self._kernels = kernels
        cuda.use(ordinal)
        self.stream = cuda.stream()
        self.events: list[int] = []
        self._published: list[int] = []
        self._turn = 0
        self._due: deque[tuple[Mark, Callable[[], object]]] = deque()

    @property
    def kernels(self) -> Kernels:
        """The kernels of this queue's device."""
        return self._kernels(self.ordinal)

    def use(self) -> None:
        """Make the queue's device that of this thread."""
        self.cuda.use(self.ordinal)

    def follow(self, stream: int) -> None:
        """Make later work of this queue wait for all work given to the stream so far."""
        self._order(first=stream, then=self.stream)

    def lead(self, stream: int) -> None:
        """Make later work of the stream wait for all work given to this queue so far."""
        self._order(first=self.stream, then=stream)

    def _order(self, *, first: int, then: int) -> None:
        event = self._event()
        self.cuda.record(event, first)
        self.cuda.wait(then, event)
        self.events.append(event)  # what waits for it waits for this record, not for a later one

    def mark(self) -> Mark:
        """Mark the present end of the queue."""
        event = self._event()
        self.cuda.record(event, self.stream)
        return Mark(self, event)

    def publish(self) -> int:
        """An interprocess event for all that was given so far: for peers who wait for it soon."""
        if len(self._published) < INTERPROCESS_EVENTS:
            self._published.append(self.cuda.event(interprocess=True))
        event = self._published[self._turn % len(self._published)]
        self._turn += 1
        self.cuda.record(event, self.stream)
        return event

    def wait(self, event: int) -> None:
        """Make later work of this queue wait for an event."""
        self.cuda.wait(self.stream, event)

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Copy between addresses, of the device or of pinned host memory."""
        self.cuda.copy(target, source, nbytes, self.stream)

    def synchronize(self) -> None:
        """Return when all that was given is done."""
        self.cuda.synchronize(self.stream)

    def take(self, nbytes: int) -> DeviceOctets:
        """Fresh memory of any content, which other processes of the node can be shown.

        With its last reference it is free again, for later work of this queue.
        """
        memory = self.kernels.memory(nbytes, self.stream)
        return DeviceOctets(memory.ptr, nbytes, self, memory)

    def afterwards(self, call: Callable[[], object]) -> None:
        """Have this called, by a later use of the queue, when all that was given so far is done.

        What it refers to is kept until then.
        """
        self._due.append((self.mark(), call))

    def look(self) -> None:
        """Call what is due."""
        while self._due and self._due[0][0].is_past():
            self._due.popleft()[1]()

    def _event(self) -> int:
        return self.events.pop() if self.events else self.cuda.event()


_left: defaultdict[tuple[int, int], list[Queue]] = defaultdict(list)
"""Queues of threads that have ended, for those that come."""


class _Queues(dict[tuple[int, int], Queue]):
    """The queues of one thread."""

    def __del__(self, left: defaultdict[tuple[int, int], list[Queue]] = _left) -> None:
        for key, queue in self.items():
            left[key].append(queue)


_of_thread = threading.local()


def queues_of_thread() -> dict[tuple[int, int], Queue]:
    """The queues of this thread, which all its communicators share, by turn and device."""
    if not hasattr(_of_thread, "queues"):
        _of_thread.queues = _Queues()
    queues: _Queues = _of_thread.queues
    return queues


def queue_of_thread(turn: int, cuda: CudaDriver, ordinal: int, kernels: Callable[[int], Kernels]) -> Queue:
    """This thread's queue for a turn on a device."""
    queues, key = queues_of_thread(), (turn, ordinal)
    if key not in queues:
        try:
            queues[key] = _left[key].pop()
        except IndexError:
            queues[key] = Queue(cuda, ordinal, kernels)
    return queues[key]
