"""The memory that the ranks of a communicator share on one node.

    slot 0     rank 0: header, body     rank 1: header, body     …
    slot 1     …
    …          SLOTS of them: the t-th call in this memory uses slot t mod SLOTS
    ended      rank 0: one word for each slot     rank 1: …     the last call that the rank has ended there

A header is one cache line of 64-bit words, which its rank alone writes:

    word 0     state:  number of the call | digest of the request | phase
    word 1…5   bases:  where element 0 of the rank's data, output, work space, send copy and input would lie

`executors/shared_call.py` has the protocol. A body holds what its rank sends in a short call. The words of
a rank's ended calls are one cache line, too, so that a look at it tells of all slots.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import numpy as np

from hpcpar.transport.interface import Octets
from hpcpar.transport.shared_memory import Segment
from hpcpar.units import KiB, MiB

WORD_NBYTES = 8
LINE_NBYTES = 64

SLOTS = 8
"""Calls that can be under way in shared memory at once; the next one waits for the oldest."""

LARGEST_POST_NBYTES = 256 * KiB
BODIES_NBYTES = 32 * MiB
"""All bodies of a communicator on one node; with many ranks each has a shorter one."""

NUMBER_SHIFT, DIGEST_SHIFT = 40, 16
NUMBER_MASK = (1 << 20) - 1
DIGEST_MASK = (1 << NUMBER_SHIFT - DIGEST_SHIFT) - 1
PHASE_MASK = (1 << DIGEST_SHIFT) - 1

UNUSED = NUMBER_MASK << NUMBER_SHIFT
"""State before the first call."""
FAILED = PHASE_MASK
"""Phase of a call that its rank cannot complete: ranks that wait for it need not."""

SHARED = 1 << 63
"""In a base: what follows is the number of an array that all ranks map, and an offset into it."""
PRIVATE = 1 << 62
"""In a base: what follows is an address in the rank's private memory."""
SERIAL_SHIFT = 40
OFFSET_ZERO = 1 << SERIAL_SHIFT - 1
"""An offset of 0: a base may lie before the array, where only a part of what the base is of lies in it."""


def post_nbytes(local_size: int) -> int:
    """Bytes that a rank can send in a short call, when `local_size` ranks share a node."""
    share = BODIES_NBYTES // (SLOTS * local_size) // LINE_NBYTES * LINE_NBYTES
    return max(LINE_NBYTES, min(LARGEST_POST_NBYTES, share))


def segment_nbytes(local_size: int, post: int) -> int:
    """Bytes of the whole segment."""
    return SLOTS * local_size * (_stride(local_size, post) + WORD_NBYTES)


