"""Open memory that the ranks of a node share, together or not at all."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcpar.comm.arena import ALIGNED, Arena, arena_nbytes, least_stage_nbytes, stage_nbytes
from hpcpar.errors import OperationError, SharedMemoryError
from hpcpar.transport import peer_memory, shared_memory
from hpcpar.transport.buffers import bind, from_octets, itemsize_of_dtype
from hpcpar.transport.shared_memory import Segment

if TYPE_CHECKING:
    from hpcpar.comm.communicator import Communicator

log = logging.getLogger("hpcpar")


def open_arena(comm: Communicator, stage: int | None = None) -> Arena | None:
    """Memory through which the ranks of this communicator exchange; None where it is not to be had.

    stage     bytes of a rank's stage in a lane; None: as fits the number of ranks
    returns   None as well where a node has one rank only, or ranks are on several nodes. Collective.
    """
    if comm.size == 1 or len(set(comm.nodes)) > 1:
        return None
    ranks = range(comm.size)
    stage = max(stage or stage_nbytes(comm.size), least_stage_nbytes(comm.size))
    segment = _map_together(comm, arena_nbytes(comm.size, stage))
    return None if segment is None else Arena(segment, comm.rank, ranks, stage, _pids_to_read(comm))


def _pids_to_read(comm: Communicator) -> list[int]:
    """The processes of the ranks, if each can read every other's memory; else none. Collective."""
    quiet = comm.unchecked("shared memory")
    peer_memory.allow()
    sample = np.frombuffer(os.urandom(16), dtype=np.uint8)
    mine = os.getpid(), sample.ctypes.data, sample.tobytes()
    all_samples = quiet.allgather_object(mine)
    readable = all(quiet.allgather_object(all(peer_memory.can_read(*of_peer) for of_peer in all_samples)))
    return [pid for pid, _, _ in all_samples] if readable else []


def allocate(comm: Communicator, arena: Arena | None, shape: Sequence[int], dtype: Any) -> Any:
    """An array of zeros of this rank's own, that the others can read where it lies. Collective."""
    nbytes = math.prod(shape) * itemsize_of_dtype(dtype)
    rounded = -(-nbytes // ALIGNED) * ALIGNED
    sizes = comm.unchecked("shared memory").allgather_object(rounded)
    segment = None if arena is None else _map_together(comm, max(ALIGNED, sum(sizes)))
    if arena is None or segment is None:
        return from_octets(None, shape, dtype)
    arena.add(segment)
    begin = sum(sizes[: comm.rank])
    return from_octets(segment.octets[begin : begin + nbytes], shape, dtype)


def release(comm: Communicator, arena: Arena | None, array: Any) -> None:
    """Give the memory of `allocate` back, once nobody holds an array in it. Collective."""
    octets = bind(array, writable=False).host.octets
    number = None if arena is None else arena.array_number(octets)
    told = comm.unchecked("shared memory").allgather_object((octets.size, number))
    found = {number for nbytes, number in told if nbytes}  # an array of nothing lies nowhere
    if len(found) > 1:
        numbers = [number for _, number in told]
        raise OperationError(
            f"free_shared got arrays of different allocations: number {numbers} by rank; every rank must "
            f"pass its own array of the same allocate_shared"
        )
    for number in found:
        if arena is not None and number is not None:
            arena.drop(number)


def _map_together(comm: Communicator, nbytes: int) -> Segment | None:
    """Rank 0 makes the memory, all map it, and its name goes; if one fails, None on all, and a warning."""
    quiet = comm.unchecked("shared memory")
    path, segment, problem = "", None, shared_memory.hindrance()
    if comm.rank == 0 and problem is None:
        try:
            path, segment = shared_memory.create(nbytes)
        except SharedMemoryError as error:
            problem = str(error)
    path = quiet.broadcast_object(path)
    try:
        if comm.rank > 0 and problem is None and path:
            try:
                segment = shared_memory.attach(path)
            except SharedMemoryError as error:
                problem = str(error)
        told = quiet.allgather_object((problem, _warned))
    finally:
        if comm.rank == 0 and path:
            shared_memory.remove(path)
    problems = [found for found, _ in told if found]
    if not problems:
        return segment
    _warn(problems[0], aloud=comm.rank == 0 and not any(warned for _, warned in told))
    return None


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
