"""The memory that the ranks of a communicator share on one node, and how they find each other's data in it.

    control   for each lane and each pair of ranks two cache lines:  head, places | tail
              the sender writes head (pieces sent so far) and where the last four of them lie,
              the receiver tail (pieces taken so far)
    stages    for each lane and each rank: memory in which it lays out what it sends, for one peer or
              for several at once

A *piece* is what is sent at a time. It lies in its sender's stage, or, when the sender's own array is
shared memory (`Communicator.allocate_shared`), is the array itself, which the receiver then reads there.

Operations take lanes in turn, by the number of their call, and within a lane run one after the other;
all ranks make the same calls in the same order. So the pieces between two ranks in a lane are always
those that are expected, and need no tags.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hpcpar.comm.operation import Operation
from hpcpar.transport.interface import Octets
from hpcpar.transport.shared_memory import Segment
from hpcpar.units import KiB, MiB

LANES = 4
WORD_NBYTES = 8
PAIR_WORDS = 16
"""Head and places in one cache line, tail in another: each has one rank that writes to it."""

PLACES = 4
TAIL = 8
"""Words from a pair's head to its tail."""

SLOTS = 4
"""Pieces that a rank can have laid out for the same receivers: one is read while others are written."""

LARGEST_STAGE_NBYTES = 512 * KiB
"""Of one rank in one lane. What is written there is to be still in the cache when it is read."""

ARENA_NBYTES = 32 * MiB
"""All stages of a communicator on one node, at most; many ranks have smaller ones."""

ALIGNED = 64

DIRECT = 1 << 63
"""In a place: not a piece, but the whole message where the sender has it."""
SERIAL_SHIFT = 40
"""In a place: below, where in the memory; above, the number of the memory. 0 is the arena."""

Hazard = tuple[int, int]
"""Word of a tail, and what it must have come to before a slot is written again."""


def stage_nbytes(local_size: int) -> int:
    """Bytes of one rank's stage in one lane, when `local_size` ranks share a node."""
    share = ARENA_NBYTES // (LANES * local_size)
    return max(4 * KiB, min(LARGEST_STAGE_NBYTES, share // (4 * KiB) * 4 * KiB))


def arena_nbytes(local_size: int, stage: int) -> int:
    """Bytes of the whole arena."""
    return LANES * local_size * (local_size * PAIR_WORDS * WORD_NBYTES + stage)


@dataclass
class Allocated:
    """An array that one rank made for others to read: its number, where it begins here, who can see it."""

    serial: int
    segment: Segment
    readers: frozenset[int]


@dataclass
class SharedArrays:
    """What ranks of this node have allocated, by all communicators of a family.

    own      this rank's arrays, by number
    others   those of other ranks, by world rank and number
    """

    own: dict[int, Allocated] = field(default_factory=dict)
    others: dict[tuple[int, int], Segment] = field(default_factory=dict)
    made: int = 0

    def place(self, octets: Octets, readers: Sequence[int]) -> int | None:
        """Where memory lies for these world ranks, all of which must see it; None: not in a shared array."""
        if not self.own:
            return None
        address = octets.__array_interface__["data"][0]
        for array in self.own.values():
            offset = address - array.segment.address
            if 0 <= offset and offset + octets.size <= array.segment.nbytes:
                return array.serial << SERIAL_SHIFT | offset if array.readers.issuperset(readers) else None
        return None


class Lane:
    """What operations pass through one after the other: counters, stages, and who is in it.

    sent, taken   pieces to and from each local rank so far
    hazards       for each slot of the own stage, who must have read it before it is written again
    fanout        into how many regions the own stage is divided
    """

    def __init__(self, arena: Arena, number: int) -> None:
        size = arena.size
        first_word = number * size * size * PAIR_WORDS
        self.arena = arena
        self.number = number
        self.holder: Operation | None = None
        self.heads_out = [first_word + (arena.rank * size + to) * PAIR_WORDS for to in range(size)]
        self.heads_in = [first_word + (source * size + arena.rank) * PAIR_WORDS for source in range(size)]
        self.sent = [0] * size
        self.taken = [0] * size
        self.fanout = 1
        self.hazards: list[tuple[Hazard, ...]] = [()] * SLOTS
        self._stage = arena.control_nbytes + (number * size + arena.rank) * arena.stage

    def enter(self, operation: Operation) -> bool:
        if self.holder is None:
            self.holder = operation
        return self.holder is operation

    def leave(self) -> None:
        self.holder = None

    def slot_place(self, slot: int, slot_nbytes: int) -> int:
        """Where a slot of the own stage begins in the arena."""
        return self._stage + slot * slot_nbytes

    def laid_out(self, fanout: int) -> bool:
        """Divide the own stage into that many regions, once all that lies there has been read."""
        if fanout == self.fanout:
            return True
        words = self.arena.words
        if any(words[tail] < count for slot in self.hazards for tail, count in slot):
            return False
        self.fanout = fanout
        self.hazards = [()] * (fanout * SLOTS)
        return True


class Arena:
    """One rank's view of it.

    rank, size    among the ranks of the communicator that share the node
    world_ranks   of those ranks
    local         of each rank of the communicator on this node: its number among them
    stage         bytes of a rank's stage in a lane
    """

    def __init__(
        self,
        segment: Segment,
        rank: int,
        ranks: Sequence[int],
        world_ranks: Sequence[int],
        stage: int,
        arrays: SharedArrays,
    ) -> None:
        self.rank = rank
        self.size = len(ranks)
        self.local = {r: number for number, r in enumerate(ranks)}
        self.ranks = tuple(ranks)
        self.world_ranks = tuple(world_ranks)
        self.stage = stage
        self.words = segment.words
        self.control_nbytes = LANES * self.size * self.size * PAIR_WORDS * WORD_NBYTES
        self.arrays = arrays
        self._octets = segment.octets
        self.lanes = tuple(Lane(self, number) for number in range(LANES))

    def slot_nbytes(self, fanout: int) -> int:
        """Bytes of a piece, when the stage is divided into `fanout` regions. The same on all ranks."""
        return max(ALIGNED, self.stage // (fanout * SLOTS) // ALIGNED * ALIGNED)

    def memory(self, source: int, place: int, nbytes: int) -> Octets:
        """The bytes at a place that local rank `source` has named."""
        serial, offset = (place & ~DIRECT) >> SERIAL_SHIFT, place & (1 << SERIAL_SHIFT) - 1
        octets = self._octets if serial == 0 else self.arrays.others[self.world_ranks[source], serial].octets
        return octets[offset : offset + nbytes]

    def place_of(self, octets: Octets, receivers: Sequence[int]) -> int | None:
        """Where these local ranks can read the caller's own memory; None: they cannot."""
        return self.arrays.place(octets, [self.world_ranks[receiver] for receiver in receivers])
