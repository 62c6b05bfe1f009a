"""Bind a plan to the memory of a node: for each message of this rank, the step of its peer that it meets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import groupby
from typing import NamedTuple

from hpcpar.algorithms.registry import Algorithm
from hpcpar.algorithms.step import Send, Space, Step
from hpcpar.algorithms.topology import Nodes
from hpcpar.comm.blocks import Action
from hpcpar.comm.compiled import ExecutorStep
from hpcpar.comm.executors.shared_call import SharedCall
from hpcpar.comm.executors.shared_reads import BASE_OF, Group, Source
from hpcpar.comm.executors.shared_tasks import SharedStep, tasks_in
from hpcpar.comm.plan import Edges, Message, Offsets, Plan, PlannedStep, overlapping, reading_input, runs_of
from hpcpar.comm.shm_segment import LINE_NBYTES, ShmSegment
from hpcpar.comm.spaces import copies_of, copying, octets_of
from hpcpar.units import KiB

MOVED_NBYTES = 64 * KiB
"""Longer messages that are only moved are copied once, by the kernel. What is reduced is read anyway, so it
may be as long as a body."""


class Schedules(NamedTuple):
    """Schedules of all ranks, which each of them can generate.

    reads_input   the data get their first values from the space "input" (`plan.reading_input`)
    """

    algorithm: Algorithm
    size: int
    root: int
    segments: int
    nodes: Nodes
    reads_input: bool = False

    def of(self, rank: int) -> tuple[Step, ...]:
        schedule = self.algorithm.schedule(
            rank, self.size, root=self.root, segments=self.segments, nodes=self.nodes
        )
        found = reading_input(schedule) if self.reads_input else None
        return schedule if found is None else found[0]


@lru_cache(maxsize=1024)
def sends_between(schedules: Schedules, sender: int, receiver: int) -> list[tuple[int, Step, Send]]:
    """List what one rank sends to another, with the step and its number in the sender's schedule."""
    steps = enumerate(schedules.of(sender))
    return [(number, step, send) for number, step in steps for send in step.sends if send.to == receiver]


@lru_cache(maxsize=1024)
def receives_between(schedules: Schedules, sender: int, receiver: int) -> list[int]:
    """List the step of each message from one rank to another in the receiver's schedule."""
    steps = enumerate(schedules.of(receiver))
    return [number for number, step in steps for receive in step.receives if receive.source == sender]


