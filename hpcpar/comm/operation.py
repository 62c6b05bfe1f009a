"""Execute a schedule: steps bound to memory, advanced a little whenever somebody has time.

`plan` turns the chunks of a schedule into runs of elements once. Bound to memory they are steps
that can be posted: loosely, anew for each call (here), or compiled, to be started again and again
(`compiled.py`). An `Operation` posts one step after the other, and never blocks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import groupby
from typing import Protocol

import numpy as np

from hpcpar.algorithms.registry import Algorithm
from hpcpar.algorithms.step import Receive, Send, Space, Step
from hpcpar.algorithms.topology import Nodes
from hpcpar.comm.reductions import prepare_combine, prepare_fold
from hpcpar.errors import MismatchError
from hpcpar.transport.buffers import HostBuffer
from hpcpar.transport.interface import Exchange, Octets, Transport
from hpcpar.units import KiB

COPIED_BY_PYTHON_NBYTES = 16 * KiB
"""Up to so much a memoryview's copy costs half of an array's; beyond, what starting it costs is little."""

_ALL = slice(None)

Spaces = dict[Space, HostBuffer]

Run = tuple[Space, int, int]
"""Elements start to stop of a space: chunks that lie side by side are one run."""

Offsets = tuple[tuple[Space, tuple[int, ...]], ...]
"""For each space, where its chunks start, in elements, and where the last one ends."""


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a step: the peer, what it carries, and whether it is combined on arrival.

    own_turn   how many of those that are combined in the same place come before what is there, in the sum;
               None: it is first, and the sum of two may be formed either way
    own        of what is combined: for each run, where this rank's own summand lies; None: in the run itself
    """

    peer: int
    runs: tuple[Run, ...]
    count: int
    combine: bool = False
    own_turn: int | None = None
    own: tuple[Run, ...] | None = None


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """A step with element positions.

    copies   from which run to which
    """

    copies: tuple[tuple[Run, Run], ...]
    sends: tuple[Message, ...]
    receives: tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """A schedule with element positions, and its bill: messages sent, elements sent and received."""

    steps: tuple[PlannedStep, ...]
    messages: int
    sent: int
    received: int


@lru_cache(maxsize=1024)
def plan(
    algorithm: Algorithm,
    rank: int,
    size: int,
    root: int,
    segments: int,
    offsets: Offsets,
    nodes: Nodes | None = None,
) -> Plan:
    """Bind one rank's schedule to element positions; messages of no elements are left out.

    The messages of a barrier carry no chunks at all, and stay.
    """
    edges = dict(offsets)
    schedule = algorithm.schedule(rank, size, root=root, segments=segments, nodes=nodes)
    return bill(tuple(_plan_step(step, edges) for step in schedule))


def bill(steps: tuple[PlannedStep, ...]) -> Plan:
    """Steps with what they cost; steps that do nothing are left out."""
    sends = [message for step in steps for message in step.sends]
    receives = [message for step in steps for message in step.receives]
    return Plan(
        tuple(step for step in steps if step.copies or step.sends or step.receives),
        messages=len(sends),
        sent=sum(message.count for message in sends),
        received=sum(message.count for message in receives),
    )


def _plan_step(step: Step, edges: dict[Space, tuple[int, ...]]) -> PlannedStep:
    copies = [
        (_run(copy.space, source, edges), _run(copy.into_space, target, edges))
        for copy in step.copies
        for source, target in zip(copy.chunks, copy.into, strict=True)
    ]
    sends = [Message(send.to, *_runs(send, edges)) for send in step.sends]
    receives = [
        Message(r.source, *_runs(r, edges), combine=r.combine, own_turn=step.own_turn) for r in step.receives
    ]
    return PlannedStep(
        tuple(copies),
        tuple(message for message in sends if message.count or not message.runs),
        tuple(message for message in receives if message.count or not message.runs),
    )


def _run(space: Space, chunk: int, edges: dict[Space, tuple[int, ...]]) -> Run:
    return space, edges[space][chunk], edges[space][chunk + 1]


def _runs(message: Send | Receive, edges: dict[Space, tuple[int, ...]]) -> tuple[tuple[Run, ...], int]:
    """The message's chunks, in order, as few runs as possible; and the number of elements."""
    runs: list[Run] = []
    for chunk in message.chunks:
        space, start, stop = _run(message.space, chunk, edges)
        if runs and runs[-1][2] == start:
            runs[-1] = (space, runs[-1][1], stop)
        else:
            runs.append((space, start, stop))
    return tuple(runs), sum(stop - start for _, start, stop in runs)


def copies_of(
    planned: PlannedStep, spaces: Spaces
) -> tuple[list[Callable[[], None]], list[Callable[[], None]]]:
    """The copies of a step: those to begin with, and those of which its messages touch nothing."""
    touched = [run for message in (*planned.sends, *planned.receives) for run in message.runs]
    before: list[Callable[[], None]] = []
    beside: list[Callable[[], None]] = []
    for source, target in planned.copies:
        is_beside = not any(overlapping(run, other) for run in touched for other in (source, target))
        copy = copying(octets_of(spaces, target), octets_of(spaces, source))
        (beside if is_beside else before).append(copy)
    return before, beside


