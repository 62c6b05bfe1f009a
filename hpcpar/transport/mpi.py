"""MPI on host memory: messages between ranks, and communicators."""

from __future__ import annotations

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

from hpcpar.errors import OperationError
from hpcpar.transport.interface import COLLECTIVE_TAGS, Exchange, Natives, Octets, PreparedExchange, Transport
from hpcpar.transport.mpi_library import MPI, explained, last_line, ranks_in_world, start, world_nodes
from hpcpar.transport.mpi_native import MpiNatives

MAX_MESSAGE_NBYTES = 2**30
"""Longer messages travel in pieces: MPI counts are 32-bit in most libraries' data paths.

The receiver of a short message leaves room for a longer one (`comm/executors/peer_message.py`), which must be
one piece: 5 KB at least.
"""

SPIN_ATTEMPTS = 64
"""Fruitless tests before a wait first offers its core to others (one test is about 0.3 µs)."""

NAP_ATTEMPTS, EARLY_NAP_ATTEMPTS = 2000, 200
NAP_S = 50e-6
"""Fruitless tests before a wait naps. Early: on a core that ranks share, so that an idle stage of a pipeline
leaves it to the others; and where the tests only look whether a peer has come."""


NOT_COMPLETE = -12345
"""Tag in a status that no test has filled in yet."""


class _Exchange:
    """MPI requests, receives first: fresh ones, or persistent ones that are started again and again.

    calls          make the requests, one after the other
    keep_lengths   only where they are asked for: each costs a status
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
            raise explained(error, self._peers) from error
        return True

    def waiting_for(self) -> tuple[int, ...]:
        # Not by Get_status: MPICH 5.0.2 then ends a persistent request that is complete, without its status.
        try:
            found = [part for part in self._parts() if not _is_complete(*part[:2])]
        except MPI.Exception as error:
            self._open = []
            raise explained(error, self._peers) from error
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
        self.natives: Natives | None = MpiNatives(comm)
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
            world_nodes(),
            max_message_nbytes=max_message_nbytes,
        )

    def start(
        self, sends: Sequence[tuple[Octets, int]], receives: Sequence[tuple[Octets, int]], tag: int
    ) -> Exchange:
        exchange = self.prepare(sends, receives, tag, persistent=False, keep_lengths=tag >= COLLECTIVE_TAGS)
        exchange.start()
        return exchange

    def prepare(
        self,
        sends: Sequence[tuple[Octets, int]],
        receives: Sequence[tuple[Octets, int]],
        tag: int,
        *,
        persistent: bool,
        keep_lengths: bool = False,
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
            keep_lengths=keep_lengths,
            persistent=persistent,
        )

    def _arguments(self, messages: Sequence[tuple[Octets, int]], tag: int) -> list[tuple[Any, int, int]]:
        return [([piece, MPI.BYTE], peer, tag) for octets, peer in messages for piece in self._pieces(octets)]

    def _pieces(self, octets: Octets) -> Sequence[Octets]:
        limit = self._max_message_nbytes
        if octets.size <= limit:
            return (octets,)
        return [octets[start : start + limit] for start in range(0, octets.size, limit)]

    def probe(self, tag: int, source: int | None = None) -> int | None:
        status = MPI.Status()
        if not self._comm.Iprobe(MPI.ANY_SOURCE if source is None else source, tag, status):
            return None
        return status.Get_source()

    def memory_fence(self) -> Callable[[], None]:
        """MPI_Win_sync, which is a full memory barrier (MPI 4.1, section 12.5.4), on a window of our own."""
        global _fence_window  # one for the process, given back before MPI ends
        if _fence_window is None:
            _fence_window = MPI.Win.Allocate(8, comm=MPI.COMM_SELF)
            _fence_window.Lock_all()
        return _fence_window.Sync

    def pause(self, attempt: int, *, drives_messages: bool = True) -> None:
        is_early = self.yield_at_once or not drives_messages
        if attempt > (EARLY_NAP_ATTEMPTS if is_early else NAP_ATTEMPTS):
            time.sleep(NAP_S)
        elif self.yield_at_once or attempt > SPIN_ATTEMPTS:
            os.sched_yield()

    def split(self, color: int | None, key: int) -> Transport | None:
        return self._over(lambda: self._comm.Split(MPI.UNDEFINED if color is None else color, key))

    def group(self, members: Sequence[int], tag: int) -> Transport:
        comm: Any = self._comm  # an Intracomm, which alone has Create_group
        all_ranks = comm.Get_group()
        chosen = all_ranks.Incl(members)
        try:
            made = self._over(lambda: comm.Create_group(chosen, tag))
        finally:
            chosen.Free()
            all_ranks.Free()
        assert made is not None, "members alone come here"
        return made

    def _over(self, make: Callable[[], MPI.Comm]) -> MpiTransport | None:
        """Make a communicator, and a transport over it; None where this rank is in none."""
        try:
            comm = make()
        except MPI.Exception as error:
            raise OperationError(
                f"MPI could not make another communicator ({last_line(error)}). It has room for about two "
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
        return [] if MPI.Is_finalized() else self._control.receive()

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
