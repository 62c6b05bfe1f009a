"""Steps by messages of the transport: fresh ones for each call, or persistent requests.

A persistent request (MPI 4.1, section 3.9) has a fixed tag. Calls with one *signature* (all that ranks agree
on: collective, algorithm, element type, sizes) share a few tags, and take turns with each, by their numbers:

    call   1   2   3   4   5   6
    tag    a   b   c   d   a   b          call 5 waits until call 1 is complete on this rank

Every rank gives a call the same tag, whatever buffers it uses. The tag holds a digest of the signature:
messages of different calls do not meet, nor do those of calls of different numbers, up to TURNS apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from hpcpar.comm.blocks import Action
from hpcpar.comm.compiled import Turn
from hpcpar.comm.plan import Message, PlannedStep, lands_in_place
from hpcpar.comm.spaces import (
    ScratchPool,
    Spaces,
    copies_of,
    copying,
    folds,
    itemsize_of,
    octets_of,
    packing,
)
from hpcpar.transport.interface import Octets, PreparedExchange, Transport
from hpcpar.units import MiB

PERSISTENT_NBYTES = 4 * MiB
"""Larger arrays travel by fresh requests: the few microseconds that persistent ones save do not show."""

LANDING_NBYTES = 1 * MiB
"""Of one step under one tag: with more, requests stay fresh, and scratch is shared by all calls."""

TURNS = 4
"""Tags of one signature."""

POSTING, WAITING, REDUCING, DONE = range(4)


class MessageStep:
    """One step of a schedule as messages.

    tags        of which the call's number chooses one
    require     called with the bytes that are expected and those that have come, where ranks may expect
                different lengths; raises an error
    landing     memory for messages that do not land in place. With it requests and views are made once and
                used again; None: they are made when the step is posted, with scratch that is given back
    """

    count, done = 1, 0
    awaited = None

    def __init__(
        self,
        transport: Transport,
        planned: PlannedStep,
        spaces: Spaces,
        op: str,
        tags: range,
        scratch: ScratchPool,
        *,
        require: Callable[[int, int], None] | None = None,
        landing: Octets | None = None,
    ) -> None:
        self._transport = transport
        self._planned = planned
        self._spaces = spaces
        self._op = op
        self._tags = tags
        self._tag = tags[0]
        self._require = require
        self._scratch = scratch
        self._landing = landing
        self._landed_nbytes = 0
        self._lent: list[Octets] = []
        self._exchange: PreparedExchange | None = None
        self._is_persistent = landing is not None
        self._state = POSTING
        self._actions: Iterator[Action] | None = None
        self._before: list[Action] = []
        self._beside: list[Action] = []
        self._folds: list[Action] = []
        self._messages: tuple[list[tuple[Octets, int]], list[tuple[Octets, int]]] = ([], [])
        self._is_bound = False
        if landing is not None:
            self._bind()
            self._exchange = transport.prepare(*self._messages, self._tag, persistent=True)

    def begin(self, number: int) -> None:
        self._state = POSTING
        self._actions = None
        if self._is_persistent:
            assert self._exchange is not None
            self._exchange.rewind()
        else:
            self._exchange = None
            self._tag = self._tags[number % len(self._tags)]

    def advance(self, looks: int) -> bool:
        state = self._state
        if state == POSTING:
            self._post()
            state = self._state
        if state == WAITING:
            assert self._exchange is not None
            if not self._exchange.test():
                return False
            if self._require is not None:
                expected = sum(octets.size for octets, _ in self._messages[1])
                self._require(expected, self._exchange.received_nbytes())
            self._actions = iter(self._folds)
            self._state = state = REDUCING
        if state == REDUCING:
            assert self._actions is not None
            for action in self._actions:
                action()
            if self._lent:
                self._give_back()
            self._state = DONE
        return True

    def _post(self) -> None:
        if not self._is_bound:
            self._bind()
        if self._exchange is None:
            self._exchange = self._transport.prepare(
                *self._messages, self._tag, persistent=False, keep_lengths=self._require is not None
            )
        if self._actions is None:
            self._actions = iter([*self._before, self._exchange.start])
        for action in self._actions:
            action()
        for action in self._beside:  # may be repeated: nothing else writes or reads there
            action()
        self._state = WAITING

    def _bind(self) -> None:
        """Bind the ranges to memory: messages in place where they can be, else through scratch."""
        planned, spaces = self._planned, self._spaces
        itemsize = itemsize_of(spaces)
        before, self._beside = copies_of(planned, spaces)
        landed: list[tuple[Message, Octets]] = []
        receives: list[tuple[Octets, int]] = []
        for message in planned.receives:
            if lands_in_place(message):
                receives.append((octets_of(spaces, message.runs[0]), message.peer))
            else:
                landed.append((message, self._take(message.count * itemsize)))
                receives.append((landed[-1][1], message.peer))
        sends: list[tuple[Octets, int]] = []
        for message in planned.sends:
            if len(message.runs) == 1:
                sends.append((octets_of(spaces, message.runs[0]), message.peer))
                continue
            octets = self._take(message.count * itemsize)
            sends.append((octets, message.peer))
            before += [copying(into, part) for part, into in packing(spaces, message, octets)]
        self._before = before
        self._messages = sends, receives
        self._folds = folds(spaces, landed, self._op)
        self._is_bound = True

    def _take(self, nbytes: int) -> Octets:
        if self._landing is not None:
            self._landed_nbytes += nbytes
            return self._landing[self._landed_nbytes - nbytes : self._landed_nbytes]
        octets = self._scratch.take(nbytes)
        self._lent.append(octets)
        return octets[:nbytes]

    def _give_back(self) -> None:
        self._is_bound = False
        self._messages, self._before, self._beside, self._folds = ([], []), [], [], []
        while self._lent:
            self._scratch.give_back(self._lent.pop())

    def waiting_for(self) -> tuple[int, ...]:
        if self._exchange is None or self._state != WAITING:
            return ()
        return self._exchange.waiting_for()

    def received_nbytes(self) -> int:
        return 0 if self._exchange is None else self._exchange.received_nbytes()

    def free(self) -> None:
        if self._is_persistent and self._exchange is not None:
            self._exchange.free()


def landing_nbytes(steps: Sequence[PlannedStep], itemsize: int) -> int:
    """Bytes that the step that needs most of them lands, or packs, elsewhere than in place."""
    return itemsize * max(
        (
            sum(each.count for each in step.receives if not lands_in_place(each))
            + sum(each.count for each in step.sends if len(each.runs) != 1)
            for step in steps
        ),
        default=0,
    )


class Signature:
    """The tags of all calls with one signature."""

    __slots__ = ("tags", "turns")

    def __init__(self, first_tag: int, turns: Sequence[Turn | None]) -> None:
        self.tags = range(first_tag, first_tag + len(turns))
        self.turns = turns


class MessageProgram:
    """A plan bound to memory, once for each tag of its signature.

    The first call under a tag uses fresh requests; memory that comes a second time is worth persistent ones.
    """

    __slots__ = ("_bound", "_make", "_nbytes", "signature")

    def __init__(
        self,
        transport: Transport,
        steps: Sequence[PlannedStep],
        spaces: Spaces,
        op: str,
        scratch: ScratchPool,
        signature: Signature,
    ) -> None:
        self.signature = signature
        self._make = (transport, steps, spaces, op, scratch)
        self._nbytes = landing_nbytes(steps, itemsize_of(spaces))
        self._bound: list[tuple[list[MessageStep], bool] | None] = [None] * len(signature.tags)

    @property
    def nbytes(self) -> int:
        """Landing memory of all tags."""
        return self._nbytes * len(self._bound) if self._nbytes <= LANDING_NBYTES else 0

    def at(self, number: int) -> tuple[list[MessageStep], Turn | None]:
        """The steps of a call, under its tag, and its turn."""
        place = number % len(self._bound)
        return self._steps(place), self.signature.turns[place]

    def _steps(self, at: int) -> list[MessageStep]:
        found = self._bound[at]
        if found is not None and (found[1] or self._nbytes > LANDING_NBYTES):
            return found[0]
        transport, steps, spaces, op, scratch = self._make
        landing = None if found is None else np.empty(self._nbytes, dtype=np.uint8)
        made = [
            MessageStep(
                transport, step, spaces, op, self.signature.tags[at : at + 1], scratch, landing=landing
            )
            for step in steps
        ]
        self._bound[at] = made, landing is not None
        return made

    def free(self) -> None:
        for found in self._bound:
            for step in found[0] if found is not None else ():
                step.free()
        self._bound = [None] * len(self._bound)