def overlapping(one: Run, other: Run) -> bool:
    """Whether two runs have elements in common."""
    return one[0] == other[0] and one[1] < other[2] and other[1] < one[2]


class ScratchPool:
    """Memory lent to operations and used again, so that pages are not faulted in on every call."""

    KEPT = 8

    def __init__(self) -> None:
        self._free: list[Octets] = []

    def take(self, nbytes: int) -> Octets:
        """At least `nbytes` bytes of any content; the smallest that is large enough."""
        fitting = [i for i, octets in enumerate(self._free) if octets.size >= nbytes]
        if not fitting:
            return np.empty(nbytes, dtype=np.uint8)
        return self._free.pop(min(fitting, key=lambda i: self._free[i].size))

    def give_back(self, octets: Octets) -> None:
        self._free.append(octets)
        if len(self._free) > self.KEPT:
            self._free.pop(min(range(len(self._free)), key=lambda i: self._free[i].size))


class BoundStep(Protocol):
    """A step of a plan together with the memory it works on."""

    def post(self) -> Exchange:
        """Do the copies, and post all sends and receives."""

    def settle(self) -> None:
        """The messages are all here: fold in or unpack those that landed in scratch."""


class LooseStep:
    """A step bound for one call: views and scratch are had when it is posted, and given back."""

    def __init__(
        self,
        transport: Transport,
        planned: PlannedStep,
        spaces: Spaces,
        op: str,
        tag: int,
        scratch: ScratchPool,
    ) -> None:
        self._transport = transport
        self._planned = planned
        self._spaces = spaces
        self._itemsize = itemsize_of(spaces)
        self._op = op
        self._tag = tag
        self._scratch = scratch
        self._landings: list[tuple[Message, Octets]] = []
        self._packed: list[Octets] = []

    def post(self) -> Exchange:
        before, beside = copies_of(self._planned, self._spaces)
        for copy in before:
            copy()
        receives = [(self._landing(message), message.peer) for message in self._planned.receives]
        sends = [(self._departing(message), message.peer) for message in self._planned.sends]
        exchange = self._transport.start(sends, receives, self._tag)
        for copy in beside:
            copy()
        return exchange

    def settle(self) -> None:
        for fold in folds(self._spaces, self._landings, self._op):
            fold()
        for _, octets in self._landings:
            self._scratch.give_back(octets)
        for octets in self._packed:
            self._scratch.give_back(octets)
        self._landings.clear()
        self._packed.clear()

    def _landing(self, message: Message) -> Octets:
        if lands_in_place(message):
            return octets_of(self._spaces, message.runs[0])
        octets = self._scratch.take(message.count * self._itemsize)
        self._landings.append((message, octets))
        return octets[: message.count * self._itemsize]

    def _departing(self, message: Message) -> Octets:
        if len(message.runs) == 1:
            return octets_of(self._spaces, message.runs[0])
        octets = self._scratch.take(message.count * self._itemsize)
        self._packed.append(octets)
        for part, place in packing(self._spaces, message, octets):
            place[...] = part
        return octets[: message.count * self._itemsize]


def itemsize_of(spaces: Spaces) -> int:
    """Bytes of an element; all spaces of a call have the same, and a barrier has none."""
    return next((buffer.itemsize for buffer in spaces.values()), 1)


def octets_of(spaces: Spaces, run: Run) -> Octets:
    """The bytes of a run."""
    space, start, stop = run
    buffer = spaces[space]
    return buffer.octets[start * buffer.itemsize : stop * buffer.itemsize]


def part_of(spaces: Spaces, run: Run) -> HostBuffer:
    """The elements of a run."""
    space, start, stop = run
    return spaces[space].part(start, stop)


def lands_in_place(message: Message) -> bool:
    """Whether what arrives can be received where it belongs."""
    return not message.combine and len(message.runs) == 1


def folds(
    spaces: Spaces, landed: Sequence[tuple[Message, Octets]], op: str, held: Octets | None = None
) -> Iterator[Callable[[], None]]:
    """What is to be done with messages that landed elsewhere, in the order of their receives.

    Messages of several peers for the same place are folded in together, in one pass over memory.

    held   a copy of what is there that will not change meanwhile, for sums in which it is not the first
    """
    for (runs, combines), group in groupby(landed, key=lambda landing: (landing[0].runs, landing[0].combine)):
        alike = list(group)
        first = alike[0][0]
        pieces, own_turn = [octets for _, octets in alike], first.own_turn
        at = 0
        for run, own_run in zip(runs, first.own or runs, strict=True):
            target = part_of(spaces, run)
            incoming = [target.like(octets[at : at + target.octets.size]) for octets in pieces]
            if own_run != run:
                own = part_of(spaces, own_run)
            else:
                own = target if held is None else target.like(held[at : at + target.octets.size])
            at += target.octets.size
            if not combines:
                yield copying(target.octets, incoming[-1].octets)
            elif own_turn is not None:
                yield prepare_fold(op, target, (*incoming[:own_turn], own, *incoming[own_turn:]))
            elif len(incoming) == 1:
                yield prepare_combine(op, target, own, incoming[0])
            else:
                yield prepare_fold(op, target, (own, *incoming))


