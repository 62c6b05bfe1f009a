"""Messages between GPUs whose MPI takes no device pointers: through pinned host memory, piece by piece.

Each message has two slots on each side, so that MPI moves one piece while a GPU copies the next, or the last:

    sender's GPU      copy 0   copy 1   copy 2   copy 3
    MPI                        move 0   move 1   move 2   move 3
    receiver's GPU                      copy 0   copy 1   copy 2   copy 3
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from hpcpar.transport.buffers import octets_at
from hpcpar.transport.gpu.cuda_driver import CudaDriver
from hpcpar.transport.gpu.queue import DeviceOctets, Mark, Queue
from hpcpar.transport.interface import COLLECTIVE_TAGS, Exchange, Octets, Transport

PIECE_NBYTES = 2 * 1024 * 1024
"""Long enough that a copy (about 80 µs over PCIe 4) hides what a message costs beside its bytes."""

SMALL_NBYTES = 64 * 1024
"""Pieces up to this length go into smaller slots, of which one allocation holds many."""

POOL_NBYTES = 64 * 1024 * 1024
"""Bytes that a pool pins before messages must do with one slot: enough for sixteen with two."""

SLOTS = 2
"""Slots of a message."""

NAP_S = 50e-6


def cut(nbytes: int) -> list[slice]:
    """The pieces of a message: full ones, and a last one that is shorter, if need be empty.

    So the first piece that is not full ends a message, and one that is too short for its buffer, or too
    long, is seen as such whatever its length. That costs an empty piece after a multiple of PIECE_NBYTES.
    """
    return [slice(start, min(start + PIECE_NBYTES, nbytes)) for start in range(0, nbytes + 1, PIECE_NBYTES)]


class Slot:
    """Pinned memory for one piece.

    octets   its bytes as NumPy and MPI have them
    """

    __slots__ = ("address", "octets")

    def __init__(self, address: int, nbytes: int) -> None:
        self.address = address
        self.octets: Octets = octets_at(address, nbytes)


NOWHERE = Slot(0, 0)
"""For empty pieces."""


class PinnedPool:
    """Pinned memory lent to messages and used again, and whose turn it is among the messages to a peer.

    All exchanges of a transport share one pool; for one thread at a time.
    """

    def __init__(self, cuda: CudaDriver, *, most_nbytes: int = POOL_NBYTES) -> None:
        self.turns = Turns()
        self._cuda = cuda
        self._most_nbytes = most_nbytes
        self._allocated: list[tuple[int, int]] = []
        self._small = _Class(SMALL_NBYTES)
        self._large = _Class(PIECE_NBYTES)

    @property
    def nbytes(self) -> int:
        """Pinned by now."""
        return len(self._allocated) * PIECE_NBYTES

    def take(self, nbytes: int, queue: Queue, *, needed: bool) -> Slot | None:
        """Memory for a piece, of any content. None: for now there is no more; ask again later.

        needed   the message has no slot at all. It may be the one that the owners of all others wait for,
                 by way of other ranks, so it never waits for anything but copies of the GPU: the pool
                 grows beyond its bound instead
        """
        if not nbytes:
            return NOWHERE
        kind = self._class_of(nbytes)
        slot = kind.take()
        if slot is None and (self.nbytes < self._most_nbytes or (needed and not kind.due)):
            self._grow(kind, queue.ordinal)
            slot = kind.take()
        return slot

    def give_back(self, slot: Slot, after: Mark | None = None) -> None:
        """The slot is free; with `after`, as soon as that is past."""
        if slot is NOWHERE:
            return
        kind = self._class_of(slot.octets.size)
        if after is None:
            kind.free.append(slot)
        else:
            kind.due.append((after, slot))

    def close(self) -> None:
        """Unpin everything, after the copies that are under way; no exchange may be."""
        for kind in (self._small, self._large):
            for mark, _ in kind.due:
                while not mark.is_past():
                    time.sleep(NAP_S)
            kind.free.clear()
            kind.due.clear()
        while self._allocated:
            address, ordinal = self._allocated.pop()
            self._cuda.use(ordinal)
            self._cuda.free_pinned(address)

    def _class_of(self, nbytes: int) -> _Class:
        return self._small if nbytes <= SMALL_NBYTES else self._large

    def _grow(self, kind: _Class, ordinal: int) -> None:
        self._cuda.use(ordinal)
        address = self._cuda.alloc_pinned(PIECE_NBYTES)
        self._allocated.append((address, ordinal))
        for start in range(0, PIECE_NBYTES, kind.nbytes):
            kind.free.append(Slot(address + start, kind.nbytes))


class _Class:
    """Slots of one length.

    free   those to be had
    due    those that will be when a copy is over
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.free: list[Slot] = []
        self.due: list[tuple[Mark, Slot]] = []

    def take(self) -> Slot | None:
        if self.free:
            return self.free.pop()
        for index, (mark, slot) in enumerate(self.due):
            if mark.is_past():
                del self.due[index]
                return slot
        return None


