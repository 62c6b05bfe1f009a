"""Sends and receives, derived from a schedule's rows: all communication of a pipeline's stages.

    row of this rank          1F0        1F1        1B0 …
    received for it           ▲ of 0F0   ▲ of 0F1   ▲ of 2B0      posted one ahead, in each direction
    sent after it             ▼ to 2F0   ▼ to 2F1   ▼ to 0B0      not waited for, held until delivered

    tag of a message          3 × boundary + 0  what an activation looks like, where that is not known
                                           + 1  activation
                                           + 2  gradient

Boundary b lies between stages b and b + 1. Its microbatches travel under one tag in the order of the
sender's row, and are received in that order, so that messages need not be told apart by more: tags stay small
however many microbatches there are. Two stages of one rank hand over without a message.

A receive takes memory from when it is posted. One ahead in each direction is the least with which the next
message of a steady phase, activation or gradient, travels while this action is computed.
"""

from __future__ import annotations

import pickle
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hpcpar.comm import Communicator, Handle
from hpcpar.errors import BufferTypeError, MismatchError
from hpcpar.pipeline_parallel.forms import Form, TensorForm, Tensors
from hpcpar.pipeline_schedules.action import Action
from hpcpar.pipeline_schedules.schedule import Schedule
from hpcpar.transport.interface import Octets

Direction = Literal["F", "B"]

Forms = dict[tuple[int, int], Form | None]
"""By boundary and microbatch; None where the stage before the boundary failed, so that nothing follows."""

ANNOUNCEMENT_NBYTES = 4096
"""All are as long, so that receives for them can be posted; a form of 150 tensors fits."""


class _Landed(NamedTuple):
    """Memory for the tensors of a message, and their receives."""

    tensors: tuple[Tensor, ...]
    handles: tuple[Handle, ...]


class _Inbox:
    """Messages that come over one boundary in one direction.

    order        microbatches in the order of the sender's row
    forms        what messages look like, as far as known; what is announced is added
    announced    every message comes with its form ahead of it
    """

    def __init__(
        self,
        comm: Communicator,
        source: int,
        boundary: int,
        direction: Direction,
        order: Sequence[int],
        forms: Forms,
        device: torch.device,
        *,
        announced: bool,
    ) -> None:
        self._comm = comm
        self._source = source
        self._boundary = boundary
        self._direction = direction
        self._order = order
        self._places = {microbatch: place for place, microbatch in enumerate(order)}
        self._forms = forms
        self._device = device
        self._announced = announced
        self._posted = 0
        self._announcements: deque[tuple[int, Handle]] = deque()
        self._landed: dict[int, _Landed] = {}

    def post(self, microbatch: int) -> None:
        """Have the receives for this microbatch posted, and for those that are sent before it."""
        while self._posted <= self._places[microbatch]:
            following = self._order[self._posted]
            if self._announced:
                octets = np.empty(ANNOUNCEMENT_NBYTES, dtype=np.uint8)
                tag = _tag(self._boundary, "announcement")
                self._announcements.append((following, self._comm.start_recv(octets, self._source, tag)))
            elif (self._boundary, following) in self._forms:
                self._land(following)
            else:
                # A gradient whose activation has not been made yet: its form is known once it is.
                return
            self._posted += 1
        self.advance()

    def advance(self) -> None:
        """Post what announcements that have come speak of."""
        while self._announcements and self._announcements[0][1].done:
            self._hear()

    def take(self, microbatch: int) -> tuple[Tensor, ...]:
        """Wait for the tensors of this microbatch."""
        self.post(microbatch)
        while microbatch not in self._landed:
            self._hear()
        tensors, handles = self._landed.pop(microbatch)
        for handle in handles:
            handle.wait()
        return tensors

    def _hear(self) -> None:
        microbatch, handle = self._announcements.popleft()
        self._forms[self._boundary, microbatch] = _read(handle.wait())
        self._land(microbatch)

    def _land(self, microbatch: int) -> None:
        tensors = tuple(
            each.empty(self._device)
            for each in _travelling(self._forms[self._boundary, microbatch], self._direction)
        )
        tag = _tag(self._boundary, self._direction)
        handles = tuple(self._comm.start_recv(each, self._source, tag) for each in tensors)
        self._landed[microbatch] = _Landed(tensors, handles)


