"""Hierarchical: the ranks of a node work together first, so that each byte crosses between nodes once.

Nothing new is exchanged here: the flat algorithms are run among the ranks of each node and along the
lanes of `topology`, one rank of every node, on the chunks that these share.

    all-reduce                     node 0           node 1
    inside    reduce-scatter       0 ⇄ 1 ⇄ 2        3 ⇄ 4 ⇄ 5       a rank is left with its lane's part
    between   all-reduce           0 ────────────── 3               lane 0
                                       1 ────────────── 4           lane 1
                                           2 ────────────── 5       lane 2
    inside    all-gather           0 ⇄ 1 ⇄ 2        3 ⇄ 4 ⇄ 5

The `pipelined` ones cut the vector into segments, each a step behind the one before, so that the links
within the nodes and those between them are busy at the same time:

    step                0         1         2         3         4         5         6         two nodes
    segment 0           inside    between   between   inside
    segment 1                     inside    between   between   inside
    segment 2                               inside    between   between   inside

Any ranks may share a node, and nodes may differ in size; without `nodes` every rank has a node of
its own, which leaves only the flat algorithm between them. The costs are for N nodes of g ranks
each (n = Ng) and S bytes of the whole vector, with α and β within a node, α' and β' between nodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

from hpcpar.algorithms import direct, doubling, ring, tree
from hpcpar.algorithms.doubling import largest_power
from hpcpar.algorithms.step import Generator, Receive, Send, Step, Steps
from hpcpar.algorithms.topology import NodeMap, Nodes, map_nodes

Chunks = tuple[int, ...]
"""The chunks that one chunk of a flat algorithm stands for; may be empty."""

Grid = tuple[tuple[Chunks, ...], ...]
"""By lane, then by chunk of the flat algorithm that runs along the lane."""


def allreduce(rank: int, size: int, *, nodes: Nodes | None = None) -> Steps:
    """Combine over all ranks; give every rank the total. Between the nodes a ring for each lane.

    before   every rank: lanes × N chunks of any values
    after    every rank: all chunks are totals
    order    within the node r, r-1, r-2 …, then node after node as in the ring
    cost     inside 2(g-1)α + (g-1)/g·S(2β + γ); between 2(N-1)α' + (N-1)/N·S/g·(2β' + γ); each rank
             sends 2(N-1)/N·S/g between the nodes, each node 2(N-1)/N·S, the least possible
    source   Cho, Finkler, Serrano, Kung, Hunter 2019, "BlueConnect"; Träff, Hunold 2020,
             "Decomposing collectives for exploiting multi-lane communication"
    """
    node_map = map_nodes(size, nodes)
    yield from _allreduce(rank, node_map, ring.allreduce, pieces=node_map.nodes)


def halving_allreduce(rank: int, size: int, *, nodes: Nodes | None = None) -> Steps:
    """Combine over all ranks, with Rabenseifner's algorithm for each lane: fewer messages between many nodes.

    before   every rank: lanes × m chunks of any values, m the largest power of two of N
    after    every rank: all chunks are totals
    cost     inside as `allreduce`; between 2 log₂N·α' + (N-1)/N·S/g·(2β' + γ); N not a power of two:
             with m for N, + 2α' + S/g·(2β' + γ)
    source   Träff, Hunold 2020, with Rabenseifner 2004 along the lanes
    """
    node_map = map_nodes(size, nodes)
    yield from _allreduce(rank, node_map, doubling.rabenseifner, pieces=largest_power(node_map.nodes))


def leaders_allreduce(rank: int, size: int, *, nodes: Nodes | None = None) -> Steps:
    """Combine over all ranks; give every rank the total. One rank of each node speaks to other nodes.

    before   every rank: one chunk of any values
    after    every rank: the total
    order    by local rank as in (0 + 1) + (2 + 3), then by node alike
    cost     inside 2⌈log₂g⌉(α + Sβ) + ⌈log₂g⌉Sγ; between log₂N·(α' + Sβ' + Sγ), N not a power of two:
             log₂m, + 2α' + 2Sβ' + Sγ
    source   MPICH src/mpi/coll/allreduce/allreduce_intra_smp.c
    """
    node_map = map_nodes(size, nodes)
    yield from _inside(rank, node_map, tree.reduce, ((0,),))
    if node_map.local_rank(rank) == 0:
        leaders = tuple(members[0] for members in node_map.members)
        node = node_map.node_of[rank]
        yield from _among(doubling.allreduce(node, node_map.nodes), leaders, ((0,),))
    yield from _inside(rank, node_map, tree.broadcast, ((0,),))


def reduce_scatter(rank: int, size: int, *, nodes: Nodes | None = None) -> Steps:
    """Combine over all ranks; leave rank r the total of chunk r. Between the nodes a ring for each lane.

    before   every rank: n chunks of any values
    after    rank r: chunk r is the total, the other chunks hold partial sums
    order    as `allreduce`
    cost     inside (g-1)α + (g-1)/g·S(β + γ); between (N-1)α' + (N-1)/N·S/g·(β' + γ)
    source   as `allreduce`
    """
    yield from _reduce_scatter(rank, map_nodes(size, nodes), ring.reduce_scatter)


def halving_reduce_scatter(rank: int, size: int, *, nodes: Nodes | None = None) -> Steps:
    """Reduce-scatter with recursive halving for each lane: fewer messages between many nodes.

    before   every rank: n chunks of any values
    after    rank r: chunk r is the total, the other chunks hold partial sums
    cost     inside as `reduce_scatter`; between log₂N·α' + (N-1)/N·S/g·(β' + γ), and the fold where N
             is not a power of two, as in `doubling`
    source   Träff, Hunold 2020, with Thakur, Rabenseifner, Gropp 2005 along the lanes
    """
    yield from _reduce_scatter(rank, map_nodes(size, nodes), doubling.reduce_scatter)


def allgather(rank: int, size: int, *, nodes: Nodes | None = None) -> Steps:
    """Give every rank the chunks of all. Between the nodes a ring for each lane.

    before   rank r: chunk r
    after    every rank: all n chunks
    cost     between (N-1)(α' + S/n·β'); inside (g-1)(α + S/g·β)
    source   as `allreduce`
    """
    yield from _allgather(rank, map_nodes(size, nodes), ring.allgather)


def doubling_allgather(rank: int, size: int, *, nodes: Nodes | None = None) -> Steps:
    """All-gather with recursive doubling for each lane: fewer messages between many nodes.

    before   rank r: chunk r
    after    every rank: all n chunks
    cost     between log₂N·α' + (N-1)/N·S/g·β', and the fold where N is not a power of two, as in
             `doubling`; inside (g-1)(α + S/g·β)
    source   Träff, Hunold 2020, with Thakur, Rabenseifner, Gropp 2005 along the lanes
    """
    yield from _allgather(rank, map_nodes(size, nodes), doubling.allgather)


def pipelined_allreduce(rank: int, size: int, *, segments: int = 1, nodes: Nodes | None = None) -> Steps:
    """All-reduce in k segments, each one step behind the one before.

    before   every rank: k × lanes × N chunks of any values
    after    every rank: all chunks are totals
    order    as `allreduce`
    cost     for long vectors about that of the slower level alone, and 1/k of the other's: between the
             nodes 2k(N-1)α' + (N-1)/N·S/g·(2β' + γ); inside 2(g-1)α + (g-1)/g·S/k·(2β + γ)
    source   as `allreduce`; the pipeline as in Träff, Hunold 2020, section 2
    """
    node_map = map_nodes(size, nodes)
    grid = _grid(node_map, node_map.nodes)
    shares = _shares(rank, node_map, grid)
    inside = _inside(rank, node_map, direct.reduce_scatter, shares)
    between = _side_by_side(_along_lanes(rank, node_map, ring.allreduce, grid))
    inside_again = _inside(rank, node_map, direct.allgather, shares)
    walk = (*_at_least_one(inside), *between, *_at_least_one(inside_again))
    chunks = node_map.lanes * node_map.nodes
    numbers = [[(segment * chunks + chunk,) for chunk in range(chunks)] for segment in range(segments)]
    yield from _staggered(walk, size, numbers)


def pipelined_reduce_scatter(rank: int, size: int, *, segments: int = 1, nodes: Nodes | None = None) -> Steps:
    """Reduce-scatter in k segments, each one step behind the one before.

    before   every rank: n × k chunks of any values
    after    rank r: chunks rk to rk + k - 1 are totals, the other chunks hold partial sums
    order    as `allreduce`
    cost     for long vectors about: between the nodes k(N-1)α' + (N-1)/N·S/g·(β' + γ); inside
             (g-1)α + (g-1)/g·S/k·(β + γ)
    source   as `pipelined_allreduce`
    """
    node_map = map_nodes(size, nodes)
    grid = _grid_of_ranks(node_map)
    inside = _inside(rank, node_map, direct.reduce_scatter, _shares(rank, node_map, grid))
    between = _side_by_side(_along_lanes(rank, node_map, ring.reduce_scatter, grid))
    yield from _staggered((*_at_least_one(inside), *between), size, _parts_of_chunks(size, segments))


def pipelined_allgather(rank: int, size: int, *, segments: int = 1, nodes: Nodes | None = None) -> Steps:
    """All-gather in k segments, each one step behind the one before.

    before   rank r: chunks rk to rk + k - 1
    after    every rank: all n × k chunks
    cost     for long vectors about: between the nodes k(N-1)α' + (N-1)/N·S/g·β'; inside (g-1)(α + S/gk·β)
    source   as `pipelined_allreduce`
    """
    node_map = map_nodes(size, nodes)
    grid = _grid_of_ranks(node_map)
    between = _side_by_side(_along_lanes(rank, node_map, ring.allgather, grid))
    inside = _inside(rank, node_map, direct.allgather, _shares(rank, node_map, grid))
    yield from _staggered((*between, *_at_least_one(inside)), size, _parts_of_chunks(size, segments))


def broadcast(rank: int, size: int, *, root: int = 0, segments: int = 1, nodes: Nodes | None = None) -> Steps:
    """Give every rank the root's chunks: a part of them down each lane, as a chain in k segments.

    before   root: lanes × `segments` chunks
    after    every rank: the root's chunks
    cost     inside 2(g-1)(α + S/g·β); between (N-2+k)(α' + S/gk·β'); no node but the last sends more
             than S between the nodes
    source   Träff, Hunold 2020, with the pipelined chain of van de Geijn 1994 along the lanes
    """
    node_map = map_nodes(size, nodes)
    grid = _grid(node_map, segments)
    along_lanes = _between(
        rank, node_map, ring.broadcast, grid, root=node_map.node_of[root], segments=segments
    )
    yield from _broadcast(rank, node_map, root, grid, along_lanes)


def binomial_broadcast(rank: int, size: int, *, root: int = 0, nodes: Nodes | None = None) -> Steps:
    """Broadcast with a binomial tree for each lane: fewer messages one after another.

    before   root: one chunk for each lane
    after    every rank: the root's chunks
    cost     inside 2(g-1)(α + S/g·β); between ⌈log₂N⌉(α' + S/g·β')
    source   Träff, Hunold 2020, with Thakur, Rabenseifner, Gropp 2005 along the lanes
    """
    node_map = map_nodes(size, nodes)
    grid = _grid(node_map, 1)
    along_lanes = _between(rank, node_map, tree.broadcast, grid, root=node_map.node_of[root])
    yield from _broadcast(rank, node_map, root, grid, along_lanes)


def leaders_broadcast(rank: int, size: int, *, root: int = 0, nodes: Nodes | None = None) -> Steps:
    """Give every rank the root's vector: a binomial tree of the root and one rank of each other node,
    then one in every node.

    before   root: one chunk
    after    every rank: the root's chunk
    cost     between ⌈log₂N⌉(α' + Sβ'); inside ⌈log₂g⌉(α + Sβ)
    source   MPICH src/mpi/coll/bcast/bcast_intra_smp.c
    """
    node_map = map_nodes(size, nodes)
    home = node_map.node_of[root]
    leaders = tuple(root if node == home else members[0] for node, members in enumerate(node_map.members))
    node = node_map.node_of[rank]
    if rank == leaders[node]:
        yield from _among(tree.broadcast(node, node_map.nodes, root=home), leaders, ((0,),))
    yield from _inside(rank, node_map, tree.broadcast, ((0,),), root=node_map.local_rank(leaders[node]))


def _allreduce(rank: int, node_map: NodeMap, flat: Generator, *, pieces: int) -> Steps:
    grid = _grid(node_map, pieces)
    shares = _shares(rank, node_map, grid)
    yield from _inside(rank, node_map, direct.reduce_scatter, shares)
    yield from _between(rank, node_map, flat, grid)
    yield from _inside(rank, node_map, direct.allgather, shares)


def _reduce_scatter(rank: int, node_map: NodeMap, flat: Generator) -> Steps:
    grid = _grid_of_ranks(node_map)
    yield from _inside(rank, node_map, direct.reduce_scatter, _shares(rank, node_map, grid))
    yield from _between(rank, node_map, flat, grid)


def _allgather(rank: int, node_map: NodeMap, flat: Generator) -> Steps:
    grid = _grid_of_ranks(node_map)
    yield from _between(rank, node_map, flat, grid)
    yield from _inside(rank, node_map, direct.allgather, _shares(rank, node_map, grid))


def _broadcast(rank: int, node_map: NodeMap, root: int, grid: Grid, along_lanes: Steps) -> Steps:
    """The root deals the lanes' parts out in its node; in the end each node brings them together."""
    shares = _shares(rank, node_map, grid)
    at_home = node_map.node_of[rank] == node_map.node_of[root]
    if at_home:
        yield from _inside(rank, node_map, direct.scatter, shares, root=node_map.local_rank(root))
    yield from along_lanes
    for step in _inside(rank, node_map, direct.allgather, shares):
        # The root has everything: it is sent nothing.
        sends = tuple(send for send in step.sends if send.to != root)
        yield Step(sends, () if rank == root else step.receives)