def copying(target: Octets, source: Octets) -> Callable[[], None]:
    """target = source as a call without arguments; a sixth of what `numpy.copyto` costs for a small one.

    Bytes of a device are copied in their queue, however few.
    """
    if isinstance(target, np.ndarray) and target.size <= COPIED_BY_PYTHON_NBYTES:
        return partial(target.data.__setitem__, _ALL, source.data)
    return partial(target.__setitem__, ..., source)


def packing(spaces: Spaces, message: Message, packed: Octets) -> Iterator[tuple[Octets, Octets]]:
    """For each run of a message that travels packed: (its bytes, their place in the packet)."""
    at = 0
    for run in message.runs:
        part = octets_of(spaces, run)
        yield part, packed[at : at + part.size]
        at += part.size


class Lane(Protocol):
    """What operations that share a tag pass through one after the other, in the order of their calls."""

    def join(self, operation: Operation) -> None:
        """This operation will want its turn."""

    def enter(self, operation: Operation) -> bool:
        """True if it is this operation's turn."""

    def leave(self) -> None:
        """The operation is over."""


class Outcome:
    """What became of an operation, each time it is done."""

    __slots__ = ("done", "error")

    def __init__(self) -> None:
        self.done = False
        self.error: BaseException | None = None


class Operation:
    """A schedule under way on one rank.

    what             what is being done, for errors: "allreduce"
    number, comm     which call it is, of which communicator
    on_done          called once, when the last step is complete
    memory           what the steps work on, kept alive until they are done
    lane             where it waits for its turn, if it shares a tag with others
    expected_nbytes  what point-to-point receives must bring, no more and no less
    """

    def __init__(
        self,
        transport: Transport,
        steps: Sequence[BoundStep],
        on_done: Callable[[Operation], None],
        *,
        what: str,
        number: int,
        comm: str,
        memory: object,
        lane: Lane | None = None,
        expected_nbytes: int | None = None,
    ) -> None:
        self.started_s = time.perf_counter()
        self.outcome = Outcome()
        self._transport = transport
        self.steps = steps
        self._on_done = on_done
        self._named = (what, number, comm)
        self._memory = memory
        self._lane = lane
        self._expected_nbytes = expected_nbytes
        self._index = 0
        self._exchange: Exchange | None = None
        if lane is not None:
            lane.join(self)

    def restart(self, number: int, memory: object = None) -> None:
        """Make a completed operation ready to be done once more, as call `number`.

        memory   what is to be kept alive this time
        """
        self.started_s = time.perf_counter()
        self.outcome = Outcome()
        self._named = (self._named[0], number, self._named[2])
        self._memory = memory
        self._index = 0
        if self._lane is not None:
            self._lane.join(self)

    def resume(self, number: int, index: int, exchange: Exchange, memory: object) -> None:
        """A completed operation is being done once more, as call `number`, and has come to this step."""
        self.restart(number, memory)
        self._index = index
        self._exchange = exchange

    @property
    def done(self) -> bool:
        return self.outcome.done

    @property
    def comm(self) -> str:
        return self._named[2]

    @property
    def name(self) -> str:
        what, number, comm = self._named
        return f"{what} (call {number} of {comm!r})"

    def advance(self) -> bool:
        """Do all that can be done without waiting; True when the operation has ended."""
        if self.outcome.done:
            return True
        if self._lane is not None and not self._lane.enter(self):
            return False
        try:
            if not self._advance_steps():
                return False
        except BaseException:
            self._leave()
            raise
        self.outcome.done = True
        self._leave()
        self._on_done(self)
        self._memory = None
        return True

    def _advance_steps(self) -> bool:
        while self._index < len(self.steps):
            step = self.steps[self._index]
            if self._exchange is None:
                self._exchange = step.post()
            if not self._exchange.test():
                return False
            if self._expected_nbytes is not None:
                self._require_length(self._exchange)
            step.settle()
            self._exchange = None
            self._index += 1
        return True

    def _leave(self) -> None:
        if self._lane is not None:
            self._lane.leave()

    def waiting_for(self) -> tuple[int, ...]:
        """World ranks whose messages are missing."""
        if self.done or self._exchange is None:
            return ()
        return tuple(self._transport.world_ranks[r] for r in self._exchange.waiting_for())

    def progress(self) -> str:
        return f"step {self._index + 1} of {len(self.steps)}"

    def _require_length(self, exchange: Exchange) -> None:
        if exchange.received_nbytes() != self._expected_nbytes:
            raise MismatchError(
                f"{self.name} expected {self._expected_nbytes} bytes, but {exchange.received_nbytes()} came; "
                f"sender and receiver must name the same number of bytes"
            )
