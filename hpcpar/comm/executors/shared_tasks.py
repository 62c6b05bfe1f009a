"""Steps in the memory of a node as the tasks of a call in one slot: what is done, told and waited for."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from hpcpar.comm.blocks import Action
from hpcpar.comm.compiled import ExecutorStep
from hpcpar.comm.executors.shared_call import Beyond, Deferred, Gate, SharedCall, Task
from hpcpar.comm.executors.shared_reads import Group
from hpcpar.comm.shm_segment import ShmSegment
from hpcpar.comm.spaces import copying
from hpcpar.transport.interface import Octets


class SharedStep(NamedTuple):
    """One step of a schedule in the memory of a node.

    position    in the rank's schedule
    before      actions before what is sent can be read
    post        (byte of the body, what is copied there), in a short call that sends
    beside      actions for which the peers need not wait
    groups      messages of local ranks
    readers     local ranks that read what this step sends, and the phase in which they have done so
    elsewhere   messages of the same step to and from other nodes
    is_held     what comes from local ranks is reduced only when the messages to other nodes have left
    """

    position: int
    before: Sequence[Action]
    post: tuple[int, Octets] | None
    beside: Sequence[Action]
    groups: Sequence[Group]
    readers: Sequence[tuple[int, int]]
    elsewhere: ExecutorStep | None
    is_held: bool


def tasks_in(
    call: SharedCall, steps: Sequence[SharedStep], first: Sequence[Action], last: Sequence[Action], slot: int
) -> list[Task]:
    """Tasks of a call in one slot."""
    segment = call.segment
    tasks = _Tasks(segment, slot)
    tasks.act(_publishing(call, slot))
    tasks.act(first)
    for number, step in enumerate(steps):
        tasks.act(step.before)
        if step.post is not None:
            at, source = step.post
            tasks.act([copying(segment.body(slot, segment.rank)[at : at + source.size], source)])
        tasks.tell(2 * step.position + 1)
        tasks.step = number
        tasks.act(step.beside)
        if step.elsewhere is not None:
            tasks.wait((), Beyond(call, step.elsewhere, is_awaited=step.is_held))
        for group in step.groups:
            if call.is_short:
                tasks.wait(group.waits)
                tasks.act(group.from_bodies(slot))
            else:
                tasks.wait(group.waits, group)
        if step.groups and not call.is_short:
            tasks.tell(2 * step.position + 2)
        if step.readers:
            tasks.wait(step.readers)
        if step.elsewhere is not None and not step.is_held:
            tasks.wait((), Beyond(call, step.elsewhere, is_awaited=True))
    if call.is_short and not any(step.groups for step in steps):
        peers = [word for word in segment.headers[slot] if word != segment.own_headers[slot]]
        tasks.act([partial(call.glance, peers)])
    tasks.act(last)
    return tasks.end()


def _publishing(call: SharedCall, slot: int) -> list[Action]:
    """Write where the own arrays lie, before the first state that lets others read them."""
    segment = call.segment
    header, table = segment.own_headers[slot], segment.table_word(slot, segment.rank)
    words = [(header + word, base) for word, base in call.bases]
    words += [(table + number, value) for number, value in enumerate(call.table)]
    return [partial(call.words.__setitem__, word, value) for word, value in words]


class _Tasks:
    """Tasks in the making: what is done, told and waited for one after the other.

    On processors that reorder memory accesses, fences stand before what is told and after a wait.
    """

    def __init__(self, segment: ShmSegment, slot: int) -> None:
        self.step = 0
        self._headers = segment.headers[slot]
        self._fences: list[Action] = [] if segment.fence is None else [segment.fence]
        self._made: list[Task] = []
        self._phase = 0
        self._gate: Gate | None = None

    def act(self, actions: Sequence[Action]) -> None:
        for action in actions:
            self._made.append(Task(len(self._made) + 1, self._phase, self._gate, action))
            self._phase, self._gate = 0, None

    def tell(self, phase: int) -> None:
        """Tell the peers that this phase is reached."""
        self.act(self._fences)
        self._settle()
        self._phase = phase

    def wait(self, waits: Sequence[tuple[int, int]], deferred: Deferred | None = None) -> None:
        """Wait for these local ranks to reach these phases, and do what `deferred` then says."""
        if self._gate is not None:
            self._settle()
        found = [(self._headers[rank], phase) for rank, phase in waits]
        if self._fences and found:
            self._gate = Gate(found, None, self.step)
            self.act(self._fences)
            found = []
        if found or deferred is not None:
            self._gate = Gate(found, deferred, self.step)

    def end(self) -> list[Task]:
        self.act(self._fences)
        self._settle()
        return self._made

    def _settle(self) -> None:
        """Make a task of what has no action yet."""
        if self._phase or self._gate is not None:
            self.act([bool])
