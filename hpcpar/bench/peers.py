"""What else there is: MPI's own collectives, torch's gloo and Horovod, on the same memory.

MPI's own is given prepared buffers (address, count and type looked up once), which is the fastest way
to call it from Python, in its three forms: blocking, nonblocking and persistent.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from mpi4py import MPI

from hpcpar.bench.measure import IN_EQUAL_PIECES, WINDOW, Buffers, Candidate, Case, Place, tensor
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
"""What MPI can sum; other element types move as pairs of bytes."""


def farthest(comm: Communicator) -> int:
    """The other one of the two ranks that send to each other: 0 and the last."""
    return comm.size - 1 if comm.rank == 0 else 0


def sends(comm: Communicator) -> bool:
    return comm.size > 1 and comm.rank in (0, comm.size - 1)


Starter = tuple[str, Callable[[], Any], Any, bool]
"""A call that does not block: name, start, result, and whether a thread of its own makes progress.

What start returns has `test()` and `wait()`.
"""


class _Request:
    """An MPI request in the house's spelling."""

    __slots__ = ("test", "wait")

    def __init__(self, request: MPI.Request) -> None:
        self.test = request.Test
        self.wait = request.Wait


class _Work:
    """What gloo has under way, in the house's spelling.

    Its wait sleeps, so a test may as well wait; and its reduce-scatter never says that it is complete.
    """

    __slots__ = ("wait",)

    def __init__(self, work: Any) -> None:
        self.wait = work.wait

    def test(self) -> bool:
        self.wait()
        return True


class MpiPeer:
    """The MPI library's own collectives, on all ranks of the job. Making and freeing it are collective."""

    def __init__(self) -> None:
        self._mpi = MPI.COMM_WORLD.Dup()
        self._scratch = bytearray(1)

    def free(self) -> None:
        self._mpi.Free()

    def candidates(self, case: Case, comm: Communicator, buffers: Buffers, place: Place) -> list[Candidate]:
        """All forms that this library has; none where it cannot sum the element type."""
        if case.collective in ("send", "send_window"):
            return self._sending(case, comm, buffers)
        if case.collective in SUMS and case.dtype not in TYPES:
            return []
        arguments, result = self._arguments(case, comm, buffers, place)
        method = METHODS[case.collective]
        blocking = getattr(self._mpi, method)
        nonblocking = getattr(self._mpi, f"I{method.lower()}")
        found = [
            Candidate("mpi", lambda: blocking(*arguments), lambda: result),
            Candidate("mpi_nonblocking", lambda: nonblocking(*arguments).Wait(), lambda: result),
        ]
        persistent = self._persistent(method, arguments)
        if persistent is not None:
            found.append(_started("mpi_persistent", persistent, result))
        return found

    def _persistent(self, method: str, arguments: tuple[Any, ...]) -> MPI.Prequest | None:
        try:
            request: MPI.Prequest = getattr(self._mpi, f"{method}_init")(*arguments)
        except (NotImplementedError, MPI.Exception):  # new in MPI 4
            return None
        return request

    def _arguments(
        self, case: Case, comm: Communicator, buffers: Buffers, place: Place
    ) -> tuple[tuple[Any, ...], Any]:
        """Prepared arguments, and the array in which the result will be."""
        # mpi4py counts the elements of one piece where MPI does.
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

    def starters(self, case: Case, comm: Communicator, buffers: Buffers, place: Place) -> list[Starter]:
        """The nonblocking form, which moves on while it is tested."""
        if case.collective in SUMS and case.dtype not in TYPES:
            return []
        arguments, result = self._arguments(case, comm, buffers, place)
        start = getattr(self._mpi, f"I{METHODS[case.collective].lower()}")
        return [("mpi", lambda: _Request(start(*arguments)), result, False)]

    def _sending(self, case: Case, comm: Communicator, buffers: Buffers) -> list[Candidate]:
        sent, received = prepared(buffers.whole), prepared(buffers.other)
        names = ("mpi", "mpi_nonblocking", "mpi_persistent")
        window = case.collective == "send_window"
        if not sends(comm):  # stands by under the same names
            return [Candidate(name, lambda: None, lambda: None) for name in (names[1:2] if window else names)]
        peer = farthest(comm)
        if window:
            return self._window(comm, sent, received, peer, buffers)
        mpi, first = self._mpi, comm.rank == 0

        def blocking() -> None:
            if first:
                mpi.Send(sent, peer)
            mpi.Recv(received, peer)
            if not first:
                mpi.Send(sent, peer)

        def nonblocking() -> None:
            if first:
                mpi.Isend(sent, peer).Wait()
            mpi.Irecv(received, peer).Wait()
            if not first:
                mpi.Isend(sent, peer).Wait()

        send, receive = mpi.Send_init(sent, peer), mpi.Recv_init(received, peer)

        def persistent() -> None:
            for request in (send, receive) if first else (receive, send):
                request.Start()
                request.Wait()

        def free() -> None:
            send.Free()
            receive.Free()

        return [
            Candidate("mpi", blocking, lambda: buffers.other),
            Candidate("mpi_nonblocking", nonblocking, lambda: buffers.other),
            Candidate("mpi_persistent", persistent, lambda: buffers.other, free),
        ]

    def _window(
        self, comm: Communicator, sent: Any, received: Any, peer: int, buffers: Buffers
    ) -> list[Candidate]:
        """WINDOW messages one way, all into the same memory, then one byte back."""
        mpi, first, word = self._mpi, comm.rank == 0, [self._scratch, 1, MPI.BYTE]

        def run() -> None:
            post: Callable[..., MPI.Request] = mpi.Isend if first else mpi.Irecv
            MPI.Request.Waitall([post(sent if first else received, peer) for _ in range(WINDOW)])
            if first:
                mpi.Recv(word, peer)
            else:
                mpi.Send(word, peer)

        return [Candidate("mpi_nonblocking", run, lambda: None if first else buffers.other)]