class Mailbox:
    """The messages of one pass of one rank over its row.

    schedule           of all ranks
    known              forms by boundary and microbatch, the same on both sides of each; None: every
                       activation is announced, by a message of 4 KiB ahead of it
    devices            by own stage, where what it receives is to be
    most_undelivered   how many activations of a boundary may be under way; the next waits until one of them
                       is delivered. None: no limit, as the row itself says how far a rank may be ahead
    forms              of all activations that this rank has sent or received in this pass
    """

    def __init__(
        self,
        comm: Communicator,
        schedule: Schedule,
        known: Mapping[tuple[int, int], Form] | None,
        devices: Mapping[int, torch.device],
        *,
        most_undelivered: int | None = None,
    ) -> None:
        self._comm = comm
        self._home = schedule.rank_of_stage
        self._devices = devices
        self._announces = known is None
        self._promised: Mapping[tuple[int, int], Form] = known or {}
        self._most_undelivered = most_undelivered
        self._outgoing: dict[tuple[int, Direction], deque[list[Handle]]] = defaultdict(deque)
        self._handed_over: dict[tuple[int, Direction, int], tuple[Tensor, ...]] = {}
        self.forms: Forms = dict(self._promised)
        row = schedule.rows[comm.rank]
        keys = dict.fromkeys(map(self._comes_over, row))
        self._inboxes = {key: self._inbox(schedule, *key) for key in keys if key is not None}
        self._early = self._posted_early(row)

    def prepare(self, position: int) -> None:
        """Post the receives for the row's action at this position, and the next ones beyond it."""
        for key, microbatch in self._early[position]:
            self._inboxes[key].post(microbatch)

    def activation(self, stage: int, microbatch: int) -> tuple[Form | None, Tensors]:
        """What the stage before made for this one; waits. The form is None where it failed."""
        tensors = self._receive(stage - 1, "F", microbatch)
        form = self.forms[stage - 1, microbatch]
        if form is None:
            return None, ()
        present = iter(tensors)
        return form, tuple(None if each is None else next(present) for each in form.tensors)

    def gradients(self, stage: int, microbatch: int) -> tuple[Tensor, ...]:
        """Gradients of this stage's outputs that require one, by the stage after it; waits."""
        return self._receive(stage, "B", microbatch)

    def require_fit(self, stage: int, microbatch: int, form: Form) -> None:
        """That this form can go to the next stage.

        errors   MismatchError where another one was promised, BufferTypeError where there is no room for it
        """
        promised = self._promised.get((stage, microbatch))
        if promised is None:
            _written(form, stage)
        elif form != promised:
            raise MismatchError(
                f"stage {stage} returned {form} for microbatch {microbatch}, but {promised} in an earlier "
                "pass with inputs of the same shapes, so the next stage expects that; let shapes of outputs "
                "follow from those of the pipeline's inputs, the stages' modes and types, autocast, and what "
                "is frozen"
            )

    def send_activation(self, stage: int, microbatch: int, form: Form, tensors: Tensors) -> None:
        """Hand a stage's output, of a form that fits, to the next stage."""
        self.forms[stage, microbatch] = form
        present = tuple(each.detach() for each in tensors if each is not None)
        self._send(stage, "F", microbatch, present, form)

    def send_gradients(self, stage: int, microbatch: int, gradients: tuple[Tensor, ...]) -> None:
        """Hand the gradients of a stage's inputs that require one to the stage before it."""
        self._send(stage - 1, "B", microbatch, gradients)

    def send_nothing(self, action: Action) -> None:
        """Keep the promise of a stage that has failed: zeros, or word that nothing follows.

        So both sides of every boundary have exchanged the same messages at the end of the pass, and the next
        one can use the communicator.
        """
        stage, kind, microbatch = action
        if kind == "F":
            form = self.forms[stage, microbatch] = self._promised.get((stage, microbatch))
            self._send(stage, "F", microbatch, _zeros(form, "F"), form)
        else:
            form = self.forms[stage - 1, microbatch]
            self._send(stage - 1, "B", microbatch, _zeros(form, "B"))

    def advance(self) -> None:
        """Bring everything under way further without waiting; buffers of what is delivered are let go."""
        self._comm.poke()
        for inbox in self._inboxes.values():
            inbox.advance()
        for queue in self._outgoing.values():
            while queue and all(handle.done for handle in queue[0]):
                queue.popleft()

    def finish(self) -> None:
        """Wait until all that was sent is delivered."""
        for queue in self._outgoing.values():
            while queue:
                _wait_for(queue.popleft())

    def _inbox(self, schedule: Schedule, boundary: int, direction: Direction) -> _Inbox:
        sender, receiver = (boundary, boundary + 1) if direction == "F" else (boundary + 1, boundary)
        return _Inbox(
            self._comm,
            self._home[sender],
            boundary,
            direction,
            [a.microbatch for a in schedule.rows[self._home[sender]] if a[:2] == (sender, direction)],
            self.forms,
            self._devices[receiver],
            announced=self._announces and direction == "F",
        )

    def _comes_over(self, action: Action) -> tuple[int, Direction] | None:
        """The boundary and direction of what an action waits for; None: nothing from another rank."""
        stage, kind, _ = action
        if kind == "F" and stage > 0 and not self._is_local(stage - 1):
            return stage - 1, "F"
        if kind == "B" and stage + 1 in self._home and not self._is_local(stage):
            return stage, "B"
        return None

    def _posted_early(self, row: Sequence[Action]) -> list[list[tuple[tuple[int, Direction], int]]]:
        """For each position what must be posted there: its own message, and the next in each direction."""
        following: dict[Direction, tuple[tuple[int, Direction], int]] = {}
        early = []
        for action in reversed(row):
            key = self._comes_over(action)
            here = list(following.values())
            if key is not None:
                following[key[1]] = (key, action.microbatch)
                here.insert(0, (key, action.microbatch))
            early.append(here)
        return early[::-1]

    def _is_local(self, boundary: int) -> bool:
        return self._home[boundary] == self._home[boundary + 1]

    def _receive(self, boundary: int, direction: Direction, microbatch: int) -> tuple[Tensor, ...]:
        if self._is_local(boundary):
            return self._handed_over.pop((boundary, direction, microbatch))
        return self._inboxes[boundary, direction].take(microbatch)

    def _send(
        self,
        boundary: int,
        direction: Direction,
        microbatch: int,
        tensors: tuple[Tensor, ...],
        form: Form | None = None,
    ) -> None:
        if self._is_local(boundary):
            self._handed_over[boundary, direction, microbatch] = tensors
            return
        queue = self._outgoing[boundary, direction]
        while self._most_undelivered is not None and len(queue) >= self._most_undelivered:
            _wait_for(queue.popleft())
        to = self._home[boundary + 1 if direction == "F" else boundary]
        handles = []
        if self._announces and direction == "F":
            octets = _written(form, boundary)
            handles.append(self._comm.start_send(octets, to, _tag(boundary, "announcement")))
        tag = _tag(boundary, direction)
        handles += [self._comm.start_send(each.contiguous(), to, tag) for each in tensors]
        queue.append(handles)