@dataclass(frozen=True, slots=True)
class Way:
    """A direction between two ranks under one tag: the k-th send meets the k-th receive."""

    transport: Transport
    peer: int
    tag: int
    is_sending: bool


class Turns:
    """Messages of one way, of whatever exchange, start one after the other: their pieces must not mix."""

    def __init__(self) -> None:
        self._lines: dict[Way, deque[object]] = {}

    def join(self, way: Way, message: object) -> None:
        self._lines.setdefault(way, deque()).append(message)

    def has(self, way: Way, message: object) -> bool:
        """True if it is this message's turn."""
        line = self._lines.get(way)
        return line is not None and line[0] is message

    def leave(self, way: Way, message: object) -> None:
        """Give up the turn: all pieces have been started, or none will be any more."""
        line = self._lines.get(way, deque())
        if message in line:
            line.remove(message)
        if not line:
            self._lines.pop(way, None)


class _Message:
    """Common part of sends and receives.

    pieces    not begun yet, in order
    copying   pieces that the GPU copies just now, in order
    moving    those that MPI moves, in order
    """

    def __init__(self, way: Way, octets: DeviceOctets, queue: Queue, pool: PinnedPool) -> None:
        self._way = way
        self._octets = octets
        self._queue = queue
        self._pool = pool
        self._pieces = deque(cut(octets.size))
        self._copying: deque[tuple[Mark | None, Slot, slice]] = deque()
        self._moving: deque[tuple[Exchange, Slot, slice]] = deque()
        pool.turns.join(way, self)

    def waiting_for(self) -> set[int]:
        return {rank for exchange, _, _ in self._moving for rank in exchange.waiting_for()}

    def end(self) -> None:
        """Begin nothing more. Slots come back after their copies; those that MPI may still use never do."""
        self._pool.turns.leave(self._way, self)
        while self._copying:
            mark, slot, _ = self._copying.popleft()
            self._pool.give_back(slot, mark)

    def _next_slot(self) -> Slot | None:
        """For the first of the pieces that are left, if there are any and it may begin."""
        under_way = len(self._copying) + len(self._moving)
        if not self._pieces or under_way >= SLOTS or not self._pool.turns.has(self._way, self):
            return None
        return self._pool.take(_nbytes(self._pieces[0]), self._queue, needed=not under_way)

    def _copy(self, target: int, source: int, slot: Slot, piece: slice) -> None:
        mark = None
        if _nbytes(piece):
            self._queue.copy(target, source, _nbytes(piece))
            mark = self._queue.mark()
        self._copying.append((mark, slot, piece))


