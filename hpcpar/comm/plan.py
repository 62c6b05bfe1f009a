"""From the chunks of a schedule to element ranges: integers only, no memory."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby

from hpcpar.algorithms.registry import Algorithm
from hpcpar.algorithms.step import Receive, Send, Space, Step
from hpcpar.algorithms.topology import Nodes

Run = tuple[Space, int, int]
"""A contiguous range of elements of a space: (space, start, stop)."""

Edges = tuple[int, ...]
"""Where the chunks of a space start, in elements, and where the last one ends."""

Offsets = tuple[tuple[Space, Edges], ...]
"""The edges of each space's chunks."""


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a step: the peer, the ranges it carries, and how it is received.

    combine    reduce it into the ranges on arrival, instead of overwriting them
    own_turn   number of combined messages that precede this rank's own operand
    own        where this rank's own operands lie; None: in the ranges themselves
    place      number of the schedule's earlier messages between the two ranks in this direction: it meets
               the peer's of the same number
    """

    peer: int
    runs: tuple[Run, ...]
    count: int
    combine: bool = False
    own_turn: int = 0
    own: tuple[Run, ...] | None = None
    place: int = 0


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """One step of a schedule in element ranges.

    copies   (from, to) ranges that are copied before the messages
    index    position of the step in the rank's schedule
    """

    copies: tuple[tuple[Run, Run], ...]
    sends: tuple[Message, ...]
    receives: tuple[Message, ...]
    index: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """One rank's schedule in element ranges, with its traffic: messages sent, elements sent and received."""

    steps: tuple[PlannedStep, ...]
    messages: int
    sent: int
    received: int


NOT_COUNTED = Plan((), messages=0, sent=0, received=0)
"""The plan of a collective that the MPI library does: its messages cannot be counted."""


@lru_cache(maxsize=1024)
def plan(
    algorithm: Algorithm,
    rank: int,
    size: int,
    root: int,
    segments: int,
    offsets: Offsets,
    nodes: Nodes | None = None,
    *,
    reads_input: bool = False,
) -> Plan:
    """Bind one rank's schedule to element ranges. Messages of no elements are left out.

    The messages of a barrier carry no chunks at all, and stay.

    reads_input   the data get their first values from the space "input" (`reading_input`)
    """
    edges = dict(offsets)
    schedule = algorithm.schedule(rank, size, root=root, segments=segments, nodes=nodes)
    fresh: Sequence[Sequence[bool]] = [[False] * len(step.receives) for step in schedule]
    if reads_input:
        found = reading_input(schedule)
        assert found is not None, "asked before"
        schedule, fresh = found
        edges["input"] = edges["data"]
    places: defaultdict[tuple[bool, int], Iterator[int]] = defaultdict(itertools.count)
    return counted(
        tuple(_plan_step(step, index, edges, fresh[index], places) for index, step in enumerate(schedule))
    )


@lru_cache(maxsize=1024)
def reading_input(schedule: tuple[Step, ...]) -> tuple[tuple[Step, ...], list[list[bool]]] | None:
    """Let a rank read in the space "input" what it has not written in "data" before.

    So the input need not be copied first, and stays as it is. Where messages are read in their sender's
    memory, the readers know by this which of them lie in its input.

    returns   the steps, and for each of their receives, True if the rank's own operands are in the input;
              None where a message, or what a step sends, has chunks of both kinds
    """
    written: set[int] = set()
    steps: list[Step] = []
    fresh: list[list[bool]] = []
    for step in schedule:
        if step.copies:
            return None
        sends = []
        for send in step.sends:
            is_fresh = send.space == "data" and written.isdisjoint(send.chunks)
            if send.space == "data" and not is_fresh and not written.issuperset(send.chunks):
                return None
            sends.append(replace(send, space="input") if is_fresh else send)
        if len({send.space for send in sends if send.chunks}) > 1:
            return None
        flags: list[bool] = []
        for (space, chunks, combine), alike in groupby(
            step.receives, lambda r: (r.space, r.chunks, r.combine)
        ):
            is_fresh = combine and space == "data" and written.isdisjoint(chunks)
            if combine and space == "data" and not is_fresh and not written.issuperset(chunks):
                return None
            flags += [is_fresh for _ in alike]
            written.update(chunks if space == "data" else ())
        steps.append(replace(step, sends=tuple(sends)))
        fresh.append(flags)
    return tuple(steps), fresh


