"""Mailbox: all sends and receives of a pipeline's stages, derived from the schedule's rows.

    row of this rank          1F0        1F1        1B0 …
    receive before it         ▲ of 0F0   ▲ of 0F1   ▲ of 2B0      posted one ahead, in each direction
    send after it             ▼ to 2F0   ▼ to 2F1   ▼ to 0B0      non-blocking, held until delivered

    tag of a message          3 × boundary + 0  announcement: an activation's spec, if not known; which of
                                                several gradients there are
                                           + 1  activation
                                           + 2  gradient

A stage may leave some of its inputs unused. Their gradients travel as zeros, as receives have been posted.

Boundary b lies between stages b and b + 1. Its microbatches travel under one tag, sent and received in the
order of the sender's row. So tags stay small for any number of microbatches. Two stages of one rank hand over
without a message.

A posted receive holds memory. One ahead in each direction is the least that lets the next activation and the
next gradient travel while an action is computed.
"""

from __future__ import annotations

import pickle
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from hpcpar.comm import Communicator, Handle
from hpcpar.errors import BufferTypeError, MismatchError, OperationError
from hpcpar.pipeline_parallel.tensor_spec import OutputSpec, Tensors, TensorSpec
from hpcpar.pipeline_schedules.action import Action
from hpcpar.pipeline_schedules.pipeline_schedule import Schedule
from hpcpar.transport.interface import Octets

Direction = Literal["F", "B"]

Specs = dict[tuple[int, int], OutputSpec | None]
"""Specs by boundary and microbatch; None: the stage before the boundary failed, and nothing follows."""

ANNOUNCEMENT_NBYTES = 4096
"""Fixed length, so that receives can be posted in advance; a spec of 150 tensors fits."""