_TAGS = {"announcement": 0, "F": 1, "B": 2}


def _tag(boundary: int, what: str) -> int:
    return 3 * boundary + _TAGS[what]


def _travelling(form: Form | None, direction: Direction) -> tuple[TensorForm, ...]:
    if form is None:
        return ()
    return form.present if direction == "F" else form.differentiable


def _zeros(form: Form | None, direction: Direction) -> tuple[Tensor, ...]:
    return tuple(each.zeros() for each in _travelling(form, direction))


def _wait_for(handles: Sequence[Handle]) -> None:
    for handle in handles:
        handle.wait()


def _written(form: Form | None, boundary: int) -> Octets:
    payload = pickle.dumps(form, protocol=pickle.HIGHEST_PROTOCOL)
    if len(payload) > ANNOUNCEMENT_NBYTES:
        raise BufferTypeError(
            f"stage {boundary} returned {len(form.tensors) if form else 0} tensors, whose shapes take "
            f"{len(payload)} bytes to announce; there is room for {ANNOUNCEMENT_NBYTES}: join some of them"
        )
    return np.frombuffer(payload.ljust(ANNOUNCEMENT_NBYTES, b"\0"), dtype=np.uint8)


def _read(octets: Octets) -> Form | None:
    form: Form | None = pickle.loads(octets.data)
    return form
