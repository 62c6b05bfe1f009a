"""Read and reduce what the ranks of a node send each other, in their bodies or where it lies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hpcpar.comm.blocks import Action
from hpcpar.comm.plan import Message, Run
from hpcpar.comm.shm_segment import LINE_NBYTES, PRIVATE
from hpcpar.comm.spaces import copying, folds, octets_of
from hpcpar.transport import peer_memory
from hpcpar.transport.buffers import HostBuffer
from hpcpar.transport.interface import Octets
from hpcpar.units import KiB

if TYPE_CHECKING:
    from hpcpar.comm.executors.shared_call import SharedCall

SUMMED_AT_ONCE_NBYTES = 1536 * KiB
"""Private memory, of all operands together, that is copied before it is summed: it is still in the cache."""

BASES_KEPT = 8
"""Places of the peers' arrays for which a step keeps its actions."""

BASE_OF: dict[str, int] = {"data": 1, "output": 2, "work": 3, "copy": 4, "input": 5}
"""Word of the header that holds the base of a space."""


class Source(NamedTuple):
    """Place of a message in its sender's memory.

    rank     number of the sender among the local ranks
    phase    state that its header must have reached
    space    of the sender; "copy": its send copy
    runs     ranges of that space; None: told in the sender's table
    offset   bytes from the beginning of the sender's body to element 0 of the space, in a short call
    """

    rank: int
    phase: int
    space: str
    runs: tuple[Run, ...] | None
    offset: int