class _Inbox:
    """Incoming messages over one boundary in one direction.

    order        microbatches in the order of the sender's row
    specs        known specs; announced ones are added
    announced    every message is preceded by its spec
    """

    def __init__(
        self,
        comm: Communicator,
        source: int,
        boundary: int,
        direction: Direction,
        order: Sequence[int],
        specs: Specs,
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
        self._specs = specs
        self._device = device
        self._announced = announced
        self._posted = 0
        self._announcements: deque[tuple[int, Handle]] = deque()
        self._received: dict[int, tuple[tuple[Tensor, ...], tuple[Handle, ...], Handle | None]] = {}

    def post(self, microbatch: int) -> None:
        """Post the receives of this microbatch, and of those that are sent before it."""
        while self._posted <= self._places[microbatch]:
            following = self._order[self._posted]
            if self._announced:
                octets = np.empty(ANNOUNCEMENT_NBYTES, dtype=np.uint8)
                tag = _tag(self._boundary, "announcement")
                self._announcements.append((following, self._comm.start_recv(octets, self._source, tag)))
            elif (self._boundary, following) in self._specs:
                self._post_tensors(following)
            else:
                # A gradient of an activation that does not exist yet: its spec is known once it does.
                return
            self._posted += 1
        self.advance()

    def advance(self) -> None:
        """Post the receives of the announcements that have arrived."""
        while self._announcements and self._announcements[0][1].done:
            self._read_announcement()

    def take(self, microbatch: int) -> Tensors:
        """Wait for the tensors of this microbatch, and return them; None for a gradient that there is not."""
        self.post(microbatch)
        while microbatch not in self._received:
            self._read_announcement()
        tensors, handles, given = self._received.pop(microbatch)
        _wait_for(handles)
        if given is None:
            return tensors
        return tuple(each if is_given else None for each, is_given in zip(tensors, given.wait(), strict=True))

    def _read_announcement(self) -> None:
        microbatch, handle = self._announcements.popleft()
        self._specs[self._boundary, microbatch] = _read(handle.wait())
        self._post_tensors(microbatch)

    def _post_tensors(self, microbatch: int) -> None:
        specs = _travelling(self._specs[self._boundary, microbatch], self._direction)
        tensors = tuple(each.empty(self._device) for each in specs)
        given = None
        if self._direction == "B" and len(specs) > 1:
            octets = np.empty(len(specs), dtype=np.uint8)
            given = self._comm.start_recv(octets, self._source, _tag(self._boundary, "announcement"))
        tag = _tag(self._boundary, self._direction)
        handles = tuple(self._comm.start_recv(each, self._source, tag) for each in tensors)
        self._received[microbatch] = tensors, handles, given


class _Sent:
    """Tensors under way, and how often each had been written to when it left."""

    def __init__(self, tensors: Tensors, handles: Sequence[Handle] = ()) -> None:
        self.tensors = tensors
        self.handles = handles
        self._versions = list(map(_version, tensors))

    def wait(self) -> bool:
        """Wait until they are delivered; True if they are as they were."""
        _wait_for(self.handles)
        return list(map(_version, self.tensors)) == self._versions


class Mailbox:
    """Messages of one rank in one pass over its row.

    schedule          rows of all ranks
    known             specs by boundary and microbatch, equal on both sides of each; None: a message of 4 KiB
                      announces every activation
    devices           device of each own stage, for received tensors
    max_undelivered   activations of a boundary that may be under way; the next send waits for one of them.
                      None: no limit, as the row itself limits how far a rank is ahead
    specs             specs of all activations that this rank has sent or received in this pass
    """

    def __init__(
        self,
        comm: Communicator,
        schedule: Schedule,
        known: Mapping[tuple[int, int], OutputSpec] | None,
        devices: Mapping[int, torch.device],
        *,
        max_undelivered: int | None = None,
    ) -> None:
        self._comm = comm
        self._home = schedule.rank_of_stage
        self._devices = devices
        self._announces = known is None
        self._promised: Mapping[tuple[int, int], OutputSpec] = known or {}
        self._max_undelivered = max_undelivered
        self._outgoing: dict[tuple[int, Direction], deque[_Sent]] = defaultdict(deque)
        self._handed_over: dict[tuple[int, Direction, int], _Sent] = {}
        self._is_used: dict[int, bool] = {}  # by boundary: a gradient has come of its only tensor
        self._changed: set[int] = set()
        self.specs: Specs = dict(self._promised)
        row = schedule.rows[comm.rank]
        keys = dict.fromkeys(map(self._incoming, row))
        self._inboxes = {key: self._inbox(schedule, *key) for key in keys if key is not None}
        self._early = self._posted_early(row)

    def prepare(self, position: int) -> None:
        """Post the receives for the row's action at this position, and the next one in each direction."""
        for key, microbatch in self._early[position]:
            self._inboxes[key].post(microbatch)

    def activation(self, stage: int, microbatch: int) -> tuple[OutputSpec | None, Tensors]:
        """Wait for the activation of the stage before; its spec is None if that stage failed."""
        tensors = self._receive(stage - 1, "F", microbatch)
        spec = self.specs[stage - 1, microbatch]
        if spec is None:
            return None, ()
        present = iter(tensors)
        return spec, tuple(None if each is None else next(present) for each in spec.tensors)

    def gradients(self, stage: int, microbatch: int) -> Tensors:
        """Wait for the gradients of this stage's differentiable outputs, from the stage after it.

        result   None for an output that the stages after it do not use
        """
        return self._receive(stage, "B", microbatch)

    def require_fit(self, stage: int, microbatch: int, spec: OutputSpec) -> None:
        """Check that an output of this spec can be sent to the next stage.

        errors   MismatchError if the next stage expects another one, BufferTypeError if an announcement
                 has no room for it
        """
        promised = self._promised.get((stage, microbatch))
        if promised is None:
            _written(spec, stage)
        elif spec != promised:
            raise MismatchError(
                f"stage {stage} returned {spec} for microbatch {microbatch}, but {promised} in an earlier "
                "pass with inputs of the same shapes, so the next stage expects that; let shapes of outputs "
                "follow from those of the pipeline's inputs, the stages' modes and types, autocast, and what "
                "is frozen"
            )

    def send_activation(self, stage: int, microbatch: int, spec: OutputSpec, tensors: Tensors) -> None:
        """Send a stage's output, checked by `require_fit`, to the next stage."""
        self.specs[stage, microbatch] = spec
        present = tuple(each.detach() for each in tensors if each is not None)
        self._send(stage, "F", microbatch, present, self._announcement(spec, stage))

    def send_gradients(self, stage: int, microbatch: int, gradients: Tensors) -> None:
        """Send the gradients of a stage's differentiable inputs, None where none is, to the stage before."""
        announcement = None
        if not self._is_local(stage - 1):
            specs = _travelling(self.specs[stage - 1, microbatch], "B")
            given = np.array([each is not None for each in gradients], dtype=np.uint8)
            gradients = tuple(
                spec.zeros() if each is None else each for spec, each in zip(specs, gradients, strict=True)
            )
            if len(given) > 1:
                announcement = given
            elif len(given):
                self._is_used[stage - 1] = self._is_used.get(stage - 1, False) or bool(given[0])
        self._send(stage - 1, "B", microbatch, gradients, announcement)

    def send_nothing(self, action: Action) -> None:
        """Send placeholders for a stage that has failed: zeros, or an announcement that nothing follows.

        So no message is missing or left over at the end of the pass, and the next one can use the
        communicator.
        """
        stage, kind, microbatch = action
        if kind == "F":
            spec = self.specs[stage, microbatch] = self._promised.get((stage, microbatch))
            self._send(stage, "F", microbatch, _zeros(spec, "F"), self._announcement(spec, stage))
        else:
            self.send_gradients(stage, microbatch, _zeros(self.specs[stage - 1, microbatch], "B"))

    def advance(self) -> None:
        """Progress all messages without waiting, and free the buffers of delivered ones."""
        self._comm.poke()
        for inbox in self._inboxes.values():
            inbox.advance()
        for key, queue in self._outgoing.items():
            while queue and all(handle.done for handle in queue[0].handles):
                self._end(*key, queue.popleft())

    def finish(self) -> None:
        """Wait until all sent messages are delivered.

        errors   OperationError if a stage has changed an output before it was delivered, and if there was no
                 gradient for a stage's only input in the whole pass, but zeros were sent
        """
        for key, queue in self._outgoing.items():
            while queue:
                self._end(*key, queue.popleft())
        for stage in sorted(self._changed):
            raise OperationError(
                f"stage {stage} returned a tensor that it changed in place before stage {stage + 1} had it, "
                "in a later microbatch: let it return a clone()"
            )
        for stage, is_used in self._is_used.items():
            if not is_used:
                raise OperationError(
                    f"no loss depends on what stage {stage} returns, as if stage {stage + 1} detached its "
                    "input; without a gradient an optimizer would leave the weights before it as they are, "
                    f"but with zeros it may not: freeze all stages up to {stage} by requires_grad_(False)"
                )

    def _inbox(self, schedule: Schedule, boundary: int, direction: Direction) -> _Inbox:
        sender, receiver = (boundary, boundary + 1) if direction == "F" else (boundary + 1, boundary)
        return _Inbox(
            self._comm,
            self._home[sender],
            boundary,
            direction,
            [a.microbatch for a in schedule.rows[self._home[sender]] if a[:2] == (sender, direction)],
            self.specs,
            self._devices[receiver],
            announced=self._announces and direction == "F",
        )

    def _incoming(self, action: Action) -> tuple[int, Direction] | None:
        """Boundary and direction of the message that an action waits for; None: no message."""
        stage, kind, _ = action
        if kind == "F" and stage > 0 and not self._is_local(stage - 1):
            return stage - 1, "F"
        if kind == "B" and stage + 1 in self._home and not self._is_local(stage):
            return stage, "B"
        return None

    def _posted_early(self, row: Sequence[Action]) -> list[list[tuple[tuple[int, Direction], int]]]:
        """List the receives to post at each position: its own, and the next in each direction."""
        following: dict[Direction, tuple[tuple[int, Direction], int]] = {}
        early = []
        for action in reversed(row):
            key = self._incoming(action)
            here = list(following.values())
            if key is not None:
                following[key[1]] = (key, action.microbatch)
                here.insert(0, (key, action.microbatch))
            early.append(here)
        return early[::-1]

    def _is_local(self, boundary: int) -> bool:
        return self._home[boundary] == self._home[boundary + 1]

    def _receive(self, boundary: int, direction: Direction, microbatch: int) -> Tensors:
        if self._is_local(boundary):
            sent = self._handed_over.pop((boundary, direction, microbatch))
            self._end(boundary, direction, sent)
            return sent.tensors
        return self._inboxes[boundary, direction].take(microbatch)

    def _send(
        self,
        boundary: int,
        direction: Direction,
        microbatch: int,
        tensors: Tensors,
        announcement: Octets | None,
    ) -> None:
        if self._is_local(boundary):
            self._handed_over[boundary, direction, microbatch] = _Sent(tensors)
            return
        queue = self._outgoing[boundary, direction]
        while self._max_undelivered is not None and len(queue) >= self._max_undelivered:
            self._end(boundary, direction, queue.popleft())
        to = self._home[boundary + 1 if direction == "F" else boundary]
        handles = []
        if announcement is not None:
            handles.append(self._comm.start_send(announcement, to, _tag(boundary, "announcement")))
        tag = _tag(boundary, direction)
        tensors = tuple(each.contiguous() for each in tensors if each is not None)
        handles += [self._comm.start_send(each, to, tag) for each in tensors]
        queue.append(_Sent(tensors, handles))

    def _announcement(self, spec: OutputSpec | None, boundary: int) -> Octets | None:
        is_announced = self._announces and not self._is_local(boundary)
        return _written(spec, boundary) if is_announced else None

    def _end(self, boundary: int, direction: Direction, sent: _Sent) -> None:
        if not sent.wait() and direction == "F":
            self._changed.add(boundary)


_TAGS = {"announcement": 0, "F": 1, "B": 2}


def _tag(boundary: int, what: str) -> int:
    return 3 * boundary + _TAGS[what]


def _travelling(spec: OutputSpec | None, direction: Direction) -> tuple[TensorSpec, ...]:
    if spec is None:
        return ()
    return spec.present if direction == "F" else spec.differentiable


def _zeros(spec: OutputSpec | None, direction: Direction) -> tuple[Tensor, ...]:
    return tuple(each.zeros() for each in _travelling(spec, direction))


def _version(tensor: Tensor | None) -> int:
    """Count the writes to a tensor's memory, in its views, too, as autograd does."""
    return 0 if tensor is None or tensor.is_inference() else tensor._version


def _wait_for(handles: Sequence[Handle]) -> None:
    for handle in handles:
        handle.wait()


def _written(spec: OutputSpec | None, boundary: int) -> Octets:
    payload = pickle.dumps(spec, protocol=pickle.HIGHEST_PROTOCOL)
    if len(payload) > ANNOUNCEMENT_NBYTES:
        raise BufferTypeError(
            f"stage {boundary} returned {len(spec.tensors) if spec else 0} tensors, whose shapes take "
            f"{len(payload)} bytes to announce; there is room for {ANNOUNCEMENT_NBYTES}: join some of them"
        )
    return np.frombuffer(payload.ljust(ANNOUNCEMENT_NBYTES, b"\0"), dtype=np.uint8)


def _read(octets: Octets) -> OutputSpec | None:
    spec: OutputSpec | None = pickle.loads(octets.data)
    return spec
