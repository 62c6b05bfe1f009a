"""The engine of a process set: takes operations, finds out when all ranks have asked, and carries them out.

    submit ──> negotiation rounds (control) ──> queue ──> courses (comm) ──> result of the ticket

Nothing runs in the background: the engines of all process sets move on together whenever the program is in
`wait`, `poll` or, now and then, `submit`. Rounds have a communicator of their own, because they and the data
overtake each other differently on every rank.
"""

from __future__ import annotations

import math
import pickle
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from hpcpar.errors import HpcparError
from hpcpar.horovod import responses
from hpcpar.horovod.exceptions import HorovodInternalError
from hpcpar.horovod.fusion import FusionBuffer
from hpcpar.horovod.gpu_streams import GpuStreams
from hpcpar.horovod.negotiation import (
    BATCHES_REMEMBERED,
    RECORD_NBYTES,
    Negotiation,
    News,
    Ready,
    Request,
    shortcoming,
)
from hpcpar.horovod.responses import Course, Item, Room, Ticket
from hpcpar.horovod.stall import StallInspector
from hpcpar.units import KiB, MiB

if TYPE_CHECKING:
    from hpcpar.comm import Communicator, Handle
    from hpcpar.comm.communicator import Loan
    from hpcpar.horovod.timeline import Timeline
    from hpcpar.launch.horovod_settings import HorovodSettings

BUFFER_NBYTES = 8 * MiB
FUSED_NBYTES = 4 * MiB
"""Most bytes of one fused message: a larger one is no quicker, and two of them keep both sides busy."""
ALONE_FROM_NBYTES = 512 * KiB
"""A tensor as large as that is not worth two copies."""
MOST_RETIRED = 64
"""Optimizers that are gone, and whose first step a rank that has joined can still take part in."""
EXACT_SIZE = 16
"""Up to so many ranks a round is one exchange of all with all, which knows exactly who is missing."""

_JOIN = Request("join", "join")

_NO_STREAM = nullcontext()

MakeCourse = Callable[[Room, Sequence[Item]], Course]

_ALONE: dict[str, MakeCourse] = {
    "allreduce": responses.allreduce,
    "broadcast": responses.broadcast,
    "allgather": responses.allgather,
    "reducescatter": responses.reducescatter,
    "alltoall": responses.alltoall,
    "barrier": responses.barrier,
}
_FUSED = {"allreduce": responses.fused_allreduce, "broadcast": responses.fused_broadcast}