@dataclass(frozen=True)
class NodeLayout:
    """All that the ranks of a node know of each other's schedules.

    offsets     where the chunks lie, on every rank
    itemsize    bytes of an element
    is_uneven   ranks pass different offsets: an uneven all-to-all
    """

    schedules: Schedules
    offsets: Offsets
    itemsize: int
    is_uneven: bool

    @property
    def edges(self) -> dict[Space, Edges]:
        edges = dict(self.offsets)
        return {**edges, "input": edges["data"]} if self.schedules.reads_input else edges

    def posts(self, rank: int, local: Sequence[int]) -> dict[int, tuple[Space, int, int, int]]:
        """For each step in which a rank sends to local ones: (space, start, stop, byte in the body)."""
        edges, at = self.edges, 0
        found: dict[int, tuple[Space, int, int, int]] = {}
        for index, step in enumerate(self.schedules.of(rank)):
            sends = [send for send in step.sends if send.to in local and send.chunks]
            if not sends:
                continue
            space = sends[0].space
            start = min(edges[space][chunk] for send in sends for chunk in send.chunks)
            stop = max(edges[space][chunk + 1] for send in sends for chunk in send.chunks)
            if any(send.space != space for send in sends):
                raise AssertionError(f"{self.schedules.algorithm.name} sends from two spaces in one step")
            found[index] = space, start, stop, at
            at += -(-((stop - start) * self.itemsize) // LINE_NBYTES) * LINE_NBYTES
        return found

    def post_nbytes(self, local: Sequence[int]) -> int:
        """Bytes that the body of the busiest rank would need."""
        most = 0
        for rank in local:
            for _, start, stop, at in self.posts(rank, local).values():
                most = max(most, at + (stop - start) * self.itemsize)
        return most


def is_short(segment: ShmSegment, layout: NodeLayout, nbytes: int, *, combines: bool) -> bool:
    """True if a call's messages are copied into the bodies. The same on every rank of the node."""
    if layout.is_uneven or nbytes > (segment.post_nbytes if combines else MOVED_NBYTES):
        return False
    return layout.post_nbytes(segment.ranks) <= segment.post_nbytes


def bind_steps(
    call: SharedCall,
    planned: Plan,
    op: str,
    elsewhere: dict[int, ExecutorStep],
    first: Sequence[Action],
    last: Sequence[Action],
) -> None:
    """Bind a plan to the memory of the node: the steps of a call.

    elsewhere     for each step, by index, its messages to and from other nodes
    first, last   actions before and after all steps
    """
    segment, layout, spaces = call.segment, call.layout, call.spaces
    steps = {step.index: step for step in planned.steps}
    if not steps:  # takes part, so that the others see its end
        steps = {0: PlannedStep((), (), ())}
    matching = _Matching(call)
    posts = layout.posts(call.rank, segment.ranks) if call.is_short else {}
    bound: list[SharedStep] = []
    for index, step in steps.items():
        before, beside = copies_of(step, spaces)  # type: ignore[arg-type]
        local = PlannedStep(
            step.copies,
            tuple(message for message in step.sends if message.peer in segment.local),
            tuple(message for message in step.receives if message.peer in segment.local),
            index,
        )
        post = None
        if call.is_short and index in posts:
            space, start, stop, at = posts[index]
            post = at, call.sent((space, start, stop))
        elif not call.is_short:
            before = [*before, *matching.send_copies(local)]
        if call.lent is not None and step.sends:
            lent, at = call.lent
            beside = [*beside, copying(spaces["data"].part(at, at + lent.count).octets, lent.octets)]
        sent_beyond = [run for m in step.sends if m.peer not in segment.local for run in m.runs]
        is_held = any(
            overlapping(run, other)
            for message in local.receives
            for run in message.runs
            for other in sent_beyond
        )
        readers = [] if call.is_short else matching.readers(local)
        groups = _groups(call, local, matching, op)
        bound.append(SharedStep(index, before, post, beside, groups, readers, elsewhere.get(index), is_held))
    call.bind(len(bound), partial(tasks_in, call, bound, first, last), list(elsewhere.values()))
    if not call.is_short:
        call.bases = matching.bases()


def _groups(call: SharedCall, step: PlannedStep, matching: _Matching, op: str) -> list[Group]:
    groups: list[Group] = []
    by_ranges = groupby(step.receives, key=lambda message: (message.runs, message.combine))
    for (_, combine), alike in by_ranges:
        messages = list(alike)
        found = [matching.source(message) for message in messages]
        if combine:
            groups.append(Group(call, messages, found, op))
        else:
            groups += [Group(call, [m], [s], op) for m, s in zip(messages, found, strict=True)]
    return groups


class _Matching:
    """Find, for each message of this rank's schedule, the step of the peer's that it meets."""

    def __init__(self, call: SharedCall) -> None:
        self._call = call
        self._layout = call.layout
        self._edges = call.layout.edges
        self._copy: tuple[Space, int, int] | None = None
        self._own = call.layout.schedules.of(call.rank)
        self._copies_input = call.is_in_place and any(
            send.space == "input" and self._is_overwritten(step, send)
            for step in self._own
            for send in step.sends
        )
        copied = [
            (send.space, chunk)
            for step in self._own
            for send in step.sends
            if self._is_copied(step, send)
            for chunk in send.chunks
        ]
        if copied and not call.is_short:
            space = copied[0][0]
            start = min(self._edges[space][chunk] for _, chunk in copied)
            stop = max(self._edges[space][chunk + 1] for _, chunk in copied)
            self._copy = space, start, stop
            call.spaces["copy"] = call.spaces[space].scratch(stop - start)

    def source(self, message: Message) -> Source:
        """Place of a message that this rank receives."""
        layout, call, peer = self._layout, self._call, message.peer
        number, step, send = sends_between(layout.schedules, peer, call.rank)[message.place]
        local = call.segment.local[peer]
        phase = 2 * number + 1
        if not send.chunks:  # a barrier's
            return Source(local, phase, "data", (), 0)
        if layout.is_uneven and send.space == "input":
            return Source(local, phase, "input", None, 0)
        runs, _ = runs_of(send, self._edges)
        if call.is_short:
            space, start, _, at = layout.posts(peer, call.segment.ranks)[number]
            return Source(local, phase, space, runs, at - start * layout.itemsize)
        space_name: str = "copy" if _is_overwritten(step, send) else send.space
        return Source(local, phase, space_name, runs, 0)

    def readers(self, step: PlannedStep) -> list[tuple[int, int]]:
        """Who reads what a step sends, and the phase in which that is done."""
        schedules, rank, local = self._layout.schedules, self._call.rank, self._call.segment.local
        return [
            (local[message.peer], 2 * receives_between(schedules, rank, message.peer)[message.place] + 2)
            for message in step.sends
        ]

    def send_copies(self, step: PlannedStep) -> list[Action]:
        """Copy what a step both sends and receives into."""
        if self._copy is None:
            return []
        space, begin, _ = self._copy
        itemsize, spaces = self._layout.itemsize, self._call.spaces
        original = self._own[step.index]
        runs = {
            run
            for send in original.sends
            if self._is_copied(original, send)
            for run in runs_of(send, self._edges)[0]
        }
        return [
            copying(
                spaces["copy"].octets[(start - begin) * itemsize : (stop - begin) * itemsize],
                octets_of(spaces, (space, start, stop)),  # type: ignore[arg-type]
            )
            for _, start, stop in sorted(runs)
        ]

    def _is_copied(self, step: Step, send: Send) -> bool:
        """True if this rank sends from a copy: it receives there in the same step, or the copy is made."""
        is_local = send.to in self._call.segment.local
        return is_local and (
            (self._copies_input and send.space == "input") or self._is_overwritten(step, send)
        )

    def _is_overwritten(self, step: Step, send: Send) -> bool:
        if self._call.is_in_place and send.space == "input":
            send = replace(send, space="data")
        return _is_overwritten(step, send)

    def bases(self) -> list[tuple[int, int]]:
        """(word of the header, base) of each space of this rank."""
        segment, itemsize = self._call.segment, self._layout.itemsize
        found = []
        for name in self._call.spaces:
            place = "copy" if name == "input" and self._copies_input else name
            buffer = self._call.spaces[place]
            if not buffer.octets.size:
                continue
            base = segment.base_of(buffer.address, buffer.octets.size)
            if name == "data" and self._call.lent is not None:
                lent, at = self._call.lent
                base = segment.base_of(lent.address, lent.octets.size) - at * itemsize
            if place == "copy" and self._copy is not None:
                base -= self._copy[1] * itemsize
            found.append((BASE_OF[name], base))
        return found


def _is_overwritten(step: Step, send: Send) -> bool:
    """True if a step receives into chunks that it sends."""
    return any(
        receive.space == send.space and set(receive.chunks) & set(send.chunks) for receive in step.receives
    )
