"""Every algorithm of every collective, by name: `find("allreduce", "ring").schedule(rank=0, size=4)`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

from hpcpar.algorithms import alltoall, cost, direct, double_tree, doubling, hierarchical, ring, tree
from hpcpar.algorithms.cost import Cost, CostForm, OnNodes, TwoLevelCost
from hpcpar.algorithms.doubling import largest_power
from hpcpar.algorithms.step import Generator, Step
from hpcpar.algorithms.topology import Nodes, map_nodes
from hpcpar.errors import OperationError, did_you_mean

CHUNKS: dict[str, Callable[[int, int, Nodes | None], int]] = {
    "0": lambda n, k, nodes: 0,
    "1": lambda n, k, nodes: 1,
    "n": lambda n, k, nodes: n,
    "m": lambda n, k, nodes: largest_power(n),
    "k": lambda n, k, nodes: k,
    "2k": lambda n, k, nodes: 2 * k,
    "nk": lambda n, k, nodes: n * k,
    "l": lambda n, k, nodes: map_nodes(n, nodes).lanes,
    "lk": lambda n, k, nodes: map_nodes(n, nodes).lanes * k,
    "lN": lambda n, k, nodes: map_nodes(n, nodes).lanes * map_nodes(n, nodes).nodes,
    "lM": lambda n, k, nodes: map_nodes(n, nodes).lanes * largest_power(map_nodes(n, nodes).nodes),
    "lNk": lambda n, k, nodes: map_nodes(n, nodes).lanes * map_nodes(n, nodes).nodes * k,
}
"""Chunks that the vector is cut into, for n ranks, k segments, N nodes and l lanes; m and M are the largest
powers of two that are at most n and N."""


@dataclass(frozen=True)
class Algorithm:
    """One algorithm of one collective.

    steps        the generator: `(rank, size)`, and `root=`, `segments=`, `nodes=` where it has these
    cut          number of chunks of the data space (of an all-to-all: the input), a key of CHUNKS
    cost         (size, segments) -> the closed form on a uniform network, each rank on a node of its own
    on_nodes     closed form on a network of nodes, from the cost; None: every message goes at the
                 pace of the links between the nodes, which are not faster than those within
    uneven       chunks may have any sizes (counts given by the caller), also zero
    work_chunks  size -> chunks of the work space, each as large as an input chunk
    estimated    the closed form is not exact for every size; all others are
    ordered      a rank combines the values of all others in rank order, so it needs all of them in memory
                 at once, except where it reads them in place
    """

    name: str
    steps: Generator
    cut: str
    cost: CostForm
    on_nodes: OnNodes | None = None
    uneven: bool = True
    work_chunks: Callable[[int], int] = lambda size: 0
    estimated: bool = False
    ordered: bool = False
    collective: str = ""

    @property
    def rooted(self) -> bool:
        """True if one rank is the root."""
        return "root" in self._options

    @property
    def segmented(self) -> bool:
        """True if the algorithm is pipelined."""
        return "segments" in self._options

    @property
    def placed(self) -> bool:
        """True if the steps depend on which ranks share a node."""
        return "nodes" in self._options

    @property
    def _options(self) -> dict[str, object]:
        return getattr(self.steps, "__kwdefaults__", None) or {}

    def chunks(self, size: int, segments: int = 1, nodes: Nodes | None = None) -> int:
        """The number of chunks that the data space (of an all-to-all: the input) is cut into."""
        return CHUNKS[self.cut](size, segments, nodes)

    def generate(
        self, rank: int, size: int, *, root: int = 0, segments: int = 1, nodes: Nodes | None = None
    ) -> tuple[Step, ...]:
        """The steps of one rank; `root`, `segments`, `nodes` are ignored by algorithms that have none.

        nodes   a number for each rank, equal for the ranks of one node; None: a node for each rank
        """
        if size < 1 or not 0 <= rank < size or not 0 <= root < size or segments < 1:
            raise OperationError(
                f"{self.collective} {self.name}: asked for rank {rank} of {size} with root {root} and "
                f"{segments} segments; need 0 <= rank < size, 0 <= root < size and segments >= 1"
            )
        given: dict[str, object] = {"root": root, "segments": segments, "nodes": nodes}
        return tuple(self.steps(rank, size, **{name: given[name] for name in self._options}))

    def schedule(
        self, rank: int, size: int, *, root: int = 0, segments: int = 1, nodes: Nodes | None = None
    ) -> tuple[Step, ...]:
        """Generate the steps, or take them from a cache: equal arguments give the same tuple."""
        return _cached(self, rank, size, root, segments, nodes if self.placed else None)

    def schedules(
        self, size: int, *, root: int = 0, segments: int = 1, nodes: Nodes | None = None
    ) -> list[tuple[Step, ...]]:
        """The schedule of every rank."""
        return [self.schedule(rank, size, root=root, segments=segments, nodes=nodes) for rank in range(size)]

    def cost_on_nodes(self, nodes: int, per_node: int, segments: int = 1) -> TwoLevelCost:
        """The closed form on nodes of `per_node` consecutive ranks each, by kind of link."""
        size, nothing = nodes * per_node, Cost(0)
        if size == 1:
            return TwoLevelCost(nothing, nothing)
        if self.on_nodes is not None and (self.placed or (nodes > 1 and per_node > 1)):
            return self.on_nodes(self.cost, nodes, per_node, segments)
        whole = self.cost(size, segments)
        return TwoLevelCost(whole, nothing) if nodes == 1 else TwoLevelCost(nothing, whole)


@lru_cache(maxsize=1024)
def _cached(
    algorithm: Algorithm, rank: int, size: int, root: int, segments: int, nodes: Nodes | None
) -> tuple[Step, ...]:
    return algorithm.generate(rank, size, root=root, segments=segments, nodes=nodes)


def require_collective(collective: str) -> None:
    """Refuse an unknown collective with a list of those that exist."""
    if collective not in ALGORITHMS:
        raise OperationError(f"no collective {collective!r}; there are {', '.join(ALGORITHMS)}")


def find(collective: str, name: str) -> Algorithm:
    """Look an algorithm up; OperationError with the known names if there is none of this name."""
    require_collective(collective)
    if name not in ALGORITHMS[collective]:
        known = ", ".join(ALGORITHMS[collective])
        hint = did_you_mean(name, ALGORITHMS[collective])
        raise OperationError(f"no algorithm {name!r} for {collective}; {hint}there are {known}")
    return ALGORITHMS[collective][name]


# fmt: off
_TABLE = {
    # name, steps, chunks, cost, cost on nodes
    "allreduce": (
        Algorithm("ring", ring.allreduce, "n", cost.every_chunk_twice),
        Algorithm("binomial", tree.allreduce, "1", cost.rounds_of_vectors_twice, cost.tree_of_nodes),
        Algorithm("double_binary", double_tree.allreduce, "2k", cost.double_binary,
                  cost.double_binary_of_nodes, estimated=True),
        Algorithm("recursive_doubling", doubling.allreduce, "1", cost.recursive_doubling_allreduce,
                  cost.exchange_of_nodes),
        Algorithm("rabenseifner", doubling.rabenseifner, "m", cost.rabenseifner,
                  cost.chunk_exchange_of_nodes),
        Algorithm("direct", direct.allreduce, "n", cost.every_chunk_twice, cost.one_port),
        Algorithm("one_shot", direct.one_shot, "1", cost.every_vector_combined, cost.one_port, ordered=True),
        Algorithm("hierarchical", hierarchical.allreduce, "lN", cost.every_chunk_twice,
                  cost.long_inside(cost.every_chunk_twice)),
        Algorithm("hierarchical_halving", hierarchical.halving_allreduce, "lM", cost.rabenseifner,
                  cost.long_inside(cost.every_chunk_twice)),
        Algorithm("hierarchical_pipelined", hierarchical.pipelined_allreduce, "lNk",
                  cost.in_segments(cost.every_chunk_twice), cost.overlapped(cost.every_chunk_twice),
                  estimated=True),
        Algorithm("leaders", hierarchical.leaders_allreduce, "1", cost.recursive_doubling_allreduce,
                  cost.whole_inside(cost.rounds_of_vectors_twice)),
    ),
    "reduce_scatter": (
        Algorithm("ring", ring.reduce_scatter, "n", cost.every_chunk_combined),
        Algorithm("recursive_halving", doubling.reduce_scatter, "n", cost.recursive_halving,
                  cost.chunk_exchange_of_nodes),
        Algorithm("direct", direct.reduce_scatter, "n", cost.every_chunk_combined, cost.one_port),
        Algorithm("hierarchical", hierarchical.reduce_scatter, "n", cost.every_chunk_combined,
                  cost.long_inside(cost.every_chunk_combined)),
        Algorithm("hierarchical_halving", hierarchical.halving_reduce_scatter, "n", cost.recursive_halving,
                  cost.long_inside(cost.every_chunk_combined)),
        Algorithm("hierarchical_pipelined", hierarchical.pipelined_reduce_scatter, "nk",
                  cost.in_segments(cost.every_chunk_combined), cost.overlapped(cost.every_chunk_combined),
                  estimated=True),
    ),
    "allgather": (
        Algorithm("ring", ring.allgather, "n", cost.every_chunk),
        Algorithm("recursive_doubling", doubling.allgather, "n", cost.recursive_doubling_allgather,
                  cost.chunk_exchange_of_nodes),
        Algorithm("bruck", alltoall.bruck_allgather, "n", cost.rounds_of_chunks),
        Algorithm("direct", direct.allgather, "n", cost.every_chunk, cost.one_port),
        Algorithm("hierarchical", hierarchical.allgather, "n", cost.every_chunk,
                  cost.long_inside(cost.every_chunk)),
        Algorithm("hierarchical_doubling", hierarchical.doubling_allgather, "n",
                  cost.recursive_doubling_allgather, cost.long_inside(cost.every_chunk)),
        Algorithm("hierarchical_pipelined", hierarchical.pipelined_allgather, "nk",
                  cost.in_segments(cost.every_chunk), cost.overlapped(cost.every_chunk), estimated=True),
    ),
    "broadcast": (
        Algorithm("binomial", tree.broadcast, "1", cost.rounds_of_vectors, cost.tree_of_nodes),
        Algorithm("ring", ring.broadcast, "k", cost.chain, cost.chain_of_nodes),
        Algorithm("direct", direct.broadcast, "1", cost.every_vector, cost.one_port),
        Algorithm("hierarchical", hierarchical.broadcast, "lk", cost.chain,
                  cost.long_inside(cost.scattered_and_gathered)),
        Algorithm("hierarchical_binomial", hierarchical.binomial_broadcast, "l", cost.rounds_of_vectors,
                  cost.long_inside(cost.scattered_and_gathered)),
        Algorithm("leaders", hierarchical.leaders_broadcast, "1", cost.rounds_of_vectors,
                  cost.whole_inside(cost.rounds_of_vectors)),
    ),
    "reduce": (
        Algorithm("binomial", tree.reduce, "1", cost.rounds_of_vectors_combined, cost.tree_of_nodes),
        Algorithm("ring", ring.reduce, "k", cost.chain_combined, cost.chain_of_nodes),
        Algorithm("direct", direct.reduce, "1", cost.every_vector_combined, cost.one_port),
    ),
    "gather": (
        Algorithm("binomial", tree.gather, "n", cost.rounds_of_chunks, cost.chunk_tree_of_nodes),
        Algorithm("direct", direct.gather, "n", cost.every_chunk, cost.one_port),
    ),
    "scatter": (
        Algorithm("binomial", tree.scatter, "n", cost.rounds_of_chunks, cost.chunk_tree_of_nodes),
        Algorithm("direct", direct.scatter, "n", cost.every_chunk, cost.one_port),
    ),
    "alltoall": (
        Algorithm("pairwise", alltoall.pairwise, "n", cost.every_chunk),
        Algorithm("bruck", alltoall.bruck, "n", cost.rounds_of_half, uneven=False,
                  work_chunks=lambda size: size + size // 2),
        Algorithm("direct", direct.alltoall, "n", cost.every_chunk, cost.one_port),
    ),
    "barrier": (
        Algorithm("dissemination", doubling.barrier, "0", cost.rounds_of_nothing),
    ),
}
# fmt: on

ALGORITHMS: dict[str, dict[str, Algorithm]] = {
    collective: {one.name: replace(one, collective=collective) for one in algorithms}
    for collective, algorithms in _TABLE.items()
}
