"""Binomial trees: the number of ranks that are served doubles in every round.

    place   0   1   2   3   4   5   6   7        place = (rank - root) mod n
            0 ──────────────▶ 4                  distance 4
            0 ──────▶ 2       4 ──────▶ 6        distance 2
            0 ─▶ 1    2 ─▶ 3  4 ─▶ 5   6 ─▶ 7    distance 1

Broadcast and scatter walk down the picture; reduce and gather walk it up. n ranks, S bytes of
the whole vector.
"""

from __future__ import annotations

from hpcpar.algorithms.doubling import doublings
from hpcpar.algorithms.step import Receive, Send, Step, Steps


def broadcast(rank: int, size: int, *, root: int = 0) -> Steps:
    """Give every rank the root's vector.

    before   root: one chunk
    after    every rank: the root's chunk
    cost     ⌈log₂n⌉(α + Sβ)
    source   Thakur, Rabenseifner, Gropp 2005, section 4.3
    """
    place = (rank - root) % size
    for distance in reversed(doublings(size)):
        if _has_child(place, distance, size):
            yield Step(sends=(Send((rank + distance) % size, (0,)),))
        elif _is_child(place, distance):
            yield Step(receives=(Receive((rank - distance) % size, (0,)),))


def reduce(rank: int, size: int, *, root: int = 0) -> Steps:
    """Combine over all ranks into the root.

    before   every rank: one chunk of any values
    after    root: the total; the other ranks hold partial sums
    order    by place, as in (0 + 1) + (2 + 3)
    cost     ⌈log₂n⌉(α + Sβ + Sγ)
    source   Thakur, Rabenseifner, Gropp 2005, section 4.4
    """
    place = (rank - root) % size
    for distance in doublings(size):
        if _has_child(place, distance, size):
            yield Step(receives=(Receive((rank + distance) % size, (0,), combine=True),))
        elif _is_child(place, distance):
            yield Step(sends=(Send((rank - distance) % size, (0,)),))


def allreduce(rank: int, size: int) -> Steps:
    """Combine over all ranks; give every rank the total: a reduce to rank 0, then a broadcast.

    before   every rank: one chunk of any values
    after    every rank: the total
    cost     2⌈log₂n⌉(α + Sβ) + ⌈log₂n⌉Sγ
    source   Thakur, Rabenseifner, Gropp 2005, section 4.5
    """
    yield from reduce(rank, size)
    yield from broadcast(rank, size)


def gather(rank: int, size: int, *, root: int = 0) -> Steps:
    """Bring the chunks of all ranks to the root; each rank passes on those of its whole subtree.

    before   rank r: chunk r
    after    root: all `size` chunks; the other ranks hold those of their subtrees
    cost     ⌈log₂n⌉α + (n-1)/n·Sβ
    source   Chan, Heimlich, Purkayastha, van de Geijn 2007 (minimum spanning tree gather)
    """
    place = (rank - root) % size
    for distance in doublings(size):
        if _has_child(place, distance, size):
            chunks = _subtree(place + distance, distance, size, root)
            yield Step(receives=(Receive((rank + distance) % size, chunks),))
        elif _is_child(place, distance):
            chunks = _subtree(place, distance, size, root)
            yield Step(sends=(Send((rank - distance) % size, chunks),))


def scatter(rank: int, size: int, *, root: int = 0) -> Steps:
    """Deal the root's chunks out; each rank receives those of its whole subtree and passes them on.

    before   root: all `size` chunks
    after    rank r: chunk r; inner ranks hold those of their subtrees too
    cost     ⌈log₂n⌉α + (n-1)/n·Sβ
    source   Chan, Heimlich, Purkayastha, van de Geijn 2007 (minimum spanning tree scatter)
    """
    place = (rank - root) % size
    for distance in reversed(doublings(size)):
        if _has_child(place, distance, size):
            chunks = _subtree(place + distance, distance, size, root)
            yield Step(sends=(Send((rank + distance) % size, chunks),))
        elif _is_child(place, distance):
            chunks = _subtree(place, distance, size, root)
            yield Step(receives=(Receive((rank - distance) % size, chunks),))


def _has_child(place: int, distance: int, size: int) -> bool:
    return place % (2 * distance) == 0 and place + distance < size


def _is_child(place: int, distance: int) -> bool:
    return place % (2 * distance) == distance


def _subtree(place: int, distance: int, size: int, root: int) -> tuple[int, ...]:
    """Chunks of all ranks below and at `place`, which hangs from its parent by `distance`."""
    return tuple((p + root) % size for p in range(place, min(place + distance, size)))