class Engine:
    """Collectives by name between the ranks of one process set. Making one is collective.

    comm, control   communicators of the same ranks, for the data and for the rounds; nobody else uses them
    crew            the engines of all process sets, which move on together
    serve           what a rank that has joined does in another's schedule, by its name
    asked           what those who ask remember of their operations, by the names that users gave them
    users           who is to be closed when the engine is: objects with a `close`
    """

    def __init__(
        self,
        comm: Communicator,
        control: Communicator,
        crew: Crew,
        knobs: HorovodSettings,
        *,
        timeline: Timeline | None = None,
    ) -> None:
        self.rank, self.size = comm.rank, comm.size
        self.timeline = timeline
        self.serve: dict[str, Callable[[], None]] = {}
        self.asked: dict[str, Any] = {}
        self._shown: set[str] = set()
        self._comm, self._control, self._crew, self._knobs = comm, control, crew, knobs
        self._room = Room(
            comm,
            FusionBuffer(comm.allocate_shared(BUFFER_NBYTES, torch.uint8)),
            cache(_buffer_on_gpu),
            self._show,
            "hierarchical" if knobs.hierarchical_allreduce else None,
            "hierarchical" if knobs.hierarchical_allgather else None,
        )
        self._gpu = GpuStreams()
        self._negotiation = Negotiation(comm.size, comm.world_ranks)
        # A tensor, which a communicator knows again a little sooner than an array, and its bytes.
        self._record = torch.zeros(RECORD_NBYTES, dtype=torch.uint8)
        self._record_bytes = self._record.numpy().data
        self._round_algorithm = "one_shot" if self.size <= EXACT_SIZE else "recursive_doubling"
        self._round: Generator[Handle, None, list[Ready]] | None = None
        self._round_handle: Handle | None = None
        self._next_round_s = 0.0
        self._open: dict[str, Ticket] = {}
        self._sorted_out: dict[int, _SortedOut] = {}
        self._queue: deque[tuple[MakeCourse, list[Item]]] = deque()
        self._course: tuple[Course, list[Item]] | None = None
        self._course_handle: Handle | None = None
        self._finals: deque[tuple[Handle | None, Callable[[], None], list[Item]]] = deque()
        self._gathering_s = 0.0
        self._gathered_nbytes = 0
        self._cycle_time_s = knobs.cycle_time_s
        self._fused_nbytes = min(knobs.fusion_threshold_nbytes, FUSED_NBYTES)
        self._joining: Ticket | None = None
        self._joins = self._unnamed = self._optimizers = 0
        self._loans: weakref.WeakKeyDictionary[Any, list[Loan]] = weakref.WeakKeyDictionary()
        self._step_on: dict[Communicator, str] = {}
        self._retired: deque[str] = deque()
        self.users: weakref.WeakSet[Any] = weakref.WeakSet()
        self._failure: str | None = None
        self._inspect = StallInspector(knobs, self).inspect
        self._stop_inspecting = comm.while_waiting(self._inspect)
        crew.engines.append(self)

    def unnamed(self, kind: str) -> tuple[str, int]:
        """Name and number of an operation that was given none: ranks that call in the same order agree."""
        self._unnamed += 1
        # Once ranks have joined they may have counted differently, and begin anew, under other names.
        since = f"{self._joins}." if self._joins else ""
        return f"{kind}.noname.{since}{self._unnamed}", self._unnamed

    def submit(self, tickets: Sequence[Ticket]) -> None:
        """Ask for operations; those of one call become ready together if they are a group.

        errors   ValueError for a name that is under way on this rank already
                 HorovodInternalError after a failure that ended the engine
        """
        with self._crew.lock:
            if self._failure is not None:
                raise HorovodInternalError(self._failure)
            opened = self._open
            for ticket in tickets:
                if ticket.request.name in opened:
                    raise ValueError(
                        f"{ticket.request.name} was asked for a second time while the first is under way; "
                        f"synchronize the first, or give the second another name"
                    )
            now_s = time.perf_counter()
            for ticket in tickets:
                request = ticket.request
                ticket.asked_s = now_s
                opened[request.name] = ticket
                if request.device == "GPU":
                    self._gpu.asked(ticket)
                self._negotiation.ask(request)
                if ticket.tensor is not None:
                    self._gathered_nbytes += ticket.tensor.nbytes
                if self.timeline is not None:
                    self.timeline.negotiate_start(request.name, request.kind)
            if not self._gathering_s:
                self._gathering_s = now_s
            is_full = self._gathered_nbytes >= self._fused_nbytes
            if is_full or now_s - self._gathering_s >= self._cycle_time_s:
                self._crew.advance()

    def next_optimizer(self) -> str:
        """A name for an optimizer: ranks that make theirs in the same order get the same."""
        self._optimizers += 1
        return f"DistributedOptimizer.{self._optimizers}"

    @property
    def lock(self) -> threading.RLock:
        """Held by the thread that moves on the engines."""
        return self._crew.lock

    @property
    def setup(self) -> Communicator:
        """For what all ranks do together, and wait for, in a schedule that is being carried out."""
        return self._comm

    def lend_communicator(
        self, borrower: object, step: str, serve: Callable[[Communicator], None]
    ) -> Communicator:
        """One for the borrower's life: one that nobody has any more on any rank, or a new one.

        step, serve   the schedule that will use it, and what a rank that has joined does in it; that goes on
                      when the borrower is gone, until the communicator is lent again
        Only in an operation that is being carried out: the ranks agree, and wait for each other.
        """
        loan = self._comm.lend("gradients", "gradients")
        self._loans.setdefault(borrower, []).append(loan)
        comm = loan.comm
        self.serve.pop(self._step_on.get(comm, ""), None)
        self._step_on[comm] = step
        self.serve[step] = lambda: serve(comm)
        return comm

    def retire(self, step: str) -> None:
        """A schedule whose owner is gone on this rank is served for a while; the oldest are forgotten."""
        self._retired.append(step)
        if len(self._retired) > MOST_RETIRED:
            self.serve.pop(self._retired.popleft(), None)

    def allgather_object(self, value: Any) -> list[Any]:
        """All ranks' objects, by rank; other operations go on meanwhile. All ranks call it in one order."""
        payload = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        pieces = []
        for tensor in (torch.tensor([payload.numel()]), payload):
            name, serial = self.unnamed("allgather")
            dtype = str(tensor.dtype).removeprefix("torch.")
            ticket = Ticket(Request(name, "allgather", dtype, tuple(tensor.shape), serial=serial), tensor)
            self.submit([ticket])
            pieces.append(self.wait(ticket))
        lengths, everything = pieces
        return [pickle.loads(piece.numpy().tobytes()) for piece in torch.split(everything, lengths.tolist())]

    def join(self) -> int:
        """This rank has no more data: take part in the others' reductions until all have joined.

        returns   the rank that joined last
        errors    HorovodInternalError after a failure that ended the engine, and as `wait`
        """
        ticket = Ticket(_JOIN)
        with self._crew.lock:
            if self._failure is not None:
                raise HorovodInternalError(self._failure)
            self._joining = ticket
            self._negotiation.join()
        self.wait(ticket)
        return int(ticket.result)

    def poll(self, ticket: Ticket) -> bool:
        """Move on; whether the operation was done when this was called."""
        if ticket.done:
            return True
        self._crew.step()
        try:
            self._inspect(self.waiting_for())
        except HorovodInternalError as error:
            self._crew.fail(error)
        return False

    def wait(self, ticket: Ticket) -> Any:
        """Its result, when it is done.

        errors   HorovodInternalError: ranks that disagree (on every rank), a lost peer, a stall;
                 ValueError: what cannot be done although all ranks ask for the same
        """
        if not ticket.done:
            try:
                if not self._done_at_once(ticket):
                    waited = _Waited(self, ticket)
                    self._comm.wait_until(waited.is_over, waited)
            except Exception as error:  # of whatever kind: an operation that was begun cannot go on
                self._crew.fail(error)
        if ticket.error is not None:
            raise ticket.error
        if ticket.request.device == "GPU":
            self._gpu.taken(ticket)
        return ticket.result

    def _done_at_once(self, ticket: Ticket) -> bool:
        """The short way for a single small all-reduce: two blocking calls, if nothing else is to be done."""
        request = ticket.request
        if request.kind != "allreduce" or self.timeline is not None or request.op == "adasum":
            return False
        # The calls block with the lock held: another rank may be waiting for another thread's operation, or
        # for its gradients.
        if (len(self._crew.engines) > 1 or self._loans) and threading.active_count() > 1:
            return False
        with self._crew.lock:
            # Another thread may have come in between, and the operation that is open now be its own.
            is_ours_alone = len(self._open) == 1 and self._open.get(request.name) is ticket
            if not is_ours_alone or self._round is not None or not self._negotiation.has_news:
                return False
            for engine in self._crew.engines:
                if engine is not self and engine.is_busy:
                    return False
            nbytes = _nbytes(request)
            if nbytes > min(self._fused_nbytes, ALONE_FROM_NBYTES - 1):
                return False
            self._record_bytes[:] = self._negotiation.record()
            self._control.allreduce(self._record, "and", algorithm=self._round_algorithm)
            self._gathering_s, self._gathered_nbytes = 0.0, 0
            ready = self._negotiation.conclude(self._record_bytes.tobytes())
            if ready is None:
                self._round = self._tell_more()
                return False
            item = Item(request, ticket)
            with self._stream_for([item]):
                is_done = responses.allreduce_at_once(self._room, item)
                if is_done and request.device == "GPU":
                    self._gpu.finished([item])
            if not is_done:
                self._take_in(ready)
                return False
            self._end(ticket, None)
            return True

    def _stream_for(self, items: Sequence[Item]) -> AbstractContextManager[None]:
        """Where torch works on these, which are all in host memory or all on GPUs."""
        return self._gpu.working_on(items) if items[0].request.device == "GPU" else _NO_STREAM

    @property
    def is_busy(self) -> bool:
        """Whether anything is to be done."""
        return bool(self._open or self._joining or self._round or self.is_carrying_out)

    def advance(self) -> None:
        """Do all that can be done without waiting."""
        while self._advance_round():
            pass
        self._advance_courses()

    def fail(self, reason: str, cause: BaseException | None = None) -> None:
        """All that is under way fails, and nothing more is taken."""
        if self._failure is None:
            self._failure = reason
        tickets = [*self._open.values(), *([self._joining] if self._joining else [])]
        for ticket in tickets:
            ticket.error = HorovodInternalError(reason)
            ticket.error.__cause__ = cause
            ticket.done = True
        self._open.clear()
        self._negotiation = Negotiation(self.size, self._comm.world_ranks)
        self._joining = self._round = self._course = None
        self._round_handle = self._course_handle = None
        self._queue.clear()
        self._finals.clear()

    def waiting_for(self) -> tuple[int, ...]:
        """World ranks that are known to be late: with their part of a round, or of the data."""
        handles = [self._round_handle, self._course_handle, *(handle for handle, _, _ in self._finals)]
        found: set[int] = set()
        for handle in handles:
            if handle is not None:
                found.update(handle.waiting_for())
        return tuple(sorted(found))

    def late(self, missing: tuple[int, ...]) -> Iterable[tuple[str, float, tuple[int, ...]]]:
        """Operations that not all ranks have asked for, for the stall inspector."""
        world = self._comm.world_ranks
        for name in self._negotiation.heard:
            asked_s = self._open[name].asked_s if name in self._open else 0.0
            late = tuple(world[rank] for rank in self._negotiation.missing(name))
            if late:
                yield name, asked_s, late
        others = tuple(rank for rank in missing if rank in world)
        for name in self._negotiation.unanswered if others else ():
            yield name, self._open[name].asked_s, others

    def close(self, reason: str) -> None:
        """All that is under way fails, and those who use the engine let go of it."""
        self.fail(reason)
        self._stop_inspecting()
        for user in list(self.users):
            user.close()

    def free(self) -> None:
        """Give the communicators back. Collective, and nothing may be under way on any rank."""
        self._stop_inspecting()
        self._comm.free()
        self._control.free()

    def _advance_round(self) -> bool:
        """True when a round has ended: another one may begin."""
        if self._round is None:
            if not self._may_begin_round():
                return False
            self._round, self._round_handle = self._rounds(), None
        while self._round_handle is None or self._round_handle.done:
            try:
                self._round_handle = next(self._round)
            except StopIteration as stop:
                self._round = self._round_handle = None
                self._take_in(stop.value)
                return True
        return False

    def _may_begin_round(self) -> bool:
        if self._negotiation.has_news:
            return True
        is_waiting = bool(self._negotiation.heard or self._joining) or any(
            not ticket.done for ticket in self._open.values()
        )
        return is_waiting and not self.is_carrying_out and time.perf_counter() >= self._next_round_s

    @property
    def is_carrying_out(self) -> bool:
        """Whether operations are ready that others will finish without another round."""
        return bool(self._course or self._queue or self._finals)

    def _rounds(self) -> Generator[Handle, None, list[Ready]]:
        """One round; the ready operations are its result."""
        negotiation, control = self._negotiation, self._control
        if self.timeline is not None:
            self.timeline.mark_cycle()
        self._gathering_s, self._gathered_nbytes = 0.0, 0
        had_news = negotiation.has_news
        self._record_bytes[:] = negotiation.record()
        yield control.start_allreduce(self._record, "and", algorithm=self._round_algorithm)
        ready = negotiation.conclude(self._record_bytes.tobytes())
        if ready is None:
            ready = yield from self._tell_more()
        else:
            self._rest(had_news)
        return ready

    def _tell_more(self) -> Generator[Handle, None, list[Ready]]:
        """The rest of a round in which the ranks do not bring the same."""
        negotiation, control = self._negotiation, self._control
        payload = np.frombuffer(pickle.dumps(negotiation.news()), dtype=np.uint8)
        lengths = np.empty(self.size, dtype=np.int64)
        yield control.start_allgather(np.array([payload.size], dtype=np.int64), out=lengths)
        counts = lengths.tolist()
        everything = np.empty(sum(counts), dtype=np.uint8)
        yield control.start_allgather(payload, counts=counts, out=everything)
        news = [_loads(piece) for piece in np.split(everything, np.cumsum(counts)[:-1])]
        self._rest(any(told.requests for told in news))
        return negotiation.conclude_news(news)

    def _rest(self, had_news: bool) -> None:
        """Ranks that wait for others' requests ask again now and then, not as fast as they can."""
        self._next_round_s = 0.0 if had_news else time.perf_counter() + max(self._cycle_time_s, 1e-4)

    def _take_in(self, ready: list[Ready]) -> None:
        """Ready operations go into the queue, fused; those that cannot be done fail."""
        # The same list stands for the same operations: what travels together is found out once.
        _, together, refused = self._sorted_out.get(id(ready)) or self._sort_out(ready)
        opened = self._open
        if self.timeline is not None:
            for name in (found.request.name for found in ready if found.request.name in opened):
                for rank in range(self.size):
                    self.timeline.negotiate_rank_ready(name, rank)
                self.timeline.negotiate_end(name)
        for request, error in refused:
            if request.name in opened:
                alike = error == shortcoming(request)
                self._end(opened[request.name], ValueError(error) if alike else HorovodInternalError(error))
        for make, requests in together:
            items = [Item(request, opened.get(request.name)) for request in requests]
            self._show(items, "QUEUE")
            self._queue.append((make, items))
        last = self._negotiation.end_join()
        if last is not None and self._joining is not None:
            self._joining.result, self._joining.done = last, True
            self._joining = None
            self._joins += 1
            self._unnamed = 0

    def _sort_out(self, ready: list[Ready]) -> _SortedOut:
        found = _SortedOut(
            ready,
            list(self._fused([operation.request for operation in ready if operation.error is None])),
            [operation for operation in ready if operation.error is not None],
        )
        if len(self._sorted_out) >= BATCHES_REMEMBERED:
            del self._sorted_out[next(iter(self._sorted_out))]
        self._sorted_out[id(ready)] = found
        return found

    def _fused(self, requests: Sequence[Request]) -> Iterable[tuple[MakeCourse, list[Request]]]:
        """Operations that travel together, in the same order on every rank."""
        threshold = self._fused_nbytes
        filling: dict[object, tuple[list[Request], int]] = {}
        for request in requests:
            if request.op == "adasum":
                factors = request.prescale, request.postscale
                key: object = ("adasum", request.dtype, request.device, *factors, request.group)
                together, _ = filling.setdefault(key, ([], 0))
                together.append(request)
                continue
            nbytes = _nbytes(request) if request.kind in _FUSED else 0
            if request.kind not in _FUSED or nbytes > min(threshold, ALONE_FROM_NBYTES - 1):
                yield _ALONE.get(request.kind, responses.barrier), [request]
                continue
            of_group = request.group if self._knobs.disable_group_fusion else None
            key = (*request[1:3], *request[4:9], of_group)  # all but name and shape
            together, held = filling.get(key, ([], 0))
            if together and held + nbytes > threshold:
                yield _FUSED[request.kind], together
                together, held = [], 0
            together.append(request)
            filling[key] = together, held + nbytes
        for together, _ in filling.values():
            is_adasum = together[0].op == "adasum"
            yield responses.adasum_allreduce if is_adasum else _FUSED[together[0].kind], together

    def _advance_courses(self) -> None:
        self._finish_finals()
        while self._course is not None or self._queue:
            if self._course is None:
                make, items = self._queue.popleft()
                if items[0].request.kind == "schedule":
                    self._carry_out(items[0])
                    continue
                self._course, self._course_handle = (make(self._room, items), items), None
                if make not in _FUSED.values():
                    self._show(items, f"MPI_{items[0].request.kind.upper()}")
            course, items = self._course
            try:
                while self._course_handle is None or self._course_handle.done:
                    with self._stream_for(items):
                        if self._course_handle is not None:
                            self._course_handle.wait()  # it is over; this stream is to come after it
                        self._course_handle = next(course)
                    if self._course_handle is None:
                        break
            except StopIteration as stop:
                self._course = self._course_handle = None
                self._finals.append((*stop.value, items))
                self._finish_finals()
                continue
            self._finish_finals()
            return

    def _carry_out(self, item: Item) -> None:
        """A schedule: what all ranks know how to do, also those that have joined. Its errors are its own."""
        try:
            if item.ticket is None:
                serve = self.serve.get(item.request.name)
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
        self._show_end([item])
        if item.ticket is not None:
            self._end(item.ticket, item.ticket.error)

    def _finish_finals(self) -> None:
        while self._finals and (self._finals[0][0] is None or self._finals[0][0].done):
            handle, finish, items = self._finals.popleft()
            with self._stream_for(items):
                if handle is not None:
                    handle.wait()  # it is over; this stream is to come after it
                finish()
                if items[0].request.device == "GPU":
                    self._gpu.finished(items)
            self._show_end(items)
            for item in items:
                if item.ticket is not None:
                    self._end(item.ticket, item.ticket.error)

    def _end(self, ticket: Ticket, error: BaseException | None) -> None:
        ticket.error = error
        ticket.done = True
        self._open.pop(ticket.request.name, None)

    def _show(self, items: Sequence[Item], activity: str) -> None:
        """Tell the timeline what is being done with these from now on."""
        if self.timeline is None:
            return
        for item in items:
            name = item.request.name
            if name in self._shown:
                self.timeline.activity_end(name)
            else:
                self._shown.add(name)
                self.timeline.start(name, item.request.kind)
            self.timeline.activity_start(name, activity)

    def _show_end(self, items: Sequence[Item]) -> None:
        if self.timeline is None:
            return
        for request in (item.request for item in items):
            if request.name in self._shown:
                self._shown.discard(request.name)
                self.timeline.activity_end(request.name)
                self.timeline.end(request.name, request.dtype, request.shape)
        self.timeline.flush()


