"""The memory that the ranks of a communicator share on one node, and how they find each other's data in it.

    control   for each lane and each pair of ranks two cache lines:  head, places | tail
              the sender writes head (pieces sent so far) and where the last four of them lie,
              the receiver tail (pieces taken so far)
    stages    for each lane and each rank: memory in which it lays out what it sends, for one peer or
              for several at once
    boards    for each lane and each rank a few places for short messages that all may read (`board.py`)

A *piece* is what is sent at a time, and lies in its sender's stage. Or the sender says where the whole
message lies, and waits until it has been read there: in an array of `Communicator.allocate_shared`, or,
from some size on, in the sender's private memory, from which the kernel copies it (`peer_memory`). What does
not lie there side by side is named by a list, which lies there, too.

Operations take lanes in turn, by the number of their call, and within a lane run one after the other;
all ranks make the same calls in the same order. So the pieces between two ranks in a lane are always
those that are expected, and need no tags.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence

import numpy as np

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

SMALLEST_STAGE_NBYTES = 4 * KiB

ARENA_NBYTES = 32 * MiB
"""All stages of a communicator on one node, at most; many ranks have smaller ones."""

ALIGNED = 64

BOARD_PLACES = 4
LARGEST_POST_NBYTES = 64 * KiB
"""What a rank posts on a board at a time, at most."""
BOARDS_NBYTES = 8 * MiB
"""All posts of a communicator on one node, at most; many ranks have shorter ones."""
POST_HEAD_NBYTES = 16
"""A word in front of what is posted, in its cache line; so much that the largest elements are aligned."""

DIRECT = 1 << 63
"""In a place: not a piece, but the whole message where the sender has it."""
PRIVATE = 1 << 62
"""In a direct place: what remains is an address in the sender's private memory."""
LISTED = 1 << 61
"""In a private place: what remains is the address of a list of where the message lies (`peer_memory`)."""
SERIAL_SHIFT = 40
"""In other places: below, where in the memory; above, the number of the memory. 0 is the arena."""

LOOKS = 8
"""At a word between two pauses: a look costs 40 ns."""

Hazard = tuple[int, int]
"""Word of a tail, and what it must have come to before a slot is written again."""


def stage_nbytes(local_size: int) -> int:
    """Bytes of one rank's stage in one lane, when `local_size` ranks share a node."""
    share = ARENA_NBYTES // (LANES * local_size) // SMALLEST_STAGE_NBYTES * SMALLEST_STAGE_NBYTES
    return max(SMALLEST_STAGE_NBYTES, least_stage_nbytes(local_size), min(LARGEST_STAGE_NBYTES, share))


def least_stage_nbytes(local_size: int) -> int:
    """Below, there would be no room to send something else to every rank at once."""
    return local_size * SLOTS * ALIGNED


