"""All collective algorithms by collective and name, with what an executor has to know about each.

`find("allreduce", "ring").schedule(rank=0, size=4)` is the list of steps of rank 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from hpcpar.algorithms import (
    bills,
    direct,
    dissemination,
    double_tree,
    doubling,
    exchange,
    hierarchical,
    ring,
    tree,
)
from hpcpar.algorithms.bills import Bill, Form, Levels, LevelsForm
from hpcpar.algorithms.placement import Nodes, place
from hpcpar.algorithms.powers import largest_power
from hpcpar.algorithms.step import Generator, Step
from hpcpar.errors import OperationError


@dataclass(frozen=True)
class Algorithm:
    """One way to do one collective.

    steps        the generator: `(rank, size)`, with `root=` if rooted, with `segments=` if segmented,
                 with `nodes=` if placed
    cut          (size, segments), and nodes if placed -> what `chunks` answers
    bill         (size, segments) -> what the closed form of the docstring multiplies α, Sβ and Sγ by,
                 on a uniform network, each rank on a node of its own
    levels       (nodes, ranks per node, segments) -> the same on a network of nodes; None: the bill, at
                 the pace of the links between the nodes, which are not faster than those within
    uneven       chunks may have any sizes (counts given by the caller), also zero
    work_chunks  size -> chunks of the work space, each as large as an input chunk
    estimated    the bill is not exact for every size; all others are
    placed       the steps depend on which ranks share a node
    ordered      what is combined in a step is so in the order of the ranks, and has to be there first: of
                 every other rank, in memory of its own but where it is read in place
    """

    collective: str
    name: str
    steps: Generator
    cut: Callable[..., int]
    bill: Form
    levels: LevelsForm | None = None
    rooted: bool = False
    segmented: bool = False
    uneven: bool = True
    work_chunks: Callable[[int], int] = lambda size: 0
    estimated: bool = False
    placed: bool = False
    ordered: bool = False

    def chunks(self, size: int, segments: int = 1, nodes: Nodes | None = None) -> int:
        """How many chunks the data space (of an all-to-all: the input) is cut into."""
        return self.cut(size, segments, nodes) if self.placed else self.cut(size, segments)

    def generate(
        self, rank: int, size: int, *, root: int = 0, segments: int = 1, nodes: Nodes | None = None
    ) -> tuple[Step, ...]:
        """The steps of one rank; `root`, `segments`, `nodes` are ignored by algorithms that have none.

        nodes   for every rank a number that the ranks of its node share; None: a node for each rank
        """
        if size < 1 or not 0 <= rank < size or not 0 <= root < size or segments < 1:
            raise OperationError(
                f"{self.collective} {self.name}: asked for rank {rank} of {size} with root {root} and "
                f"{segments} segments; need 0 <= rank < size, 0 <= root < size and segments >= 1"
            )
        options: dict[str, int | Nodes | None] = {"root": root} if self.rooted else {}
        if self.segmented:
            options["segments"] = segments
        if self.placed:
            options["nodes"] = nodes
        return tuple(self.steps(rank, size, **options))

    def schedule(
        self, rank: int, size: int, *, root: int = 0, segments: int = 1, nodes: Nodes | None = None
    ) -> tuple[Step, ...]:
        """As `generate`, remembered: the same call gives the same tuple."""
        return _remembered(self, rank, size, root, segments, nodes if self.placed else None)

    def bill_on_nodes(self, nodes: int, per_node: int, segments: int = 1) -> Levels:
        """The closed form on nodes of `per_node` consecutive ranks each, by kind of link."""
        size, nothing = nodes * per_node, Bill(0)
        if size == 1:
            return Levels(nothing, nothing)
        if self.levels is not None and (self.placed or (nodes > 1 and per_node > 1)):
            return self.levels(nodes, per_node, segments)
        whole = self.bill(size, segments)
        return Levels(whole, nothing) if nodes == 1 else Levels(nothing, whole)

    def cost(
        self,
        size: int,
        nbytes: float,
        alpha_s: float,
        beta_s_per_byte: float,
        gamma_s_per_byte: float = 0.0,
        segments: int = 1,
    ) -> float:
        """Seconds for a vector of `nbytes` (the whole one, S in DESIGN) by the closed form."""
        if size == 1:
            return 0.0
        bill = self.bill(size, segments)
        per_byte = bill.sent * beta_s_per_byte + bill.combined * gamma_s_per_byte
        return bill.messages * alpha_s + nbytes * per_byte


@lru_cache(maxsize=1024)
def _remembered(
    algorithm: Algorithm, rank: int, size: int, root: int, segments: int, nodes: Nodes | None
) -> tuple[Step, ...]:
    return algorithm.generate(rank, size, root=root, segments=segments, nodes=nodes)


def find(collective: str, name: str) -> Algorithm:
    """The algorithm of that name; OperationError with a list of all there are if there is none."""
    if collective not in ALGORITHMS:
        raise OperationError(f"no collective {collective!r}; there are {', '.join(ALGORITHMS)}")
    if name not in ALGORITHMS[collective]:
        known = ", ".join(ALGORITHMS[collective])
        raise OperationError(f"no algorithm {name!r} for {collective}; there are {known}")
    return ALGORITHMS[collective][name]


# What the data is cut into, by number of ranks and of segments.


def _one(size: int, segments: int) -> int:
    return 1


def _per_rank(size: int, segments: int) -> int:
    return size


def _per_member(size: int, segments: int) -> int:
    return largest_power(size)


def _per_segment(size: int, segments: int) -> int:
    return segments


def _per_segment_and_tree(size: int, segments: int) -> int:
    return 2 * segments


def _none(size: int, segments: int) -> int:
    return 0


def _vector(size: int, segments: int, nodes: Nodes | None) -> int:
    return 1


def _per_owner(size: int, segments: int, nodes: Nodes | None) -> int:
    return size


def _per_owner_and_segment(size: int, segments: int, nodes: Nodes | None) -> int:
    return size * segments


def _per_segment_lane_and_node(size: int, segments: int, nodes: Nodes | None) -> int:
    return segments * _per_lane_and_node(size, segments, nodes)


def _per_lane_and_node(size: int, segments: int, nodes: Nodes | None) -> int:
    placement = place(size, nodes)
    return placement.lanes * placement.nodes


def _per_lane_and_member(size: int, segments: int, nodes: Nodes | None) -> int:
    placement = place(size, nodes)
    return placement.lanes * largest_power(placement.nodes)


def _per_lane_and_segment(size: int, segments: int, nodes: Nodes | None) -> int:
    return place(size, nodes).lanes * segments


def _per_lane(size: int, segments: int, nodes: Nodes | None) -> int:
    return place(size, nodes).lanes


_FLAT = (
    Algorithm("allreduce", "ring", ring.allreduce, _per_rank, bills.every_chunk_twice),
    Algorithm(
        "allreduce",
        "binomial",
        tree.allreduce,
        _one,
        bills.rounds_of_vectors_twice,
        bills.tree_of_nodes(bills.rounds_of_vectors_twice),
    ),
    Algorithm(
        "allreduce",
        "double_binary",
        double_tree.allreduce,
        _per_segment_and_tree,
        bills.double_binary,
        bills.double_binary_of_nodes,
        segmented=True,
        estimated=True,
    ),
    Algorithm(
        "allreduce",
        "recursive_doubling",
        doubling.allreduce,
        _one,
        bills.recursive_doubling_allreduce,
        bills.exchange_of_nodes(bills.recursive_doubling_allreduce),
    ),
    Algorithm(
        "allreduce",
        "rabenseifner",
        doubling.rabenseifner,
        _per_member,
        bills.rabenseifner,
        bills.chunk_exchange_of_nodes(bills.rabenseifner),
    ),
    Algorithm(
        "allreduce",
        "direct",
        direct.allreduce,
        _per_rank,
        bills.every_chunk_twice,
        bills.one_port(bills.every_chunk_twice),
    ),
    Algorithm(
        "allreduce",
        "one_shot",
        direct.one_shot,
        _one,
        bills.every_vector_combined,
        bills.one_port(bills.every_vector_combined),
        ordered=True,
    ),
    Algorithm("reduce_scatter", "ring", ring.reduce_scatter, _per_rank, bills.every_chunk_combined),
    Algorithm(
        "reduce_scatter",
        "recursive_halving",
        doubling.reduce_scatter,
        _per_rank,
        bills.recursive_halving,
        bills.chunk_exchange_of_nodes(bills.recursive_halving),
    ),
    Algorithm(
        "reduce_scatter",
        "direct",
        direct.reduce_scatter,
        _per_rank,
        bills.every_chunk_combined,
        bills.one_port(bills.every_chunk_combined),
    ),
    Algorithm("allgather", "ring", ring.allgather, _per_rank, bills.every_chunk),
    Algorithm(
        "allgather",
        "recursive_doubling",
        doubling.allgather,
        _per_rank,
        bills.recursive_doubling_allgather,
        bills.chunk_exchange_of_nodes(bills.recursive_doubling_allgather),
    ),
    Algorithm("allgather", "bruck", exchange.bruck_allgather, _per_rank, bills.rounds_of_chunks),
    Algorithm(
        "allgather",
        "direct",
        direct.allgather,
        _per_rank,
        bills.every_chunk,
        bills.one_port(bills.every_chunk),
    ),
    Algorithm(
        "broadcast",
        "binomial",
        tree.broadcast,
        _one,
        bills.rounds_of_vectors,
        bills.tree_of_nodes(bills.rounds_of_vectors),
        rooted=True,
    ),
    Algorithm(
        "broadcast",
        "ring",
        ring.broadcast,
        _per_segment,
        bills.chain,
        bills.chain_of_nodes(bills.chain),
        rooted=True,
        segmented=True,
    ),
    Algorithm(
        "broadcast",
        "direct",
        direct.broadcast,
        _one,
        bills.every_vector,
        bills.one_port(bills.every_vector),
        rooted=True,
    ),
    Algorithm(
        "reduce",
        "binomial",
        tree.reduce,
        _one,
        bills.rounds_of_vectors_combined,
        bills.tree_of_nodes(bills.rounds_of_vectors_combined),
        rooted=True,
    ),
    Algorithm(
        "reduce",
        "ring",
        ring.reduce,
        _per_segment,
        bills.chain_combined,
        bills.chain_of_nodes(bills.chain_combined),
        rooted=True,
        segmented=True,
    ),
    Algorithm(
        "reduce",
        "direct",
        direct.reduce,
        _one,
        bills.every_vector_combined,
        bills.one_port(bills.every_vector_combined),
        rooted=True,
    ),
    Algorithm(
        "gather",
        "binomial",
        tree.gather,
        _per_rank,
        bills.rounds_of_chunks,
        bills.chunk_tree_of_nodes(bills.rounds_of_chunks),
        rooted=True,
    ),
    Algorithm(
        "gather",
        "direct",
        direct.gather,
        _per_rank,
        bills.every_chunk,
        bills.one_port(bills.every_chunk),
        rooted=True,
    ),
    Algorithm(
        "scatter",
        "binomial",
        tree.scatter,
        _per_rank,
        bills.rounds_of_chunks,
        bills.chunk_tree_of_nodes(bills.rounds_of_chunks),
        rooted=True,
    ),
    Algorithm(
        "scatter",
        "direct",
        direct.scatter,
        _per_rank,
        bills.every_chunk,
        bills.one_port(bills.every_chunk),
        rooted=True,
    ),
    Algorithm("alltoall", "pairwise", exchange.pairwise, _per_rank, bills.every_chunk),
    Algorithm(
        "alltoall",
        "bruck",
        exchange.bruck,
        _per_rank,
        bills.rounds_of_half,
        uneven=False,
        work_chunks=lambda size: size + size // 2,
    ),
    Algorithm(
        "alltoall",
        "direct",
        direct.alltoall,
        _per_rank,
        bills.every_chunk,
        bills.one_port(bills.every_chunk),
    ),
    Algorithm("barrier", "dissemination", dissemination.barrier, _none, bills.rounds_of_nothing),
)

_HIERARCHICAL = (
    Algorithm(
        "allreduce",
        "hierarchical",
        hierarchical.allreduce,
        _per_lane_and_node,
        bills.every_chunk_twice,
        bills.long_inside(bills.every_chunk_twice, bills.every_chunk_twice),
        placed=True,
    ),
    Algorithm(
        "allreduce",
        "hierarchical_halving",
        hierarchical.halving_allreduce,
        _per_lane_and_member,
        bills.rabenseifner,
        bills.long_inside(bills.every_chunk_twice, bills.rabenseifner),
        placed=True,
    ),
    Algorithm(
        "allreduce",
        "hierarchical_pipelined",
        hierarchical.pipelined_allreduce,
        _per_segment_lane_and_node,
        bills.in_segments(bills.every_chunk_twice),
        bills.overlapped(bills.every_chunk_twice, bills.every_chunk_twice),
        segmented=True,
        estimated=True,
        placed=True,
    ),
    Algorithm(
        "allreduce",
        "leaders",
        hierarchical.leaders_allreduce,
        _vector,
        bills.recursive_doubling_allreduce,
        bills.inside_and_between(bills.rounds_of_vectors_twice, bills.recursive_doubling_allreduce),
        placed=True,
    ),
    Algorithm(
        "reduce_scatter",
        "hierarchical",
        hierarchical.reduce_scatter,
        _per_owner,
        bills.every_chunk_combined,
        bills.long_inside(bills.every_chunk_combined, bills.every_chunk_combined),
        placed=True,
    ),
    Algorithm(
        "reduce_scatter",
        "hierarchical_halving",
        hierarchical.halving_reduce_scatter,
        _per_owner,
        bills.recursive_halving,
        bills.long_inside(bills.every_chunk_combined, bills.recursive_halving),
        placed=True,
    ),
    Algorithm(
        "reduce_scatter",
        "hierarchical_pipelined",
        hierarchical.pipelined_reduce_scatter,
        _per_owner_and_segment,
        bills.in_segments(bills.every_chunk_combined),
        bills.overlapped(bills.every_chunk_combined, bills.every_chunk_combined),
        segmented=True,
        estimated=True,
        placed=True,
    ),
    Algorithm(
        "allgather",
        "hierarchical",
        hierarchical.allgather,
        _per_owner,
        bills.every_chunk,
        bills.long_inside(bills.every_chunk, bills.every_chunk),
        placed=True,
    ),
    Algorithm(
        "allgather",
        "hierarchical_doubling",
        hierarchical.doubling_allgather,
        _per_owner,
        bills.recursive_doubling_allgather,
        bills.long_inside(bills.every_chunk, bills.recursive_doubling_allgather),
        placed=True,
    ),
    Algorithm(
        "allgather",
        "hierarchical_pipelined",
        hierarchical.pipelined_allgather,
        _per_owner_and_segment,
        bills.in_segments(bills.every_chunk),
        bills.overlapped(bills.every_chunk, bills.every_chunk),
        segmented=True,
        estimated=True,
        placed=True,
    ),
    Algorithm(
        "broadcast",
        "hierarchical",
        hierarchical.broadcast,
        _per_lane_and_segment,
        bills.chain,
        bills.long_inside(bills.scattered_and_gathered, bills.chain),
        rooted=True,
        segmented=True,
        placed=True,
    ),
    Algorithm(
        "broadcast",
        "hierarchical_binomial",
        hierarchical.binomial_broadcast,
        _per_lane,
        bills.rounds_of_vectors,
        bills.long_inside(bills.scattered_and_gathered, bills.rounds_of_vectors),
        rooted=True,
        placed=True,
    ),
    Algorithm(
        "broadcast",
        "leaders",
        hierarchical.leaders_broadcast,
        _vector,
        bills.rounds_of_vectors,
        bills.inside_and_between(bills.rounds_of_vectors, bills.rounds_of_vectors),
        rooted=True,
        placed=True,
    ),
)

ALGORITHMS: dict[str, dict[str, Algorithm]] = {}
for _algorithm in _FLAT + _HIERARCHICAL:
    ALGORITHMS.setdefault(_algorithm.collective, {})[_algorithm.name] = _algorithm