def _stride(local_size: int, post: int) -> int:
    """Bytes from one rank's header to the next one's: a header, and a body with room for a table of ranks."""
    body = max(post, 2 * WORD_NBYTES * local_size)
    return LINE_NBYTES + -(-body // LINE_NBYTES) * LINE_NBYTES


class ShmSegment:
    """One rank's view of the memory.

    rank, size    among the ranks of the communicator that share the node
    ranks         which ranks of the communicator these are
    local         of each of them, its number here
    world_ranks   of each of them, its rank in the whole job, for errors
    post_nbytes   bytes of a body
    pids          processes of these ranks, where each may read the others' private memory; else empty
    fence         orders memory accesses on processors that reorder them; None where none is needed
    arrays        arrays of `allocate_shared`, by number; all ranks here have the same
    headers       for each slot and local rank, the first word of the header
    own_headers   the same of this rank, for each slot
    tickets       calls in this memory that have been begun: ticket t uses slot t mod SLOTS
    latest        number of the call that was begun last
    ended         first of the words in which this rank tells, for each slot, one more than the ticket of the
                  last call there that it has ended
    ended_by_all  for each slot, the same of the last call that all ranks are known to have ended
    """

    def __init__(
        self,
        segment: Segment,
        rank: int,
        ranks: Sequence[int],
        post: int,
        pids: Sequence[int] = (),
        fence: Callable[[], None] | None = None,
        world_ranks: Sequence[int] = (),
    ) -> None:
        self.rank = rank
        self.size = len(ranks)
        self.ranks = tuple(ranks)
        self.world_ranks = tuple(world_ranks or ranks)
        self.local = {r: number for number, r in enumerate(ranks)}
        self.post_nbytes = post
        self.pids = tuple(pids)
        self.fence = fence
        self.words = segment.words
        self.octets = segment.octets
        stride = _stride(self.size, post)
        self.headers = [
            [(slot * self.size + r) * stride // WORD_NBYTES for r in range(self.size)]
            for slot in range(SLOTS)
        ]
        self.own_headers = [headers[rank] for headers in self.headers]
        self.tickets, self.latest = 0, -1
        self.ended_by_all = [0] * SLOTS
        self._told = SLOTS * self.size * stride // WORD_NBYTES
        self.ended = self._told + SLOTS * rank
        self.arrays: dict[int, Segment] = {}
        self._own: dict[int, weakref.ref[Octets]] = {}
        self._made = 0
        self._landing = np.empty(0, dtype=np.uint8)

    def start_slots(self) -> None:
        """Mark all own slots as free. Each rank does so before the barrier after which all use them."""
        for headers in self.headers:
            self.words[headers[self.rank]] = UNUSED
        for slot in range(SLOTS):
            self.words[self.ended + slot] = 0

    def withdraw(self, number: int) -> None:
        """Take back that a call has been begun, if it has: it gets no number, and another call its ticket."""
        if self.latest == number:
            self.tickets, self.latest = self.tickets - 1, -1

    def find_ended(self) -> None:
        """Look which calls all ranks have ended."""
        told = self._all_ended()
        self.ended_by_all[:] = map(min, told[self.rank], *told)

    def using(self, ticket: int) -> list[int]:
        """Local ranks that have not ended the call before this one in its slot."""
        told = self._all_ended()
        return [rank for rank, ended in enumerate(told) if ended[ticket % SLOTS] <= ticket - SLOTS]

    def _all_ended(self) -> list[list[int]]:
        """Words of each rank's ended calls."""
        told = self.words[self._told : self._told + SLOTS * self.size].tolist()
        return [told[at : at + SLOTS] for at in range(0, len(told), SLOTS)]

    def body(self, slot: int, rank: int) -> Octets:
        """Bytes that a local rank sends in a slot."""
        begin = self.headers[slot][rank] * WORD_NBYTES + LINE_NBYTES
        return self.octets[begin : begin + self.post_nbytes]

    def table_word(self, slot: int, rank: int) -> int:
        """First word of a body, where uneven exchanges have a table instead of data."""
        return self.headers[slot][rank] + LINE_NBYTES // WORD_NBYTES

    def base_of(self, address: int, nbytes: int) -> int:
        """Tell the other ranks where memory of this rank lies."""
        for number, segment in self.arrays.items():
            if segment.address <= address and address + nbytes <= segment.address + segment.nbytes:
                return SHARED | number << SERIAL_SHIFT | OFFSET_ZERO + address - segment.address
        return PRIVATE | address

    def shared_part(self, base: int, offset: int, nbytes: int) -> Octets:
        """Bytes at an offset from the base of an array that all ranks map."""
        number = (base & ~SHARED) >> SERIAL_SHIFT
        begin = (base & (1 << SERIAL_SHIFT) - 1) - OFFSET_ZERO + offset
        return self.arrays[number].octets[begin : begin + nbytes]

    def landing(self, nbytes: int) -> Octets:
        """Memory for what comes from a peer's private memory and goes at once into a sum; always the same."""
        if self._landing.size < nbytes:
            self._landing = np.empty(nbytes, dtype=np.uint8)
        return self._landing[:nbytes]

    # Arrays of `allocate_shared` --------------------------------------------------------------------------

    def add(self, segment: Segment, own: Octets) -> None:
        """Add memory that all ranks here have mapped, with this rank's part of it; in one order on all."""
        self._made += 1
        self.arrays[self._made] = segment
        self._own[self._made] = weakref.ref(own)

    def drop(self, number: int) -> None:
        """Forget such memory. The same on all ranks."""
        del self.arrays[number], self._own[number]

    def unused(self) -> set[int]:
        """Numbers of the arrays of which this rank holds nothing any more."""
        return {number for number, own in self._own.items() if own() is None}

    def array_number(self, octets: Octets) -> int | None:
        """Number of the array in which these bytes lie; None: in none."""
        address = octets.__array_interface__["data"][0]
        base = self.base_of(address, octets.size)
        return (base & ~SHARED) >> SERIAL_SHIFT if base & SHARED else None