@torch.inference_mode(False)  # it is kept, and written to outside of that mode
def _buffer_on_gpu() -> FusionBuffer:
    return FusionBuffer(torch.empty(BUFFER_NBYTES, dtype=torch.uint8, device="cuda"))


class _SortedOut(NamedTuple):
    """Operations that are ready, those that travel together, and those that cannot be done.

    ready   kept, so that no other list is taken for it
    """

    ready: list[Ready]
    together: list[tuple[MakeCourse, list[Request]]]
    refused: list[Ready]


class Crew:
    """The engines of a process: they move on together, so that no process set waits for another one's turn.

    poke   makes progress on everything under way
    """

    def __init__(self, poke: Callable[[], None]) -> None:
        self.engines: list[Engine] = []
        self.lock = threading.RLock()
        self._poke = poke

    def step(self) -> None:
        """Make progress on all that is under way."""
        with self.lock:
            self._poke()
            self.advance()

    def advance(self) -> None:
        """Let every engine do what can be done without waiting."""
        try:
            for engine in self.engines:
                if engine.is_busy:
                    engine.advance()
        except Exception as error:  # of whatever kind: what was under way cannot go on
            self.fail(error)

    def abandon(self, reason: str) -> None:
        """In a forked process: nothing goes on here, and who asks for something is told why."""
        self.lock = threading.RLock()  # a thread that is not here may have held it
        for engine in self.engines:
            engine.fail(reason)

    def fail(self, error: BaseException) -> None:
        """What one of them could not do ends all of them."""
        reason = str(error) if isinstance(error, HpcparError) else f"{type(error).__name__}: {error}"
        cause = None if isinstance(error, HorovodInternalError) else error
        with self.lock:
            for engine in self.engines:
                engine.fail(reason, cause)


class _Waited:
    """What this rank tells those who ask what it waits for."""

    def __init__(self, engine: Engine, ticket: Ticket) -> None:
        self.name = ticket.request.name
        self._engine = engine
        self._ticket = ticket

    def is_over(self) -> bool:
        self._engine._crew.step()
        return self._ticket.done

    def waiting_for(self) -> tuple[int, ...]:
        return self._engine.waiting_for()

    def progress(self) -> str:
        return "under way" if self._engine.is_carrying_out else "which not all ranks have asked for"


def _nbytes(request: Request) -> int:
    return math.prod(request.shape) * responses.travels_as(request).itemsize


def _loads(piece: Any) -> News:
    news: News = pickle.loads(piece.tobytes())
    return news