class Group:
    """Messages that one or several local peers send for the same ranges."""

    def __init__(
        self, call: SharedCall, messages: Sequence[Message], sources: Sequence[Source], op: str
    ) -> None:
        self.call = call
        self.messages = messages
        self.sources = sources
        self.waits = [(source.rank, source.phase) for source in sources]
        self._op = op
        self._bases_at = [(source.rank, BASE_OF[source.space]) for source in sources]
        self._is_told = any(source.runs is None for source in sources)
        self._by_bases: dict[tuple[int, ...], list[Action]] = {}

    def actions(self) -> list[Action]:
        """Actions that read and reduce these messages of a long call, once all of them are there."""
        words, headers = self.call.words, self.call.headers
        bases = tuple([words[headers[rank] + word] for rank, word in self._bases_at])
        if self._is_told:
            return self._from_bases(bases)
        known = self._by_bases.get(bases)
        if known is None:
            if len(self._by_bases) >= BASES_KEPT:
                self._by_bases.clear()
            known = self._by_bases[bases] = self._from_bases(bases)
        return known

    def from_bodies(self, slot: int) -> list[Action]:
        """Read the messages in their senders' bodies."""
        call, itemsize = self.call, self.call.layout.itemsize
        landed: list[tuple[Message, Octets]] = []
        actions: list[Action] = []
        for message, source in zip(self.messages, self.sources, strict=True):
            if not message.count:
                continue
            body = call.segment.body(slot, source.rank)
            runs = source.runs or ()
            parts = [
                body[source.offset + start * itemsize : source.offset + stop * itemsize]
                for _, start, stop in runs
            ]
            if len(parts) == 1:
                landed.append((message, parts[0]))
            elif message.combine:
                # Several ranges in the sender's body: side by side first.
                together = np.empty(message.count * itemsize, dtype=np.uint8)
                at = 0
                for part in parts:
                    actions.append(copying(together[at : at + part.size], part))
                    at += part.size
                landed.append((message, together))
            else:
                actions += _scattering(self.call.spaces, message.runs, parts, itemsize)
        return [*actions, *folds(call.spaces, landed, self._op)]  # type: ignore[arg-type]

    def _from_bases(self, bases: tuple[int, ...]) -> list[Action]:
        """Read the messages where they lie in their senders' memory."""
        itemsize = self.call.layout.itemsize
        actions: list[Action] = []
        reads = [
            (message, self._stretches(source, base, message.count))
            for message, source, base in zip(self.messages, self.sources, bases, strict=True)
            if message.count
        ]
        if not reads:
            return []
        first = reads[0][0]
        if not first.combine:
            for message, stretches in reads:
                actions += self._moving(message, stretches)
            return actions
        nbytes = first.count * itemsize
        at_once = max(LINE_NBYTES, SUMMED_AT_ONCE_NBYTES // len(reads) // LINE_NBYTES * LINE_NBYTES)
        if all(isinstance(stretches, list) and not stretches[0].pid for _, stretches in reads):
            at_once = nbytes
        for begin in range(0, nbytes, at_once):
            end = min(begin + at_once, nbytes)
            actions += self._summing(reads, begin, end)
        return actions

    def _summing(self, reads: Sequence[tuple[Message, list[Stretch]]], begin: int, end: int) -> list[Action]:
        """Reduce the bytes from `begin` to `end` of all messages."""
        call, itemsize = self.call, self.call.layout.itemsize
        actions: list[Action] = []
        landed: list[tuple[Message, Octets]] = []
        stride = -(-(end - begin) // LINE_NBYTES) * LINE_NBYTES
        for at, (message, stretches) in enumerate(reads):
            part = _part(message, begin // itemsize, end // itemsize)
            pieces = list(_within(stretches, begin, end))
            if len(pieces) == 1 and pieces[0].memory is not None:
                landed.append((part, pieces[0].memory))
                continue
            landing = call.segment.landing(
                max(SUMMED_AT_ONCE_NBYTES + LINE_NBYTES * len(reads), stride * len(reads))
            )
            memory = landing[at * stride :][: end - begin]
            actions += _filling([memory], pieces)
            landed.append((part, memory))
        return [*actions, *folds(call.spaces, landed, self._op)]  # type: ignore[arg-type]

    def _moving(self, message: Message, stretches: list[Stretch]) -> list[Action]:
        """Overwrite the message's ranges with its bytes."""
        return _filling([octets_of(self.call.spaces, run) for run in message.runs], stretches)  # type: ignore[arg-type]

    def _stretches(self, source: Source, base: int, count: int) -> list[Stretch]:
        """The bytes of a message in its sender's memory."""
        segment, itemsize = self.call.segment, self.call.layout.itemsize
        if source.runs is not None:
            runs = source.runs
        else:
            word = segment.table_word(self.call.slot, source.rank) + 2 * segment.rank
            start, told = self.call.words[word], self.call.words[word + 1]
            if told != count:
                sender, receiver = (segment.world_ranks[local] for local in (source.rank, segment.rank))
                raise self.call.failed(
                    f"rank {sender} sends {told} elements to rank {receiver}, "
                    f"which expects {count} of it in {self.call.described}: send_counts and receive_counts "
                    f"must fit"
                )
            runs = (("input", start, start + count),)
        found: list[Stretch] = []
        for _, start, stop in runs:
            offset, nbytes = start * itemsize, (stop - start) * itemsize
            if base & PRIVATE:
                found.append(Stretch(segment.pids[source.rank], (base & ~PRIVATE) + offset, nbytes, None))
            else:
                found.append(Stretch(0, 0, nbytes, segment.shared_part(base, offset, nbytes)))
        return found


class Stretch(NamedTuple):
    """Bytes in a peer's memory: in its private memory at an address, or mapped here."""

    pid: int
    address: int
    nbytes: int
    memory: Octets | None


def _within(stretches: Sequence[Stretch], begin: int, end: int) -> Iterator[Stretch]:
    """The bytes from `begin` to `end` of a message."""
    at = 0
    for pid, address, nbytes, memory in stretches:
        start, stop = max(begin, at) - at, min(end, at + nbytes) - at
        if start < stop:
            part = None if memory is None else memory[start:stop]
            yield Stretch(pid, address + start, stop - start, part)
        at += nbytes


def _filling(targets: Sequence[Octets], stretches: Sequence[Stretch]) -> list[Action]:
    """Copy stretches, one after the other, into targets, one after the other."""
    actions: list[Action] = []
    at = 0
    for target in targets:
        end = at + target.size
        filled = 0
        for piece in _within(stretches, at, end):
            into = target[filled : filled + piece.nbytes]
            if piece.memory is not None:
                actions.append(copying(into, piece.memory))
            else:
                actions += peer_memory.reading(piece.pid, [(piece.address, piece.nbytes)], [into])
            filled += piece.nbytes
        at = end
    return actions


def _scattering(
    spaces: dict[str, HostBuffer], runs: Sequence[Run], parts: Sequence[Octets], itemsize: int
) -> list[Action]:
    """Copy parts that lie apart into ranges that may be cut in other places."""
    stretches = [Stretch(0, 0, part.size, part) for part in parts]
    return _filling([octets_of(spaces, run) for run in runs], stretches)  # type: ignore[arg-type]


def _part(message: Message, begin: int, end: int) -> Message:
    """The elements from `begin` to `end` of a message that is reduced."""
    if begin == 0 and end == message.count:
        return message
    own = None if message.own is None else _cut(message.own, begin, end)
    return Message(
        message.peer, _cut(message.runs, begin, end), end - begin, message.combine, message.own_turn, own
    )


def _cut(runs: Sequence[Run], begin: int, end: int) -> tuple[Run, ...]:
    found: list[Run] = []
    at = 0
    for space, start, stop in runs:
        first, last = max(begin, at), min(end, at + stop - start)
        if first < last:
            found.append((space, start + first - at, start + last - at))
        at += stop - start
    return tuple(found)