def _grid(node_map: NodeMap, pieces: int) -> Grid:
    """The data in one run of chunks for each lane, which the flat algorithm cuts into `pieces`."""
    return tuple(tuple((lane * pieces + piece,) for piece in range(pieces)) for lane in range(node_map.lanes))


def _grid_of_ranks(node_map: NodeMap) -> Grid:
    """One chunk for each rank: piece m of lane l is that of node m's local rank l, if it has one."""
    return tuple(
        tuple(members[lane : lane + 1] for members in node_map.members) for lane in range(node_map.lanes)
    )


def _shares(rank: int, node_map: NodeMap, grid: Grid) -> tuple[Chunks, ...]:
    """For each local rank of this rank's node, the chunks of all lanes that it serves."""
    return tuple(
        tuple(chunk for lane in node_map.lanes_of(neighbour) for chunks in grid[lane] for chunk in chunks)
        for neighbour in node_map.neighbours(rank)
    )


def _inside(rank: int, node_map: NodeMap, flat: Generator, chunks: Sequence[Chunks], **options: int) -> Steps:
    """A flat algorithm among the ranks of this rank's node."""
    neighbours = node_map.neighbours(rank)
    yield from _among(flat(node_map.local_rank(rank), len(neighbours), **options), neighbours, chunks)


