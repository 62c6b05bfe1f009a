"""Execute a schedule: steps bound to memory, advanced a little whenever somebody has time.

`plan` turns the chunks of a schedule into runs of elements once; an `Operation` then posts one
step after the other, and never blocks.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from hpcpar.algorithms.catalogue import Algorithm
from hpcpar.algorithms.step import Receive, Send, Space, Step
from hpcpar.comm.reductions import combine
from hpcpar.errors import MismatchError
from hpcpar.transport.buffers import HostBuffer
from hpcpar.transport.interface import Exchange, Octets, Transport

Run = tuple[Space, int, int]
"""Elements start to stop of a space: chunks that lie side by side are one run."""

Offsets = tuple[tuple[Space, tuple[int, ...]], ...]
"""For each space, where its chunks start, in elements, and where the last one ends."""


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a step: the peer, what it carries, and whether it is combined on arrival."""

    peer: int
    runs: tuple[Run, ...]
    count: int
    combine: bool = False


@dataclass(frozen=True, slots=True)
class PlannedStep:
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
def plan(algorithm: Algorithm, rank: int, size: int, root: int, segments: int, offsets: Offsets) -> Plan:
    """Bind one rank's schedule to element positions; messages of no elements are left out.

    The messages of a barrier carry no chunks at all, and stay.
    """
    edges = dict(offsets)
    schedule = algorithm.schedule(rank, size, root=root, segments=segments)
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
    receives = [Message(r.source, *_runs(r, edges), combine=r.combine) for r in step.receives]
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


@dataclass(slots=True)
class Landing:
    """Where a message that cannot land in place is received, before it is folded in."""

    message: Message
    octets: Octets


class Operation:
    """A schedule under way on one rank.

    name             what is being done, for errors: "allreduce (call 17 of 'dp')"
    on_done          called once, when the last step is complete
    expected_nbytes  what point-to-point receives must bring, no more and no less
    """

    def __init__(
        self,
        transport: Transport,
        planned: Plan,
        spaces: dict[Space, HostBuffer],
        *,
        op: str,
        tag: int,
        name: str,
        scratch: ScratchPool,
        on_done: Callable[[], None],
        expected_nbytes: int | None = None,
    ) -> None:
        self.name = name
        self.started_s = time.perf_counter()
        self.error: BaseException | None = None
        self.done = False
        self._transport = transport
        self._plan = planned
        self._spaces = spaces
        self._itemsize = next((buffer.itemsize for buffer in spaces.values()), 1)
        self._op = op
        self._tag = tag
        self._scratch = scratch
        self._on_done = on_done
        self._expected_nbytes = expected_nbytes
        self._index = 0
        self._exchange: Exchange | None = None
        self._landings: list[Landing] = []
        self._packed: list[Octets] = []

    def advance(self) -> bool:
        """Do all that can be done without waiting; True when the operation has ended."""
        while not self.done:
            if self._index == len(self._plan.steps):
                self.done = True
                self._on_done()
                break
            if self._exchange is None:
                self._exchange = self._post(self._plan.steps[self._index])
            if not self._exchange.test():
                return False
            self._require_length(self._exchange)
            self._settle()
            self._exchange = None
            self._index += 1
        return True

    def waiting_for(self) -> tuple[int, ...]:
        """World ranks whose messages are missing."""
        if self.done or self._exchange is None:
            return ()
        return tuple(self._transport.world_ranks[r] for r in self._exchange.waiting_for())

    def progress(self) -> str:
        return f"step {self._index + 1} of {len(self._plan.steps)}"

    def _post(self, step: PlannedStep) -> Exchange:
        for source, target in step.copies:
            _copy(self._part(target), self._part(source))
        receives = [(self._landing_octets(message), message.peer) for message in step.receives]
        sends = [(self._departing_octets(message), message.peer) for message in step.sends]
        return self._transport.start(sends, receives, self._tag)

    def _part(self, run: Run) -> HostBuffer:
        space, start, stop = run
        return self._spaces[space].part(start, stop)

    def _landing_octets(self, message: Message) -> Octets:
        if not message.combine and len(message.runs) == 1:
            return self._octets(message.runs[0])
        octets = self._take(message.count)
        if message.runs:
            self._landings.append(Landing(message, octets))
        return octets[: self._nbytes(message.count)]

    def _departing_octets(self, message: Message) -> Octets:
        if len(message.runs) == 1:
            return self._octets(message.runs[0])
        octets = self._take(message.count)
        self._packed.append(octets)
        start = 0
        for run in message.runs:
            part = self._octets(run)
            octets[start : start + part.size] = part
            start += part.size
        return octets[:start]

    def _octets(self, run: Run) -> Octets:
        space, start, stop = run
        buffer = self._spaces[space]
        return buffer.octets[start * buffer.itemsize : stop * buffer.itemsize]

    def _take(self, count: int) -> Octets:
        return self._scratch.take(self._nbytes(count))

    def _nbytes(self, count: int) -> int:
        return count * self._itemsize

    def _require_length(self, exchange: Exchange) -> None:
        if self._expected_nbytes is None or exchange.received_nbytes() == self._expected_nbytes:
            return
        raise MismatchError(
            f"{self.name} expected {self._expected_nbytes} bytes, but {exchange.received_nbytes()} came; "
            f"sender and receiver must name the same number of bytes"
        )

    def _settle(self) -> None:
        """The step's messages are all here: fold in or unpack those that landed in scratch."""
        for landing in self._landings:
            start = 0
            for run in landing.message.runs:
                target = self._part(run)
                incoming = target.like(landing.octets[start : start + target.octets.size])
                if landing.message.combine:
                    combine(self._op, target, incoming)
                else:
                    _copy(target, incoming)
                start += target.octets.size
            self._scratch.give_back(landing.octets)
        for octets in self._packed:
            self._scratch.give_back(octets)
        self._landings.clear()
        self._packed.clear()


def _copy(target: HostBuffer, source: HostBuffer) -> None:
    target.octets[...] = source.octets
