"""Direct: all pairs speak at once, in one step, or two for an all-reduce. Best for a few ranks.

Messages are listed by distance, so that at no time two ranks send to the same third one. n ranks,
S bytes of the whole vector; the costs count one port for each rank, through which its messages
go one after another.
"""

from __future__ import annotations

from hpcpar.algorithms.step import Copy, Receive, Send, Step, Steps


def reduce_scatter(rank: int, size: int) -> Steps:
    """Combine over all ranks; leave rank r the total of chunk r.

    before   every rank: `size` chunks of any values
    after    rank r: chunk r is the total, the other chunks are as they were
    order    r, r-1, r-2 …
    cost     (n-1)α + (n-1)/n·S(β + γ)
    source   Chan, Heimlich, Purkayastha, van de Geijn 2007, section 5
    """
    if size > 1:
        yield Step(
            tuple(Send(to, (to,)) for to in _to(rank, size)),
            tuple(Receive(source, (rank,), combine=True) for source in _from(rank, size)),
        )


def allgather(rank: int, size: int) -> Steps:
    """Give every rank the chunks of all.

    before   rank r: chunk r
    after    every rank: all `size` chunks
    cost     (n-1)α + (n-1)/n·Sβ
    source   Chan, Heimlich, Purkayastha, van de Geijn 2007, section 5
    """
    if size > 1:
        yield Step(
            tuple(Send(to, (rank,)) for to in _to(rank, size)),
            tuple(Receive(source, (source,)) for source in _from(rank, size)),
        )


def allreduce(rank: int, size: int) -> Steps:
    """Combine over all ranks; give every rank the total, in two steps ("two-shot").

    Each chunk is summed once, so all ranks hold the same bits.

    before   every rank: `size` chunks of any values
    after    every rank: all chunks are totals
    cost     2(n-1)α + 2(n-1)/n·Sβ + (n-1)/n·Sγ
    source   Chan, Heimlich, Purkayastha, van de Geijn 2007; TensorRT-LLM's two-shot all-reduce
    """
    yield from reduce_scatter(rank, size)
    yield from allgather(rank, size)


def one_shot(rank: int, size: int) -> Steps:
    """Combine over all ranks; give every rank the total, in one step: each sums all the vectors by itself.

    before   every rank: one chunk of any values
    after    every rank: the total
    order    0, 1, 2 … on every rank, so all hold the same bits
    cost     (n-1)(α + Sβ + Sγ)
    source   TensorRT-LLM's one-shot all-reduce
    """
    if size > 1:
        sources = (source for source in range(size) if source != rank)
        yield Step(
            tuple(Send(to, (0,)) for to in _to(rank, size)),
            tuple(Receive(source, (0,), combine=True) for source in sources),
            own_turn=rank,
        )


def broadcast(rank: int, size: int, *, root: int = 0) -> Steps:
    """Give every rank the root's vector, straight from the root.

    before   root: one chunk
    after    every rank: the root's chunk
    cost     (n-1)(α + Sβ)
    source   MPI's definition of broadcast, MPI-4.1 section 6.4
    """
    if rank != root:
        yield Step(receives=(Receive(root, (0,)),))
    elif size > 1:
        yield Step(sends=tuple(Send(to, (0,)) for to in _to(root, size)))


def reduce(rank: int, size: int, *, root: int = 0) -> Steps:
    """Combine over all ranks into the root, which hears from all at once.

    before   every rank: one chunk of any values
    after    root: the total; the other ranks' chunks are as they were
    order    root, root+1, root+2 …
    cost     (n-1)(α + Sβ + Sγ)
    source   MPI's definition of reduce, MPI-4.1 section 6.9.1
    """
    if rank != root:
        yield Step(sends=(Send(root, (0,)),))
    elif size > 1:
        yield Step(receives=tuple(Receive(source, (0,), combine=True) for source in _to(root, size)))


def gather(rank: int, size: int, *, root: int = 0) -> Steps:
    """Bring the chunks of all ranks to the root.

    before   rank r: chunk r
    after    root: all `size` chunks
    cost     (n-1)α + (n-1)/n·Sβ
    source   MPI's definition of gather, MPI-4.1 section 6.5
    """
    if rank != root:
        yield Step(sends=(Send(root, (rank,)),))
    elif size > 1:
        yield Step(receives=tuple(Receive(source, (source,)) for source in _to(root, size)))


def scatter(rank: int, size: int, *, root: int = 0) -> Steps:
    """Deal the root's chunks out.

    before   root: all `size` chunks
    after    rank r: chunk r
    cost     (n-1)α + (n-1)/n·Sβ
    source   MPI's definition of scatter, MPI-4.1 section 6.6
    """
    if rank != root:
        yield Step(receives=(Receive(root, (rank,)),))
    elif size > 1:
        yield Step(sends=tuple(Send(to, (to,)) for to in _to(root, size)))


def alltoall(rank: int, size: int) -> Steps:
    """Give every rank its chunk of everybody's input.

    before   every rank: input chunk d is for rank d
    after    every rank: output chunk s came from rank s
    cost     (n-1)α + (n-1)/n·Sβ
    source   MPI's definition of all-to-all, MPI-4.1 section 6.8
    """
    yield Step(
        tuple(Send(to, (to,), "input") for to in _to(rank, size)),
        tuple(Receive(source, (source,), "output") for source in _from(rank, size)),
        (Copy((rank,), "input", (rank,), "output"),),
    )


def _to(rank: int, size: int) -> tuple[int, ...]:
    """All other ranks, the next one first."""
    return tuple((rank + distance) % size for distance in range(1, size))


def _from(rank: int, size: int) -> tuple[int, ...]:
    """All other ranks, the previous one first: those whose `_to` names this rank at distance 1, 2, 3 …"""
    return _to(rank, size)[::-1]
