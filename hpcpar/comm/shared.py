"""Steps in shared memory: what is sent is laid out or pointed at, what is received is summed where it lies.

Nothing is received into a buffer and then added: the peer's piece is added, or copied, straight from
where the peer has it, and pieces of several peers for the same place in one pass.

A step is proved safe when messages that are combined land elsewhere first. Here they do not, so:

*   what a step only sends may be read by the peers at any time of it; what it also receives into must
    be laid out before it is written. Of a range that is sent and combined in one step (recursive
    doubling), piece j is combined once piece j has been laid out.
*   where a received range overlaps a sent one in any other way, it lands in scratch after all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hpcpar.algorithms.registry import Algorithm
from hpcpar.algorithms.topology import Nodes
from hpcpar.comm.arena import (
    ALIGNED,
    DIRECT,
    LISTED,
    PLACES,
    PRIVATE,
    SLOTS,
    TAIL,
    Arena,
    Hazard,
    Lane,
    comes_to,
)
from hpcpar.comm.blocks import in_turn
from hpcpar.comm.operation import (
    BoundStep,
    Message,
    Plan,
    PlannedStep,
    Run,
    Spaces,
    copies_of,
    copying,
    folds,
    itemsize_of,
    octets_of,
    overlapping,
    packing,
)
from hpcpar.transport.interface import Exchange, Octets
from hpcpar.transport.peer_memory import Stretch, listed, listing, reading, stretch_of, within
from hpcpar.units import KiB

RANKS_LOOKED_AT = 32

SHARED_FROM_NBYTES, PRIVATE_FROM_NBYTES = 8 * KiB, 16 * KiB
"""Below, a message is sooner laid out than its sender has waited for its readers, or the kernel copied it.

What has just been written is laid out up to a whole piece: it is in this core's cache, and has to leave it
either way. With more pieces its sender would wait for the readers all the same, and more often.
"""

SUMMED_AT_ONCE_NBYTES = 1536 * KiB
"""So much private memory, of all summands together, is copied before it is summed: still in the cache."""

PART_NBYTES = 3000
PIECE_NBYTES = 600
"""What a step takes in memory for each range that it sends or receives, and for each piece of one."""

PLACES_REMEMBERED = 8
"""Places of one piece for which the folding is remembered; a sender has few for the same message."""

Extent = tuple[int, int]
"""Addresses: where memory begins and ends."""

Cut = Sequence[tuple[Run, ...]]
"""A message's runs as pieces."""


@lru_cache(maxsize=256)
def regions_for(algorithm: Algorithm, size: int, root: int, segments: int, nodes: Nodes) -> int:
    """Different things that a rank sends in one step, at most: so many regions its stage needs.

    All ranks must come to the same answer, so it is that of the first ranks, of which one is the busiest
    in every algorithm of the registry.
    """
    most = 1
    for rank in range(min(size, RANKS_LOOKED_AT)):
        for step in algorithm.schedule(rank, size, root=root, segments=segments, nodes=nodes):
            most = max(most, len({(send.space, send.chunks) for send in step.sends}))
    return most


Laying = tuple[Callable[[], None], int, int]
"""What lays a piece out, in which slot, and where that is."""


