"""All collective algorithms by collective and name, with what an executor has to know about each.

`find("allreduce", "ring").schedule(rank=0, size=4)` is the list of steps of rank 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from hpcpar.algorithms import bills, direct, dissemination, double_tree, doubling, exchange, ring, tree
from hpcpar.algorithms.bills import Bill
from hpcpar.algorithms.powers import largest_power
from hpcpar.algorithms.step import Generator, Step
from hpcpar.errors import OperationError


@dataclass(frozen=True)
class Algorithm:
    """One way to do one collective.

    steps        the generator: `(rank, size)`, with `root=` if rooted, with `segments=` if segmented
    chunks       (size, segments) -> chunks that the data space (of an all-to-all: the input) is cut into
    bill         (size, segments) -> what the closed form of the docstring multiplies α, Sβ and Sγ by
    uneven       chunks may have any sizes (counts given by the caller), also zero
    work_chunks  size -> chunks of the work space, each as large as an input chunk
    estimated    the bill is not exact for every size; all others are, on a uniform network
    """

    collective: str
    name: str
    steps: Generator
    chunks: Callable[[int, int], int]
    bill: Callable[[int, int], Bill]
    rooted: bool = False
    segmented: bool = False
    uneven: bool = True
    work_chunks: Callable[[int], int] = lambda size: 0
    estimated: bool = False

    def generate(self, rank: int, size: int, *, root: int = 0, segments: int = 1) -> tuple[Step, ...]:
        """The steps of one rank; `root` and `segments` are ignored by algorithms that have none."""
        if size < 1 or not 0 <= rank < size or not 0 <= root < size or segments < 1:
            raise OperationError(
                f"{self.collective} {self.name}: asked for rank {rank} of {size} with root {root} and "
                f"{segments} segments; need 0 <= rank < size, 0 <= root < size and segments >= 1"
            )
        options = {"root": root} if self.rooted else {}
        if self.segmented:
            options["segments"] = segments
        return tuple(self.steps(rank, size, **options))

    def schedule(self, rank: int, size: int, *, root: int = 0, segments: int = 1) -> tuple[Step, ...]:
        """As `generate`, remembered: the same call gives the same tuple."""
        return _remembered(self, rank, size, root, segments)

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
def _remembered(algorithm: Algorithm, rank: int, size: int, root: int, segments: int) -> tuple[Step, ...]:
    return algorithm.generate(rank, size, root=root, segments=segments)


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


_ALL = (
    Algorithm("allreduce", "ring", ring.allreduce, _per_rank, bills.every_chunk_twice),
    Algorithm("allreduce", "binomial", tree.allreduce, _one, bills.rounds_of_vectors_twice),
    Algorithm(
        "allreduce",
        "double_binary",
        double_tree.allreduce,
        _per_segment_and_tree,
        bills.double_binary,
        segmented=True,
        estimated=True,
    ),
    Algorithm(
        "allreduce", "recursive_doubling", doubling.allreduce, _one, bills.recursive_doubling_allreduce
    ),
    Algorithm("allreduce", "rabenseifner", doubling.rabenseifner, _per_member, bills.rabenseifner),
    Algorithm("allreduce", "direct", direct.allreduce, _per_rank, bills.every_chunk_twice),
    Algorithm("reduce_scatter", "ring", ring.reduce_scatter, _per_rank, bills.every_chunk_combined),
    Algorithm(
        "reduce_scatter", "recursive_halving", doubling.reduce_scatter, _per_rank, bills.recursive_halving
    ),
    Algorithm("reduce_scatter", "direct", direct.reduce_scatter, _per_rank, bills.every_chunk_combined),
    Algorithm("allgather", "ring", ring.allgather, _per_rank, bills.every_chunk),
    Algorithm(
        "allgather", "recursive_doubling", doubling.allgather, _per_rank, bills.recursive_doubling_allgather
    ),
    Algorithm("allgather", "bruck", exchange.bruck_allgather, _per_rank, bills.rounds_of_chunks),
    Algorithm("allgather", "direct", direct.allgather, _per_rank, bills.every_chunk),
    Algorithm("broadcast", "binomial", tree.broadcast, _one, bills.rounds_of_vectors, rooted=True),
    Algorithm("broadcast", "ring", ring.broadcast, _per_segment, bills.chain, rooted=True, segmented=True),
    Algorithm("broadcast", "direct", direct.broadcast, _one, bills.every_vector, rooted=True),
    Algorithm("reduce", "binomial", tree.reduce, _one, bills.rounds_of_vectors_combined, rooted=True),
    Algorithm("reduce", "ring", ring.reduce, _per_segment, bills.chain_combined, rooted=True, segmented=True),
    Algorithm("reduce", "direct", direct.reduce, _one, bills.every_vector_combined, rooted=True),
    Algorithm("gather", "binomial", tree.gather, _per_rank, bills.rounds_of_chunks, rooted=True),
    Algorithm("gather", "direct", direct.gather, _per_rank, bills.every_chunk, rooted=True),
    Algorithm("scatter", "binomial", tree.scatter, _per_rank, bills.rounds_of_chunks, rooted=True),
    Algorithm("scatter", "direct", direct.scatter, _per_rank, bills.every_chunk, rooted=True),
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
    Algorithm("alltoall", "direct", direct.alltoall, _per_rank, bills.every_chunk),
    Algorithm("barrier", "dissemination", dissemination.barrier, _none, bills.rounds_of_nothing),
)

ALGORITHMS: dict[str, dict[str, Algorithm]] = {}
for _algorithm in _ALL:
    ALGORITHMS.setdefault(_algorithm.collective, {})[_algorithm.name] = _algorithm
