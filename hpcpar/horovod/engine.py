"""The engine of a process set: takes operations, finds out when all ranks have asked, and runs them.

    submit ──> negotiation rounds (control) ──> fusion plan ──> operation queue (comm) ──> result

Nothing runs in the background: the engines of all process sets move on together whenever the program is in
`wait`, `poll` or, now and then, `submit`.

    module             class                 owns
    rounds             NegotiationRounds     communicator `control`, which requests are ready
    fusion_plan        FusionPlanner         which operations share a message
    op_queue           OperationQueue        communicator `comm`, what is under way on it
    served_steps       ServedSteps           what this rank does for optimizers after join()
    chrome_timeline    TimelineObserver      what is recorded
"""

from __future__ import annotations

import pickle
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from hpcpar.errors import HpcparError
from hpcpar.horovod.chrome_timeline import TimelineObserver
from hpcpar.horovod.exceptions import HorovodInternalError
from hpcpar.horovod.fusion import FusionBuffer
from hpcpar.horovod.fusion_plan import FusionPlanner
from hpcpar.horovod.negotiation import ReadyRequest, TensorRequest, shortcoming
from hpcpar.horovod.op_queue import OperationQueue
from hpcpar.horovod.operations import EngineContext, ReadyOp, Ticket
from hpcpar.horovod.rounds import NegotiationRounds
from hpcpar.horovod.served_steps import ServedSteps
from hpcpar.horovod.stall import StallInspector
from hpcpar.units import MiB

if TYPE_CHECKING:
    from hpcpar.comm import Communicator
    from hpcpar.launch.horovod_settings import HorovodSettings

T = TypeVar("T")

BUFFER_NBYTES = 8 * MiB

_JOIN = TensorRequest("join", "join")