class _Sending:
    """One range on its way to one or several local ranks, piece by piece or pointed at as a whole."""

    def __init__(
        self,
        lane: Lane,
        message: Message,
        to: Sequence[int],
        spaces: Spaces,
        region: int,
        slot_nbytes: int,
        lent: Lent,
        earlier: Sequence[_Sending],
    ) -> None:
        self.runs = message.runs
        self.to = tuple(to)
        self.next = 0
        self.pieces = _pieces_of(message, spaces, slot_nbytes)
        self._lane = lane
        self._words = lane.arena.words
        self.place = lent.place
        self._listing = lent.listing
        self._earlier = [sending for sending in earlier if set(sending.to) & set(to)]
        self.awaited: list[Hazard] = []
        self._cut: Cut | None = None
        self._spaces = spaces
        self._region = region
        self._slot_nbytes = slot_nbytes
        self.turns: list[Laying | None] = [None] * SLOTS
        self._prepared: list[Laying] = []
        self.heads = tuple((rank, lane.heads_out[rank], lane.heads_out[rank] + TAIL) for rank in to)
        self.is_quick = (self.pieces == 1 or self.place is not None) and not self._earlier

    def begin(self) -> None:
        self.next = 0

    def advance(self) -> bool:
        """Lay out what there is room for; True when there is nothing left to do or to wait for."""
        if self.next < self.pieces and all(sent.next == sent.pieces for sent in self._earlier):
            if self.place is None:
                while self.next < self.pieces and self._lay_out():
                    self.next += 1
            elif self._has_room():
                # The array is the caller's again only when all have read it.
                self.awaited = self._publish(self.place)
                self.next = self.pieces
        if self.next < self.pieces:
            return False
        while self.awaited:
            tail, count = self.awaited[-1]
            if self._words[tail] < count:
                return False
            self.awaited.pop()
        return True

    def await_readers(self) -> None:
        """It has been sent, and is the caller's again when all that was sent to these ranks has been read."""
        self.awaited = [(tail, self._lane.sent[rank]) for rank, _, tail in self.heads]

    def waiting_for(self) -> set[int]:
        words, sent = self._words, self._lane.sent
        if self.next == self.pieces and not self.awaited:
            return set()
        unread = {rank for rank, _, tail in self.heads if words[tail] < sent[rank]}
        if self.next == self.pieces:
            return unread
        # Or others have yet to read what lies where this is to be laid out.
        return unread | self._lane.behind([hazard for slot in self._lane.hazards for hazard in slot])

    def _lay_out(self) -> bool:
        lane, words = self._lane, self._words
        lay_out, slot, place = self.turn(lane.turn) if self.pieces == 1 else self._piece(self.next)
        if any(words[tail] < count for tail, count in lane.hazards[slot]) or not self._has_room():
            return False
        lay_out()
        lane.hazards[slot] = self._publish(place)
        lane.turn += self.pieces == 1
        return True

    def turn(self, number: int) -> Laying:
        """How a message of a single piece, or one that is read where it is, is laid out in that slot."""
        laying = self.turns[number % SLOTS]
        if laying is None:
            laying = self.turns[number % SLOTS] = self._prepare(0, number % SLOTS)
        return laying

    def _piece(self, number: int) -> Laying:
        """The same for one of several; they are asked for in order at first."""
        if number == len(self._prepared):
            self._prepared.append(self._prepare(number, number % SLOTS))
        return self._prepared[number]

    def _prepare(self, number: int, slot: int) -> Laying:
        slot += self._region * SLOTS
        if self.place is not None:
            return _nothing, slot, self.place
        place = self._lane.slot_place(slot, self._slot_nbytes)
        if self._cut is None:
            self._cut = _in_pieces(self.runs, self._spaces, self._slot_nbytes)
        runs = self._cut[number]
        message = Message(-1, runs, sum(stop - start for _, start, stop in runs))
        memory = self._lane.arena.memory(place, self._slot_nbytes)
        return (
            in_turn([copying(into, part) for part, into in packing(self._spaces, message, memory)]),
            slot,
            place,
        )

    def _has_room(self) -> bool:
        words, sent = self._words, self._lane.sent
        return all(words[tail] > sent[rank] - PLACES for rank, _, tail in self.heads)

    def _publish(self, place: int) -> list[Hazard]:
        words, sent = self._words, self._lane.sent
        published = []
        for rank, head, tail in self.heads:
            count = sent[rank] + 1
            sent[rank] = count
            words[head + 1 + count % PLACES] = place
            words[head] = count  # after the place: whoever sees the count sees the place
            published.append((tail, count))
        return published


