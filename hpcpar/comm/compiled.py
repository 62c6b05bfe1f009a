"""Schedules bound to a buffer once and run often: persistent requests, prepared views, landing memory.

A persistent request has a fixed tag, so calls of one *signature* (algorithm, root, op, element type
and sizes: the same on every rank) take turns among a few lanes, each with a tag of its own:

    call   1   2   3   4   5   6          all calls of one signature
    lane   0   1   2   3   0   1          call 5 waits until call 1 is complete on this rank

Every rank makes the same calls in the same order, so every rank gives a call the same tag, whatever
buffers it uses. Within a lane each buffer has a program of its own, compiled at second sight: a
buffer that is seen once only is not worth it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence

import numpy as np

from hpcpar.comm.operation import (
    BoundStep,
    Message,
    Operation,
    Plan,
    PlannedStep,
    Spaces,
    copies_of,
    copying,
    folds,
    itemsize_of,
    lands_in_place,
    octets_of,
    packing,
)
from hpcpar.transport.interface import COLLECTIVE_TAGS, Exchange, Octets, Prepared, Transport
from hpcpar.units import MiB

LANE_TAGS = COLLECTIVE_TAGS // 2
"""The first tag of lanes, and the number of tags below it, which go from call to call."""

LANES = 4
LARGEST_NBYTES = 4 * MiB
"""Of a whole array; above it the few microseconds that compiling saves do not show."""

LANDING_NBYTES = 64 * MiB
"""Landing memory that a communicator keeps, at most; the signatures that were used last keep theirs.

A single signature may have more, for the lanes of the largest arrays that are compiled.
"""

MOST_SIGNATURES = 256
PROGRAMS_PER_LANE = 8

NOWHERE = np.empty(0, dtype=np.uint8)

Address = tuple[int, ...]
"""Where each space's memory begins."""

Wait = Callable[[Operation], None]


class CompiledStep:
    """A step whose views, requests and foldings are all at hand."""

    def __init__(
        self,
        copies: Sequence[Callable[[], None]],
        prepared: Prepared,
        folds: Sequence[Callable[[], None]],
        copies_beside: Sequence[Callable[[], None]] = (),
    ) -> None:
        self._copies = copies
        self._copies_beside = copies_beside
        self._folds = folds
        self.prepared = prepared

    def post(self) -> Exchange:
        for copy in self._copies:
            copy()
        self.prepared.start()
        for copy in self._copies_beside:
            copy()
        return self.prepared

    def settle(self) -> None:
        for fold in self._folds:
            fold()


class Lane:
    """One tag and the landing memory that goes with it; its operations run one after the other.

    holder   the operation whose turn it is
    due      all that were started in this lane and have not ended, the holder among them
    landing  empty until the first program needs it: most lanes never see the same memory twice
    """

    def __init__(self, tag: int, landing_nbytes: int) -> None:
        self.tag = tag
        self.holder: Operation | None = None
        self.due: list[Operation] = []
        self.landing = NOWHERE
        self._landing_nbytes = landing_nbytes
        self._programs: OrderedDict[Address, tuple[CompiledStep, ...] | None] = OrderedDict()

    def join(self, operation: Operation) -> None:
        self.due.append(operation)

    def enter(self, operation: Operation) -> bool:
        if self.holder is None:
            self.holder = operation
        return self.holder is operation

    def leave(self) -> None:
        if self.holder in self.due:
            self.due.remove(self.holder)
        self.holder = None

    def program(
        self, transport: Transport, planned: Plan, spaces: Spaces, op: str
    ) -> tuple[BoundStep, ...] | None:
        """The compiled steps for memory that was seen before; None at first sight."""
        address = tuple(buffer.address for buffer in spaces.values())
        if address not in self._programs:
            self._make_room()
            self._programs[address] = None
            return None
        self._programs.move_to_end(address)
        program = self._programs[address]
        if program is None:
            # The views hold no reference to the memory: a buffer must be free to go. They are used
            # only with a buffer that has just been seen at the same address, of the same length.
            held = {space: buffer.unowned() for space, buffer in spaces.items()}
            if self.landing is NOWHERE:
                self.landing = np.empty(self._landing_nbytes, dtype=np.uint8)
            program = self._programs[address] = tuple(
                _compile(transport, step, held, op, self.tag, self.landing) for step in planned.steps
            )
        return program

    def _make_room(self) -> None:
        """For one more program: those that were used longest ago go, but for those of calls that are due."""
        if len(self._programs) < PROGRAMS_PER_LANE:
            return
        due = {id(operation.steps) for operation in self.due}
        for address, program in list(self._programs.items()):
            if id(program) not in due and len(self._programs) >= PROGRAMS_PER_LANE:
                _free(self._programs.pop(address))

    def compiled(self, address: Address) -> tuple[CompiledStep, ...] | None:
        """The program for memory at this address, if there is one."""
        return self._programs.get(address)

    def free(self) -> None:
        for program in self._programs.values():
            _free(program)
        self._programs.clear()
        self.landing = NOWHERE


