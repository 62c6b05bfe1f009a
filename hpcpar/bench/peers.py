"""MPI's own collectives and torch's gloo, called on the same memory as hpcpar's.

MPI gets buffer specifications (address, count, datatype) that were made once: the fastest way to call it
from Python. Its blocking, nonblocking and persistent forms are candidates of their own.
"""

from __future__ import annotations

import contextlib
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from mpi4py import MPI

from hpcpar.bench.measure import (
    IN_EQUAL_PIECES,
    WINDOW,
    Buffers,
    Candidate,
    Case,
    Place,
    partner,
    ping_pong,
    tensor,
)
from hpcpar.errors import PeerFailedError

if TYPE_CHECKING:
    from hpcpar.comm import Communicator

METHODS = {
    "allreduce": "Allreduce",
    "reduce_scatter": "Reduce_scatter_block",
    "allgather": "Allgather",
    "broadcast": "Bcast",
    "reduce": "Reduce",
    "alltoall": "Alltoall",
}
SUMS = ("allreduce", "reduce_scatter", "reduce")

TYPES = {
    "float32": MPI.FLOAT,
    "float64": MPI.DOUBLE,
    "int32": MPI.INT32_T,
    "int64": MPI.INT64_T,
    "uint8": MPI.UINT8_T,
}
"""Element types that MPI can sum; others move as pairs of bytes."""


class MpiPeer:
    """The MPI library's own collectives on all ranks of the job. Creating and freeing are collective."""

    def __init__(self) -> None:
        self.comm = MPI.COMM_WORLD.Dup()
        self._scratch = bytearray(1)

    def free(self) -> None:
        self.comm.Free()

    def candidates(self, case: Case, comm: Communicator, buffers: Buffers, place: Place) -> list[Candidate]:
        """Return all forms that this library has; none where it cannot sum the element type."""
        if case.collective in ("send", "send_window"):
            return self._sending(case, comm, buffers)
        if case.collective in SUMS and case.dtype not in TYPES:
            return []
        arguments, result = self.arguments(case, comm, buffers, place)
        method = METHODS[case.collective]
        blocking = getattr(self.comm, method)
        nonblocking = getattr(self.comm, f"I{method.lower()}")
        found = [
            Candidate("mpi", lambda: blocking(*arguments), lambda: result),
            Candidate("mpi_nonblocking", lambda: nonblocking(*arguments).Wait(), lambda: result),
        ]
        with contextlib.suppress(NotImplementedError, MPI.Exception):  # new in MPI 4
            request = getattr(self.comm, f"{method}_init")(*arguments)
            found.append(Candidate("mpi_persistent", _once_more(request), lambda: result, request.Free))
        return found

    def arguments(
        self, case: Case, comm: Communicator, buffers: Buffers, place: Place
    ) -> tuple[tuple[Any, ...], Any]:
        """Return the call's buffer specifications, and the array that will hold the result."""
        # MPI counts the elements of one equal piece, and so does mpi4py.
        pieces = case.size if case.collective in IN_EQUAL_PIECES else 1
        whole, other = prepared(buffers.whole, pieces), prepared(buffers.other, pieces)
        shard = prepared(buffers.shard)
        own_first = buffers.whole[: case.share]
        inside = place == "in"
        root = comm.rank == 0
        sent: Any = MPI.IN_PLACE if inside else whole
        match case.collective:
            case "allreduce":
                return (sent, whole if inside else other), buffers.whole if inside else buffers.other
            case "reduce_scatter":
                return (sent, whole if inside else shard), own_first if inside else buffers.shard
            case "allgather":
                return (MPI.IN_PLACE if inside else shard, whole), buffers.whole
            case "broadcast":
                return (whole, 0), buffers.whole
            case "reduce":
                if not root:
                    return (whole, None, MPI.SUM, 0), None
                into, target = (whole, buffers.whole) if inside else (other, buffers.other)
                return (sent, into, MPI.SUM, 0), target
        return (whole, other), buffers.other

    def _sending(self, case: Case, comm: Communicator, buffers: Buffers) -> list[Candidate]:
        sent, received = prepared(buffers.whole), prepared(buffers.other)
        names = ("mpi", "mpi_nonblocking", "mpi_persistent")
        window = case.collective == "send_window"
        peer = partner(comm)
        if peer is None:  # the ranks between do nothing, under the same names
            return [Candidate(name, lambda: None, lambda: None) for name in (names[1:2] if window else names)]
        if window:
            return self._window(comm, sent, received, peer, buffers)
        mpi = self.comm
        send, receive = mpi.Send_init(sent, peer), mpi.Recv_init(received, peer)
        blocking = partial(mpi.Send, sent, peer), partial(mpi.Recv, received, peer)
        nonblocking = lambda: mpi.Isend(sent, peer).Wait(), lambda: mpi.Irecv(received, peer).Wait()
        persistent = _once_more(send), _once_more(receive)

        def free() -> None:
            send.Free()
            receive.Free()

        return [
            Candidate("mpi", ping_pong(comm, *blocking), lambda: buffers.other),
            Candidate("mpi_nonblocking", ping_pong(comm, *nonblocking), lambda: buffers.other),
            Candidate("mpi_persistent", ping_pong(comm, *persistent), lambda: buffers.other, free),
        ]

    def _window(
        self, comm: Communicator, sent: Any, received: Any, peer: int, buffers: Buffers
    ) -> list[Candidate]:
        """Send WINDOW messages one way, all into the same memory, then one byte back."""
        mpi, first, word = self.comm, comm.rank == 0, [self._scratch, 1, MPI.BYTE]

        def run() -> None:
            post: Callable[..., MPI.Request] = mpi.Isend if first else mpi.Irecv
            MPI.Request.Waitall([post(sent if first else received, peer) for _ in range(WINDOW)])
            if first:
                mpi.Recv(word, peer)
            else:
                mpi.Send(word, peer)

        return [Candidate("mpi_nonblocking", run, lambda: None if first else buffers.other)]


