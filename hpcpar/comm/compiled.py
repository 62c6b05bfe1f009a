"""`CompiledCollective`: a plan bound to memory and to an executor. The only thing that runs.

    idle ── start ──> under way ── advance, advance, … ──> done (or failed) ── start ──> …

`advance` never blocks, and may be called from any place that has time: `poke`, `test`, `wait`. It may also
be left by an exception of a signal handler at any point, and then goes on where it was: every action on
memory is begun exactly once (`spaces.py`), and every other assignment may be repeated.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from hpcpar.comm.accounting import Tally, Trace, TrafficRow
from hpcpar.comm.blocks import Action
from hpcpar.comm.watch import NO_NUMBER, Call
from hpcpar.errors import HpcparError

if TYPE_CHECKING:
    from hpcpar.comm.executors.message import MessageProgram
    from hpcpar.comm.progress import Progress
    from hpcpar.comm.runtime import Runtime

Result = Callable[[Any, Any], Any]
"""Of the caller's two arrays."""


class AtEnd:
    """A result that can be had only once the call has ended: a copy of what it has written."""

    def __init__(self, result: Result) -> None:
        self.result = result

    def __call__(self, buffer: Any, out: Any) -> Any:
        return self.result(buffer, out)


Awaited = tuple["Sequence[int] | memoryview[int]", int, int]
"""(words, word, value) of memory that ranks share."""


class ExecutorStep(Protocol):
    """One or several steps of a schedule, bound to memory by an executor.

    count, done   how many steps, and how many of them have been done before the one under way
    awaited       it cannot go on while that word has that value; None: not known
    """

    @property
    def count(self) -> int: ...

    @property
    def done(self) -> int: ...

    @property
    def awaited(self) -> Awaited | None: ...

    def begin(self, number: int) -> Turn | None:
        """Make ready for call `number`; the turn that it has to wait for. May be repeated."""

    def advance(self, looks: int) -> bool:
        """Do all that can be done without waiting, looking `looks` times at most; True when complete."""

    def waiting_for(self) -> tuple[int, ...]:
        """Ranks of the communicator whose part is missing."""

    def received_nbytes(self) -> int:
        """Bytes that all receives brought (point-to-point)."""

    def free(self) -> None:
        """Release what the transport holds for it."""


class Turn:
    """Calls that share a tag run one after the other, in the order in which all ranks make them."""

    __slots__ = ("queue",)

    def __init__(self) -> None:
        self.queue: list[CompiledCollective] = []


class StepSequence:
    """Steps one after the other, with actions on memory before the first and after the last of them.

    program   chooses steps and turn by the number of the call; None: they are always these
    """

    awaited = None

    def __init__(
        self,
        steps: Sequence[ExecutorStep] = (),
        first: Sequence[Action] = (),
        last: Sequence[Action] = (),
        program: MessageProgram | None = None,
    ) -> None:
        self.steps = steps
        self._first, self._last = first, last
        self._program = program
        self._index = 0
        self._first_actions: Iterator[Action] | None = None
        self._last_actions: Iterator[Action] | None = None

    @property
    def count(self) -> int:
        return sum(step.count for step in self.steps)

    @property
    def done(self) -> int:
        under_way = self.steps[self._index : self._index + 1]
        return sum(step.count for step in self.steps[: self._index]) + sum(step.done for step in under_way)

    def begin(self, number: int) -> Turn | None:
        turn = None
        if self._program is not None:
            self.steps, turn = self._program.at(number)
        for step in self.steps:
            step.begin(number)
        self._index = 0
        self._first_actions, self._last_actions = iter(self._first), iter(self._last)
        return turn

    def advance(self, looks: int) -> bool:
        for action in self._first_actions or ():
            action()
        steps = self.steps
        while self._index < len(steps):
            if not steps[self._index].advance(looks):
                return False
            self._index += 1
        for action in self._last_actions or ():
            action()
        return True

    def waiting_for(self) -> tuple[int, ...]:
        return self.steps[self._index].waiting_for() if self._index < len(self.steps) else ()

    def received_nbytes(self) -> int:
        return self.steps[0].received_nbytes()

    def free(self) -> None:
        if self._program is not None:
            self._program.free()
        else:
            for step in self.steps:
                step.free()


