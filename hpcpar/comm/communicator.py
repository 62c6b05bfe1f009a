"""`Communicator`: collectives, messages and splits over any transport."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, NoReturn, TypeVar

from hpcpar.comm import agree, loans, messages, methods, objects, sharing, splits
from hpcpar.comm.accounting import Trace, Traffic
from hpcpar.comm.calls import Calls
from hpcpar.comm.devices import open_devices
from hpcpar.comm.executors import native
from hpcpar.comm.loans import Lent, Loan
from hpcpar.comm.runtime import Runtime
from hpcpar.comm.select import ANY
from hpcpar.comm.tuning import Tuning
from hpcpar.comm.watch import STALL_WARN_S, Waited, Watch
from hpcpar.errors import OperationError
from hpcpar.launch.settings import Settings
from hpcpar.transport import loopback
from hpcpar.transport.interface import Transport

T = TypeVar("T")


class Communicator:
    """Ranks that talk to each other; made by `hpcpar.init()`, `split`, `group`, `alone` or `run_loopback`.

    rank, size    position in it, and number of ranks
    name          for messages and tables
    nodes         of each rank, the node it runs on, numbered as they first appear
    world_ranks   of each rank, its rank in the whole job
    traffic       messages and bytes of this rank, by collective

    What the collectives have in common stands in `hpcpar/comm/methods.py`.
    """

    def __init__(self, transport: Transport, runtime: Runtime, name: str, tag: int | None = None) -> None:
        self._hold(Calls(transport, runtime, name, tag))

    def _hold(self, calls: Calls) -> None:
        transport = calls.transport
        self._transport = transport
        self._runtime = calls.runtime
        self._calls = calls
        self.name = calls.name
        self.rank, self.size = transport.rank, transport.size
        self.world_ranks = transport.world_ranks
        numbers = {node: number for number, node in enumerate(dict.fromkeys(transport.nodes))}
        self.nodes = tuple(numbers[node] for node in transport.nodes)
        self._lent: list[Lent] = []

    @classmethod
    def alone(cls) -> Communicator:
        """This process by itself, without MPI. Every collective does nothing, correctly."""
        return cls.over(loopback.connect(1)[0])

    @classmethod
    def over(
        cls,
        transport: Transport,
        *,
        timeout_s: float = 600.0,
        stall_warn_s: float = STALL_WARN_S,
        check: bool = False,
    ) -> Communicator:
        """A world of its own over a transport; see `hpcpar.init` for timeout_s, stall_warn_s and check."""
        watch = Watch(transport, timeout_s, stall_warn_s)
        return cls(transport, Runtime(transport, watch, check=check), "world")

    @classmethod
    def face_of(cls, calls: Calls) -> Communicator:
        """A communicator for calls that exist already: another name to count under, or without checks."""
        face = cls.__new__(cls)
        face._hold(calls)
        return face

    # Collectives and messages (`methods.py`, `messages.py`) -------------------------------------------------

    start_allreduce, allreduce = methods.start_allreduce, methods.allreduce
    start_reduce_scatter, reduce_scatter = methods.start_reduce_scatter, methods.reduce_scatter
    start_allgather, allgather = methods.start_allgather, methods.allgather
    start_broadcast, broadcast = methods.start_broadcast, methods.broadcast
    start_reduce, reduce = methods.start_reduce, methods.reduce
    start_gather, gather = methods.start_gather, methods.gather
    start_scatter, scatter = methods.start_scatter, methods.scatter
    start_alltoall, alltoall = methods.start_alltoall, methods.alltoall
    start_barrier, barrier = methods.start_barrier, methods.barrier
    start_send, send = messages.start_send, messages.send
    start_recv, recv = messages.start_recv, messages.recv
    sendrecv, probe = messages.sendrecv, messages.probe

    # Python objects (`objects.py`) -------------------------------------------------------------------------

    broadcast_object = objects.broadcast_object
    allgather_object = objects.allgather_object
    gather_object = objects.gather_object
    scatter_object = objects.scatter_object
    send_object = objects.send_object
    recv_object = objects.recv_object

    def unchecked(self, label: str | None) -> Communicator:
        """This communicator, without agreeing on each call in checked mode.

        label   under which it counts; None: each collective under its own name
        """
        view = type(self).__new__(type(self))
        view.__dict__.update(self.__dict__, _calls=self._calls.unchecked(label))
        return view

    @property
    def label(self) -> str | None:
        """Name under which all calls count; None: each collective counts under its own."""
        return self._calls.label

    @property
    def traffic(self) -> Traffic:
        """Messages and bytes of this rank, by collective."""
        return self._calls.traffic

    @traffic.setter
    def traffic(self, traffic: Traffic) -> None:
        self._calls.traffic = traffic

    # Algorithms --------------------------------------------------------------------------------------------

    def algorithm_for(
        self,
        collective: str,
        nbytes: int,
        *,
        uneven: bool = False,
        named: str | None = None,
        dtype: str = ANY,
        op: str = "sum",
        on_device: bool = False,
    ) -> str:
        """Name of the algorithm that a collective of `nbytes`, of the whole array, would run by.

        uneven   the ranks' pieces are not equally large
        named    what the caller of the collective would ask for
        dtype    element type; ANY: one that every algorithm can do
        on_device   the array is on a GPU
        errors   OperationError where the collective would raise it, and for one that there is not
        """
        return self._calls.algorithm_for(
            collective, nbytes, uneven=uneven, named=named, dtype=dtype, op=op, on_device=on_device
        )

    def native_obstacle(
        self, collective: str, nbytes: int, *, dtype: str = ANY, op: str = "sum"
    ) -> str | None:
        """Say why algorithm="native", MPI's own, cannot do such a collective here; None: it can."""
        dtype = "float64" if dtype == ANY else dtype
        return native.obstacle(self._transport, collective, op, dtype, nbytes, named=True)

    def choose_by(self, tuning: Tuning) -> None:
        """Choose by these tables from now on, here and on all that will be split. The same on every rank."""
        self._calls.choose_by(tuning)

    # Memory ------------------------------------------------------------------------------------------------

    def share_memory(self, post_nbytes: int | None = None) -> bool:
        """From now on exchange through shared memory, here and on all that will be split. Collective.

        post_nbytes    bytes that a rank can send in a short call, for trying out; None: as fits the number of
                       ranks
        returns        True if any ranks of this communicator do: some are on one node, which has room for
                       it; where it has not, a warning has said why, once
        """
        self._runtime.shares_memory, self._runtime.post_nbytes = True, post_nbytes
        segment, shares, reads = sharing.open_segment(self, post_nbytes)
        if shares:
            self._calls.share(segment, reads_private=reads)
        return shares

    def share_devices(self, asked: str, mpi_takes_pointers: Callable[[], bool] = lambda: False) -> bool:
        """From now on move GPU memory as it is, here and on all that will be split. Collective.

        asked     auto; or one way alone, for trying out: pull, mpi, staged (`hpcpar/comm/devices.py`)
        mpi_takes_pointers   asked on rank 0, if it matters
        returns   whether it is done: every rank has a GPU that it can use; if only some have, a warning says
                  why the others cannot
        errors    CudaError on every rank where the way asked for cannot be had
        """
        self._runtime.devices = open_devices(self, asked, mpi_takes_pointers)
        return self._runtime.devices is not None

    @property
    def shares_devices(self) -> bool:
        """True if arrays on GPUs are moved as they are; else each call copies them to the host and back."""
        return self._runtime.devices is not None

    @property
    def shares_memory(self) -> bool:
        """True if ranks of this communicator exchange through memory that they share."""
        return self._calls.segment is not None or self._calls.shares_in_part

    def allocate_shared(self, shape: int | Sequence[int], dtype: Any) -> Any:
        """An array of zeros that the other ranks read where it lies, in collectives of this communicator.

        shape    of this rank's array; ranks may ask for different ones
        dtype    of NumPy, or its name, for a NumPy array; of torch for a tensor
        returns  ordinary memory where the ranks cannot share any. Collective.

        The memory goes with the last reference to it on any rank, at the next `allocate_shared` or `free`.
        A process forked from the rank, such as a DataLoader's worker, keeps to itself what it writes there.
        """
        self._calls.forget_all()  # some may point into memory that goes now
        return sharing.allocate(self, self._calls.segment, shape, dtype)

    def allocate_common(self, shape: int | Sequence[int], dtype: Any) -> Any:
        """An array of zeros that is the same memory on all ranks, which must be on one node. Collective.

        What one rank writes the others read: a barrier must lie between. The memory goes with the last
        reference on any rank.
        errors   OperationError, SharedMemoryError on every rank where there is none such
        """
        return sharing.allocate_common(self, shape, dtype)

    def free_shared(self, array: Any) -> None:
        """Give the memory of an `allocate_shared` back as soon as the last reference to it is gone.

        From now on the array is like any other. Collective: every rank passes its own.
        errors   OperationError on every rank when they are not of the same allocation
        """
        self._calls.forget_all()  # some may point into it
        sharing.release(self, self._calls.segment, array)

    @property
    def trace(self) -> Trace | None:
        """Record of what moved when, of this communicator and its relatives; None: nobody asks."""
        return self._runtime.trace

    @trace.setter
    def trace(self, trace: Trace | None) -> None:
        self._runtime.trace = trace

    def traffics(self) -> dict[str, Traffic]:
        """The accounts of this rank on all communicators split from the same world, by name."""
        return dict(self._runtime.traffics)

    def poke(self) -> None:
        """Advance all that is under way, on every communicator of the family; never blocks."""
        self._runtime.progress.poke()

    progress = poke
    """MPI's word for it."""

    def depart(self) -> None:
        """This rank makes no more calls on this family: those who wait for it get a PeerLeftError."""
        self._runtime.progress.require_rank("depart")
        self._runtime.watch.depart()

    def end_job(self, why: str, status: int) -> None:
        """End the whole job at once, with this exit status; from any thread, and without a traceback.

        why   for people; the sentinel hears it, too, so that nobody is called lost
        """
        if self._runtime.end_job is None:  # this process is all of the job
            os.write(2, f"hpcpar: ends the job: {why}\n".encode())
            os._exit(status)
        self._runtime.end_job(why, status)

    def while_waiting(self, inspect: Callable[[tuple[int, ...]], None]) -> Callable[[], None]:
        """Have `inspect(missing world ranks)` called now and then in long waits; its errors end them.

        returns   what puts an end to that
        """
        inspectors = self._runtime.watch.inspectors
        inspectors.append(inspect)
        return lambda: inspectors.remove(inspect) if inspect in inspectors else None

    def wait_until(self, condition: Callable[[], bool], waited: Waited) -> None:
        """Return when `condition()` holds, which is to poke; it may start collectives, too.

        waited   tells what is waited for, in errors: a name, the missing world ranks, and how far it is
        errors   StallError, PeerLeftError, as `Handle.wait`
        """
        self._runtime.progress.wait_until(condition, waited)

    def agree(self, error: BaseException | None, doing: str) -> None:
        """Fail together: raise on every rank when any of them passes an error. Collective.

        doing    what was being done, for the message: "opening the training data"
        errors   PeerFailedError that names the ranks and what went wrong there; its cause is the
                 rank's own error. On a communicator of one rank, that error itself
        """
        agree.require_success(self, error, doing)

    @contextmanager
    def together(self, doing: str) -> Iterator[None]:
        """A block that may fail on some ranks only: if it does, raise on all. Collective.

            with comm.together("reading the data"):
                text = path.read_text()                  # no collective inside the block

        errors   as `agree`
        """
        failure: Exception | None = None
        try:
            yield
        except Exception as error:  # whatever it is, the other ranks must hear of it
            failure = error
        self.agree(failure, doing)

    # Communicators of some of the ranks (`splits.py`) -------------------------------------------------------

    split, split_by_node, group = splits.split, splits.split_by_node, splits.group

    def lend(self, purpose: str, label: str | None = None) -> Loan:
        """Lend one of the same ranks, for calls in another order than those on this one. Collective.

        label   under which it counts on this one's account; None: as this one does

        In checked mode, too, it agrees on no calls, for which ranks would wait that are busy with another's.
        A communicator whose borrower is gone on all ranks is lent again; but one whose borrower went in the
        middle of things may have begun a call on one rank and not on another, which the next one's calls
        would meet there: it is left alone.
        """
        return loans.lend(self, self._lent, purpose, label)

    def free(self) -> None:
        """Give the communicator back to MPI, which has room for about two thousand. Collective.

        Those that it has lent go with it. Every call on it is an OperationError from then on.
        """
        self._runtime.progress.require_rank("free")
        for lent in self._lent:
            lent.comm.free()
        self._lent.clear()
        self._calls.free()
        self._transport.free()

    @property
    def calls(self) -> int:
        """Number of collectives begun: the same on all ranks, if they make the same calls."""
        return self._calls.count[0]

    @property
    def calls_of_lent(self) -> list[int]:
        """Numbers of collectives begun here and on the communicators that it has lent."""
        return [self.calls, *(calls for lent in self._lent for calls in lent.comm.calls_of_lent)]

    def abandon(self) -> None:
        """Give up what is under way here because other ranks will never come to it.

        Nobody may use it, or a communicator that it has lent, afterwards. Not collective; memory that
        messages may still come to is kept.
        """
        self._calls.abandoned.extend(self._runtime.progress.give_up(self.name))
        for lent in self._lent:
            lent.comm.abandon()

    def __enter__(self) -> Communicator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Freeing is collective, and after an error the other ranks may never come to it.
        if kind is None:
            self.free()

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise OperationError(
            f"communicator {self.name!r} cannot be copied, nor can a model whose layers have it by "
            "copy.deepcopy; build the model once more and load the first one's state_dict(), or "
            "shard_state_dict(model) where its layers are divided"
        )

    def __reduce__(self) -> NoReturn:
        raise OperationError(
            f"communicator {self.name!r} cannot be pickled, as for a process that a DataLoader spawns: pass "
            f"what the process needs to know, such as rank {self.rank} of {self.size}, instead"
        )

    def __repr__(self) -> str:
        return f"Communicator({self.name!r}, rank {self.rank} of {self.size})"