class Engine:
    """Collectives by name between the ranks of one process set. Making one is collective.

    comm, control   communicators of the same ranks, for the data and for the rounds; nobody else uses them
    engine_group    the engines of all process sets, which move on together
    users           objects whose `close` is called when the engine is closed
    """

    def __init__(
        self, comm: Communicator, control: Communicator, engine_group: EngineGroup, knobs: HorovodSettings
    ) -> None:
        self.rank, self.size = comm.rank, comm.size
        self.observer = TimelineObserver(None, comm.size)
        self.steps = ServedSteps(comm)
        self.users: weakref.WeakSet[Any] = weakref.WeakSet()
        self._comm, self._control, self._engine_group = comm, control, engine_group
        self._open: dict[str, Ticket] = {}
        context = EngineContext(
            comm,
            FusionBuffer(comm.allocate_shared(BUFFER_NBYTES, torch.uint8)),
            cache(_buffer_on_gpu),
            self.observer.activity,
            "hierarchical" if knobs.hierarchical_allreduce else None,
            "hierarchical" if knobs.hierarchical_allgather else None,
        )
        self._queue = OperationQueue(context, self.observer, self.steps.serve, self._end)
        self._rounds = NegotiationRounds(control, knobs.cycle_time_s)
        self._planner = FusionPlanner(knobs)
        self._cycle_time_s = knobs.cycle_time_s
        self._gathering_s = 0.0
        self._gathered_nbytes = 0
        self._joining: Ticket | None = None
        self._joins = self._unnamed = self._optimizers = 0
        self._failure: str | None = None
        self._inspect = StallInspector(knobs, self).inspect
        self._stop_inspecting = comm.while_waiting(self._inspect)
        engine_group.engines.append(self)

    # --- requests ---------------------------------------------------------------------------------

    def unnamed(self, kind: str) -> tuple[str, int]:
        """Number an operation without a name: ranks that call in the same order agree on (name, number)."""
        self._unnamed += 1
        # Once ranks have joined they may have counted differently, and begin anew, under other names.
        since = f"{self._joins}." if self._joins else ""
        return f"{kind}.noname.{since}{self._unnamed}", self._unnamed

    def submit(self, tickets: Sequence[Ticket]) -> None:
        """Ask for operations; a group in one call becomes ready together.

        errors   ValueError for a name that is under way on this rank already
                 HorovodInternalError after a failure that ended the engine
        """
        with self._engine_group.lock:
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
                    self._queue.gpu.asked(ticket)
                self._rounds.negotiation.ask(request)
                if ticket.tensor is not None:
                    self._gathered_nbytes += ticket.tensor.nbytes
                self.observer.asked(request.name, request.kind)
            if not self._gathering_s:
                self._gathering_s = now_s
            is_full = self._gathered_nbytes >= self._planner.threshold_nbytes
            if is_full or now_s - self._gathering_s >= self._cycle_time_s:
                self._engine_group.advance()

    def next_optimizer(self) -> str:
        """Name an optimizer: ranks that make theirs in the same order agree on the name."""
        self._optimizers += 1
        return f"DistributedOptimizer.{self._optimizers}"

    @property
    def lock(self) -> threading.RLock:
        """Held by the thread that moves on the engines."""
        return self._engine_group.lock

    @property
    def setup(self) -> Communicator:
        """Communicator for blocking collectives inside an `on_ready`, where all ranks are."""
        return self._comm

    def run_together(self, name: str, call: Callable[[], T], content: str = "") -> T:
        """Call a function once all ranks have come to this call; return its result. Collective.

        content   text that must be the same on all ranks
        """
        results: list[T] = []
        request = TensorRequest(name, "schedule", content=content)
        ticket = Ticket(request, on_ready=lambda: results.append(call()))
        self.submit([ticket])
        self.wait(ticket)
        return results[0]

    def allgather_object(self, value: Any) -> list[Any]:
        """Gather one object of each rank while other operations go on. All ranks call it in one order."""
        payload = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        pieces = []
        for tensor in (torch.tensor([payload.numel()]), payload):
            name, serial = self.unnamed("allgather")
            dtype = str(tensor.dtype).removeprefix("torch.")
            ticket = Ticket(
                TensorRequest(name, "allgather", dtype, tuple(tensor.shape), serial=serial), tensor
            )
            self.submit([ticket])
            pieces.append(self.wait(ticket))
        lengths, everything = pieces
        return [pickle.loads(piece.numpy().tobytes()) for piece in torch.split(everything, lengths.tolist())]

    def join(self) -> int:
        """Take part with zeros in the others' reductions, until all ranks have joined.

        returns   the rank that joined last
        errors    HorovodInternalError after a failure that ended the engine, and as `wait`
        """
        ticket = Ticket(_JOIN)
        with self._engine_group.lock:
            if self._failure is not None:
                raise HorovodInternalError(self._failure)
            self._joining = ticket
            self._rounds.negotiation.join()
        self.wait(ticket)
        return int(ticket.result)

    def poll(self, ticket: Ticket) -> bool:
        """Make progress; return True if the operation was done when this was called."""
        if ticket.done:
            return True
        self._engine_group.step()
        try:
            self._inspect(self.waiting_for())
        except HorovodInternalError as error:
            self._engine_group.fail(error)
        return False

    def wait(self, ticket: Ticket) -> Any:
        """Wait for an operation, and return its result.

        errors   HorovodInternalError: ranks that disagree (on every rank), a lost peer, a stall;
                 ValueError: what cannot be done although all ranks ask for the same
        """
        if not ticket.done:
            try:
                if not self._run_blocking(ticket):
                    waited = _Waited(self, ticket)
                    self._comm.wait_until(waited.is_over, waited)
            except Exception as error:  # of whatever kind: an operation that was begun cannot go on
                self._engine_group.fail(error)
        if ticket.error is not None:
            raise ticket.error
        if ticket.request.device == "GPU":
            self._queue.gpu.taken(ticket)
        return ticket.result

    def _run_blocking(self, ticket: Ticket) -> bool:
        """Run a single small all-reduce by two blocking collectives, if nothing else is to be done."""
        request = ticket.request
        if request.kind != "allreduce" or request.op == "adasum":
            return False
        # The calls block with the lock held: another rank may be waiting for another thread's operation, or
        # for its gradients.
        if (len(self._engine_group.engines) > 1 or self.steps) and threading.active_count() > 1:
            return False
        with self._engine_group.lock:
            # Another thread may have come in between, and the operation that is open now be its own.
            is_ours_alone = len(self._open) == 1 and self._open.get(request.name) is ticket
            if not is_ours_alone or self._queue or not self._planner.is_fusible(request):
                return False
            if self._rounds.under_way or not self._rounds.negotiation.has_news:
                return False
            if any(engine.is_busy for engine in self._engine_group.engines if engine is not self):
                return False
            self._begin_cycle()
            ready = self._rounds.run_blocking()
            if ready is None:
                return False
            self.observer.ready(ready, self._open)
            self._queue.run_blocking(ReadyOp(request, ticket))
            self._end(ticket, None)
            return True

    # --- progress ---------------------------------------------------------------------------------

    @property
    def is_busy(self) -> bool:
        """True while anything is to be done."""
        return bool(self._open or self._joining or self._rounds.under_way or self._queue)

    @property
    def is_carrying_out(self) -> bool:
        """True while operations are ready that others will finish without another round."""
        return bool(self._queue)

    def advance(self) -> None:
        """Do all that can be done without waiting."""
        while self._rounds.under_way or self._may_begin_round():
            if not self._rounds.under_way:
                self._begin_cycle()
                self._rounds.begin()
            ready = self._rounds.advance()
            if ready is None:
                break
            self.observer.ready(ready, self._open)
            self._enqueue(ready)
        self._queue.advance()

    def _begin_cycle(self) -> None:
        self.observer.cycle()
        self._gathering_s, self._gathered_nbytes = 0.0, 0

    def _may_begin_round(self) -> bool:
        negotiation = self._rounds.negotiation
        if negotiation.has_news:
            return True
        is_waiting = bool(negotiation.heard or self._joining) or any(
            not ticket.done for ticket in self._open.values()
        )
        return is_waiting and not self._queue and self._rounds.is_due

    def _enqueue(self, ready: list[ReadyRequest]) -> None:
        """Append ready operations to the queue, fused; fail those that cannot be done."""
        plan = self._planner.plan(ready)
        for request, error in plan.refused:
            if error is not None and request.name in self._open:
                # An error of one rank's own is its caller's mistake; ranks that disagree are another matter.
                alike = error == shortcoming(request)
                self._end(self._open[request.name], (ValueError if alike else HorovodInternalError)(error))
        for make, requests in plan.together:
            self._queue.add(make, [ReadyOp(request, self._open.get(request.name)) for request in requests])
        last = self._rounds.negotiation.end_join()
        if last is not None and self._joining is not None:
            self._joining.result, self._joining.done = last, True
            self._joining = None
            self._joins += 1
            self._unnamed = 0

    def _end(self, ticket: Ticket, error: BaseException | None) -> None:
        ticket.error = error
        ticket.done = True
        self._open.pop(ticket.request.name, None)

    # --- failures ---------------------------------------------------------------------------------

    def fail(self, reason: str, cause: BaseException | None = None) -> None:
        """Fail all that is under way, and take nothing more."""
        if self._failure is None:
            self._failure = reason
        for ticket in [*self._open.values(), *([self._joining] if self._joining else [])]:
            ticket.error = HorovodInternalError(reason)
            ticket.error.__cause__ = cause
            ticket.done = True
        self._open.clear()
        self._joining = None
        self._rounds.reset()
        self._queue.clear()

    def waiting_for(self) -> tuple[int, ...]:
        """World ranks that are known to be late: with their part of a round, or of the data."""
        own = [] if self._rounds.handle is None else [self._rounds.handle]
        found = {rank for handle in [*own, *self._queue.handles()] for rank in handle.waiting_for()}
        return tuple(sorted(found))

    def not_asking_for(self, name: str) -> tuple[int, ...]:
        """World ranks that have not asked for an operation, as far as is known here."""
        return tuple(self._comm.world_ranks[rank] for rank in self._rounds.negotiation.missing(name))

    def late(self, missing: tuple[int, ...]) -> Iterable[tuple[str, float, tuple[int, ...]]]:
        """Operations that not all ranks have asked for, for the stall inspector."""
        negotiation = self._rounds.negotiation
        for name, asked in negotiation.heard.items():
            own = self._open.get(name)
            since_s = asked.since_s if own is None else min(asked.since_s, own.asked_s)
            late = self.not_asking_for(name)
            if late:
                yield name, since_s, late
        others = tuple(rank for rank in missing if rank in self._comm.world_ranks)
        for name in negotiation.unanswered if others else ():
            yield name, self._open[name].asked_s, others

    def close(self, reason: str) -> None:
        """Fail all that is under way, and let the engine's users go."""
        self.fail(reason)
        self._stop_inspecting()
        for user in list(self.users):
            user.close()

    def free(self) -> None:
        """Give the communicators back. Collective, and nothing may be under way on any rank."""
        self._stop_inspecting()
        self._comm.free()
        self._control.free()


