"""Open memory that the ranks of a node share, together or not at all."""

from __future__ import annotations

import logging
import math
import operator
import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcpar.comm.agree import require_same
from hpcpar.comm.objects import gathered
from hpcpar.comm.shm_segment import LINE_NBYTES, ShmSegment, post_nbytes, segment_nbytes
from hpcpar.errors import OperationError, SharedMemoryError
from hpcpar.transport import peer_memory, shared_memory
from hpcpar.transport.buffers import bind, from_octets, is_torch_dtype, itemsize_of_dtype
from hpcpar.transport.shared_memory import Segment

if TYPE_CHECKING:
    from hpcpar.comm.communicator import Communicator

log = logging.getLogger("hpcpar")

LABEL = "shared memory"
"""Under which all that is done here counts."""


def open_segment(comm: Communicator, post: int | None = None) -> tuple[ShmSegment | None, bool, bool]:
    """Map the memory through which the ranks of each node exchange. Collective.

    post      bytes that a rank can send in a short call; None: as fits the number of ranks
    returns   this node's, None where the rank is alone on it; True if any node has one; and True if all ranks
              can read the private memory of those of their node
    """
    here = ranks_here(comm)
    most = max(Counter(comm.nodes).values())
    post = post_nbytes(most) if post is None else post
    if len(set(comm.nodes)) == comm.size:
        return None, False, False
    mapped, is_mapped = _map_together(comm, segment_nbytes(len(here), post))
    if not is_mapped:
        return None, False, False
    pids = _pids_to_read(comm, here)
    segment = None
    if mapped is not None:
        world_ranks = [comm.world_ranks[rank] for rank in here]
        segment = ShmSegment(mapped, here.index(comm.rank), here, post, pids, _fence(comm), world_ranks)
        segment.start_slots()
    comm.unchecked(LABEL).barrier(name="share_memory")
    return segment, True, bool(pids)


