"""The ring: every rank speaks only to its two neighbours, and every link is busy all the time.

n ranks, S bytes of the whole vector, k segments; α, β, γ as in DESIGN: latency, seconds per byte
sent, seconds per byte combined.
"""

from __future__ import annotations

from hpcpar.algorithms.step import Receive, Send, Step, Steps


def reduce_scatter(rank: int, size: int) -> Steps:
    """Combine over all ranks; leave rank r the total of chunk r.

    before   every rank: `size` chunks of any values
    after    rank r: chunk r is the total, the other chunks hold partial sums
    order    chunk c starts at rank c + 1 and gathers rank after rank up to c
    cost     (n-1)(α + S/n·β + S/n·γ); each rank sends (n-1)/n·S
    source   Thakur, Rabenseifner, Gropp 2005, section 4 (ring); Patarasuk, Yuan 2009
    """
    right, left = (rank + 1) % size, (rank - 1) % size
    for k in range(1, size):
        outgoing, incoming = (rank - k) % size, (rank - k - 1) % size
        yield Step((Send(right, (outgoing,)),), (Receive(left, (incoming,), combine=True),))


def allgather(rank: int, size: int) -> Steps:
    """Give every rank the chunks of all.

    before   rank r: chunk r
    after    every rank: all `size` chunks
    cost     (n-1)(α + S/n·β); each rank sends (n-1)/n·S
    source   Thakur, Rabenseifner, Gropp 2005, section 4.1 (ring)
    """
    right, left = (rank + 1) % size, (rank - 1) % size
    for k in range(size - 1):
        outgoing, incoming = (rank - k) % size, (rank - k - 1) % size
        yield Step((Send(right, (outgoing,)),), (Receive(left, (incoming,)),))


def allreduce(rank: int, size: int) -> Steps:
    """Combine over all ranks; give every rank the total: a reduce-scatter, then an all-gather.

    before   every rank: `size` chunks of any values
    after    every rank: all chunks are totals
    cost     2(n-1)α + 2(n-1)/n·Sβ + (n-1)/n·Sγ; each rank sends 2(n-1)/n·S, the least possible
    source   Patarasuk, Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations"
    """
    yield from reduce_scatter(rank, size)
    yield from allgather(rank, size)


def broadcast(rank: int, size: int, *, root: int = 0, segments: int = 1) -> Steps:
    """Give every rank the root's chunks: a chain, in which segment s follows segment s - 1.

    before   root: `segments` chunks
    after    every rank: the root's chunks
    cost     (n-2+k)(α + S/k·β), about Sβ for a long vector; each rank but the last sends S
    source   Thakur, Rabenseifner, Gropp 2005; van de Geijn 1994 (pipelined chain)
    """
    place, after, before = (rank - root) % size, (rank + 1) % size, (rank - 1) % size
    for slot in range(segments + 1) if size > 1 else ():
        receives = (Receive(before, (slot,)),) if place > 0 and slot < segments else ()
        sends = (Send(after, (slot - 1,)),) if place < size - 1 and slot > 0 else ()
        if sends or receives:
            yield Step(sends, receives)


def reduce(rank: int, size: int, *, root: int = 0, segments: int = 1) -> Steps:
    """Combine over all ranks into the root: the chain of `broadcast`, walked towards the root.

    before   every rank: `segments` chunks of any values
    after    root: all chunks are totals; the other ranks hold partial sums
    order    root + (root+1 + (root+2 + …))
    cost     (n-2+k)(α + S/k·β + S/k·γ); each rank but the root sends S
    source   as `broadcast`
    """
    place, after, before = (rank - root) % size, (rank + 1) % size, (rank - 1) % size
    for slot in range(segments + 1) if size > 1 else ():
        receives = (Receive(after, (slot,), combine=True),) if place < size - 1 and slot < segments else ()
        sends = (Send(before, (slot - 1,)),) if place > 0 and slot > 0 else ()
        if sends or receives:
            yield Step(sends, receives)
