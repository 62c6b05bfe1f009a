"""MPI's own collectives: one step, which the library does.

A call begins MPI's collective at once and takes no turns, so all ranks begin those of one communicator in the
order of their calls, as MPI demands. From then on it is tested, waited for, timed out and reported like any
other. MPI does not say whose part is missing, so the ranks ask each other (`comm/watch.py`): those that have
begun the same call are not waited for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Protocol

from hpcpar.algorithms.step import Space
from hpcpar.comm.plan import Offsets
from hpcpar.comm.watch import Watch
from hpcpar.transport.buffers import HostBuffer
from hpcpar.transport.interface import Exchange, NativeCall, Natives, Transport

FLOATS = ("float16", "bfloat16", "float32", "float64")


def obstacle(
    transport: Transport, collective: str, op: str, dtype: str, nbytes: int | None, *, named: bool
) -> str | None:
    """Say why MPI's own cannot do a call; None: it can. The same on every rank.

    nbytes   of the whole array; None where the ranks do not know it of each other
    named    the caller asks for it, and so takes its min and max as they are
    """
    if transport.natives is None:
        return "there is no MPI below this communicator, whose ranks are threads of one process"
    if not named and op in ("min", "max") and dtype in FLOATS:
        return f"MPI leaves open what becomes of a NaN in the {op} of {dtype}"
    return transport.natives.obstacle(collective, op, dtype, nbytes)


@dataclass(frozen=True, slots=True)
class Participants:
    """Ranks that take part in a call, as the watch has heard.

    comm_id, number   as in `watch.Call`
    """

    watch: Watch
    world_ranks: tuple[int, ...]
    comm_id: int
    number: int

    def answer(self) -> None:
        """Note that this rank takes part."""
        self.watch.begin(self.comm_id, self.number)

    def missing(self, ranks: tuple[int, ...]) -> tuple[int, ...]:
        """Those of `ranks` that are not known to take part; when all do, those that have not left."""
        absent = [
            r for r in ranks if not self.watch.has_begun(self.world_ranks[r], self.comm_id, self.number)
        ]
        return tuple(absent) or tuple(r for r in ranks if not self.watch.has_left(self.world_ranks[r]))


class Posted(Protocol):
    """Interface that native calls and device steps share."""

    def post(self) -> Exchange: ...

    def settle(self) -> None: ...


class _NativeCallExchange:
    """A collective of MPI under way, which waits for the ranks that have not begun it."""

    def __init__(self, begun: Exchange, participants: Participants) -> None:
        self.test = begun.test
        self.received_nbytes = begun.received_nbytes
        self._begun = begun
        self._participants = participants

    def waiting_for(self) -> tuple[int, ...]:
        return self._participants.missing(self._begun.waiting_for())


class NativeStep:
    """The only step of such a call.

    place   where the result belongs; MPI may have to leave it elsewhere first
    """

    def __init__(
        self, natives: Natives, call: NativeCall, place: HostBuffer, participants: Participants
    ) -> None:
        self._natives = natives
        self._call = call
        self._place = place
        self._participants = participants

    def post(self) -> Exchange:
        self._participants.answer()
        return _NativeCallExchange(self._natives.start(self._call), self._participants)

    def settle(self) -> None:
        if self._place is not self._call.target:
            self._place.octets[...] = self._call.target.octets


def native_step(
    transport: Transport,
    participants: Participants,
    call: NativeCall,
    spaces: Mapping[Space, HostBuffer],
    offsets: Offsets | None,
) -> NativeStep:
    """A call bound to memory as MPI wants it: input and result are either the same or apart.

    call      without pieces, its target the first of `spaces`
    spaces    what the steps of ours would work in
    offsets   where the ranks' pieces start in these
    """
    assert transport.natives is not None, "never chosen without them"
    counts = {space: tuple(stop - start for start, stop in pairwise(edges)) for space, edges in offsets or ()}
    place = call.target
    match call.collective:
        case "allgather":
            call = replace(call, target_counts=counts["data"])
        case "reduce_scatter":
            start = sum(counts["data"][: transport.rank])
            place = call.target.part(start, start + counts["data"][transport.rank])
            # In place MPI would leave every rank's piece at the beginning.
            apart = place.scratch(place.count)
            call = replace(call, source=call.target, target=apart, source_counts=counts["data"])
        case "alltoall":
            place = spaces["output"]
            call = replace(call, source=spaces["input"], target=place)
            call = replace(call, source_counts=counts["input"], target_counts=counts["output"])
    return NativeStep(transport.natives, call, place, participants)


class PostedStep:
    """A step that is posted, tested until its messages are complete, and then settled."""

    count, done = 1, 0
    awaited = None

    def __init__(self, step: Posted) -> None:
        self._step = step
        self._exchange: Exchange | None = None
        self._is_done = False

    def begin(self, number: int) -> None:
        self._exchange = None
        self._is_done = False

    def advance(self, looks: int) -> bool:
        if self._is_done:
            return True
        if self._exchange is None:
            self._exchange = self._step.post()
        if not self._exchange.test():
            return False
        self._step.settle()
        self._is_done = True
        return True

    def waiting_for(self) -> tuple[int, ...]:
        return () if self._exchange is None or self._is_done else self._exchange.waiting_for()

    def received_nbytes(self) -> int:
        return 0 if self._exchange is None else self._exchange.received_nbytes()

    def free(self) -> None:
        """Nothing is held."""
