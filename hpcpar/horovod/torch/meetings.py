"""How ranks come together before the collectives of a sharded optimizer.

Those collectives are on a communicator of the optimizer's own, where a rank that did something else (that
joined, that alone asked for the state) would leave the others waiting. So the engine is asked first, under
one name for all calls of an optimizer: they begin when all ranks have made the same call. Different ones, or
a rank that has joined, are an error on every rank that made one, before anything was sent.

    rank 0   step()          rank 0 brought a call of step(), but rank 1 brought a call of state_dict()
    rank 1   state_dict()

Gradients need not wait for that in backward: their buckets gather at the gate until it opens.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from torch import Tensor

from hpcpar.data_parallel.buckets import Bucket
from hpcpar.data_parallel.reduction import Pending, Reduction
from hpcpar.horovod.exceptions import HorovodInternalError
from hpcpar.horovod.negotiation import TensorRequest
from hpcpar.horovod.operations import Ticket

if TYPE_CHECKING:
    from hpcpar.horovod.engine import Engine

KIND = "call of a sharded optimizer"
STEP = "step()"


class Meetings:
    """Of the ranks of an engine; None: this rank is alone, and waits for nobody.

    name   of the optimizer, the same on all ranks
    """

    def __init__(self, engine: Engine | None, name: str) -> None:
        self._engine = engine
        self._name = name
        self._last = Ticket(TensorRequest(name, KIND), done=True)

    def call(self, what: str) -> Ticket:
        """Say that this rank makes a call, and go on; one that was made before is awaited."""
        if self._engine is None:
            return self._last
        if not self._last.done:
            with suppress(HorovodInternalError):  # it is told to who waits for that call
                self._engine.wait(self._last)
        self._last = Ticket(TensorRequest(self._name, KIND, content=f"a call of {what}"))
        self._engine.submit([self._last])
        return self._last

    def look(self, ticket: Ticket) -> bool:
        """Whether all ranks have made the call; never waits."""
        if self._engine is not None and not ticket.done:
            self._engine.poll(ticket)
        return ticket.done and ticket.error is None

    def wait(self, ticket: Ticket) -> None:
        """Return when all ranks have made the call; HorovodInternalError where one did something else."""
        if self._engine is not None:
            self._engine.wait(ticket)

    def hold(self, what: str) -> None:
        """Make a call, and wait for all ranks to make it."""
        self.wait(self.call(what))


class Gate:
    """Lets the buckets of a step leave once all ranks have come to it. A `Reduction`."""

    def __init__(self, reduction: Reduction, meetings: Meetings) -> None:
        self._reduction = reduction
        self._meetings = meetings
        self._ticket: Ticket | None = None
        self._is_open = False
        self._waiting: list[_Waiting] = []

    def start(self, flat: Tensor, bucket: Bucket) -> Pending:
        return self._admit(lambda: self._reduction.start(flat, bucket))

    def start_map(self, bits: Any) -> Pending:
        return self._admit(lambda: self._reduction.start_map(bits), is_last=True)

    def wait(self) -> None:
        """Return when it is open. Where it cannot open, nothing has left, and who waits is sent away."""
        if self._is_open or self._ticket is None:
            return
        try:
            self._meetings.wait(self._ticket)
        except HorovodInternalError:
            self._ticket = None
            self._waiting.clear()
            raise
        self._open()

    def close(self) -> None:
        """The step's last one has arrived."""
        self._is_open, self._ticket = False, None

    def _admit(self, begin: Callable[[], Pending], *, is_last: bool = False) -> _Waiting:
        waiting = _Waiting(self, begin, is_last=is_last)
        if self._is_open:
            waiting.leave()
            return waiting
        self._waiting.append(waiting)
        if self._ticket is None:
            self._ticket = self._meetings.call(STEP)
        if self._meetings.look(self._ticket):
            self._open()
        return waiting

    def _open(self) -> None:
        self._is_open = True
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            each.leave()


class _Waiting:
    """A bucket at the gate, and then under way."""

    def __init__(self, gate: Gate, begin: Callable[[], Pending], *, is_last: bool) -> None:
        self._gate = gate
        self._begin = begin
        self._is_last = is_last
        self._handle: Pending | None = None

    def leave(self) -> None:
        self._handle = self._begin()

    def wait(self) -> None:
        self._gate.wait()
        assert self._handle is not None, "the gate is open"
        self._handle.wait()
        if self._is_last:
            self._gate.close()