def run_loopback(
    size: int,
    function: Callable[[Communicator], T],
    *,
    nodes: Sequence[int] | None = None,
    check: bool | None = None,
    timeout_s: float = 60.0,
    shared_memory: bool = False,
    post_nbytes: int | None = None,
) -> list[T]:
    """Call `function(comm)` on `size` ranks that are threads of this process; its results, by rank.

    Threads share torch's generator of random numbers: `torch.manual_seed` on each rank does not give all the
    same values. Make a torch.Generator for each rank, or broadcast what must be equal.

    nodes    of each rank, the node that it pretends to be on
    check    agree on every collective before data moves (default: HPCPAR_CHECK, or off)
    shared_memory, post_nbytes   as `Communicator.share_memory`
    errors   the exception of the rank that failed first
    """

    checked = Settings.from_environ().check if check is None else check

    # What a rank has under way when its function returns lives until all have returned: others write to it.
    held: list[Communicator] = []

    def call(transport: loopback.LoopbackTransport) -> T:
        comm = Communicator.over(transport, timeout_s=timeout_s, check=checked)
        held.append(comm)
        if shared_memory:
            comm.share_memory(post_nbytes)
        return function(comm)

    try:
        return loopback.run(size, call, nodes=nodes, timeout_s=timeout_s)
    finally:  # their shared memory goes now, not when the cyclic collector runs
        for comm in held:
            for calls in list(comm._runtime.calls):
                calls.free()