@torch.inference_mode(False)  # it is kept, and written to outside of that mode
def _buffer_on_gpu() -> FusionBuffer:
    return FusionBuffer(torch.empty(BUFFER_NBYTES, dtype=torch.uint8, device="cuda"))


class EngineGroup:
    """The engines of a process, which move on together: no process set waits for another one's turn.

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
        """Refuse everything in a forked process, for this reason."""
        self.lock = threading.RLock()  # a thread that is not here may have held it
        for engine in self.engines:
            engine.fail(reason)

    def fail(self, error: BaseException) -> None:
        """End all engines by the error of one."""
        reason = str(error) if isinstance(error, HpcparError) else f"{type(error).__name__}: {error}"
        cause = None if isinstance(error, HorovodInternalError) else error
        with self.lock:
            for engine in self.engines:
                engine.fail(reason, cause)


class _Waited:
    """Answers the communicator, which asks what this rank waits for and whether that is over."""

    def __init__(self, engine: Engine, ticket: Ticket) -> None:
        self.name = ticket.request.name
        self._engine = engine
        self._ticket = ticket

    def is_over(self) -> bool:
        self._engine._engine_group.step()
        return self._ticket.done

    def waiting_for(self) -> tuple[int, ...]:
        return self._engine.waiting_for() or self._engine.not_asking_for(self.name)

    def progress(self) -> str:
        return "under way" if self._engine.is_carrying_out else "which not all ranks have asked for"