def _between(rank: int, node_map: NodeMap, flat: Generator, grid: Grid, **options: int) -> Steps:
    """A flat algorithm among the nodes, along all lanes that this rank serves, abreast."""
    yield from _abreast(_along_lanes(rank, node_map, flat, grid, **options))


def _along_lanes(rank: int, node_map: NodeMap, flat: Generator, grid: Grid, **options: int) -> list[Steps]:
    """A flat algorithm among the nodes, for each lane that this rank serves."""
    node = node_map.node_of[rank]
    return [
        _renamed(flat(node, node_map.nodes, **options), node_map.lane(lane), grid[lane])
        for lane in node_map.lanes_of(rank)
    ]


def _among(steps: Steps, ranks: Sequence[int], chunks: Sequence[Chunks]) -> Steps:
    """Steps written for ranks 0, 1, 2 … and chunks 0, 1, 2 …, taken by these instead."""
    yield from _abreast([_renamed(steps, ranks, chunks)])


def _renamed(steps: Steps, ranks: Sequence[int], chunks: Sequence[Chunks]) -> Steps:
    def named(before: Chunks) -> Chunks:
        return tuple(chunk for one in before for chunk in chunks[one])

    for step in steps:
        yield Step(
            tuple(Send(ranks[send.to], named(send.chunks)) for send in step.sends),
            tuple(Receive(ranks[r.source], named(r.chunks), combine=r.combine) for r in step.receives),
            own_turn=step.own_turn,
        )