class _Receiving:
    """One range that one peer's message is copied to, or that one or several peers' are combined into."""

    def __init__(
        self,
        lane: Lane,
        spaces: Spaces,
        messages: Sequence[Message],
        op: str,
        slot_nbytes: int,
        gates: Sequence[_Sending],
        earlier: Sequence[_Receiving],
    ) -> None:
        self.next = 0
        self.pieces = _pieces_of(messages[0], spaces, slot_nbytes)
        self.sources = tuple(lane.arena.local[message.peer] for message in messages)
        self._message = messages[0]
        self._arena = lane.arena
        self._taken = lane.taken
        self._words = lane.arena.words
        self._spaces = spaces
        self._cuts: tuple[Cut, Cut] | None = None
        self._op = op
        self._slot_nbytes = slot_nbytes
        self._gates = gates
        self._earlier = [receiving for receiving in earlier if set(receiving.sources) & set(self.sources)]
        self.heads = tuple((source, lane.heads_in[source]) for source in self.sources)
        self._places = (0,) * len(messages)
        self._folds: dict[int, dict[tuple[int, ...], Callable[[], None]]] = {}
        self.wholes: dict[tuple[int, ...], Callable[[], None]] = {}
        self.is_quick = not self._earlier

    def begin(self) -> None:
        self.next = 0
        self._places = (0,) * len(self.sources)

    def advance(self) -> bool:
        """Take in all that is there; True when everything has come."""
        if any(received.next < received.pieces for received in self._earlier):
            return False
        while self.next < self.pieces:
            if any(gate.next <= self.next for gate in self._gates):
                return False
            if not self._see():
                return False
            places = self._places
            # All point at whole messages: no reason to go piece by piece.
            whole = self.next == 0 and not self._gates and all(place & DIRECT for place in places)
            self.fold(-1 if whole else self.next, places)()
            self.next = self.pieces if whole else self.next + 1
            for (source, head), place in zip(self.heads, places, strict=True):
                if self.next == self.pieces or not place & DIRECT:
                    self._taken[source] += 1
                    self._words[head + TAIL] = self._taken[source]
        return True

    def waiting_for(self) -> set[int]:
        if self.next == self.pieces:
            return set()
        return {
            source
            for (source, head), place in zip(self.heads, self._places, strict=True)
            if not place & DIRECT and self._words[head] <= self._taken[source]
        }

    def _see(self) -> bool:
        """Note where the next piece of each source lies; False while one of them is not there."""
        words, taken = self._words, self._taken
        places = []
        for (source, head), place in zip(self.heads, self._places, strict=True):
            if not place & DIRECT:
                count = taken[source] + 1
                if words[head] < count:
                    return False
                place = words[head + 1 + count % PLACES]
            places.append(place)
        self._places = tuple(places)
        return True

    def whole(self, places: tuple[int, ...]) -> Callable[[], None] | None:
        """What brings everything in, if it lies in these places; None where there are pieces to come."""
        if any(place & LISTED for place in places):
            return self.fold(-1, places) if all(place & DIRECT for place in places) else None
        fold = self.wholes.get(places)
        if fold is None and (self.pieces == 1 or all(place & DIRECT for place in places)):
            if len(self.wholes) >= PLACES_REMEMBERED:
                self.wholes.clear()
            fold = self.wholes[places] = self.fold(-1 if places[0] & DIRECT else 0, places)
        return fold

    def fold(self, number: int, places: tuple[int, ...]) -> Callable[[], None]:
        """What brings the pieces of that number in from these places; -1: the whole messages."""
        if any(place & LISTED for place in places):
            return self._prepare(number, places)  # next time the list may be another
        by_places = self._folds.setdefault(number, {})
        fold = by_places.get(places)
        if fold is None:
            if len(by_places) >= PLACES_REMEMBERED:
                by_places.clear()
            fold = by_places[places] = self._prepare(number, places)
        return fold

    def _prepare(self, number: int, places: tuple[int, ...]) -> Callable[[], None]:
        message = self._message
        own = message.own or message.runs
        if number >= 0:
            if self._cuts is None:
                self._cuts = self._cut_in(self._slot_nbytes)
            runs, own = (pieces[number] for pieces in self._cuts)
            return in_turn(self._taking_in(runs, own, number * self._slot_nbytes, places))
        if any(place & PRIVATE for place in places) and message.combine:
            nbytes = max(ALIGNED, SUMMED_AT_ONCE_NBYTES // len(places) // ALIGNED * ALIGNED)
            by_piece = (
                self._taking_in(runs, own, at * nbytes, places)
                for at, (runs, own) in enumerate(zip(*self._cut_in(nbytes), strict=True))
            )
            return in_turn([call for calls in by_piece for call in calls])
        return in_turn(self._taking_in(message.runs, own, 0, places))

    def _cut_in(self, nbytes: int) -> tuple[Cut, Cut]:
        """The message's runs in pieces of so many bytes, and where the own summands of these lie."""
        message = self._message
        own = message.own or message.runs
        return _in_pieces(message.runs, self._spaces, nbytes), _in_pieces(own, self._spaces, nbytes)

    def _taking_in(
        self, runs: tuple[Run, ...], own: tuple[Run, ...], offset: int, places: tuple[int, ...]
    ) -> list[Callable[[], None]]:
        """What brings in these runs, which lie that far into the message; called in this order."""
        arena, combine, own_turn = self._arena, self._message.combine, self._message.own_turn
        count = sum(stop - start for _, start, stop in runs)
        nbytes = count * itemsize_of(self._spaces)
        stride = -(-nbytes // ALIGNED) * ALIGNED
        calls: list[Callable[[], None]] = []
        landed: list[tuple[Message, Octets]] = []
        for at, (source, place) in enumerate(zip(self.sources, places, strict=True)):
            message = Message(source, runs, count, combine, own_turn, own)
            if not place & PRIVATE:
                landed.append((message, arena.memory(place + offset if place & DIRECT else place, nbytes)))
                continue
            pid, stretches = arena.pids[source], self._stretches(source, place, offset, nbytes)
            if combine:
                landing = arena.landing(max(SUMMED_AT_ONCE_NBYTES, len(places) * stride))
                memory = landing[at * stride :][:nbytes]
                calls += reading(pid, stretches, [memory])
                landed.append((message, memory))
            else:
                calls += reading(pid, stretches, [octets_of(self._spaces, run) for run in runs])
        return [*calls, *folds(self._spaces, landed, self._op)]

    def _stretches(self, source: int, place: int, offset: int, nbytes: int) -> list[Stretch]:
        """Where in the source's private memory that part of a message lies."""
        address = place & ~(DIRECT | PRIVATE | LISTED)
        if place & LISTED:
            return within(listed(self._arena.pids[source], address), offset, nbytes)
        return [(address + offset, nbytes)]


class SharedStep:
    """A step of a plan whose messages between ranks of this node go through shared memory.

    fresh       memory that the call itself writes, as addresses
    nbytes      what it takes in memory itself, roughly
    elsewhere   the same step's messages to and from other nodes; None: there are none

    It is its own exchange: messages are taken in while it is tested.
    """

    def __init__(
        self,
        lane: Lane,
        planned: PlannedStep,
        spaces: Spaces,
        op: str,
        regions: int,
        fresh: Sequence[Extent],
        elsewhere: BoundStep | None = None,
    ) -> None:
        local = lane.arena.local
        self._lane = lane
        self._regions = regions
        self._elsewhere = elsewhere
        self._exchange: Exchange | None = None
        self._copies, self._copies_beside = copies_of(planned, spaces)
        landing = _Landing(planned, local, spaces)
        slot_nbytes = lane.arena.slot_nbytes(regions)
        self._sendings = _sendings(lane, planned, spaces, regions, slot_nbytes, fresh)
        self._receivings = _receivings(lane, landing, op, slot_nbytes, self._sendings)
        self._folds = list(folds(spaces, landing.landed, op))
        self._open: list[_Sending | _Receiving] = []
        self._words = lane.arena.words
        # What `at_once` looks at, without a detour.
        self._outgoing = [(part, part.heads, part.turns) for part in self._sendings]
        self._incoming = [(part, part.heads, part.wholes) for part in self._receivings]
        lent = sum(sending.pieces - 1 for sending in self._sendings if sending.place is not None)
        pieces = sum(part.pieces for part in self._parts()) - lent
        self.nbytes = PART_NBYTES * len(self._parts()) + PIECE_NBYTES * pieces
        self._is_quick = elsewhere is None and all(part.is_quick for part in self._parts())

    def post(self) -> Exchange:
        for copy in self._copies:
            copy()
        self._open = self._parts()
        for part in self._open:
            part.begin()
        if self._elsewhere is not None:
            self._exchange = self._elsewhere.post()
        if self._copies_beside:
            self.test()  # so that the peers need not wait for them
            self._copy_beside()
        return self

    def at_once(self, attempts: int, pause: Callable[[int], None]) -> bool:
        """A step from `post` to `settle`; False when it takes longer: go on with `test`, then `settle`.

        Of single pieces all is done right here: nothing that calls for it would be cheap beside it.
        """
        lane = self._lane
        if not self._is_quick or self._regions != lane.regions:
            self.post()
            return self._ends_now()
        words, sent, taken, hazards = self._words, lane.sent, lane.taken, lane.hazards
        lent: list[Hazard] = []
        for copy in self._copies:
            copy()
        for done, (sending, heads, turns) in enumerate(self._outgoing):
            lay_out, slot, place = turns[lane.turn % SLOTS] or sending.turn(lane.turn)
            for tail, count in hazards[slot]:
                if words[tail] < count:
                    self._copy_beside()
                    return self._goes_on(done, 0)
            published = []
            for rank, _, tail in heads:
                if words[tail] <= sent[rank] - PLACES:
                    self._copy_beside()
                    return self._goes_on(done, 0)
            lay_out()
            for rank, head, tail in heads:
                count = sent[rank] = sent[rank] + 1
                words[head + 1 + count % PLACES] = place
                words[head] = count
                published.append((tail, count))
            hazards[slot] = published
            lane.turn += 1
            lent += published if place & DIRECT else ()
        for copy in self._copies_beside:
            copy()
        for done, (receiving, sources, wholes) in enumerate(self._incoming):
            places: tuple[int, ...] = ()
            for source, head in sources:
                count = taken[source] + 1
                if words[head] < count and not comes_to(lane, head, count, attempts, pause):
                    return self._goes_on(len(self._sendings), done)
                places += (words[head + 1 + count % PLACES],)
            fold = wholes.get(places) or receiving.whole(places)
            if fold is None:
                return self._goes_on(len(self._sendings), done)
            fold()
            for source, head in sources:
                count = taken[source] = taken[source] + 1
                words[head + TAIL] = count
        for tail, count in lent:
            if words[tail] < count and not comes_to(lane, tail, count, attempts, pause):
                return self._goes_on(len(self._sendings), len(self._receivings))
        for fold in self._folds:
            fold()
        return True

    def test(self) -> bool:
        if self._open:
            # While the stage is still being read as it was divided before, only what comes in can be had.
            closed = self._sendings and not self._lane.divide(self._regions)
            still = [part for part in self._open if (closed and part in self._sendings) or not part.advance()]
            if len(still) > 1:  # what was laid out since may have opened a gate
                still = [part for part in still if (closed and part in self._sendings) or not part.advance()]
            self._open = still
        if self._exchange is not None and self._exchange.test():
            self._exchange = None
        return not self._open and self._exchange is None

    def settle(self) -> None:
        for fold in self._folds:
            fold()
        if self._elsewhere is not None:
            self._elsewhere.settle()

    def waiting_for(self) -> tuple[int, ...]:
        missing: set[int] = set()
        for part in self._open:
            missing |= {self._lane.arena.ranks[number] for number in part.waiting_for()}
        if self._exchange is not None:
            missing |= set(self._exchange.waiting_for())
        return tuple(sorted(missing))

    def received_nbytes(self) -> int:
        raise AssertionError("only point-to-point counts what came, and it does not go this way")

    def _copy_beside(self) -> None:
        for copy in self._copies_beside:
            copy()

    def _ends_now(self) -> bool:
        if not self.test():
            return False
        self.settle()
        return True

    def _goes_on(self, sent: int, received: int) -> bool:
        """Some parts have ended at once; the others are for `test`."""
        ended: list[_Sending | _Receiving] = [*self._sendings[:sent], *self._receivings[:received]]
        for part in ended:
            part.next = part.pieces
        lent = [sending for sending in self._sendings[:sent] if sending.place is not None]
        for sending in lent:
            sending.await_readers()
        rest: list[_Sending | _Receiving] = [*self._sendings[sent:], *self._receivings[received:]]
        for part in rest:
            part.begin()
        self._open = [*lent, *rest]
        return False

    def _parts(self) -> list[_Sending | _Receiving]:
        return [*self._sendings, *self._receivings]


class _Landing:
    """The local receives of a step, those that would disturb its sends turned to scratch."""

    def __init__(self, planned: PlannedStep, local: dict[int, int], spaces: Spaces) -> None:
        self.spaces = dict(spaces)
        self.messages: list[Message] = []
        self.landed: list[tuple[Message, Octets]] = []
        for message in planned.receives:
            if message.peer not in local:
                continue
            if not any(_disturbs(message, send, local) for send in planned.sends):
                self.messages.append(message)
                continue
            name = f"landing {len(self.landed)}"
            scratch = next(iter(spaces.values())).scratch(message.count)
            self.spaces[name] = scratch  # type: ignore[index]  # a space of this step's own
            self.landed.append((message, scratch.octets))
            run = (name, 0, message.count)
            self.messages.append(Message(message.peer, (run,), message.count))  # type: ignore[arg-type]


def _disturbs(receive: Message, send: Message, local: dict[int, int]) -> bool:
    """Whether taking the receive in piece by piece would change what is still to be sent."""
    if receive.runs == send.runs and send.peer in local:
        return False
    return any(overlapping(a, b) for a in receive.runs for b in send.runs)


def _sendings(
    lane: Lane,
    planned: PlannedStep,
    spaces: Spaces,
    regions: int,
    slot_nbytes: int,
    fresh: Sequence[Extent],
) -> list[_Sending]:
    """The step's sends on this node; the same range for several peers is laid out once."""
    arena = lane.arena
    by_runs: dict[tuple[Run, ...], list[Message]] = {}
    for send in planned.sends:
        if send.peer in arena.local:
            by_runs.setdefault(send.runs, []).append(send)
    sendings: list[_Sending] = []
    for region, (runs, messages) in enumerate(by_runs.items()):
        to = [arena.local[message.peer] for message in messages]
        lent = _lent(arena, planned, spaces, runs, fresh, slot_nbytes)
        sendings.append(
            _Sending(lane, messages[0], to, spaces, region % regions, slot_nbytes, lent, sendings)
        )
    return sendings


class Lent(NamedTuple):
    """Where the peers can read a message without its being laid out, if that is worth while.

    listing   what the place refers to, if the message is in several pieces of memory
    """

    place: int | None
    listing: NDArray[np.uint64] | None = None


def _lent(
    arena: Arena,
    planned: PlannedStep,
    spaces: Spaces,
    runs: tuple[Run, ...],
    fresh: Sequence[Extent],
    slot_nbytes: int,
) -> Lent:
    received = [run for message in planned.receives for run in message.runs]
    if not runs or any(overlapping(one, other) for one in received for other in runs):
        return Lent(None)
    parts = [octets_of(spaces, run) for run in runs]
    shared_from, private_from = SHARED_FROM_NBYTES, PRIVATE_FROM_NBYTES
    extents = [extent(part) for part in parts]
    if any(a < other_b and other_a < b for a, b in extents for other_a, other_b in fresh):
        shared_from, private_from = max(shared_from, slot_nbytes + 1), max(private_from, slot_nbytes + 1)
    if len(parts) == 1:
        return Lent(arena.place_of(parts[0], shared_from, private_from))
    if not arena.pids or sum(part.size for part in parts) < private_from:
        return Lent(None)
    found = listing([stretch_of(part) for part in parts])
    return Lent(DIRECT | PRIVATE | LISTED | found.ctypes.data, found)


def extent(octets: Octets) -> Extent:
    """Where memory begins and ends."""
    begin: int = octets.__array_interface__["data"][0]
    return begin, begin + octets.size


def _receivings(
    lane: Lane, landing: _Landing, op: str, slot_nbytes: int, sendings: Sequence[_Sending]
) -> list[_Receiving]:
    """The step's receives; those of several peers that are combined into the same range are one."""
    spaces = landing.spaces
    receivings: list[_Receiving] = []
    for (runs, combine), alike in groupby(
        landing.messages, key=lambda message: (message.runs, message.combine)
    ):
        messages = list(alike)
        gates = [sending for sending in sendings if sending.runs == runs and runs]
        for group in [messages] if combine else [[message] for message in messages]:
            receivings.append(_Receiving(lane, spaces, group, op, slot_nbytes, gates, receivings))
    return receivings


def _pieces_of(message: Message, spaces: Spaces, nbytes: int) -> int:
    """How many pieces of so many bytes a message is."""
    return max(1, -(-message.count // _most(spaces, nbytes)))


def _in_pieces(runs: Sequence[Run], spaces: Spaces, nbytes: int) -> Cut:
    """Runs as pieces of so many bytes."""
    return list(_cut(runs, _most(spaces, nbytes)))


def _most(spaces: Spaces, nbytes: int) -> int:
    """Elements of a piece of so many bytes."""
    return max(1, nbytes // itemsize_of(spaces))


def _cut(runs: Sequence[Run], most: int) -> Iterator[tuple[Run, ...]]:
    """Runs as pieces of `most` elements, the last one shorter; a message of nothing is one empty piece."""
    piece: list[Run] = []
    room = most
    for space, start, stop in runs:
        if start == stop:
            continue
        for begin in _begins(start, stop, room, most):
            end = min(stop, begin + room)
            piece.append((space, begin, end))
            room -= end - begin
            if not room:
                yield tuple(piece)
                piece, room = [], most
    if piece or not runs:
        yield tuple(piece)


def _begins(start: int, stop: int, first: int, most: int) -> Iterator[int]:
    """Where parts of a run begin, of which the first may have `first` elements, the others `most`."""
    yield start
    yield from range(start + first, stop, most)


def _nothing() -> None:
    """What there is to lay out of a message that is read where it is."""


def shared_steps(
    lane: Lane,
    planned: Plan,
    spaces: Spaces,
    op: str,
    regions: int,
    filled: Extent | None = None,
    loosely: Callable[[PlannedStep], BoundStep] | None = None,
) -> list[SharedStep]:
    """The plan's steps on this memory, in this lane.

    filled    what has been written for this call
    loosely   binds what a step exchanges with other nodes; None: there are none
    """
    written = {run for step in planned.steps for message in step.receives for run in message.runs}
    written |= {target for step in planned.steps for _, target in step.copies}
    fresh = [extent(octets_of(spaces, run)) for run in written]
    fresh += [] if filled is None else [filled]
    steps = []
    for step in planned.steps:
        beyond = None if loosely is None else _beyond(step, lane.arena)
        elsewhere = None if beyond is None or loosely is None else loosely(beyond)
        steps.append(SharedStep(lane, step, spaces, op, regions, fresh, elsewhere))
    return steps


def _beyond(step: PlannedStep, arena: Arena) -> PlannedStep | None:
    """The messages of a step that leave this node or come from others; None: there are none."""
    sends = tuple(message for message in step.sends if message.peer not in arena.local)
    receives = tuple(message for message in step.receives if message.peer not in arena.local)
    return PlannedStep((), sends, receives) if sends or receives else None
