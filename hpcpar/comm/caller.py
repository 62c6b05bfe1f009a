"""From a collective that was asked for to an operation under way: what all calls have in common."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hpcpar import partition
from hpcpar.algorithms.step import Space
from hpcpar.comm.accounting import Trace, Traffic
from hpcpar.comm.operation import Offsets, Operation, Plan, ScratchPool, plan
from hpcpar.comm.progress import Handle, Progress
from hpcpar.comm.reductions import finish
from hpcpar.comm.select import choose, segments_for
from hpcpar.comm.watch import Watch
from hpcpar.errors import HpcparError, OperationError
from hpcpar.transport.buffers import Binding, HostBuffer, bind
from hpcpar.transport.interface import COLLECTIVE_TAGS, Transport

Spaces = dict[Space, HostBuffer]

NOTHING = HostBuffer(np.empty(0, dtype=np.uint8), np.empty(0, dtype=np.uint8), "uint8", 1)
"""What a barrier communicates."""


@dataclass
class Family:
    """What a communicator shares with all that are split from it.

    check       agree on every collective before data moves
    overrides   algorithm by collective, from HPCPAR_ALGORITHM
    trace       where to note what moved when, or None
    """

    transport: Transport
    watch: Watch
    check: bool = False
    overrides: Mapping[str, str] = field(default_factory=dict)
    trace: Trace | None = None
    traffics: dict[str, Traffic] = field(default_factory=dict)
    scratch: ScratchPool = field(default_factory=ScratchPool)

    def __post_init__(self) -> None:
        self.progress = Progress(self.transport, self.watch)

    def register(self, name: str) -> tuple[str, Traffic]:
        """A name of its own, and an empty account, for a new communicator."""
        unique, number = name, 1
        while unique in self.traffics:
            number += 1
            unique = f"{name}#{number}"
        return unique, self.traffics.setdefault(unique, Traffic())

    def forget(self, name: str) -> None:
        """Drop an account, and so free its name."""
        self.traffics.pop(name, None)


@dataclass
class Call:
    """One collective as it is being asked for.

    described   what all ranks must agree on, beside the collective's name, root and algorithm
    """

    collective: str
    op: str = "sum"
    root: int | None = None
    algorithm: str | None = None
    described: str = ""

    def __str__(self) -> str:
        root = "" if self.root is None else f", root={self.root}"
        algorithm = "" if self.algorithm is None else f", algorithm={self.algorithm}"
        return f"{self.collective}({self.described}{root}{algorithm})"


class Caller(ABC):
    """What every collective needs: the transport, the family, the account and the call number."""

    rank: int
    size: int
    name: str
    traffic: Traffic

    def __init__(self, transport: Transport, family: Family, name: str) -> None:
        self._transport = transport
        self._family = family
        self._checked = family.check
        self._label: str | None = None
        self._calls = [0]  # shared with unchecked copies, so that every call has a tag of its own
        self.name, self.traffic = family.register(name)
        self.rank = transport.rank
        self.size = transport.size

    def algorithm_for(
        self, collective: str, nbytes: int, *, uneven: bool = False, named: str | None = None
    ) -> str:
        """Name of the algorithm that a collective of `nbytes`, of the whole array, would run by.

        uneven   the ranks' pieces are not equally large
        named    what the caller of the collective would ask for
        """
        return choose(collective, nbytes, uneven=uneven, named=named, overrides=self._family.overrides).name

    @abstractmethod
    def _require_same(self, description: str) -> None:
        """Raise MismatchError on every rank unless all pass the same description."""

    @contextmanager
    def _asking(self, call: Call) -> Iterator[Call]:
        """Look at the arguments inside; in checked mode all ranks agree on them before data moves.

        An error in one rank's arguments is then everybody's, so that nobody waits for that rank.
        """
        try:
            if call.root is not None:
                self._require_peer(call.root, f"the root of {call.collective}")
            yield call
        except HpcparError as error:
            if self._checked:
                self._require_same(f"{call.collective}, and failed: {error}")
            raise
        if self._checked:
            self._require_same(str(call))

    def _start(
        self,
        call: Call,
        spaces: Spaces,
        offsets: Offsets | None,
        result: Callable[[], Any],
        *,
        uneven: bool = False,
        averaged: HostBuffer | None = None,
        write_back: Callable[[], None] | None = None,
    ) -> Handle:
        """Choose the algorithm, bind its schedule to the spaces, and set it going.

        offsets      where the chunks of each space start; None: as the algorithm cuts the data
        uneven       the pieces of the ranks are not equally large
        averaged     what an average divides at the end
        write_back   brings a result from host memory to where the caller has it
        """
        whole = next(iter(spaces.values()), NOTHING)
        nbytes = whole.octets.size
        algorithm = choose(
            call.collective, nbytes, uneven=uneven, named=call.algorithm, overrides=self._family.overrides
        )
        segments = segments_for(algorithm, nbytes)
        chunks = max(1, algorithm.chunks(self.size, segments))
        cut = offsets or (("data", partition.offsets(partition.counts(whole.count, chunks))),)
        work_chunks = algorithm.work_chunks(self.size)
        if work_chunks:
            cut, spaces = _with_work(cut, spaces, work_chunks)
        planned = plan(algorithm, self.rank, self.size, call.root or 0, segments, cut)

        def on_done() -> None:
            if averaged is not None:
                finish(call.op, averaged, self.size)
            if write_back is not None:
                write_back()

        return self._go(call.collective, planned, spaces, result, on_done, op=call.op, by=algorithm.name)

    def _go(
        self,
        what: str,
        planned: Plan,
        spaces: Spaces,
        result: Callable[[], Any],
        on_done: Callable[[], None],
        *,
        op: str = "sum",
        by: str = "",
        row: str | None = None,
        tag: int | None = None,
        expected_nbytes: int | None = None,
    ) -> Handle:
        """Make the operation, count it, trace it, and bring it as far as it goes without waiting."""
        number = self._calls[0]
        if tag is None:
            tag = number % COLLECTIVE_TAGS
            self._calls[0] += 1
        account = self.traffic.row(self._label or row or what)
        itemsize = next((buffer.itemsize for buffer in spaces.values()), 0)

        def ended() -> None:
            on_done()
            account.calls += 1
            account.messages += planned.messages
            account.nbytes_sent += planned.sent * itemsize
            account.nbytes_received += planned.received * itemsize
            trace = self._family.trace
            if trace is not None:
                trace.add(
                    f"{what} {self.name}",
                    "communication",
                    operation.started_s,
                    time.perf_counter(),
                    nbytes_sent=planned.sent * itemsize,
                    algorithm=by,
                )

        operation = Operation(
            self._transport,
            planned,
            spaces,
            op=op,
            tag=tag,
            name=f"{what} (call {number} of {self.name!r})",
            scratch=self._family.scratch,
            on_done=ended,
            expected_nbytes=expected_nbytes,
        )
        self._family.progress.add(operation)
        return Handle(self._family.progress, operation, result, account)

    def _require_peer(self, peer: int, what: str) -> None:
        if not 0 <= peer < self.size:
            raise OperationError(
                f"{what} is rank {peer}, but communicator {self.name!r} has ranks 0 to {self.size - 1}"
            )


def typed(array: Any, host: HostBuffer) -> str:
    """Element type and shape, as ranks compare them: float32[1024, 1024]."""
    return f"{host.dtype}{list(array.shape)}"


def bind_out(out: Any, count: int, dtype: str) -> Binding:
    """An `out` argument: it must be writable and have the result's length and element type."""
    binding = bind(out, writable=True, what="out")
    if binding.host.count != count or binding.host.dtype != dtype:
        raise OperationError(
            f"out has {binding.host.count} elements of {binding.host.dtype}; "
            f"the result has {count} of {dtype}: give an array of that length and type"
        )
    return binding


def fill(target: HostBuffer, source: HostBuffer) -> None:
    """Copy, unless both are the same memory."""
    if target is not source and target.octets.size and target.octets.ctypes.data != source.octets.ctypes.data:
        target.octets[...] = source.octets


def _with_work(offsets: Offsets, spaces: Spaces, chunks: int) -> tuple[Offsets, Spaces]:
    """Add scratch of `chunks` chunks, each as large as the first chunk of the first space."""
    edges = offsets[0][1]
    count = edges[1] - edges[0]
    template = next(iter(spaces.values()))
    work = template.scratch(count * chunks)
    work_edges = tuple(range(0, count * chunks + 1, count)) if count else (0,) * (chunks + 1)
    return (*offsets, ("work", work_edges)), {**spaces, "work": work}
