"""Calls whose data are to stay as they are, or whose result goes to another array.

A schedule works on one array, in place. Where the data are elsewhere, `reading` has it take them from there
for as long as it has not received anything in their place; else they would be copied first, and peers that
read each other's memory would wait for the copy.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby

from hpcpar.comm.operation import Message, Plan, PlannedStep, Run, ScratchPool, Spaces, overlapping
from hpcpar.transport.buffers import HostBuffer
from hpcpar.transport.gpu.memory import DeviceBuffer
from hpcpar.transport.interface import Octets

Span = tuple[int, int]
"""Elements from, to."""


@dataclass(frozen=True, slots=True)
class Kept:
    """The caller's data are to stay as they are; what is received goes elsewhere.

    target   what gets the result, this rank's own share of the data; None: none is wanted
    """

    target: HostBuffer | None = None


@lru_cache(maxsize=256)
def reading(planned: Plan, filled: Run, given: Run, *, fills: bool = True) -> Plan | None:
    """The plan as if `filled` held what `given` holds: read there, and copied where nothing else comes.

    fills   False: where nothing else comes, nothing is wanted

    None where that is not to be had: there are no steps, or a message or a sum is of both, what has been
    received and what has not.
    """
    try:
        return _Reading(filled, given).plan(planned, fills=fills)
    except _IsOfBothError:
        return None


class _IsOfBothError(Exception):
    """A part that was received into, beside one that was not."""


class _Reading:
    """A plan on its way to reading elsewhere.

    _left   spans of `filled` that nothing has been received into so far
    """

    def __init__(self, filled: Run, given: Run) -> None:
        self._filled = filled
        self._given = given
        self._left: list[Span] = [filled[1:]]

    def plan(self, planned: Plan, *, fills: bool) -> Plan:
        steps = [self._step(step) for step in planned.steps]
        if not steps:
            raise _IsOfBothError
        if fills:
            copies = [(self._elsewhere(left), (self._filled[0], *left)) for left in self._left]
            steps[0] = replace(steps[0], copies=(*steps[0].copies, *copies))
        return replace(planned, steps=tuple(steps))

    def _step(self, step: PlannedStep) -> PlannedStep:
        if any(overlapping(run, self._filled) for copy in step.copies for run in copy):
            raise _IsOfBothError
        sends = tuple(self._moved(message, own=False) for message in step.sends)
        receives = tuple(
            self._moved(message, own=True) if message.combine else message for message in step.receives
        )
        seen: list[Run] = []
        for runs, _ in groupby(message.runs for message in receives):
            if any(overlapping(run, other) for run in runs for other in seen):
                raise _IsOfBothError  # whichever comes second would find a sum already
            seen += runs
        for run in seen:
            if run[0] == self._filled[0]:
                self._left = [part for left in self._left for part in _without(left, run[1:])]
        return replace(step, sends=sends, receives=receives)

    def _moved(self, message: Message, *, own: bool) -> Message:
        runs = tuple(map(self._place, message.runs))
        if runs == message.runs:
            return message
        return replace(message, own=runs) if own else replace(message, runs=runs)

    def _place(self, run: Run) -> Run:
        """Where the content of a run is now."""
        space, start, stop = run
        if space != self._filled[0] or not any(start < b and a < stop for a, b in self._left):
            return run
        if not any(a <= start and stop <= b for a, b in self._left):
            raise _IsOfBothError
        return self._elsewhere((start, stop))

    def _elsewhere(self, span: Span) -> Run:
        shift = self._given[1] - self._filled[1]
        return self._given[0], span[0] + shift, span[1] + shift


def _without(span: Span, taken: Span) -> Iterator[Span]:
    """What is left of a span."""
    for start, stop in ((span[0], min(span[1], taken[0])), (max(span[0], taken[1]), span[1])):
        if start < stop:
            yield start, stop


def redirected(planned: Plan, run: Run) -> Plan | None:
    """The plan with all that it receives into `run` in the space "output" instead, of that size and filled.

    None where something else is received, or where the run is sent as well.
    """
    received = {message.runs for step in planned.steps for message in step.receives}
    sent = {part for step in planned.steps for message in step.sends for part in message.runs}
    if received != {(run,)} or any(overlapping(part, run) for part in sent):
        return None
    into: tuple[Run] = (("output", 0, run[2] - run[1]),)
    return replace(
        planned,
        steps=tuple(
            replace(step, receives=tuple(replace(message, runs=into) for message in step.receives))
            for step in planned.steps
        ),
    )


def apart(
    kept: Kept, own: Span, spaces: Spaces, scratch: ScratchPool | None
) -> tuple[Spaces, tuple[HostBuffer, HostBuffer] | None, Octets | None]:
    """Memory of the data's size to work in, what is to be copied out of it at the end, and what was borrowed.

    scratch   from which to borrow the memory; None: it is to be new
    """
    data, borrowed = spaces["data"], None
    if scratch is None or isinstance(data, DeviceBuffer):
        work = data.scratch(data.count)
    else:
        borrowed = scratch.take(data.octets.size)
        work = data.like(borrowed[: data.octets.size])
    delivered = None if kept.target is None else (kept.target, work.part(*own))
    return {**spaces, "data": work}, delivered, borrowed


def fill(target: HostBuffer, source: HostBuffer) -> None:
    """Copy, unless both are the same memory."""
    if not is_same(target, source):
        target.octets[...] = source.octets


def is_same(target: HostBuffer, source: HostBuffer) -> bool:
    """Whether both are the same memory; they are of one length."""
    return target is source or not target.octets.size or target.address == source.address


def overlap(a: HostBuffer, b: HostBuffer) -> bool:
    """Whether they have memory in common."""
    return a.address < b.address + b.octets.size and b.address < a.address + a.octets.size
