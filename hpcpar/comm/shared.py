"""Execute steps in shared memory: what is sent is laid out or pointed at, what is received is summed where it lies.

Nothing is received into a buffer and then added: the peer's piece is added, or copied, straight from
where the peer has it, and pieces of several peers for the same place in one pass.

A step is proved safe when messages that are combined land elsewhere first. Here they do not, so:

*   what a step only sends may be read by the peers at any time of it; what it also receives into must
    be laid out before it is written. Of a range that is sent and combined in one step (recursive
    doubling), piece j is combined once piece j has been laid out.
*   where a received range overlaps a sent one in any other way, it lands in scratch after all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from itertools import groupby

from hpcpar.algorithms.catalogue import Algorithm
from hpcpar.algorithms.placement import Nodes
from hpcpar.algorithms.step import Space
from hpcpar.comm.arena import DIRECT, PLACES, SLOTS, TAIL, Arena, Lane
from hpcpar.comm.operation import Message, Plan, PlannedStep, Run, folds, octets_of
from hpcpar.transport.buffers import HostBuffer
from hpcpar.transport.interface import Exchange, Octets
from hpcpar.units import KiB

Spaces = dict[Space, HostBuffer]

DIRECT_FROM_NBYTES = 8 * KiB
"""Below, a piece is sooner copied than the sender has waited until it is read."""

MOST_PLACES = 64
"""Places of a piece for which the folding is remembered."""

RANKS_LOOKED_AT = 32


@lru_cache(maxsize=256)
def fanout(algorithm: Algorithm, size: int, root: int, segments: int, nodes: Nodes) -> int:
    """Different things that a rank sends in one step, at most: so many regions its stage needs.

    All ranks must come to the same answer, so it is that of the first ranks, of which one is the busiest
    in every algorithm of the catalogue.
    """
    most = 1
    for rank in range(min(size, RANKS_LOOKED_AT)):
        for step in algorithm.schedule(rank, size, root=root, segments=segments, nodes=nodes):
            most = max(most, len({(send.space, send.chunks) for send in step.sends}))
    return most


class _Sending:
    """One range on its way to one or several local ranks, piece by piece or pointed at as a whole."""

    def __init__(
        self,
        lane: Lane,
        runs: Sequence[Run],
        to: Sequence[int],
        pieces: Sequence[Sequence[Octets]],
        region: int,
        slot_nbytes: int,
        place: int | None,
        first_slot: int,
        earlier: Sequence[_Sending],
    ) -> None:
        self.runs = tuple(runs)
        self.to = tuple(to)
        self.next = 0
        self.pieces = len(pieces)
        self._lane = lane
        self._words = lane.arena.words
        self._place = place
        self._earlier = [sending for sending in earlier if set(sending.to) & set(to)]
        self._awaited: list[tuple[int, int]] = []
        self._pieces: list[tuple[list[tuple[Octets, Octets]], int, int]] = []
        if place is not None:
            return
        for number, parts in enumerate(pieces):
            slot = region * SLOTS + (first_slot + number) % SLOTS
            begin = lane.slot_place(slot, slot_nbytes)
            memory = lane.arena.memory(lane.arena.rank, begin, slot_nbytes)
            self._pieces.append((_laid_out(parts, memory), slot, begin))

    def begin(self) -> None:
        self.next = 0
        self._awaited = []

    def advance(self) -> bool:
        """Lay out what there is room for; True when there is nothing left to do or to wait for."""
        if self.next < self.pieces and all(sent.next == sent.pieces for sent in self._earlier):
            if self._place is not None:
                self._point(self._place)
            else:
                self._lay_out()
        if self.next < self.pieces:
            return False
        words = self._words
        while self._awaited:
            tail, count = self._awaited[-1]
            if words[tail] < count:
                return False
            self._awaited.pop()
        return True

    def waiting_for(self) -> set[int]:
        lane, words = self._lane, self._words
        behind = {to for to in self.to if words[lane.heads_out[to] + TAIL] < lane.sent[to]}
        return behind if self.next < self.pieces or self._awaited else set()

    def _lay_out(self) -> None:
        lane, words = self._lane, self._words
        while self.next < self.pieces:
            copies, slot, place = self._pieces[self.next]
            for tail, count in lane.hazards[slot]:
                if words[tail] < count:
                    return
            if not self._has_room():
                return
            for target, source in copies:
                target[...] = source
            lane.hazards[slot] = tuple(self._publish(place))
            self.next += 1

    def _point(self, place: int) -> None:
        if self._has_room():
            # The array is the caller's again only when all have read it.
            self._awaited = self._publish(DIRECT | place)
            self.next = self.pieces

    def _has_room(self) -> bool:
        lane, words = self._lane, self._words
        return all(words[lane.heads_out[to] + TAIL] > lane.sent[to] - PLACES for to in self.to)

    def _publish(self, place: int) -> list[tuple[int, int]]:
        lane, words = self._lane, self._words
        published = []
        for to in self.to:
            head = lane.heads_out[to]
            count = lane.sent[to] + 1
            lane.sent[to] = count
            words[head + 1 + count % PLACES] = place
            words[head] = count  # after the place: whoever sees the count sees the place
            published.append((head + TAIL, count))
        return published


class _Receiving:
    """One range that one peer's message is copied to, or that one or several peers' are combined into."""

    def __init__(
        self,
        lane: Lane,
        spaces: Spaces,
        messages: Sequence[Message],
        pieces: Sequence[tuple[Run, ...]],
        op: str,
        slot_nbytes: int,
        gates: Sequence[_Sending],
        earlier: Sequence[_Receiving],
    ) -> None:
        arena = lane.arena
        self.next = 0
        self.pieces = len(pieces)
        self.sources = tuple(arena.local[message.peer] for message in messages)
        self._combine = messages[0].combine
        self._lane = lane
        self._words = arena.words
        self._spaces = spaces
        self._runs = pieces
        self._whole = messages[0].runs
        self._itemsize = next((buffer.itemsize for buffer in spaces.values()), 1)
        self._op = op
        self._slot_nbytes = slot_nbytes
        self._gates = gates
        self._earlier = [receiving for receiving in earlier if set(receiving.sources) & set(self.sources)]
        self._places = [0] * len(messages)
        self._folds: dict[tuple[int, ...], Callable[[], None]] = {}

    def begin(self) -> None:
        self.next = 0
        self._places = [0] * len(self.sources)

    def advance(self) -> bool:
        """Take in all that is there; True when everything has come."""
        lane, words, places, sources = self._lane, self._words, self._places, self.sources
        if any(received.next < received.pieces for received in self._earlier):
            return False
        while self.next < self.pieces:
            if any(gate.next <= self.next for gate in self._gates):
                return False
            for at, source in enumerate(sources):
                if places[at] & DIRECT:
                    continue
                head, count = lane.heads_in[source], lane.taken[source] + 1
                if words[head] < count:
                    return False
                places[at] = words[head + 1 + count % PLACES]
            # All point at whole messages: no reason to go piece by piece.
            whole = self.next == 0 and not self._gates and all(place & DIRECT for place in places)
            key = (-1 if whole else self.next, *places)
            fold = self._folds.get(key)
            if fold is None:
                fold = self._prepare(key, whole)
            fold()
            self.next = self.pieces if whole else self.next + 1
            for at, source in enumerate(sources):
                if self.next == self.pieces or not places[at] & DIRECT:
                    count = lane.taken[source] + 1
                    lane.taken[source] = count
                    words[lane.heads_in[source] + TAIL] = count
        return True

    def waiting_for(self) -> set[int]:
        lane, words = self._lane, self._words
        if self.next == self.pieces:
            return set()
        return {
            source
            for at, source in enumerate(self.sources)
            if not self._places[at] & DIRECT and words[lane.heads_in[source]] <= lane.taken[source]
        }

    def _prepare(self, key: tuple[int, ...], whole: bool) -> Callable[[], None]:
        runs = self._whole if whole else self._runs[self.next]
        nbytes = sum(stop - start for _, start, stop in runs) * self._itemsize
        landed = []
        for source, place in zip(self.sources, self._places, strict=True):
            begin = place
            if place & DIRECT and not whole:
                begin += self.next * self._slot_nbytes
            octets = self._lane.arena.memory(source, begin, nbytes)
            landed.append((Message(source, runs, nbytes // self._itemsize, self._combine), octets))
        prepared = list(folds(self._spaces, landed, self._op))
        fold = prepared[0] if len(prepared) == 1 else partial(_each, prepared)
        if len(self._folds) >= MOST_PLACES:
            self._folds.clear()
        self._folds[key] = fold
        return fold


class SharedStep:
    """A step of a plan, all of whose messages go between ranks of this node, bound to memory.

    It is its own exchange: messages are taken in while it is tested.
    """

    def __init__(
        self, lane: Lane, planned: PlannedStep, spaces: Spaces, op: str, regions: int, number: int
    ) -> None:
        self._lane = lane
        self._regions = regions
        self._copies = [(octets_of(spaces, t), octets_of(spaces, s)) for s, t in planned.copies]
        slot_nbytes = lane.arena.slot_nbytes(regions)
        landing = _Landing(planned, spaces)
        self._spaces = spaces
        self._op = op
        self._landing = landing
        self._sendings = _sendings(lane, planned, spaces, regions, slot_nbytes, number)
        self._receivings = _receivings(lane, landing, op, slot_nbytes, self._sendings)
        self._open: list[_Sending | _Receiving] = []

    def post(self) -> Exchange:
        for target, source in self._copies:
            target[...] = source
        for sending in self._sendings:
            sending.begin()
        for receiving in self._receivings:
            receiving.begin()
        self._open = [*self._sendings, *self._receivings]
        return self

    def test(self) -> bool:
        if self._open:
            if self._sendings and not self._lane.laid_out(self._regions):
                # The stage is still being read as it was divided before; what comes in can be taken.
                for part in self._open:
                    if isinstance(part, _Receiving):
                        part.advance()
                return False
            self._open = [part for part in self._open if not part.advance()]
            if len(self._open) > 1:  # what was laid out since may have opened a gate
                self._open = [part for part in self._open if not part.advance()]
        return not self._open

    def settle(self) -> None:
        for fold in folds(self._spaces, self._landing.landed, self._op):
            fold()

    def waiting_for(self) -> tuple[int, ...]:
        missing: set[int] = set()
        for part in self._open:
            missing |= part.waiting_for()
        return tuple(sorted(self._lane.arena.ranks[number] for number in missing))

    def received_nbytes(self) -> int:
        raise AssertionError("only point-to-point counts what came, and it does not go this way")


class _Landing:
    """The receives of a step, those that would disturb its sends turned to scratch."""

    def __init__(self, planned: PlannedStep, spaces: Spaces) -> None:
        self.spaces = dict(spaces)
        self.messages: list[Message] = []
        self.landed: list[tuple[Message, Octets]] = []
        for message in planned.receives:
            if not any(_disturbs(message, send) for send in planned.sends):
                self.messages.append(message)
                continue
            name = f"landing {len(self.landed)}"
            scratch = next(iter(spaces.values())).scratch(message.count)
            self.spaces[name] = scratch  # type: ignore[index]  # a space of this step's own
            self.landed.append((message, scratch.octets))
            self.messages.append(Message(message.peer, ((name, 0, message.count),), message.count))  # type: ignore[arg-type]


def _disturbs(receive: Message, send: Message) -> bool:
    """Whether taking the receive in piece by piece would change what is still to be sent."""
    return receive.runs != send.runs and any(_overlap(a, b) for a in receive.runs for b in send.runs)


def _overlap(a: Run, b: Run) -> bool:
    return a[0] == b[0] and a[1] < b[2] and b[1] < a[2]


def _sendings(
    lane: Lane, planned: PlannedStep, spaces: Spaces, regions: int, slot_nbytes: int, number: int
) -> list[_Sending]:
    """The step's sends; the same range for several peers is laid out once."""
    arena = lane.arena
    to_by_runs: dict[tuple[Run, ...], list[int]] = {}
    for send in planned.sends:
        to_by_runs.setdefault(send.runs, []).append(arena.local[send.peer])
    sendings = []
    for region, (runs, to) in enumerate(to_by_runs.items()):
        itemsize = next((buffer.itemsize for buffer in spaces.values()), 1)
        pieces = [
            [octets_of(spaces, run) for run in piece] for piece in _cut(runs, max(1, slot_nbytes // itemsize))
        ]
        place = None
        kept = not any(_overlap(r, s) for message in planned.receives for r in message.runs for s in runs)
        if kept and len(runs) == 1:
            octets = octets_of(spaces, runs[0])
            if octets.size >= DIRECT_FROM_NBYTES:
                place = arena.place_of(octets, to)
        first_slot = number if len(pieces) == 1 else 0
        sendings.append(
            _Sending(lane, runs, to, pieces, region % regions, slot_nbytes, place, first_slot, sendings)
        )
    return sendings


def _receivings(
    lane: Lane, landing: _Landing, op: str, slot_nbytes: int, sendings: Sequence[_Sending]
) -> list[_Receiving]:
    """The step's receives; those of several peers that are combined into the same range are one."""
    spaces = landing.spaces
    itemsize = next((buffer.itemsize for buffer in spaces.values()), 1)
    receivings = []
    for (runs, combine), alike in groupby(landing.messages, key=lambda message: (message.runs, message.combine)):
        messages = list(alike)
        groups = [messages] if combine else [[message] for message in messages]
        pieces = list(_cut(runs, max(1, slot_nbytes // itemsize)))
        gates = [sending for sending in sendings if sending.runs == runs and runs]
        for group in groups:
            receivings.append(
                _Receiving(lane, spaces, group, pieces, op, slot_nbytes, gates, receivings)
            )
    return receivings


def _cut(runs: Sequence[Run], count: int) -> list[tuple[Run, ...]]:
    """Runs as pieces of `count` elements, the last one shorter; a message of nothing is one empty piece."""
    pieces: list[tuple[Run, ...]] = []
    piece: list[Run] = []
    room = count
    for space, start, stop in runs:
        at = start
        while at < stop:
            end = min(stop, at + room)
            piece.append((space, at, end))
            room -= end - at
            at = end
            if not room:
                pieces.append(tuple(piece))
                piece, room = [], count
    if piece or not pieces:
        pieces.append(tuple(piece))
    return pieces


def _laid_out(parts: Sequence[Octets], memory: Octets) -> list[tuple[Octets, Octets]]:
    copies, at = [], 0
    for part in parts:
        copies.append((memory[at : at + part.size], part))
        at += part.size
    return copies


def _each(calls: Sequence[Callable[[], None]]) -> None:
    for call in calls:
        call()
