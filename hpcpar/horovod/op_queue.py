"""The queue of ready operations: runs their coroutines one after the other, and finishes them in that order.

queue ──> coroutine (starts collectives) ──> started (waits for the last handle) ──> result of the ticket
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from hpcpar.errors import HpcparError
from hpcpar.horovod import operations
from hpcpar.horovod.exceptions import HorovodInternalError
from hpcpar.horovod.fusion_plan import FUSED
from hpcpar.horovod.gpu_streams import GpuStreams
from hpcpar.horovod.operations import Coroutine, EngineContext, MakeCoroutine, ReadyOp, Ticket

if TYPE_CHECKING:
    from hpcpar.comm import Handle
    from hpcpar.horovod.chrome_timeline import TimelineObserver

_NO_STREAM = nullcontext()


class OperationQueue:
    """Operations that all ranks have asked for.

    serve     what a rank that has joined does in another's schedule, by the schedule's name
    finish    called with each ticket that is done, and its error
    """

    def __init__(
        self,
        context: EngineContext,
        observer: TimelineObserver,
        serve: dict[str, Callable[[], None]],
        finish: Callable[[Ticket, BaseException | None], None],
    ) -> None:
        self.gpu = GpuStreams()
        self._context, self._observer, self._serve, self._finish = context, observer, serve, finish
        self._queue: deque[tuple[MakeCoroutine, list[ReadyOp]]] = deque()
        self._current: tuple[Coroutine, list[ReadyOp]] | None = None
        self._handle: Handle | None = None
        self._started: deque[tuple[Handle | None, Callable[[], None], list[ReadyOp]]] = deque()

    def __bool__(self) -> bool:
        """True while operations are ready that need no further round."""
        return bool(self._current or self._queue or self._started)

    def add(self, make: MakeCoroutine, items: list[ReadyOp]) -> None:
        """Append operations that share a message."""
        self._observer.activity(items, "QUEUE")
        self._queue.append((make, items))

    def clear(self) -> None:
        """Drop all operations, done or not."""
        self._current = self._handle = None
        self._queue.clear()
        self._started.clear()

    def handles(self) -> Iterable[Handle]:
        """Collectives that are under way."""
        handles = [self._handle, *(handle for handle, _, _ in self._started)]
        return [handle for handle in handles if handle is not None]

    def advance(self) -> None:
        """Start and finish what can be without waiting."""
        self._finish_started()
        while self._current is not None or self._queue:
            if self._current is None and not self._begin_next():
                continue
            if not self._advance_current():
                self._finish_started()
                return
            self._finish_started()

    def run_blocking(self, item: ReadyOp) -> None:
        """All-reduce one small tensor while nothing else is under way."""
        self._observer.activity([item], "QUEUE")
        with self._stream_for([item]):
            operations.allreduce_blocking(self._context, item)
            if item.request.device == "GPU":
                self.gpu.finished([item])
        self._observer.done([item])

    def _begin_next(self) -> bool:
        """Take the next operations; False for a schedule, which is over at once."""
        make, items = self._queue.popleft()
        if items[0].request.kind == "schedule" or (items[0].ticket and items[0].ticket.on_ready):
            self._call(items[0])
            return False
        self._current, self._handle = (make(self._context, items), items), None
        if make not in FUSED.values():
            self._observer.activity(items, f"MPI_{items[0].request.kind.upper()}")
        return True

    def _advance_current(self) -> bool:
        """Let the coroutine go on; True once it has started its last collective."""
        assert self._current is not None, "there is one"
        coroutine, items = self._current
        try:
            while self._handle is None or self._handle.done:
                with self._stream_for(items):
                    if self._handle is not None:
                        self._handle.wait()  # it is over; this stream is to come after it
                    self._handle = next(coroutine)
                if self._handle is None:  # no space in the fusion buffer yet
                    return False
        except StopIteration as stop:
            self._current = self._handle = None
            self._started.append((*stop.value, items))
            return True
        return False

    def _call(self, item: ReadyOp) -> None:
        """Call what the ticket brought; a rank that has joined serves instead. Its errors are its own."""
        try:
            if item.ticket is None:
                serve = self._serve.get(item.request.name)
                if serve is None:
                    raise HorovodInternalError(
                        f"{item.request.name}: this rank has joined and never had that optimizer; make it on "
                        f"every rank before join()"
                    )
                serve()
            elif item.ticket.on_ready is not None:
                item.ticket.on_ready()
        except HpcparError as error:
            if item.ticket is not None:
                item.ticket.error = HorovodInternalError(str(error))
                item.ticket.error.__cause__ = error
        self._observer.done([item])
        if item.ticket is not None:
            self._finish(item.ticket, item.ticket.error)

    def _finish_started(self) -> None:
        while self._started and (self._started[0][0] is None or self._started[0][0].done):
            handle, finish, items = self._started.popleft()
            with self._stream_for(items):
                if handle is not None:
                    handle.wait()  # it is over; this stream is to come after it
                finish()
                if items[0].request.device == "GPU":
                    self.gpu.finished(items)
            self._observer.done(items)
            for item in items:
                if item.ticket is not None:
                    self._finish(item.ticket, item.ticket.error)

    def _stream_for(self, items: Sequence[ReadyOp]) -> AbstractContextManager[None]:
        """Select torch's stream for operations that are all in host memory or all on GPUs."""
        return self.gpu.working_on(items) if items[0].request.device == "GPU" else _NO_STREAM
