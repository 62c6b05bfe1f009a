"""What data parallelism must send, by theory: the figures that the counted bytes are held to."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from hpcpar.comm.select import ANY, NATIVE
from hpcpar.data_parallel.buckets import Bucket
from hpcpar.data_parallel.replicas import TOLD_NBYTES
from hpcpar.errors import OperationError

if TYPE_CHECKING:
    import torch

    from hpcpar.comm import Communicator


def allreduce_nbytes(
    comm: Communicator,
    nbytes: int,
    *,
    algorithm: str | None = None,
    dtype: str = ANY,
    op: str = "sum",
    on_device: bool = False,
) -> int:
    """Bytes that all ranks of `comm` send in one all-reduce of S = `nbytes`, whatever the remainders.

    2(p-1)S                for ring, direct, both kinds of tree, anything on two ranks: no byte twice
    m·log₂m·S + 2(p-m)S    recursive doubling, m the largest power of two up to p
    p(p-1)S                one-shot: everybody's whole vector to everybody
    2(m-1)S + 2(p-m)S      Rabenseifner
    2(p-N)S + 2(N-1)S      hierarchical on N nodes: within them and between them, so 2(p-1)S again
    2(p-N)S + …            leaders: what recursive doubling sends among N ranks
    0                      native: what MPI sends by itself is not counted

    nbytes      as they travel: half of a float32 array's where it is compressed
    algorithm   None = the one that the communicator chooses for this many bytes
    dtype       element type that travels, where tables or MPI make a difference
    on_device   whether the array is on a GPU, for which other algorithms may be chosen
    """
    size = comm.size
    name = comm.algorithm_for("allreduce", nbytes, named=algorithm, dtype=dtype, op=op, on_device=on_device)
    members = 1 << (size.bit_length() - 1)
    folded = 2 * (size - members)
    match name:
        case "ring" | "direct" | "binomial" | "double_binary":
            return 2 * (size - 1) * nbytes
        case "hierarchical" | "hierarchical_halving" | "hierarchical_pipelined":
            return 2 * (size - 1) * nbytes
        case "recursive_doubling":
            return _doubled(size) * nbytes
        case "one_shot":
            return size * (size - 1) * nbytes
        case "rabenseifner":
            return (2 * (members - 1) + folded) * nbytes
        case "leaders":
            nodes = len(set(comm.nodes))
            return (2 * (size - nodes) + _doubled(nodes)) * nbytes
        case "native":
            return 0
    raise OperationError(f"no theory of the bytes of an allreduce by {name!r}")


def reduce_scatter_nbytes(
    comm: Communicator,
    nbytes: int,
    *,
    algorithm: str | None = None,
    dtype: str = ANY,
    op: str = "sum",
    on_device: bool = False,
) -> int:
    """Bytes that all ranks of `comm` send in one reduce-scatter of S = `nbytes` into equal pieces.

    (p-1)S                 by every algorithm of ours: what is not one's own goes out once
    (p-1)S + (p-m)S/p      by recursive halving, m the largest power of two up to p: its fold
    0                      native
    """
    size = comm.size
    name = comm.algorithm_for(
        "reduce_scatter", nbytes, named=algorithm, dtype=dtype, op=op, on_device=on_device
    )
    if name == NATIVE:
        return 0
    fold = size - (1 << (size.bit_length() - 1)) if name == "recursive_halving" else 0
    return (size - 1) * nbytes + fold * nbytes // size


def allgather_nbytes(
    comm: Communicator,
    nbytes: int,
    *,
    algorithm: str | None = None,
    dtype: str = ANY,
    on_device: bool = False,
) -> int:
    """Bytes that all ranks of `comm` send in one all-gather of equal shards, S = `nbytes` in all: (p-1)S."""
    name = comm.algorithm_for("allgather", nbytes, named=algorithm, dtype=dtype, on_device=on_device)
    return 0 if name == NATIVE else (comm.size - 1) * nbytes


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

    Per synchronization every bucket is all-reduced once, and a map with one bit for each parameter and 17
    bytes beside it; inner microbatches send nothing, so synchronizations are optimizer steps.
    """
    steps = expected_traffic(comm, tuple(buckets), stage=0, steps=synchronizations, algorithm=algorithm)
    return steps.get("allreduce", 0)