class _Sending(_Message):
    """One message to go."""

    def advance(self) -> bool:
        """Do all that can be done without waiting; True once everything has been sent."""
        while self._moving and self._moving[0][0].test():
            self._pool.give_back(self._moving.popleft()[1])
        while (slot := self._next_slot()) is not None:
            piece = self._pieces.popleft()
            self._copy(slot.address, self._octets.address + piece.start, slot, piece)
        while self._copying and _is_past(self._copying[0][0]):
            _, slot, piece = self._copying.popleft()
            outgoing = [(slot.octets[: _nbytes(piece)], self._way.peer)]
            self._moving.append((self._way.transport.start(outgoing, [], self._way.tag), slot, piece))
            if not self._pieces and not self._copying:
                self._pool.turns.leave(self._way, self)
        return not self._pieces and not self._copying and not self._moving


class _Receiving(_Message):
    """One message to come, and its bytes that have come: `nbytes`.

    In collectives both sides know the length of a message, and transports do not tell it. In
    point-to-point a message may be shorter than its buffer: a receive for a piece that does not come would
    take the next message's, so it is posted only when all pieces before it have come in full.
    """

    nbytes = 0

    def advance(self) -> bool:
        """Do all that can be done without waiting; True once the last copy is given to the queue."""
        is_agreed = self._way.tag < COLLECTIVE_TAGS
        while self._moving and self._moving[0][0].test():
            exchange, slot, piece = self._moving.popleft()
            expected = _nbytes(piece)
            found = expected if is_agreed else exchange.received_nbytes()
            self.nbytes += found
            if found < expected:  # a short piece is the last
                self._pieces.clear()
            came = slice(piece.start, piece.start + found)
            self._copy(self._octets.address + piece.start, slot.address, slot, came)
        while self._copying and _is_past(self._copying[0][0]):
            self._pool.give_back(self._copying.popleft()[1])
        while (is_agreed or not self._moving) and (taken := self._next_slot()) is not None:
            piece = self._pieces.popleft()
            incoming = [(taken.octets[: _nbytes(piece)], self._way.peer)]
            self._moving.append((self._way.transport.start([], incoming, self._way.tag), taken, piece))
            if not self._pieces:
                self._pool.turns.leave(self._way, self)
        if self._pieces or self._moving:
            return False
        self.end()
        return True


class StagedExchange:
    """Messages between device memories by way of pinned memory; an `interface.Exchange`.

    Complete when everything has been sent, and what has come is here or its copy is given to the queue:
    later work in the queue comes after it. The bytes to be sent are read, and those received are written,
    after all that was given to the queue before.

    A message that is too long is an error where it arrives; its sender waits in vain to be rid of the rest.
    """

    def __init__(
        self,
        transport: Transport,
        queue: Queue,
        pool: PinnedPool,
        sends: Sequence[tuple[DeviceOctets, int]],
        receives: Sequence[tuple[DeviceOctets, int]],
        tag: int,
    ) -> None:
        self._receives = [
            _Receiving(Way(transport, source, tag, False), octets, queue, pool) for octets, source in receives
        ]
        outgoing = [_Sending(Way(transport, to, tag, True), octets, queue, pool) for octets, to in sends]
        self._open: list[_Receiving | _Sending] = [*self._receives, *outgoing]
        self.test()

    def test(self) -> bool:
        """Make progress; True once complete, and ever after, also when an error was raised."""
        if self._open:
            try:
                self._open = [message for message in self._open if not message.advance()]
            except BaseException:
                for message in self._open:
                    message.end()
                self._open = []
                raise
        return not self._open

    def waiting_for(self) -> tuple[int, ...]:
        """Ranks that a piece is under way to or from."""
        return tuple(sorted({rank for message in self._open for rank in message.waiting_for()}))

    def received_nbytes(self) -> int:
        return sum(message.nbytes for message in self._receives)


def _nbytes(piece: slice) -> int:
    nbytes: int = piece.stop - piece.start
    return nbytes


def _is_past(mark: Mark | None) -> bool:
    return mark is None or mark.is_past()