def writes_all(planned: Plan, count: int) -> bool:
    """True if all `count` elements of the data are received, combined or not."""
    runs = [run for step in planned.steps for message in step.receives for run in message.runs]
    end = 0
    for _, start, stop in sorted(run for run in runs if run[0] == "data"):
        if start > end:
            return False
        end = max(end, stop)
    return end >= count


def counted(steps: tuple[PlannedStep, ...]) -> Plan:
    """Count the traffic of steps; leave out those that do nothing."""
    sends = [message for step in steps for message in step.sends]
    receives = [message for step in steps for message in step.receives]
    return Plan(
        tuple(step for step in steps if step.copies or step.sends or step.receives),
        messages=len(sends),
        sent=sum(message.count for message in sends),
        received=sum(message.count for message in receives),
    )


def _plan_step(
    step: Step,
    index: int,
    edges: dict[Space, Edges],
    fresh: Sequence[bool],
    places: Mapping[tuple[bool, int], Iterator[int]],
) -> PlannedStep:
    copies = [
        (_run(copy.space, source, edges), _run(copy.into_space, target, edges))
        for copy in step.copies
        for source, target in zip(copy.chunks, copy.into, strict=True)
    ]
    sends = [
        Message(send.to, *runs_of(send, edges), place=next(places[True, send.to])) for send in step.sends
    ]
    receives = []
    for r, is_fresh in zip(step.receives, fresh, strict=True):
        runs, count = runs_of(r, edges)
        own: tuple[Run, ...] | None = None
        if is_fresh:
            own = tuple(("input", start, stop) for _, start, stop in runs)
        place = next(places[False, r.source])
        receives.append(Message(r.source, runs, count, r.combine, step.own_turn, own, place))
    return PlannedStep(
        tuple(copies),
        tuple(message for message in sends if message.count or not message.runs),
        tuple(message for message in receives if message.count or not message.runs),
        index,
    )


def _run(space: Space, chunk: int, edges: dict[Space, Edges]) -> Run:
    return space, edges[space][chunk], edges[space][chunk + 1]


def runs_of(message: Send | Receive, edges: dict[Space, Edges]) -> tuple[tuple[Run, ...], int]:
    """The message's chunks in order, adjacent ones joined; and the number of elements."""
    runs: list[Run] = []
    for chunk in message.chunks:
        space, start, stop = _run(message.space, chunk, edges)
        if runs and runs[-1][2] == start:
            runs[-1] = (space, runs[-1][1], stop)
        else:
            runs.append((space, start, stop))
    return tuple(runs), sum(stop - start for _, start, stop in runs)


def overlapping(one: Run, other: Run) -> bool:
    """True if two ranges have elements in common."""
    return one[0] == other[0] and one[1] < other[2] and other[1] < one[2]


def lands_in_place(message: Message) -> bool:
    """True if a message can be received where it belongs, without scratch."""
    return not message.combine and len(message.runs) == 1


def received_elsewhere(planned: Plan, run: Run, *, is_filled: bool) -> Plan | None:
    """Receive into the space "output" what the plan receives into `run`, so that the data stay as they are.

    is_filled   the output holds this rank's own operands already; else the first sum takes them from `run`
    returns     None unless `run` is all that is received, and is never sent
    """
    received = {message.runs for step in planned.steps for message in step.receives}
    sent = {part for step in planned.steps for message in step.sends for part in message.runs}
    if received != {(run,)} or any(overlapping(part, run) for part in sent):
        return None
    into: tuple[Run] = (("output", 0, run[2] - run[1]),)
    steps: list[PlannedStep] = []
    for step in planned.steps:
        receives: list[Message] = []
        for message in step.receives:
            own = message.runs if message.combine and not is_filled else None
            receives.append(replace(message, runs=into, own=own))
        is_filled = is_filled or bool(receives)
        steps.append(replace(step, receives=tuple(receives)))
    return replace(planned, steps=tuple(steps))