ByCollective = dict[str, int]
"""Bytes by the name of the collective."""

NORM_NBYTES = 8


def expected_traffic(
    comm: Communicator,
    buckets: Iterable[Bucket],
    *,
    stage: int,
    steps: int = 1,
    backwards: int = 1,
    norms: int = 0,
    loads: int = 0,
    algorithm: str | None = None,
    dtype: torch.dtype | None = None,
    gathered: bool = True,
) -> ByCollective:
    """Bytes that all ranks of `comm` together send for the gradients and parameters of so many steps.

    stage       0: every bucket is all-reduced once a step; 1: reduce-scattered once, and its parameters
                all-gathered; 2: reduce-scattered in each of `backwards`, parameters once; 3: as 2, but its
                parameters are gathered as `hpcpar.fully_shard` says, which is not counted here
    norms       gradient norms in a step, of one number each; stage 0 needs none
    loads       of states, in all: in stages 1 and 2 parameters are all-gathered then
    dtype       in which gradients are summed; None: their own
    gathered    parameters travel; no: all ranks have them in common

    In every stage a map with one bit for each parameter, and 17 bytes beside it, is all-reduced once a step.
    """
    held = list(buckets)
    parameters = sum(len(bucket.members) for bucket in held)
    if not parameters:
        return {}
    named = algorithm if stage == 0 else None
    map_nbytes = usage_map_nbytes(parameters)
    reduced = allreduce_nbytes(comm, map_nbytes, algorithm=named, dtype="uint8", op="or")
    total: ByCollective = {}
    for bucket in held:
        gradient = dtype_of(bucket) if dtype is None else str(dtype).removeprefix("torch.")
        nbytes = bucket.nbytes if dtype is None else bucket.numel * dtype.itemsize
        if stage == 0:
            reduced += allreduce_nbytes(
                comm, nbytes, algorithm=algorithm, dtype=gradient, op="average", on_device=is_on_gpu(bucket)
            )
            continue
        scattered = reduce_scatter_nbytes(
            comm, nbytes, algorithm=algorithm, dtype=gradient, op="average", on_device=is_on_gpu(bucket)
        )
        times = steps * (1 if stage == 1 else backwards)
        total["reduce_scatter"] = total.get("reduce_scatter", 0) + times * scattered
        if stage < 3 and gathered:
            shards = (steps + loads) * allgather_nbytes(
                comm, bucket.nbytes, dtype=dtype_of(bucket), on_device=is_on_gpu(bucket)
            )
            total["allgather"] = total.get("allgather", 0) + shards
    if stage:
        reduced += norms * allreduce_nbytes(comm, NORM_NBYTES, dtype="float64")
    return {"allreduce": steps * reduced, **total}


def broadcast_nbytes(comm: Communicator, buckets: Iterable[Bucket]) -> int:
    """Bytes that all ranks of `comm` together send to give everyone one rank's values in these buckets.

    Every value goes to every other rank once, by whatever algorithm of ours; by MPI's own none is counted.
    """
    return sum(
        (comm.size - 1) * bucket.nbytes
        for bucket in buckets
        if comm.algorithm_for("broadcast", bucket.nbytes, dtype=dtype_of(bucket), on_device=is_on_gpu(bucket))
        != NATIVE
    )


def dtype_of(bucket: Bucket) -> str:
    """Name of the element type in a bucket, whose kind is that type, or begins with it."""
    dtype = bucket.kind[0] if isinstance(bucket.kind, tuple) else bucket.kind
    return str(dtype).removeprefix("torch.")


def is_on_gpu(bucket: Bucket) -> bool:
    """Whether it lies there, as its kind says where that names a device."""
    kind = bucket.kind
    return isinstance(kind, tuple) and any(getattr(part, "type", None) == "cuda" for part in kind)


def usage_map_nbytes(parameters: int) -> int:
    """Bytes of a map with one bit per parameter, and of what ranks tell of writes to them beside it."""
    return math.ceil(parameters / 8) + TOLD_NBYTES
