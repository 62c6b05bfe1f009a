"""What data parallelism must send, by theory: the figures that the counted bytes are held to."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from hpcpar.data_parallel.buckets import Bucket
from hpcpar.errors import OperationError

if TYPE_CHECKING:
    from hpcpar.comm import Communicator


def allreduce_nbytes(comm: Communicator, nbytes: int, *, algorithm: str | None = None) -> int:
    """Bytes that all ranks of `comm` send in one all-reduce of S = `nbytes`, whatever the remainders.

    2(p-1)S                for ring, direct, both kinds of tree, anything on two ranks: no byte twice
    m·log₂m·S + 2(p-m)S    recursive doubling, m the largest power of two up to p
    2(m-1)S + 2(p-m)S      Rabenseifner
    2(p-N)S + 2(N-1)S      hierarchical on N nodes: within them and between them, so 2(p-1)S again
    2(p-N)S + …            leaders: what recursive doubling sends among N ranks

    algorithm   None = the one that the communicator chooses for this many bytes
    """
    size = comm.size
    name = comm.algorithm_for("allreduce", nbytes, named=algorithm)
    members = 1 << (size.bit_length() - 1)
    folded = 2 * (size - members)
    match name:
        case "ring" | "direct" | "binomial" | "double_binary":
            return 2 * (size - 1) * nbytes
        case "hierarchical" | "hierarchical_halving" | "hierarchical_pipelined":
            return 2 * (size - 1) * nbytes
        case "recursive_doubling":
            return _doubled(size) * nbytes
        case "rabenseifner":
            return (2 * (members - 1) + folded) * nbytes
        case "leaders":
            nodes = len(set(comm.nodes))
            return (2 * (size - nodes) + _doubled(nodes)) * nbytes
    raise OperationError(f"no theory of the bytes of an allreduce by {name!r}")


def _doubled(size: int) -> int:
    """Vectors that all ranks send in a recursive doubling with its fold."""
    members = 1 << (size.bit_length() - 1)
    return members * (members.bit_length() - 1) + 2 * (size - members)


def expected_nbytes(
    comm: Communicator,
    buckets: Iterable[Bucket],
    *,
    synchronizations: int = 1,
    algorithm: str | None = None,
) -> int:
    """Bytes that all ranks of `comm` together send to average these buckets of gradients so many times.

    Per synchronization every bucket is all-reduced once, and a map with one bit for each parameter;
    inner microbatches send nothing, so synchronizations are optimizer steps.
    """
    held = list(buckets)
    parameters = sum(len(bucket.members) for bucket in held)
    if not parameters:
        return 0
    messages = [*(bucket.nbytes for bucket in held), usage_map_nbytes(parameters)]
    return synchronizations * sum(allreduce_nbytes(comm, nbytes, algorithm=algorithm) for nbytes in messages)


def usage_map_nbytes(parameters: int) -> int:
    """Bytes of a map with one bit per parameter."""
    return math.ceil(parameters / 8)