class LaneGroup:
    """The lanes of one signature.

    nbytes      what it counts for in the budget of landing memory
    alive       False once the group has made room for another
    last_used   number of the call that used it last, of all calls with a signature
    """

    def __init__(self, lanes: Sequence[Lane], nbytes: int) -> None:
        self.lanes = lanes
        self.nbytes = nbytes
        self.alive = True
        self.last_used = 0
        self._turn = 0

    def next(self) -> Lane:
        lane = self.lanes[self._turn]
        self._turn = (self._turn + 1) % len(self.lanes)
        return lane


class Lanes:
    """All lanes of a communicator, by signature; what was used longest ago makes room.

    Which that is follows from the order of calls alone, so all ranks come to the same answer.
    """

    def __init__(self, first_tag: int, tags: int) -> None:
        self._free_tags = list(range(first_tag + tags - 1, first_tag - 1, -1))
        self._groups: dict[Hashable, LaneGroup] = {}
        self._budgeted_nbytes = 0
        self._clock = 0
        self.evictions = 0
        self.are_freed = False  # and so is the communicator, as all its unchecked copies see here

    def group(self, signature: Hashable, planned: Plan, nbytes: int, itemsize: int, wait: Wait) -> LaneGroup:
        """The lanes of a signature, made when first asked for.

        nbytes   of the whole array: the same on every rank, where the memory to land in is not
        wait     brings an operation to its end, before the tag of its lane is given away
        """
        group = self._groups.get(signature)
        if group is None:
            self._make_room(LANES * nbytes, wait)
            self._budgeted_nbytes += LANES * nbytes
            landing = landing_count(planned) * itemsize
            lanes = [Lane(self._free_tags.pop(), landing) for _ in range(LANES)]
            group = LaneGroup(lanes, LANES * nbytes)
            self._groups[signature] = group
        return group

    def next(self, group: LaneGroup) -> Lane:
        """The lane of the call that all ranks make now."""
        self._clock += 1
        group.last_used = self._clock
        return group.next()

    def free(self) -> None:
        for group in self._groups.values():
            group.alive = False
            for lane in group.lanes:
                lane.free()
        self._groups.clear()
        self.are_freed = True

    def _make_room(self, nbytes: int, wait: Wait) -> None:
        while self._groups and (
            len(self._groups) >= MOST_SIGNATURES
            or self._budgeted_nbytes + nbytes > LANDING_NBYTES
            or len(self._free_tags) < LANES
        ):
            self._evict(min(self._groups, key=lambda signature: self._groups[signature].last_used), wait)

    def _evict(self, signature: Hashable, wait: Wait) -> None:
        group = self._groups.pop(signature)
        group.alive = False
        self._budgeted_nbytes -= group.nbytes
        self.evictions += 1
        for lane in group.lanes:
            # Not the holder alone: those behind it are bound to this lane's requests as well.
            while lane.due:
                wait(lane.due[0])
            self._free_tags.append(lane.tag)
            lane.free()


def landing_count(planned: Plan) -> int:
    """Elements that the step that needs most of them lands or packs elsewhere than in place."""
    return max((sum(message.count for message in _elsewhere(step)) for step in planned.steps), default=0)


def _elsewhere(step: PlannedStep) -> list[Message]:
    landing = [message for message in step.receives if not lands_in_place(message)]
    return landing + [message for message in step.sends if len(message.runs) != 1]


def _compile(
    transport: Transport,
    step: PlannedStep,
    spaces: Spaces,
    op: str,
    tag: int,
    landing: Octets,
) -> CompiledStep:
    """Bind a step to memory: messages in place where they can be, else one after the other in `landing`."""
    itemsize = itemsize_of(spaces)
    copies, beside = copies_of(step, spaces)
    at = 0

    def place(message: Message) -> Octets:
        nonlocal at
        at += message.count * itemsize
        return landing[at - message.count * itemsize : at]

    landed: list[tuple[Message, Octets]] = []
    receives: list[tuple[Octets, int]] = []
    for message in step.receives:
        if lands_in_place(message):
            receives.append((octets_of(spaces, message.runs[0]), message.peer))
        else:
            landed.append((message, place(message)))
            receives.append((landed[-1][1], message.peer))
    sends: list[tuple[Octets, int]] = []
    for message in step.sends:
        if len(message.runs) == 1:
            sends.append((octets_of(spaces, message.runs[0]), message.peer))
            continue
        octets = place(message)
        sends.append((octets, message.peer))
        copies += [copying(into, part) for part, into in packing(spaces, message, octets)]
    prepared = transport.prepare(sends, receives, tag)
    return CompiledStep(copies, prepared, list(folds(spaces, landed, op)), beside)


def _free(program: tuple[CompiledStep, ...] | None) -> None:
    for step in program or ():
        step.prepared.free()