def post_nbytes(local_size: int) -> int:
    """Bytes that a rank can post at a time, when `local_size` ranks share a node."""
    return min(LARGEST_POST_NBYTES, BOARDS_NBYTES // (LANES * local_size * BOARD_PLACES))


def _place_nbytes(local_size: int) -> int:
    """Bytes of a place of a board, with its head."""
    return -(-(POST_HEAD_NBYTES + post_nbytes(local_size)) // ALIGNED) * ALIGNED


def arena_nbytes(local_size: int, stage: int, *, has_boards: bool = True) -> int:
    """Bytes of the whole arena."""
    boards = BOARD_PLACES * _place_nbytes(local_size) if has_boards else 0
    return LANES * local_size * (local_size * PAIR_WORDS * WORD_NBYTES + stage + boards)


class Lane:
    """What operations pass through one after the other: counters, stages, and who is in it.

    holder        the operation whose turn it is
    sent, taken   pieces to and from each local rank so far
    hazards       for each slot of the own stage, who must have read it before it is written again
    regions       into how many parts the own stage is divided, each with slots of its own
    turn          goes up with every message that is a single piece: they take the slots in turn
    posted        calls in which this rank has posted on the lane's board
    all_posted    calls in which all others are known to have posted
    """

    def __init__(self, arena: Arena, number: int) -> None:
        size = arena.size
        first_word = number * size * size * PAIR_WORDS
        self.arena = arena
        self.tag = number
        self.holder: Operation | None = None
        self.heads_out = [first_word + (arena.rank * size + to) * PAIR_WORDS for to in range(size)]
        self.heads_in = [first_word + (source * size + arena.rank) * PAIR_WORDS for source in range(size)]
        self.sent = [0] * size
        self.taken = [0] * size
        self.regions = 1
        self.turn = 0
        self.hazards: list[Sequence[Hazard]] = [()] * SLOTS
        self._stage = arena.control_nbytes + (number * size + arena.rank) * arena.stage
        self.posted = 0
        self.all_posted = 0
        place = _place_nbytes(size)
        board = arena.control_nbytes + LANES * size * arena.stage + number * size * BOARD_PLACES * place
        self._boards = [
            [board + (rank * BOARD_PLACES + number) * place for rank in range(size)]
            for number in range(BOARD_PLACES)
        ]

    def join(self, operation: Operation) -> None:
        """Nothing to note: who comes later stands later in the list of operations under way."""

    def enter(self, operation: Operation) -> bool:
        if self.holder is None:
            self.holder = operation
        return self.holder is operation

    def leave(self) -> None:
        self.holder = None

    def post_word(self, number: int, rank: int) -> int:
        """The word in front of what that local rank posts in every call with this number, modulo places."""
        return self._boards[number % BOARD_PLACES][rank] // WORD_NBYTES

    def post(self, number: int, rank: int, start: int, stop: int) -> Octets:
        """Bytes of what that local rank posts in every call with this number, modulo places."""
        begin = self._boards[number % BOARD_PLACES][rank] + POST_HEAD_NBYTES
        return self.arena.memory(begin + start, stop - start)

    def slot_place(self, slot: int, slot_nbytes: int) -> int:
        """Where a slot of the own stage begins in the arena."""
        return self._stage + slot * slot_nbytes

    def behind(self, hazards: Sequence[Hazard]) -> set[int]:
        """The local ranks that have yet to read."""
        words, first = self.arena.words, self.heads_out[0] + TAIL
        return {(tail - first) // PAIR_WORDS for tail, count in hazards if words[tail] < count}

    def divide(self, regions: int) -> bool:
        """Divide the own stage into that many regions; False while something laid out is still unread."""
        if regions != self.regions:
            words = self.arena.words
            if any(words[tail] < count for hazards in self.hazards for tail, count in hazards):
                return False
            self.regions = regions
            self.hazards = [()] * (regions * SLOTS)
        return True


class Arena:
    """One rank's view of it.

    rank, size    among the ranks of the communicator that share the node
    ranks         which ranks of the communicator these are
    local         of each of them, its number here
    stage         bytes of a rank's stage in a lane
    post_nbytes   bytes that a rank can post on a board at a time
    arrays        memory of arrays that were allocated for these ranks to read, by number; all have the same
    seconds_waited   in calls that were done at once, until their accounts have taken it over
    pids          of these ranks, where each may read the others' private memory; else empty
    """

    def __init__(
        self,
        segment: Segment,
        rank: int,
        ranks: Sequence[int],
        stage: int,
        pids: Sequence[int] = (),
        *,
        has_boards: bool = True,
    ) -> None:
        self.rank = rank
        self.size = len(ranks)
        self.ranks = tuple(ranks)
        self.local = {r: number for number, r in enumerate(ranks)}
        self.stage = stage
        self.post_nbytes = post_nbytes(self.size) if has_boards else 0
        self.pids = tuple(pids)
        self.words = segment.words
        self.control_nbytes = LANES * self.size * self.size * PAIR_WORDS * WORD_NBYTES
        self.arrays: dict[int, Segment] = {}
        self._own: dict[int, weakref.ref[Octets]] = {}
        self.seconds_waited = 0.0
        self._made = 0
        self._octets = segment.octets
        self._landing = np.empty(0, dtype=np.uint8)
        self.lanes: tuple[Lane, ...] = tuple(Lane(self, number) for number in range(LANES))

    def slot_nbytes(self, regions: int) -> int:
        """Bytes of a piece, when the stage is divided into so many regions. The same on all ranks."""
        return max(ALIGNED, self.stage // (regions * SLOTS) // ALIGNED * ALIGNED)

    def add(self, segment: Segment, own: Octets) -> None:
        """Memory that all ranks here have mapped, and this rank's part of it. In the same order on all."""
        self._made += 1
        self.arrays[self._made] = segment
        self._own[self._made] = weakref.ref(own)

    def drop(self, number: int) -> None:
        """Forget such memory. The same on all ranks."""
        del self.arrays[number], self._own[number]

    def unused(self) -> set[int]:
        """Memory of which nothing is left that was made of this rank's part."""
        return {number for number, own in self._own.items() if own() is None}

    def free(self) -> None:
        """Let go of all memory at once: no need to wait until cyclic references are collected."""
        self.arrays.clear()
        self.lanes = ()

    def array_number(self, octets: Octets) -> int | None:
        """Which memory of `arrays` these bytes lie in; None: in none."""
        address = octets.__array_interface__["data"][0]
        for number, segment in self.arrays.items():
            if segment.address <= address and address + octets.size <= segment.address + segment.nbytes:
                return number
        return None

    def place_of(self, octets: Octets, shared_from_nbytes: int, private_from_nbytes: int) -> int | None:
        """Where the other ranks can read these bytes as they are, if that is worth while; None: nowhere.

        shared_from_nbytes    from when on it is, for what lies in an array that they can see
        private_from_nbytes   the same for other memory of this rank
        """
        number = self.array_number(octets) if self.arrays else None
        address: int = octets.__array_interface__["data"][0]
        if number is not None and octets.size >= shared_from_nbytes:
            return DIRECT | number << SERIAL_SHIFT | address - self.arrays[number].address
        if self.pids and octets.size >= private_from_nbytes:
            return DIRECT | PRIVATE | address
        return None

    def landing(self, nbytes: int) -> Octets:
        """Memory for what comes from private memory and goes at once into a sum; always the same."""
        if self._landing.size < nbytes:
            self._landing = np.empty(nbytes, dtype=np.uint8)
        return self._landing[:nbytes]

    def memory(self, place: int, nbytes: int) -> Octets:
        """The bytes at a place that a rank has named."""
        number, offset = (place & ~DIRECT) >> SERIAL_SHIFT, place & (1 << SERIAL_SHIFT) - 1
        octets = self.arrays[number].octets if number else self._octets
        return octets[offset : offset + nbytes]


def comes_to(lane: Lane, word: int, count: int, attempts: int, pause: Callable[[int], None]) -> bool:
    """Wait for a word of shared memory; False when it takes longer than some attempts."""
    words = lane.arena.words
    started_s = time.perf_counter()
    for attempt in range(attempts):
        for _ in range(LOOKS):
            if words[word] >= count:
                lane.arena.seconds_waited += time.perf_counter() - started_s
                return True
        pause(attempt)
    lane.arena.seconds_waited += time.perf_counter() - started_s
    return False
