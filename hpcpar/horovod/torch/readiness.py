"""Readiness of all ranks before an optimizer's collectives.

An optimizer's collectives are on a communicator of its own, where a rank that did something else would leave
the others waiting. So the engine is asked first, by name, whether all ranks have come to the same call.

    backward   ... dW3 ─── dW2 ─── dW1 ...
    engine         "step of optimizer 1?" ─ ─ all ranks have asked
    buckets        [dW3 dW2] waits ─ ─ ─ ─ ─ ─ > leaves     [dW1] leaves

Horovod's optimizer lets ranks that have joined take part with zeros. A sharded optimizer does not: there
different calls, or a rank that has joined, are an error on every rank that made one, before anything leaves:

    rank 0   step()          rank 0 brought a call of step(), but rank 1 brought a call of state_dict()
    rank 1   state_dict()
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING, Any

from torch import Tensor

from hpcpar.data_parallel.buckets import Bucket
from hpcpar.data_parallel.reduction import Pending, Reduction
from hpcpar.horovod.exceptions import HorovodInternalError
from hpcpar.horovod.gpu_streams import in_this_stream
from hpcpar.horovod.negotiation import TensorRequest
from hpcpar.horovod.operations import Ticket

if TYPE_CHECKING:
    from hpcpar.horovod.engine import Engine

KIND = "call of a sharded optimizer"
STEP = "step()"

OnReady = Callable[[], None]


class ReadinessBarrier:
    """Barrier of the engine's ranks before each collective call of a sharded optimizer.

    engine   None: this rank is alone, and waits for nobody
    name     of the optimizer, the same on all ranks
    """

    def __init__(self, engine: Engine | None, name: str) -> None:
        self._engine = engine
        self._name = name
        self._last = Ticket(TensorRequest(name, KIND), done=True)

    def call(self, what: str, on_ready: OnReady | None = None) -> Ticket:
        """Announce a call and go on; an earlier one is awaited first.

        on_ready   called once all ranks have made the call
        """
        if self._engine is None:
            if on_ready is not None:
                on_ready()
            return self._last
        if not self._last.done:
            with suppress(HorovodInternalError):  # raised to who waits for that call
                self._engine.wait(self._last)
        request = TensorRequest(self._name, KIND, content=f"a call of {what}")
        self._last = Ticket(request, on_ready=on_ready)
        self._engine.submit([self._last])
        return self._last

    def hold(self, what: str) -> None:
        """Make a call, and wait for all ranks to make it; HorovodInternalError where one made another."""
        ticket = self.call(what)
        if self._engine is not None:
            self._engine.wait(ticket)


class BucketGate:
    """Holds a step's buckets back until all ranks have come to the step. A `Reduction`.

    reduction   starts the collectives
    ask         asks the engine about the step; what it is given opens the gate
    on_asked    called with each bucket that arrives
    """

    def __init__(
        self,
        engine: Engine | None,
        reduction: Reduction,
        ask: Callable[[OnReady], Ticket],
        on_asked: Callable[[Bucket], None] = lambda bucket: None,
    ) -> None:
        self._engine = engine
        self._reduction = reduction
        self._ask = ask
        self._on_asked = on_asked
        self._ticket: Ticket | None = None
        self._is_open = False
        self._waiting: list[_GatedBucket] = []

    def start(self, flat: Tensor, bucket: Bucket) -> Pending:
        self._on_asked(bucket)
        # A view with a count of writes of its own: the reduction's write may come after this call, and the
        # reducer would take it for one of the user's.
        memory = flat.data
        begin = in_this_stream(flat.device, lambda: self._reduction.start(memory, bucket))
        return self._admit(_GatedBucket(self, begin))

    def start_map(self, bits: Any) -> Pending:
        return self._admit(_GatedBucket(self, lambda: self._reduction.start_map(bits), is_last=True))

    def await_open(self) -> None:
        """Wait for all ranks. Where they do not come nothing has left, and what waited is sent away."""
        if self._is_open or self._ticket is None:
            return
        assert self._engine is not None, "the gate of one rank opens at once"
        try:
            self._engine.wait(self._ticket)
        except HorovodInternalError:
            self.close()
            raise

    def close(self) -> None:
        """End the step."""
        self._is_open, self._ticket = False, None
        self._waiting.clear()

    def _admit(self, bucket: _GatedBucket) -> _GatedBucket:
        # Another thread, which waits for something else, may open the gate meanwhile.
        with nullcontext() if self._engine is None else self._engine.lock:
            if self._is_open:
                bucket.leave()
                return bucket
            self._waiting.append(bucket)
            if self._ticket is None:
                self._ticket = self._ask(self._open)
            self._poll()
        return bucket

    def _poll(self) -> None:
        if self._engine is not None and self._ticket is not None and not self._ticket.done:
            self._engine.poll(self._ticket)

    def _open(self) -> None:
        waiting, self._waiting = self._waiting, []
        for bucket in waiting:
            bucket.leave()
        self._is_open = True  # last: a thread that sees it takes the buckets for begun


class _GatedBucket:
    """A bucket, or the map of used parameters, at the gate and then under way."""

    def __init__(self, gate: BucketGate, begin: Callable[[], Pending], *, is_last: bool = False) -> None:
        self._gate = gate
        self._begin = begin
        self._is_last = is_last
        self._handle: Pending | None = None

    def leave(self) -> None:
        self._handle = self._begin()

    def wait(self) -> None:
        self._gate.await_open()
        assert self._handle is not None, "the gate is open"
        self._handle.wait()
        if self._is_last:
            self._gate.close()
