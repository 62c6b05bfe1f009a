"""Recursive doubling and halving: partners at distance 1, 2, 4 … exchange ever more, or ever less.

The exchange needs a power of two of *members*. With n = m + e ranks, m the largest power of two,
each of the first e pairs of ranks acts as one member: the odd rank takes in what the even one has,
and hands it the result at the end (the fold).

    n = 6       rank     0   1   2   3   4   5
                fold     0 ─▶1   2 ─▶3
                member       0       1   2   3

Of two partners the lower rank's value is the left operand on both, so that both get the same bits.

The dissemination barrier walks the same distances, for any number of ranks.

n ranks, m members, S bytes of the whole vector.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from hpcpar.algorithms.step import Receive, Send, Step, Steps


def doublings(size: int) -> tuple[int, ...]:
    """1, 2, 4 … below `size`: ⌈log₂ size⌉ distances; doublings(6) == (1, 2, 4)."""
    return tuple(1 << bit for bit in range((size - 1).bit_length()))


def largest_power(size: int) -> int:
    """The largest power of two that is at most `size`; largest_power(6) == 4."""
    return 1 << (size.bit_length() - 1)


def allreduce(rank: int, size: int) -> Steps:
    """Combine over all ranks; give every rank the total, by exchanging whole vectors.

    before   every rank: one chunk of any values
    after    every rank: the total
    order    (0 + 1) + (2 + 3) and so on, on every rank
    cost     log₂n·(α + Sβ + Sγ); not a power of two: log₂m, + 2α + 2Sβ + Sγ
    source   Thakur, Rabenseifner, Gropp 2005, section 4.5 (recursive doubling)
    """
    yield from _folded(rank, size, _whole_exchange(rank, size), (0,), (0,), combine=True)


def reduce_scatter(rank: int, size: int) -> Steps:
    """Combine over all ranks; leave rank r the total of chunk r, by halving what is exchanged.

    before   every rank: `size` chunks of any values
    after    rank r: chunk r is the total, the other chunks hold partial sums
    cost     log₂n·α + (n-1)/n·S(β + γ); not a power of two: + 2α and the fold of S, see `fold_chunks`
    source   Thakur, Rabenseifner, Gropp 2005, section 4.2 (recursive halving)
    """
    every = tuple(range(size))
    halving = _halving(rank, size, fold_chunks(size))
    yield from _folded(rank, size, halving, every, (_even(rank),), combine=True)


def allgather(rank: int, size: int) -> Steps:
    """Give every rank the chunks of all, by doubling what is exchanged.

    before   rank r: chunk r
    after    every rank: all `size` chunks
    cost     log₂n·α + (n-1)/n·Sβ; not a power of two: + 2α and up to S for the fold, see `fold_chunks`
    source   Thakur, Rabenseifner, Gropp 2005, section 4.1 (recursive doubling)
    """
    others = tuple(chunk for chunk in range(size) if chunk != _even(rank))
    doubling = _doubling(rank, size, fold_chunks(size))
    yield from _folded(rank, size, doubling, (_even(rank),), others, combine=False)


def rabenseifner(rank: int, size: int) -> Steps:
    """All-reduce: a reduce-scatter by recursive halving, then an all-gather by recursive doubling.

    before   every rank: m chunks of any values
    after    every rank: all chunks are totals
    cost     2 log₂n·α + 2(n-1)/n·Sβ + (n-1)/n·Sγ; not a power of two: with m for n, + 2α + 2Sβ + Sγ
    source   Rabenseifner 2004, "Optimization of collective reduction operations"; Thakur et al. 2005
    """
    first_chunks = range(largest_power(size) + 1)
    every = tuple(first_chunks[:-1])
    walk = chain(_halving(rank, size, first_chunks), _doubling(rank, size, first_chunks))
    yield from _folded(rank, size, walk, every, every, combine=True)


def barrier(rank: int, size: int) -> Steps:
    """Let no rank leave before every rank has entered, by messages without content.

    before   nothing
    after    every rank has heard, directly or through others, of all ranks
    cost     ⌈log₂n⌉α
    source   Hensgen, Finkel, Manber 1988, "Two algorithms for barrier synchronization"
    """
    for distance in doublings(size):
        yield Step((Send((rank + distance) % size),), (Receive((rank - distance) % size),))


def fold_chunks(size: int) -> tuple[int, ...]:
    """First chunk of every member, and at last the number of chunks, when each rank has one chunk.

    fold_chunks(6) == (0, 2, 4, 5, 6): members 0 and 1 stand for two ranks each.
    """
    extra = size - largest_power(size)
    return tuple(member + min(member, extra) for member in range(largest_power(size) + 1))


def _folded(
    rank: int,
    size: int,
    exchange: Steps,
    taken_in: tuple[int, ...],
    handed_back: tuple[int, ...],
    *,
    combine: bool,
) -> Steps:
    """Fold, let the members exchange, unfold; the even rank of a folded pair only sends and receives."""
    paired = rank < 2 * (size - largest_power(size))
    if paired and rank % 2 == 0:
        yield Step(sends=(Send(rank + 1, taken_in),))
        yield Step(receives=(Receive(rank + 1, handed_back),))
        return
    if paired:
        yield Step(receives=(Receive(rank - 1, taken_in, combine=combine),), own_turn=1)
    yield from exchange
    if paired:
        yield Step(sends=(Send(rank - 1, handed_back),))


def _whole_exchange(rank: int, size: int) -> Steps:
    for distance in doublings(largest_power(size)):
        partner = _rank_of(_member_of(rank, size) ^ distance, size)
        yield _exchange(rank, partner, (0,), (0,), combine=True)


def _halving(rank: int, size: int, first_chunks: Sequence[int]) -> Steps:
    """Members at distance m/2 … 1 give each other the other's half of what is left."""
    me = _member_of(rank, size)
    for distance in reversed(doublings(largest_power(size))):
        partner = me ^ distance
        given, kept = (_chunks_around(member, distance, first_chunks) for member in (partner, me))
        yield _exchange(rank, _rank_of(partner, size), given, kept, combine=True)


def _doubling(rank: int, size: int, first_chunks: Sequence[int]) -> Steps:
    """Members at distance 1 … m/2 show each other all that they have."""
    me = _member_of(rank, size)
    for distance in doublings(largest_power(size)):
        partner = me ^ distance
        shown, seen = (_chunks_around(member, distance, first_chunks) for member in (me, partner))
        yield _exchange(rank, _rank_of(partner, size), shown, seen, combine=False)


def _exchange(
    rank: int, partner: int, outgoing: tuple[int, ...], incoming: tuple[int, ...], *, combine: bool
) -> Step:
    receive = Receive(partner, incoming, combine=combine)
    return Step((Send(partner, outgoing),), (receive,), own_turn=int(partner < rank))


def _chunks_around(member: int, distance: int, first_chunks: Sequence[int]) -> tuple[int, ...]:
    """Chunks of the aligned run of `distance` members that holds `member`."""
    start = member - member % distance
    return tuple(range(first_chunks[start], first_chunks[start + distance]))


def _member_of(rank: int, size: int) -> int:
    extra = size - largest_power(size)
    return rank // 2 if rank < 2 * extra else rank - extra


def _rank_of(member: int, size: int) -> int:
    extra = size - largest_power(size)
    return 2 * member + 1 if member < extra else member + extra


def _even(rank: int) -> int:
    """The even rank of this rank's pair."""
    return rank - rank % 2
