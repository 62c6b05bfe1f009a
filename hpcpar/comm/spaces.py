"""A plan's ranges in memory: copies, packing and reductions as callables without arguments.

Everything an executor does to memory is a list of *actions*: callables that run no Python code of their own
where that can be had. A signal handler runs between two actions, never inside of one, so an executor that
takes its actions from an iterator performs each of them exactly once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby

import numpy as np

from hpcpar.algorithms.step import Space
from hpcpar.comm.blocks import Action
from hpcpar.comm.plan import Message, PlannedStep, Run, overlapping
from hpcpar.comm.reductions import combining, folding
from hpcpar.transport.buffers import HostBuffer
from hpcpar.transport.interface import Octets
from hpcpar.units import KiB

COPIED_BY_PYTHON_NBYTES = 16 * KiB
"""Up to this size a memoryview copies in half the time of an array, whose copy costs more to start."""

_ALL = slice(None)

Spaces = dict[Space, HostBuffer]


def itemsize_of(spaces: Spaces) -> int:
    """Bytes of an element; all spaces of a call have the same, and a barrier has none."""
    return next((buffer.itemsize for buffer in spaces.values()), 1)


def octets_of(spaces: Spaces, run: Run) -> Octets:
    """Bytes of a range."""
    space, start, stop = run
    buffer = spaces[space]
    return buffer.octets[start * buffer.itemsize : stop * buffer.itemsize]


def part_of(spaces: Spaces, run: Run) -> HostBuffer:
    """Elements of a range."""
    space, start, stop = run
    return spaces[space].part(start, stop)


def copying(target: Octets, source: Octets) -> Action:
    """Prepare target = source; for a short one a sixth of the cost of `numpy.copyto`.

    Bytes of a device are copied in their queue, however few.
    """
    if isinstance(target, np.ndarray) and target.size <= COPIED_BY_PYTHON_NBYTES:
        return partial(target.data.__setitem__, _ALL, source.data)
    return partial(target.__setitem__, ..., source)


def copies_of(planned: PlannedStep, spaces: Spaces) -> tuple[list[Action], list[Action]]:
    """Copies of a step: those that come first, and those that its messages have nothing to do with."""
    touched = [run for message in (*planned.sends, *planned.receives) for run in message.runs]
    before: list[Action] = []
    beside: list[Action] = []
    for source, target in planned.copies:
        is_beside = not any(overlapping(run, other) for run in touched for other in (source, target))
        copy = copying(octets_of(spaces, target), octets_of(spaces, source))
        (beside if is_beside else before).append(copy)
    return before, beside


def folds(spaces: Spaces, landed: Sequence[tuple[Message, Octets]], op: str) -> list[Action]:
    """Prepare what becomes of messages that landed elsewhere, in the order of their receives.

    Messages of several peers for the same ranges are reduced in one pass over memory.
    """
    actions: list[Action] = []
    for (runs, combines), group in groupby(landed, key=lambda landing: (landing[0].runs, landing[0].combine)):
        alike = list(group)
        first = alike[0][0]
        pieces, own_turn = [octets for _, octets in alike], first.own_turn
        at = 0
        for run, own_run in zip(runs, first.own or runs, strict=True):
            target = part_of(spaces, run)
            incoming = [target.like(octets[at : at + target.octets.size]) for octets in pieces]
            own = target if own_run == run else part_of(spaces, own_run)
            at += target.octets.size
            if not combines:
                actions.append(copying(target.octets, incoming[-1].octets))
                continue
            # Operands are never swapped: every rank combines them in one order.
            operands = (*incoming[:own_turn], own, *incoming[own_turn:])
            if len(operands) == 2:
                actions += combining(op, target, *operands)
            else:
                actions += folding(op, target, operands)
    return actions


def packing(spaces: Spaces, message: Message, packed: Octets) -> Iterator[tuple[Octets, Octets]]:
    """For each range of a message that travels packed: (its bytes, their place in the packet)."""
    at = 0
    for run in message.runs:
        part = octets_of(spaces, run)
        yield part, packed[at : at + part.size]
        at += part.size


def _size(octets: Octets) -> int:
    return octets.size


class ScratchPool:
    """Memory lent to calls and used again, so that pages are not faulted in on every call."""

    KEPT = 8

    def __init__(self) -> None:
        # By identity: one call of C takes one out, so that threads, and signal handlers, need no lock.
        self._free: dict[int, Octets] = {}

    def take(self, nbytes: int) -> Octets:
        """At least `nbytes` bytes of any content; the smallest that is large enough."""
        for octets in self._by_size():
            # Another thread may have been quicker.
            if octets.size >= nbytes and self._free.pop(id(octets), None) is not None:
                return octets
        return np.empty(nbytes, dtype=np.uint8)

    def give_back(self, octets: Octets) -> None:
        self._free[id(octets)] = octets
        if len(self._free) > self.KEPT:
            for smallest in self._by_size()[:1]:
                self._free.pop(id(smallest), None)

    def _by_size(self) -> list[Octets]:
        return sorted(self._free.values(), key=_size)