def allocate(comm: Communicator, segment: ShmSegment | None, shape: int | Sequence[int], dtype: Any) -> Any:
    """An array of zeros of this rank's own, which the others of its node read where it lies. Collective.

    What was allocated before, and is in use on no rank any more, is given back.
    """
    with comm.together("allocating shared memory"):
        shape = _shape(shape)
        nbytes = math.prod(shape) * itemsize_of_dtype(dtype)
    mine = -(-nbytes // LINE_NBYTES) * LINE_NBYTES, None if segment is None else segment.unused()
    told = gathered(comm, mine, LABEL, "allocate_shared")
    if all(unused is None for _, unused in told):
        return from_octets(None, shape, dtype)
    ranks = ranks_here(comm)
    here = [told[rank] for rank in ranks]
    begin = sum(size for size, _ in here[: ranks.index(comm.rank)])
    whole = sum(size for size, _ in here)
    mapped, _ = _map_together(comm, max(LINE_NBYTES, whole), (begin, begin + nbytes))
    if segment is None:
        return from_octets(None, shape, dtype)
    for number in set.intersection(*(unused or set() for _, unused in here)):
        segment.drop(number)
    if mapped is None:
        return from_octets(None, shape, dtype)
    own = mapped.part(begin, begin + nbytes)
    segment.add(mapped, own)
    return from_octets(own, shape, dtype)


def allocate_common(comm: Communicator, shape: int | Sequence[int], dtype: Any) -> Any:
    """An array of zeros that is the same memory on every rank. Collective.

    shape, dtype   the same on every rank
    errors   OperationError on every rank when they are not all on one node, MismatchError when they ask for
             different arrays, and SharedMemoryError when that has no memory that they can share
    """
    with comm.together("allocating memory that all ranks have in common"):
        shape = _shape(shape)
        nbytes = math.prod(shape) * itemsize_of_dtype(dtype)
        if comm.size > 1 and len(ranks_here(comm)) < comm.size:
            raise OperationError(
                f"memory that all {comm.size} ranks of {comm.name} have in common was asked for, but they "
                f"are on {len(set(comm.nodes))} nodes; ask for it among the ranks of one node"
            )
    require_same(comm, f"allocate_common({shape}, {dtype if is_torch_dtype(dtype) else np.dtype(dtype)})")
    if comm.size == 1:
        return from_octets(None, shape, dtype)
    segment, _ = _map_together(comm, max(LINE_NBYTES, nbytes))
    if segment is None:
        raise SharedMemoryError(
            f"rank {comm.rank}: {nbytes} bytes that all {comm.size} ranks of {comm.name} have in common are "
            f"not to be had; the warning before says why. Do without (shared_parameters=False)"
        )
    return from_octets(segment.part(0, nbytes), shape, dtype)


def release(comm: Communicator, segment: ShmSegment | None, array: Any) -> None:
    """Give the memory of `allocate` back, once nobody holds an array in it. Collective."""
    with comm.together("giving shared memory back"):
        octets = bind(array, writable=False).host.octets
    number = None if segment is None else segment.array_number(octets)
    mine = segment is not None and octets.size, number
    told = gathered(comm, mine, LABEL, "free_shared")
    found = {number for counts, number in told if counts}  # an array of nothing lies nowhere
    if len(found) > 1:
        numbers = [number for _, number in told]
        raise OperationError(
            f"free_shared got arrays of different allocations: number {numbers} by rank; every rank must "
            f"pass its own array of the same allocate_shared"
        )
    for number in found:
        if segment is not None and number is not None:
            segment.drop(number)


def _shape(shape: int | Sequence[int]) -> tuple[int, ...]:
    """A shape as a tuple; OperationError where it is none."""
    try:
        lengths = tuple(map(operator.index, shape if isinstance(shape, Iterable) else (shape,)))
    except TypeError:
        lengths = (-1,)
    if min(lengths, default=0) < 0:
        raise OperationError(f"memory of shape {shape!r} was asked for: give whole numbers, 0 or more")
    return lengths


def _fence(comm: Communicator) -> Callable[[], None] | None:
    """Fence between this rank's accesses to the memory; None on processors that need none."""
    return None if shared_memory.keeps_order() else comm._transport.memory_fence()


def ranks_here(comm: Communicator) -> list[int]:
    """The ranks of this rank's node."""
    return [rank for rank, node in enumerate(comm.nodes) if node == comm.nodes[comm.rank]]


def _map_together(
    comm: Communicator, nbytes: int, own: tuple[int, int] | None = None
) -> tuple[Segment | None, bool]:
    """The first rank of each node makes the memory, its others map it, and the name goes. Collective.

    own       (start, stop) of the bytes that this rank writes to; None: all
    returns   None for a rank that is alone on its node; and whether all went well. If it did not on one
              node, it did on none, and there has been a warning
    """
    here = ranks_here(comm)
    path, segment, problem = "", None, shared_memory.hindrance() if len(here) > 1 else None
    if comm.rank == here[0] and len(here) > 1 and problem is None:
        try:
            path, segment = shared_memory.create(nbytes, own=own)
        except SharedMemoryError as error:
            problem = str(error)
    made = gathered(comm, path, LABEL, "made shared memory")[here[0]]
    try:
        if comm.rank > here[0] and problem is None and made:
            try:
                segment = shared_memory.attach(made, own)
            except SharedMemoryError as error:
                problem = str(error)
        told = gathered(comm, (problem, _warned), LABEL, "mapped shared memory")
    finally:
        if path:
            shared_memory.remove(path)
    problems = [found for found, _ in told if found]
    if problems:
        _warn(problems[0], aloud=comm.rank == 0 and not any(warned for _, warned in told))
        return None, False
    return segment, True


def _pids_to_read(comm: Communicator, here: Sequence[int]) -> list[int]:
    """The processes of these ranks, if all of the job can read those of their node; else none. Collective."""
    peer_memory.allow()
    sample = np.frombuffer(os.urandom(16), dtype=np.uint8)
    mine = os.getpid(), sample.ctypes.data, sample.tobytes()
    samples = gathered(comm, mine, LABEL, "samples of memory")
    readable = all(peer_memory.can_read(*samples[rank]) for rank in here)
    all_read = all(gathered(comm, readable, LABEL, "readable memory"))
    return [samples[rank][0] for rank in here] if all_read else []


_warned = False


def _warn(problem: str, *, aloud: bool) -> None:
    """Once for all ranks that hear of it, as one reason holds for all communicators."""
    global _warned
    if aloud:
        log.warning(
            f"the ranks of a node exchange by MPI, as they cannot share memory: {problem}. "
            f"HPCPAR_SHARED_MEMORY=0 asks for that without a warning."
        )
    _warned = True