def _started(name: str, request: MPI.Prequest, result: Any) -> Candidate:
    def run() -> None:
        request.Start()
        request.Wait()

    return Candidate(name, run, lambda: result, request.Free)


def prepared(array: Any, pieces: int = 1) -> list[Any]:
    """[memory, count of one of the equal pieces, type]: mpi4py need not look at the array again."""
    flat = tensor(array)
    if flat.is_cuda:
        memory = MPI.buffer.fromaddress(flat.data_ptr(), flat.numel() * flat.element_size())
    else:
        memory = MPI.buffer(flat.view(torch.uint8).numpy())
    dtype = str(flat.dtype).removeprefix("torch.")
    return [memory, flat.numel() // pieces, TYPES.get(dtype, MPI.INT16_T)]


class GlooPeer:
    """torch.distributed over gloo, in this same job. Making and freeing it are collective.

    errors   RuntimeError on every rank when gloo cannot be started on one
    """

    name = "gloo"
    group: Any = None
    """torch's process group; None: the one of all ranks."""

    def __init__(self, comm: Communicator, *, timeout_s: float = 60.0) -> None:
        import torch.distributed as dist

        self._dist = dist
        self._comm = comm
        self._directory = ""
        failure: Exception | None = None
        try:
            where = comm.broadcast_object(self._meeting_place(comm) if comm.rank == 0 else None)
            dist.init_process_group(
                "gloo",
                init_method=where,
                rank=comm.rank,
                world_size=comm.size,
                timeout=timedelta(seconds=timeout_s),
            )
        except (RuntimeError, ValueError, OSError) as error:
            failure = error
        comm.agree(failure, "starting gloo")

    def _meeting_place(self, comm: Communicator) -> str:
        """A file on one node; a port of rank 0 between nodes."""
        if len(set(comm.nodes)) == 1:
            self._directory = tempfile.mkdtemp(prefix="hpcpar-gloo-")
            return f"file://{self._directory}/store"
        with socket.socket() as free:
            free.bind(("", 0))
            return f"tcp://{socket.gethostname()}:{free.getsockname()[1]}"

    def free(self) -> None:
        self._comm.barrier()  # others may be in the middle of their last call
        self._dist.destroy_process_group()
        self._comm.barrier()  # or about to look at the file that they met by, when they let go of it
        if self._directory:
            shutil.rmtree(self._directory, ignore_errors=True)

    def candidates(self, case: Case, comm: Communicator, buffers: Buffers, place: Place) -> list[Candidate]:
        whole, other = tensor(buffers.whole), tensor(buffers.other)
        calls = self._calls(case, comm, buffers, wait=True)
        if case.collective == "send":
            return [Candidate(self.name, self._ping_pong(comm, whole, other), lambda: _received(comm, other))]
        if (case.collective, place) not in calls:
            return []
        run, result = calls[case.collective, place]
        return [Candidate(self.name, run, lambda: result)]

    def starters(self, case: Case, comm: Communicator, buffers: Buffers, place: Place) -> list[Starter]:
        """Gloo's own threads make progress."""
        call = self._calls(case, comm, buffers, wait=False).get((case.collective, place))
        return [] if call is None else [(self.name, lambda: _Work(call[0]()), call[1], True)]

    def _calls(
        self, case: Case, comm: Communicator, buffers: Buffers, *, wait: bool
    ) -> dict[tuple[str, Place], tuple[Callable[[], object], Any]]:
        """What gloo can do with these buffers, and where the result will be."""
        dist, group, later = self._dist, self.group, not wait
        whole, shard, other = (tensor(array) for array in (buffers.whole, buffers.shard, buffers.other))
        own = whole[case.own(comm.rank)]
        # gloo has allreduce, reduce and broadcast in place only; their results are checked there.
        return {
            ("allreduce", "in"): (lambda: dist.all_reduce(whole, group=group, async_op=later), whole),
            ("reduce_scatter", "out"): (
                lambda: dist.reduce_scatter_tensor(shard, whole, group=group, async_op=later),
                shard,
            ),
            ("reduce_scatter", "in"): (
                lambda: dist.reduce_scatter_tensor(own, whole, group=group, async_op=later),
                own,
            ),
            ("allgather", "out"): (
                lambda: dist.all_gather_into_tensor(whole, shard, group=group, async_op=later),
                whole,
            ),
            ("allgather", "in"): (
                lambda: dist.all_gather_into_tensor(whole, own, group=group, async_op=later),
                whole,
            ),
            ("broadcast", "in"): (lambda: dist.broadcast(whole, 0, group=group, async_op=later), whole),
            ("reduce", "in"): (
                lambda: dist.reduce(whole, 0, group=group, async_op=later),
                whole if comm.rank == 0 else None,
            ),
            ("alltoall", "out"): (
                lambda: dist.all_to_all_single(other, whole, group=group, async_op=later),
                other,
            ),
        }

    def _ping_pong(self, comm: Communicator, sent: Any, received: Any) -> Callable[[], None]:
        dist, peer = self._dist, farthest(comm)

        def run() -> None:
            if not sends(comm):
                return
            if comm.rank == 0:
                dist.send(sent, peer)
            dist.recv(received, peer)
            if comm.rank != 0:
                dist.send(sent, peer)

        return run


def _received(comm: Communicator, other: Any) -> Any:
    return other if sends(comm) else None


class HorovodPeer:
    """Horovod's torch interface, where it is installed."""

    def __init__(self) -> None:
        self._hvd = importlib.import_module("horovod.torch")
        self._hvd.init()

    @staticmethod
    def installed() -> bool:
        with contextlib.suppress(ImportError, ValueError):
            return importlib.util.find_spec("horovod.torch") is not None
        return False

    def free(self) -> None:
        self._hvd.shutdown()

    def candidates(self, case: Case, comm: Communicator, buffers: Buffers, place: Place) -> list[Candidate]:
        hvd = self._hvd
        whole, shard = tensor(buffers.whole), tensor(buffers.shard)
        calls: dict[tuple[str, Place], Callable[[], Any]] = {
            ("allreduce", "in"): lambda: hvd.allreduce_(whole, op=hvd.Sum),
            ("allreduce", "out"): lambda: hvd.allreduce(whole, op=hvd.Sum),
            ("reduce_scatter", "out"): lambda: hvd.reducescatter(whole, op=hvd.Sum),
            ("allgather", "out"): lambda: hvd.allgather(shard),
            ("broadcast", "in"): lambda: hvd.broadcast_(whole, 0),
            ("alltoall", "out"): lambda: hvd.alltoall(whole),
        }
        call = calls.get((case.collective, place))
        if call is None:
            return []
        left: list[Any] = [None]

        def run() -> None:
            left[0] = call()

        return [Candidate("horovod", run, lambda: left[0])]


Peer = MpiPeer | GlooPeer | HorovodPeer


@contextlib.contextmanager
def connected(comm: Communicator, wanted: Sequence[str] = ()) -> Iterator[tuple[list[Peer], dict[str, str]]]:
    """The peers that work here, and what each is. Collective, on the whole job.

    wanted   names of candidates: peers none of whose candidates are among them are not started;
             empty: all. One that is installed but cannot be started is left out, and said so
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
    if _wants(wanted, "horovod"):
        if HorovodPeer.installed():
            peers.append(HorovodPeer())
        said["horovod"] = "horovod.torch" if HorovodPeer.installed() else "not installed"
    yield peers, said
    # Not on an error: giving back is collective, and the other ranks may never come to it.
    for peer in peers:
        peer.free()


def _wants(wanted: Sequence[str], name: str) -> bool:
    return not wanted or any(one.split("_")[0] == name for one in wanted)
