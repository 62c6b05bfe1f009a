"""`Communicator`: collectives, messages and splits over any transport."""

from __future__ import annotations

import operator
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NoReturn, TypeVar

import numpy as np

from hpcpar.comm import agree, sharing
from hpcpar.comm.accounting import Trace, Traffic
from hpcpar.comm.caller import Call, Family
from hpcpar.comm.devices import open_devices
from hpcpar.comm.objects import Objects
from hpcpar.comm.watch import Waited, Watch
from hpcpar.errors import OperationError
from hpcpar.launch.settings import Settings
from hpcpar.transport import loopback
from hpcpar.transport.interface import Transport

T = TypeVar("T")

LARGEST_KEY = 2**31 - 1
"""Of what MPI splits a communicator by."""

IN_USE = -1
"""What a rank tells instead of the number of calls on a communicator whose borrower it still has."""


@dataclass(eq=False)
class Loan:
    """A communicator that is the borrower's as long as this object lives."""

    comm: Communicator


@dataclass
class _Lent:
    """A communicator that is lent, or was: the borrower's loan may be gone."""

    comm: Communicator
    loan: weakref.ref[Loan]


class Communicator(Objects):
    """Ranks that talk to each other; made by `hpcpar.init()`, `split`, `alone` or `run_loopback`.

    rank, size    position in it, and number of ranks
    name          for messages and tables
    nodes         of each rank, the node it runs on, numbered as they first appear
    world_ranks   of each rank, its rank in the whole job
    traffic       messages and bytes of this rank, by collective
    """

    def __init__(self, transport: Transport, family: Family, name: str) -> None:
        super().__init__(transport, family, name)
        self.world_ranks = transport.world_ranks
        numbers = {node: number for number, node in enumerate(dict.fromkeys(transport.nodes))}
        self.nodes = tuple(numbers[node] for node in transport.nodes)
        self._lent: list[_Lent] = []

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
        check: bool = False,
    ) -> Communicator:
        """A world of its own over a transport; see `hpcpar.init` for timeout_s and check."""
        return cls(transport, Family(transport, Watch(transport, timeout_s), check=check), "world")

    def share_memory(self, stage_nbytes: int | None = None) -> bool:
        """From now on exchange through shared memory, here and on all that will be split. Collective.

        stage_nbytes   what each rank has in a lane, for trying out: all messages go through it then; None:
                       what fits the number of ranks, and short messages go over boards
        returns        whether any ranks of this communicator do: some are on one node, which has room for
                       it; where it has not, a warning has said why, once
        """
        self._family.shares_memory, self._family.stage_nbytes = True, stage_nbytes
        arena, shares = sharing.open_arena(self, stage_nbytes)
        if shares:
            self._share(arena)
        return shares

    def share_devices(self, asked: str, mpi_takes_pointers: Callable[[], bool] = lambda: False) -> bool:
        """From now on move GPU memory as it is, here and on all that will be split. Collective.

        asked     auto; or one way alone, for trying out: pull, mpi, staged (`hpcpar/comm/devices.py`)
        mpi_takes_pointers   asked on rank 0, if it matters
        returns   whether it is done: every rank has a GPU that it can use; if only some have, a warning says
                  why the others cannot
        errors    CudaError on every rank where the way asked for cannot be had
        """
        self._family.devices = open_devices(self, asked, mpi_takes_pointers)
        return self._family.devices is not None

    @property
    def shares_devices(self) -> bool:
        """Whether arrays on GPUs are moved as they are; else each call copies them to the host and back."""
        return self._family.devices is not None

    @property
    def shares_memory(self) -> bool:
        """Whether ranks of this communicator exchange through memory that they share."""
        return self._arena is not None or self._shares_in_part

    def allocate_shared(self, shape: int | Sequence[int], dtype: Any) -> Any:
        """An array of zeros that the other ranks read where it lies, in collectives of this communicator.

        shape    of this rank's array; ranks may ask for different ones
        dtype    of NumPy, or its name, for a NumPy array; of torch for a tensor
        returns  ordinary memory where the ranks cannot share any. Collective.

        The memory goes with the last reference to it on any rank, at the next `allocate_shared` or `free`.
        """
        self._forget(list(self._recipes))  # some may point into memory that goes now
        return sharing.allocate(self, self._arena, shape, dtype)

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
        self._forget(list(self._recipes))  # some may point into it
        sharing.release(self, self._arena, array)

    @property
    def trace(self) -> Trace | None:
        """Where this communicator and its relatives note what moved when."""
        return self._family.trace

    @trace.setter
    def trace(self, trace: Trace | None) -> None:
        self._family.trace = trace

    def traffics(self) -> dict[str, Traffic]:
        """The accounts of this rank on all communicators split from the same world, by name."""
        return dict(self._family.traffics)

    def poke(self) -> None:
        """Advance all that is under way, on every communicator of the family; never blocks."""
        self._family.progress.poke()

    def depart(self) -> None:
        """This rank makes no more calls on this family: those who wait for it get a PeerLeftError."""
        self._family.watch.depart()

    def end_job(self, why: str, status: int) -> None:
        """End the whole job at once, with this exit status; from any thread, and without a traceback.

        why   for people; the sentinel hears it, too, so that nobody is called lost
        """
        if self._family.end_job is None:  # this process is all of the job
            os.write(2, f"hpcpar: ends the job: {why}\n".encode())
            os._exit(status)
        self._family.end_job(why, status)

    def while_waiting(self, inspect: Callable[[tuple[int, ...]], None]) -> Callable[[], None]:
        """Have `inspect(missing world ranks)` called now and then in long waits; its errors end them.

        returns   what puts an end to that
        """
        inspectors = self._family.watch.inspectors
        inspectors.append(inspect)
        return lambda: inspectors.remove(inspect) if inspect in inspectors else None

    def wait_until(self, condition: Callable[[], bool], waited: Waited) -> None:
        """Return when `condition()` holds, which is to poke; it may start collectives, too.

        waited   tells what is waited for, in errors: a name, the missing world ranks, and how far it is
        errors   StallError, PeerLeftError, as `Handle.wait`
        """
        self._family.progress.wait_until(condition, waited)

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

    def split(self, color: int | None, key: int = 0, name: str = "") -> Communicator | None:
        """New communicators of the ranks that pass the same color, ordered by key, then rank. Collective.

        color    any whole number >= 0; None joins no new communicator, and gets None
        errors   OperationError for a color or a key that MPI cannot take
        """
        with self._asking(Call("split")):
            color = None if color is None else _whole("color", color, least=0)
            key = _whole("key", key, least=-LARGEST_KEY)
        # In MPI's split nothing moves, and a rank that comes later may still wait for what was begun before.
        self.unchecked(self._label or "split").barrier()
        transport = self._transport.split(color, key)
        if transport is None:
            return None
        part = Communicator(transport, self._family, name or f"{self.name}.{color}")
        if self._family.shares_memory:
            part.share_memory(self._family.stage_nbytes)
        return part

    def split_by_node(self, name: str = "node") -> Communicator:
        """The ranks that share this rank's node. Collective."""
        node = self.split(self.nodes[self.rank], name=name)
        assert node is not None
        return node

    def lend(self, purpose: str, label: str | None = None) -> Loan:
        """One of the same ranks for calls that come in another order than those on this one. Collective.

        label   under which it counts on this one's account; None: as this one does

        In checked mode, too, it agrees on no calls, for which ranks would wait that are busy with another's.
        What a borrower that is gone on all ranks had is lent again; but one that went in the middle of things
        may have begun a call on one rank and not on another, which the next one's calls would meet there:
        that communicator is left alone.
        """
        if self.size == 1:
            return Loan(self)
        agreed = -1
        if self._lent:
            calls = [IN_USE if lent.loan() is not None else lent.comm.calls for lent in self._lent]
            of_ranks = self.unchecked("agreement").allgather(np.array(calls, dtype=np.int64))
            of_ranks = of_ranks.reshape(self.size, -1)
            gone = (of_ranks != IN_USE).all(axis=0)
            same = gone & (of_ranks == of_ranks[0]).all(axis=0)
            for lent, is_left_alone in zip(self._lent, gone & ~same, strict=True):
                if is_left_alone:
                    lent.comm.abandon()
            agreed = int(same.argmax()) if same.any() else -1
        if agreed >= 0:
            loan = Loan(self._lent[agreed].comm)
            self._lent[agreed].loan = weakref.ref(loan)
            return loan
        made = self.split(0, self.rank, f"{self.name} {purpose}")
        assert made is not None, "every rank belongs to it"
        made.traffic.reset()
        made.traffic = self.traffic
        loan = Loan(made.unchecked(label or self._label))
        self._lent.append(_Lent(loan.comm, weakref.ref(loan)))
        return loan

    def free(self) -> None:
        """Give the communicator back to MPI, which has room for about two thousand. Collective.

        Those that it has lent go with it. Every call on it is an OperationError from then on.
        """
        for lent in self._lent:
            lent.comm.free()
        self._lent.clear()
        self._forget(list(self._recipes))
        if self._arena is not None:
            self._arena.free()
            self._arena = None
        self._lanes.free()
        self._messages.free()
        self._transport.free()

    @property
    def calls(self) -> int:
        """How many collectives have been begun: the same on all ranks, if they make the same calls."""
        return self._calls[0]

    def abandon(self) -> None:
        """Give up what is under way here because other ranks will never come to it.

        Nobody may use the communicator afterwards. Not collective; memory that messages may still come to
        is kept.
        """
        self._abandoned.extend(self._family.progress.give_up(self.name))

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

    def __repr__(self) -> str:
        return f"Communicator({self.name!r}, rank {self.rank} of {self.size})"

    def _require_same(self, description: str) -> None:
        agree.require_same(self, description)