def _abreast(lanes: Iterable[Steps]) -> Steps:
    """Run lanes side by side, without the steps that do nothing."""
    for step in _side_by_side(lanes):
        if step.sends or step.receives:
            yield step


def _side_by_side(lanes: Iterable[Steps]) -> Steps:
    """Merge step k of all lanes: one message between two ranks, and none without chunks.

    Both ends merge alike: a rank has the same position in all its lanes, so messages that share a step
    here share one at the other end as well.
    """
    for steps in zip(*lanes, strict=True):
        sent: dict[int, Chunks] = {}
        received: dict[tuple[int, bool], Chunks] = {}
        for step in steps:
            for send in step.sends:
                sent[send.to] = sent.get(send.to, ()) + send.chunks
            for receive in step.receives:
                end = (receive.source, receive.combine)
                received[end] = received.get(end, ()) + receive.chunks
        sends = tuple(Send(to, chunks) for to, chunks in sent.items() if chunks)
        receives = tuple(
            Receive(source, chunks, combine=combine)
            for (source, combine), chunks in received.items()
            if chunks
        )
        # The same for all lanes: it follows from the nodes' numbers, and the lanes' partners share a node.
        yield Step(sends, receives, own_turn=steps[0].own_turn)


def _at_least_one(steps: Steps) -> tuple[Step, ...]:
    """Keep a rank that is alone on its node in step with the others by an empty step."""
    return tuple(steps) or (Step(),)


def _parts_of_chunks(size: int, segments: int) -> list[list[Chunks]]:
    """Segment s is the s-th part of every rank's chunk."""
    return [[(chunk * segments + segment,) for chunk in range(size)] for segment in range(segments)]


def _staggered(walk: Sequence[Step], size: int, numbers: Sequence[Sequence[Chunks]]) -> Steps:
    """Walk all segments, each one step behind the one before.

    All ranks walk in equally many steps, so both ends of a step have the same segments under way, and
    list their messages in the same order.

    numbers   by segment, then by chunk of the walk: the chunk that it is
    """
    for slot in range(len(walk) + len(numbers) - 1):
        # The segment that is furthest goes first.
        under_way = range(max(0, slot - len(walk) + 1), min(slot + 1, len(numbers)))
        steps = [
            step
            for segment in under_way
            for step in _renamed(iter((walk[slot - segment],)), range(size), numbers[segment])
        ]
        sends = tuple(chain.from_iterable(step.sends for step in steps))
        receives = tuple(chain.from_iterable(step.receives for step in steps))
        if sends or receives:  # own_turn stays 0: a ring and a direct exchange combine into their own value
            yield Step(sends, receives)