def _once_more(request: MPI.Prequest) -> Callable[[], object]:
    def run() -> None:
        request.Start()
        request.Wait()

    return run


def prepared(array: Any, pieces: int = 1) -> list[Any]:
    """Return mpi4py's [memory, count of one piece, datatype], so that no call inspects the array."""
    flat = tensor(array)
    if flat.is_cuda:
        memory = MPI.buffer.fromaddress(flat.data_ptr(), flat.numel() * flat.element_size())
    else:
        memory = MPI.buffer(flat.view(torch.uint8).numpy())
    dtype = str(flat.dtype).removeprefix("torch.")
    return [memory, flat.numel() // pieces, TYPES.get(dtype, MPI.INT16_T)]


class GlooPeer:
    """torch.distributed over gloo in this job. Creating and freeing are collective.

    errors   PeerFailedError on every rank when gloo cannot start on one
    """

    name = "gloo"
    group: Any = None
    """torch's process group; None is the default group of all ranks."""

    def __init__(self, comm: Communicator) -> None:
        import torch.distributed as dist

        self._dist = dist
        self._comm = comm
        self._directory = ""
        failure: Exception | None = None
        try:
            where = comm.broadcast_object(self._rendezvous(comm) if comm.rank == 0 else None)
            dist.init_process_group(
                "gloo",
                init_method=where,
                rank=comm.rank,
                world_size=comm.size,
                timeout=timedelta(seconds=60),
            )
        except (RuntimeError, ValueError, OSError) as error:
            failure = error
        comm.agree(failure, "starting gloo")

    def _rendezvous(self, comm: Communicator) -> str:
        """Return the URL of gloo's store: a file on one node, a port of rank 0 between nodes."""
        if len(set(comm.nodes)) == 1:
            self._directory = tempfile.mkdtemp(prefix="hpcpar-gloo-")
            return f"file://{self._directory}/store"
        with socket.socket() as free:
            free.bind(("", 0))
            return f"tcp://{socket.gethostname()}:{free.getsockname()[1]}"

    def free(self) -> None:
        self._comm.barrier()  # other ranks may still be in their last call
        self._dist.destroy_process_group()
        self._comm.barrier()  # or may still read the store's file while they leave
        if self._directory:
            shutil.rmtree(self._directory, ignore_errors=True)

    def candidates(self, case: Case, comm: Communicator, buffers: Buffers, place: Place) -> list[Candidate]:
        dist, group = self._dist, self.group
        whole, shard, other = (tensor(array) for array in (buffers.whole, buffers.shard, buffers.other))
        if case.collective == "send":
            peer = partner(comm)
            if peer is None:
                return [Candidate(self.name, lambda: None, lambda: None)]
            send, receive = partial(dist.send, whole, peer), partial(dist.recv, other, peer)
            return [Candidate(self.name, ping_pong(comm, send, receive), lambda: other)]
        own = whole[case.own(comm.rank)]
        at_root = whole if comm.rank == 0 else None
        # gloo runs allreduce, reduce and broadcast in place only.
        calls: dict[tuple[str, Place], tuple[Callable[[], object], Any]] = {
            ("allreduce", "in"): (lambda: dist.all_reduce(whole, group=group), whole),
            ("reduce_scatter", "out"): (lambda: dist.reduce_scatter_tensor(shard, whole, group=group), shard),
            ("reduce_scatter", "in"): (lambda: dist.reduce_scatter_tensor(own, whole, group=group), own),
            ("allgather", "out"): (lambda: dist.all_gather_into_tensor(whole, shard, group=group), whole),
            ("allgather", "in"): (lambda: dist.all_gather_into_tensor(whole, own, group=group), whole),
            ("broadcast", "in"): (lambda: dist.broadcast(whole, 0, group=group), whole),
            ("reduce", "in"): (lambda: dist.reduce(whole, 0, group=group), at_root),
            ("alltoall", "out"): (lambda: dist.all_to_all_single(other, whole, group=group), other),
        }
        if (case.collective, place) not in calls:
            return []
        run, result = calls[case.collective, place]
        return [Candidate(self.name, run, lambda: result)]


Peer = MpiPeer | GlooPeer


@contextlib.contextmanager
def connected(comm: Communicator, wanted: Sequence[str] = ()) -> Iterator[tuple[list[Peer], dict[str, str]]]:
    """Start the peers of the wanted candidates; yield them with their descriptions. Collective on the job.

    wanted   names of candidates; empty starts all peers. A peer that cannot start is left out, with the
             reason in its description
    """
    peers: list[Peer] = []
    said: dict[str, str] = {}
    if _wants(wanted, "mpi"):
        peers.append(MpiPeer())
        said["mpi"] = "blocking, nonblocking and persistent, on prepared buffers"
    if _wants(wanted, "gloo"):
        try:
            peers.append(GlooPeer(comm))
            said["gloo"] = f"torch {torch.__version__}"
        except PeerFailedError as error:
            said["gloo"] = f"left out: {error}".splitlines()[0]
    yield peers, said
    # Not after an error: freeing is collective, and other ranks may never reach it.
    for peer in peers:
        peer.free()


def _wants(wanted: Sequence[str], name: str) -> bool:
    return not wanted or any(one.split("_")[0] == name for one in wanted)