def _whole(what: str, number: int, *, least: int) -> int:
    """What MPI can split by; OperationError for anything else."""
    try:
        found = operator.index(number)
    except TypeError:
        found = least - 1
    if not least <= found <= LARGEST_KEY:
        raise OperationError(
            f"split by {what}={number!r} was asked for: give a whole number from {least} to {LARGEST_KEY}"
        )
    return found


def run_loopback(
    size: int,
    function: Callable[[Communicator], T],
    *,
    nodes: Sequence[int] | None = None,
    check: bool | None = None,
    timeout_s: float = 60.0,
    shared_memory: bool = False,
    stage_nbytes: int | None = None,
) -> list[T]:
    """Call `function(comm)` on `size` ranks that are threads of this process; its results, by rank.

    nodes    of each rank, the node that it pretends to be on
    check    agree on every collective before data moves (default: HPCPAR_CHECK, or off)
    shared_memory, stage_nbytes   as `Communicator.share_memory`
    errors   the exception of the rank that failed first
    """

    checked = Settings.from_environ().check if check is None else check

    # What a rank has under way when its function returns lives until all have returned: others write to it.
    held: list[Communicator] = []

    def call(transport: loopback.LoopbackTransport) -> T:
        comm = Communicator.over(transport, timeout_s=timeout_s, check=checked)
        held.append(comm)
        if shared_memory:
            comm.share_memory(stage_nbytes)
        return function(comm)

    results = loopback.run(size, call, nodes=nodes, timeout_s=timeout_s)
    for comm in held:  # their shared memory goes now, not when the cyclic collector runs
        comm.free()
    return results
