"""The steps of a schedule on device memory: what is pulled from peers, what travels by MPI, what is summed.

A message reaches its receiver in one of three ways, which both sides know of each other (`Devices.reach`):

    pull     the sender shows its memory, the receiver's GPU reads it where it lies (CUDA IPC, one node)
    mpi      MPI moves it between device pointers (a CUDA-aware library)
    staged   MPI moves it between pinned host memory on both sides, piece by piece

A pull, between sender s and receiver r; the hosts exchange tokens, and only the GPUs wait for events:

    s   record an event after what made the bytes        → ready(where, event)
    r   the queue waits for the event, reads or sums     → read(event)
    s   waits for that event before the bytes are written again: at the next step that does, or at the end

So no host waits for a GPU, and one collective can follow another at once. MPI, which knows of no queue, is
given a pointer only when an event says that the bytes are there.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hpcpar.comm.blocks import Action
from hpcpar.comm.devices import Devices, Reach
from hpcpar.comm.executors.native import Posted
from hpcpar.comm.plan import Message, Plan, PlannedStep, Run, lands_in_place
from hpcpar.comm.spaces import Spaces, folds, itemsize_of, octets_of, packing
from hpcpar.comm.tokens import Kind, Mailroom, Token, TokenTicket
from hpcpar.errors import MismatchError
from hpcpar.transport.gpu.device_buffer import DeviceBuffer
from hpcpar.transport.gpu.queue import DeviceOctets, Mark, Queue, as_pointer
from hpcpar.transport.gpu.staged_messages import StagedExchange, Turns, Way
from hpcpar.transport.interface import Exchange, Transport

Extent = tuple[int, int]
"""Addresses from, to."""

Landing = tuple[Message, Any]
"""A message that is combined or unpacked, and the `DeviceOctets` that hold it."""


@dataclass(slots=True)
class Reading:
    """Bytes that a peer may still read, until its token is here and the queue waits for its event."""

    peer: int
    octets: DeviceOctets
    ticket: TokenTicket


def device_steps(
    devices: Devices,
    transport: Transport,
    mailroom: Mailroom,
    planned: Plan,
    spaces: Spaces,
    op: str,
    tag: int,
) -> tuple[Sequence[Posted], Action]:
    """A plan bound to device memory for one call, and what is to be done when all is given to the queue."""
    course = Course(devices, transport, mailroom, spaces, tag)
    steps = [DeviceStep(course, step, spaces, op) for step in planned.steps]
    return [*steps, DeviceStep(course, PlannedStep((), (), ()), spaces, op, is_last=True)], course.end


class Course:
    """State that the steps of one call share.

    missing          ranks whose token is waited for just now
    received_nbytes  what has been pulled, or has come by messages whose length MPI tells
    """

    def __init__(
        self, devices: Devices, transport: Transport, mailroom: Mailroom, spaces: Spaces, tag: int
    ) -> None:
        first = next(iter(spaces.values()))
        assert isinstance(first, DeviceBuffer)
        self.queue = first.queue
        self._spaces = spaces
        self._devices = devices
        self._transport = transport
        self._mailroom = mailroom
        self._tag = tag
        self._readings: list[Reading] = []
        self._opened: list[bytes] = []
        self.missing: tuple[int, ...] = ()
        self.received_nbytes = 0

    def is_pulled(self, peer: int) -> bool:
        """True if messages between this rank and a peer are pulled."""
        return self._reach(peer) == "pull"

    def poll(self) -> None:
        self._mailroom.poll()

    def show(self, peer: int, octets: DeviceOctets, event: int) -> None:
        """Let a peer read these bytes after the event."""
        number = self._mailroom.next_number()
        token = Token(
            Kind.READY,
            octets.size,
            self._devices.exports.export(octets.address, octets.size),
            self._devices.event_exports.export(event),
            number,
        )
        self._mailroom.send(peer, self._tag, token)
        self._readings.append(Reading(peer, octets, self._mailroom.ask(peer, self._tag, Kind.READ, number)))

    def can_show(self, octets: DeviceOctets) -> bool:
        """True if other processes can be shown these bytes where they are."""
        return not octets.size or self.queue.cuda.is_exportable(octets.address)

    def expect(self, peer: int) -> TokenTicket:
        """The next bytes that a peer shows."""
        return self._mailroom.ask(peer, self._tag, Kind.READY)

    def shown(self, peer: int, token: Token, nbytes: int) -> DeviceOctets:
        """Bytes that a peer shows, as seen from here; the queue waits until they are there."""
        if token.nbytes != nbytes:
            raise MismatchError(
                f"rank {self._transport.world_ranks[peer]} sends {token.nbytes:,} bytes, but this rank "
                f"expects {nbytes:,} from it; both must name the same number of elements of one type"
            )
        self._wait(token.event)
        if not nbytes:
            return DeviceOctets(0, 0, self.queue)
        address = self._devices.open(token.memory)
        self._opened.append(token.memory)
        return DeviceOctets(address, nbytes, self.queue)

    def _wait(self, event: bytes) -> None:
        self.queue.wait(self._devices.event_imports.open(event))
        self._devices.event_imports.release(event)

    def end(self) -> None:
        """Keep memory until the queue has done what it was given: the call's, by this object, and peers'."""
        self.queue.afterwards(self._release)

    def _release(self) -> None:
        for memory in self._opened:
            self._devices.imports.release(memory)

    def thank(self, read: Iterable[tuple[int, Token]]) -> None:
        """Tell peers that what they showed has been read, once the queue has come so far.

        read   each peer, and what it showed
        """
        event = self._devices.event_exports.export(self.queue.publish())
        for peer, token in read:
            self._mailroom.send(peer, self._tag, Token(Kind.READ, event=event, number=token.number))

    def until_read(self, extents: Sequence[Extent] | None) -> Iterator[None]:
        """Have the queue wait for peers that read any of these bytes; None: for all. Yields while waiting."""
        for reading in list(self._readings):
            if extents is not None and not any(
                _overlap(_extent_of(reading.octets), extent) for extent in extents
            ):
                continue
            while reading.ticket.token is None:
                self.missing = (reading.peer,)
                yield
            self._wait(reading.ticket.token.event)
            self._readings.remove(reading)

    def exchange(
        self, sends: Sequence[tuple[DeviceOctets, int]], receives: Sequence[tuple[DeviceOctets, int]]
    ) -> list[Exchange]:
        """Messages with ranks that are not pulled from; complete when what came may be used in the queue."""
        found: list[Exchange] = []
        transport, queue, tag = self._transport, self.queue, self._tag
        for way in ("mpi", "staged"):
            out = [(octets, peer) for octets, peer in sends if self._reach(peer) == way]
            into = [(octets, peer) for octets, peer in receives if self._reach(peer) == way]
            if out or into:
                pinned = self._devices.pinned
                found.append(
                    AfterQueue(transport, queue, pinned.turns, out, into, tag)
                    if way == "mpi"
                    else StagedExchange(transport, queue, pinned, out, into, tag)
                )
        return found

    def _reach(self, peer: int) -> Reach:
        return self._devices.reach(self._transport.world_ranks[peer])


class AfterQueue:
    """Messages that MPI is given when all that was given to the queue before is done.

    MPI keeps messages of one tag in the order in which it is given them, and queues do not wait for each
    other: so each waits for its turn, too, among those between the same ranks under the same tag.
    """

    def __init__(
        self,
        transport: Transport,
        queue: Queue,
        turns: Turns,
        sends: Sequence[tuple[DeviceOctets, int]],
        receives: Sequence[tuple[DeviceOctets, int]],
        tag: int,
    ) -> None:
        self._mark: Mark = queue.mark()
        self._messages = (transport, sends, receives, tag)
        self._turns = turns
        self._ways = [
            *(Way(transport, peer, tag, True) for _, peer in sends),
            *(Way(transport, peer, tag, False) for _, peer in receives),
        ]
        for way in self._ways:
            turns.join(way, self)
        self._exchange: Exchange | None = None

    def test(self) -> bool:
        if self._exchange is None:
            if not (self._mark.is_past() and all(self._turns.has(way, self) for way in self._ways)):
                return False
            self._exchange = self._start()
        return self._exchange.test()

    def _start(self) -> Exchange:
        transport, sends, receives, tag = self._messages
        try:
            return transport.start(
                [(as_pointer(octets), peer) for octets, peer in sends],
                [(as_pointer(octets), peer) for octets, peer in receives],
                tag,
            )
        finally:
            for way in self._ways:
                self._turns.leave(way, self)

    def waiting_for(self) -> tuple[int, ...]:
        return () if self._exchange is None else self._exchange.waiting_for()

    def received_nbytes(self) -> int:
        return 0 if self._exchange is None else self._exchange.received_nbytes()


class DeviceStep:
    """One step; posted, it is its own exchange, and goes on whenever it is tested."""

    def __init__(
        self, course: Course, planned: PlannedStep, spaces: Spaces, op: str, *, is_last: bool = False
    ) -> None:
        self._course = course
        self._planned = planned
        self._spaces = spaces
        self._op = op
        self._is_last = is_last
        self._exchanges: list[Exchange] = []
        self._course_run: Iterator[None] | None = None

    def post(self) -> Exchange:
        self._course_run = self._run()
        return self

    def test(self) -> bool:
        if self._course_run is None:
            return True
        self._course.queue.use()  # this thread may be another than the one that made the call
        self._course.poll()
        for exchange in self._exchanges:
            exchange.test()  # while a token is waited for, too: its rank may wait for what is sent here
        for _ in self._course_run:
            return False
        self._course_run = None
        return True

    def settle(self) -> None:
        """All is given to the queue when the exchange is complete."""

    def waiting_for(self) -> tuple[int, ...]:
        others = {rank for exchange in self._exchanges for rank in exchange.waiting_for()}
        return tuple(sorted(others.union(self._course.missing)))

    def received_nbytes(self) -> int:
        return self._course.received_nbytes

    def _run(self) -> Iterator[None]:
        """All of the step; yields whenever there is nothing to do but wait."""
        course, planned, spaces = self._course, self._planned, self._spaces
        if self._is_last:
            yield from course.until_read(None)
            return
        yield from course.until_read([_extent(spaces, run) for run in self._written()])
        for source, target in planned.copies:
            octets_of(spaces, target)[...] = octets_of(spaces, source)
        leaving = [(message, self._departing(message)) for message in planned.sends]
        shown = [(message, octets) for message, octets in leaving if course.is_pulled(message.peer)]
        if shown:
            event = course.queue.publish()
            for message, octets in shown:
                course.show(message.peer, octets, event)
        pulled = [message for message in planned.receives if course.is_pulled(message.peer)]
        tickets = [(message, course.expect(message.peer)) for message in pulled]
        landed = [(m, self._landing(m)) for m in planned.receives if not course.is_pulled(m.peer)]
        self._exchanges = course.exchange(
            [(octets, message.peer) for message, octets in leaving if not course.is_pulled(message.peer)],
            [(octets, message.peer) for message, octets in landed],
        )
        aside = yield from self._pull(tickets, [_extent_of(octets) for _, octets in leaving])
        course.missing = ()
        open_exchanges = self._exchanges
        while open_exchanges := [exchange for exchange in open_exchanges if not exchange.test()]:
            yield
        course.received_nbytes += sum(exchange.received_nbytes() for exchange in self._exchanges)
        yield from course.until_read([_extent(spaces, run) for m, _ in aside for run in m.runs])
        landings = [*aside, *((m, octets) for m, octets in landed if not lands_in_place(m))]
        landings.sort(key=lambda landing: planned.receives.index(landing[0]))
        for fold in folds(spaces, landings, self._op):
            fold()

    def _pull(
        self, tickets: Sequence[tuple[Message, TokenTicket]], leaving: Sequence[Extent]
    ) -> Generator[None, None, list[Landing]]:
        """Read what peers show, sum it up, and tell them; returns what could only be put aside.

        What leaves this rank in the same step must not change before it is gone.
        """
        course, itemsize = self._course, itemsize_of(self._spaces)
        at_once: list[Landing] = []
        aside: list[Landing] = []
        read: list[tuple[int, Token]] = []
        for message, ticket in tickets:
            while ticket.token is None:
                course.missing = (message.peer,)
                yield
            read.append((message.peer, ticket.token))
            octets = course.shown(message.peer, ticket.token, message.count * itemsize)
            course.received_nbytes += octets.size
            targets = [_extent(self._spaces, run) for run in message.runs]
            if any(_overlap(target, extent) for target in targets for extent in leaving):
                copy = course.queue.take(octets.size)
                copy[...] = octets
                aside.append((message, copy))
            else:
                at_once.append((message, octets))
        for fold in folds(self._spaces, at_once, self._op):
            fold()
        if read:
            course.thank(read)
        return aside

    def _written(self) -> list[Run]:
        """Runs that this step's copies and receives write."""
        copied = [target for _, target in self._planned.copies]
        return [*copied, *(run for message in self._planned.receives for run in message.runs)]

    def _departing(self, message: Message) -> Any:
        """The bytes of a message side by side, in memory that can be shown where that is needed."""
        octets: Any = octets_of(self._spaces, message.runs[0])
        is_shown = self._course.is_pulled(message.peer)
        if len(message.runs) == 1 and not (is_shown and not self._course.can_show(octets)):
            return octets
        packed: Any = self._course.queue.take(message.count * itemsize_of(self._spaces))
        for part, place in packing(self._spaces, message, packed):
            place[...] = part
        return packed

    def _landing(self, message: Message) -> Any:
        if lands_in_place(message):
            return octets_of(self._spaces, message.runs[0])
        return self._course.queue.take(message.count * itemsize_of(self._spaces))


def _extent(spaces: Spaces, run: Run) -> Extent:
    space, start, stop = run
    buffer = spaces[space]
    return buffer.address + start * buffer.itemsize, buffer.address + stop * buffer.itemsize


def _extent_of(octets: DeviceOctets) -> Extent:
    return octets.address, octets.address + octets.size


def _overlap(one: Extent, other: Extent) -> bool:
    return one[0] < other[1] and other[0] < one[1]