class CompiledCollective:
    """A request that is ready to be started, again and again, one execution at a time.

    described        the request in words, the same on every rank
    called           the name that the caller has given it
    executor         does the steps
    turn             other calls that the one under way must not overtake
    lead             makes the stream in which the caller works come after the call's; None: there is none
    result           of the caller's arrays; None: the second one, or the first where there is no second
    count_write      tells autograd of the write to the result, which is a torch tensor; None: it is none
    comm_id          of the communicator, as ranks tell each other
    is_message       a point-to-point message, of which ranks make different numbers
    receive          (peer, tag) of a receive of several messages, of which a probe could find one
    memory           the caller's arrays while they must be kept alive
    is_cached        in the cache: holds no references to the caller's arrays while it is idle
    """

    __slots__ = (
        "by",
        "called",
        "collective",
        "comm",
        "comm_id",
        "count_write",
        "described",
        "error",
        "executor",
        "handle",
        "is_cached",
        "is_message",
        "is_under_way",
        "lead",
        "memory",
        "nbytes",
        "number",
        "receive",
        "result",
        "row",
        "runtime",
        "started_s",
        "tally",
        "turn",
        "world_ranks",
    )

    def __init__(
        self,
        collective: str,
        comm: str,
        runtime: Runtime,
        world_ranks: tuple[int, ...],
        row: TrafficRow,
        *,
        described: str = "",
        by: str = "",
        traffic: tuple[int, int, int] = (0, 0, 0),
    ) -> None:
        self.collective = collective
        self.comm = comm
        self.runtime = runtime
        self.world_ranks = world_ranks
        self.row = row
        self.described = described
        self.called: str | None = None
        self.by = by
        self.tally: Tally = row.open(*traffic)
        self.result: Result | None = None
        self.count_write: Callable[[Any], None] | None = None
        self.executor: ExecutorStep = StepSequence()
        self.memory: object = None
        self.lead: Callable[[], None] | None = None
        self.turn: Turn | None = None
        self.comm_id = 0
        self.is_message = False
        self.receive: tuple[int, int] | None = None
        self.is_cached = False
        self.nbytes = 0
        self.number = 0
        self.is_under_way = False
        self.error: BaseException | None = None
        self.handle: Handle | None = None
        self.started_s = 0.0

    def advance(self, looks: int = 1) -> bool:
        """Do all that can be done without waiting; True when this execution has ended, well or not.

        An exception that none of hpcpar's own steps has raised is a signal handler's, and leaves the call.
        """
        if not self.is_under_way:
            return True
        turn = self.turn
        if turn is not None and turn.queue[0] is not self:
            return False
        try:
            if not self.executor.advance(looks):
                return False
            if self.runtime.trace is not None:
                self._note(self.runtime.trace)
        except HpcparError as error:
            self.error = error
        else:
            self.error = None
            self.tally.calls += 1
        # In these lines no call of a function, so that no signal handler runs in between.
        if turn is not None:
            del turn.queue[0]
        self.is_under_way = False
        handle = self.handle
        if handle is not None:
            handle.error = self.error
            handle.is_done = True
            handle._compiled = None
            self.handle = None
        self.memory = None
        if not self.is_cached:
            self.free()
        return True

    def _note(self, trace: Trace) -> None:
        trace.add(
            f"{self.collective} {self.comm}",
            "communication",
            self.started_s,
            time.perf_counter(),
            nbytes_sent=self.tally.nbytes_sent,
            algorithm=self.by,
            blocking=self.handle is None,
            **({} if self.is_message else {"comm": self.comm_id, "call": self.number}),
        )

    @property
    def name(self) -> str:
        """The call in words, for errors: "allreduce 'head' (call 7 of 'world')"."""
        called = "" if self.called is None else f" {self.called!r}"
        return f"{self.collective}{called} (call {self.number} of {self.comm!r})"

    @property
    def call(self) -> Call:
        """This call, to be compared with another rank's of the same number."""
        return Call(self.comm_id, NO_NUMBER if self.is_message else self.number, self.described)

    def waiting_for(self) -> tuple[int, ...]:
        """World ranks whose part is missing."""
        if not self.is_under_way:
            return ()
        turn = self.turn
        if turn is not None and turn.queue and turn.queue[0] is not self:
            return turn.queue[0].waiting_for()
        return tuple(self.world_ranks[r] for r in self.executor.waiting_for())

    def progress(self) -> str:
        count = self.executor.count
        return f"step {min(self.executor.done + 1, count)} of {count}"

    def free(self) -> None:
        """Leave the cache: requests go back to MPI, the account takes over what was counted."""
        self.is_cached = False
        if self.is_under_way:
            return  # again at its end
        self.executor.free()
        self.row.close(self.tally)
        self.tally.calls = 0
        # Perhaps somebody still refers to it; the memory that it works on goes.
        self.executor = StepSequence()


class Handle:
    """A collective or a message under way: `wait()` for its result, or `test()` and go on.

    The buffers that were handed over must neither be written nor, unless they are only sent, be
    read before `wait()` has returned.
    """

    __slots__ = ("_compiled", "_lead", "_progress", "_result", "_row", "error", "is_done")

    def __init__(self, progress: Progress, compiled: CompiledCollective, result: Any) -> None:
        self._progress = progress
        self._compiled: CompiledCollective | None = compiled
        self._lead = compiled.lead
        self._row = compiled.row
        self._result = result
        self.is_done = False
        self.error: BaseException | None = None

    def test(self) -> bool:
        """Make progress on everything under way; True when this one is complete."""
        if not self.is_done:
            self._progress.require_rank("testing a call")
            self._progress.poke()
        return self.done

    @property
    def done(self) -> bool:
        """True when it is complete, as far as is known without making progress; its error is raised."""
        if self.error is not None:
            raise self.error
        return self.is_done

    def waiting_for(self) -> tuple[int, ...]:
        """World ranks whose messages are missing."""
        return () if self._compiled is None else self._compiled.waiting_for()

    def wait(self) -> Any:
        """Block until complete; returns the result. A second call returns it again.

        For arrays on a GPU "complete" is that the GPU has been given all: work that the caller gives it
        from now on, in the stream in which it waits, comes after the call's.

        errors   StallError after the communicator's timeout_s, naming who waits for whom
                 PeerLeftError when a rank that is waited for has ended
        """
        if self._compiled is not None:
            self._progress.wait(self._compiled, self)
        if self.error is not None:
            raise self.error
        if self._lead is not None:
            self._lead()
        if type(self._result) is partial:  # of `AtEnd`
            self._result = self._result()
        return self._result
