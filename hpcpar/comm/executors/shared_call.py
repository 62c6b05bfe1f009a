"""Steps in memory that the ranks of a node share: one protocol for short and for long arrays.

Every call of a communicator uses one slot (`shm_segment.py`), in which each local rank has a header. Its
state word goes up as the rank proceeds through the steps k = 0, 1, … of its schedule:

    free     ── all ranks have ended the call that used the slot before ──>  2k+1
    2k+1     what this rank sends in step k can be read. It receives: for each source it waits for 2j+1, where
             j is the source's step that sends the message, compares the digest, reads, and reduces  ──>  2k+2
    2k+2     this rank has read all of step k. (Long arrays: it waits until all readers of what it sent in
             step k have said so.)  ──>  2k+3, the next step, or after the last one  ──>  ended

That it has ended a call, a rank tells in a word apart, which only those look at who need the slot.

*   Short: what a rank sends is copied into its body, and read there. Nobody waits for readers, and 2k+2 is
    not written: the body is used again SLOTS calls later, when all ranks have ended this call.
*   Long: the header says where the rank's arrays lie, and the peers read there: in arrays of
    `Communicator.allocate_shared` as they are, in private memory by the kernel (process_vm_readv). What is
    received into in the same step is sent from a copy. A sum with `out` reads and sends its input where it
    lies until it has written to the result (`plan.reading_input`).

Whether a call is short follows from the request, so all ranks know it. Where the messages lie in the sender's
memory follows from its schedule, which every rank can generate; only the pieces of an uneven all-to-all are
told, in a table in the body.

The state word holds a digest of the request: a reader compares it before it touches the sender's memory. A
rank that finds another request there fails, marks its header as FAILED, and who waits for it fails, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol
from zlib import crc32

from hpcpar.comm.blocks import Action
from hpcpar.comm.compiled import Awaited, ExecutorStep
from hpcpar.comm.plan import Plan, Run
from hpcpar.comm.shm_segment import (
    DIGEST_MASK,
    DIGEST_SHIFT,
    FAILED,
    NUMBER_MASK,
    NUMBER_SHIFT,
    PHASE_MASK,
    SLOTS,
    ShmSegment,
)
from hpcpar.comm.spaces import Spaces, octets_of
from hpcpar.errors import MismatchError
from hpcpar.transport.buffers import HostBuffer
from hpcpar.transport.interface import Octets

if TYPE_CHECKING:
    from hpcpar.comm.executors.shared_binding import NodeLayout


class Deferred(Protocol):
    """Interface of a part of a call whose actions are known only when the peers have come."""

    def actions(self) -> Sequence[Action] | None:
        """None: not yet."""


class Gate(NamedTuple):
    """The peers that a rank waits for before it goes on, and what it then does.

    waits      (state word of a local rank, phase that it must have reached)
    deferred   actions that are known only then; None: there are none
    step       number of the step that it belongs to, for reports
    """

    waits: Sequence[tuple[int, int]]
    deferred: Deferred | None
    step: int


class Task(NamedTuple):
    """Tell the peers, pass a gate, act: a call in one slot is a list of these.

    after   number of the next task
    phase   what this rank's state tells from now on; 0: as before
    gate    None: nobody is waited for
    action  what is done then, exactly once
    """

    after: int
    phase: int
    gate: Gate | None
    action: Action


class SharedCall:
    """One compiled call in the memory of a node: its slot, its digest, where all of it lies, and its tasks.

    described   the request in words, for errors
    is_short    what is sent is copied into the body
    is_in_place the data are the input, too, where other ranks may have them apart
    tell        called with the number of a call, and in words how another rank's differs: tells all ranks
    count       of steps
    beyond      messages to and from other nodes that are under way
    """

    def __init__(
        self,
        segment: ShmSegment,
        layout: NodeLayout,
        rank: int,
        spaces: Spaces,
        described: str,
        *,
        is_short: bool,
        tell: Callable[[int, str], None],
    ) -> None:
        self._tell = tell
        self.segment = segment
        self.layout = layout
        self.rank = rank
        self.described = described
        self.is_short = is_short
        self.words = segment.words
        self._digest = (crc32(described.encode()) & DIGEST_MASK) << DIGEST_SHIFT
        self.spaces: dict[str, HostBuffer] = {str(name): buffer for name, buffer in spaces.items()}
        self.is_in_place = layout.schedules.reads_input and "input" not in spaces
        if self.is_in_place:
            self.spaces["input"] = self.spaces["data"]
        self.lent: tuple[HostBuffer, int] | None = None
        self.bases: list[tuple[int, int]] = []
        self.table: list[int] = []
        self.count = 0
        self._bind: Callable[[int], Sequence[Task]] | None = None
        self._by_slot: list[Sequence[Task] | None] = [None] * SLOTS
        self._elsewhere: Sequence[ExecutorStep] = ()
        self.beyond: ExecutorStep | None = None
        self.number = self.ticket = -1
        self.slot, self.stamp, self.header = 0, 0, segment.headers[0][segment.rank]
        self._tasks: Sequence[Task] = ()
        self._at = 0  # of the task under way, until its action is begun
        self._actions: Iterator[Action] | None = None
        self.awaited: Awaited | None = None

    @property
    def headers(self) -> Sequence[int]:
        """State words of the local ranks."""
        return self.segment.headers[self.slot]

    @property
    def done(self) -> int:
        """Number of steps before the one under way."""
        gate = self._gate
        return 0 if gate is None else gate.step

    @property
    def _gate(self) -> Gate | None:
        return self._tasks[self._at].gate if self._at < len(self._tasks) else None

    def bind(
        self, count: int, bind: Callable[[int], Sequence[Task]], elsewhere: Sequence[ExecutorStep]
    ) -> None:
        """Take the number of steps, and what makes their tasks in a slot."""
        self.count, self._bind, self._elsewhere = count, bind, elsewhere

    def begin(self, number: int) -> None:
        segment = self.segment
        ticket = segment.tickets
        segment.tickets, segment.latest = ticket + 1, number
        self.number, self.ticket = number, ticket
        self.slot = slot = ticket % SLOTS
        self.stamp = (number & NUMBER_MASK) << NUMBER_SHIFT | self._digest
        self.header = segment.own_headers[slot]
        tasks = self._by_slot[slot]
        if tasks is None:
            assert self._bind is not None, "freed"
            tasks = self._by_slot[slot] = self._bind(slot)
        self._tasks = tasks
        self._at = 0
        self._actions = None
        for elsewhere in self._elsewhere:
            elsewhere.begin(number)
            self.beyond = None

    def lend(self, lent: HostBuffer, own: tuple[int, int], planned: Plan) -> bool:
        """Send from `lent` what the data will hold in `own`, and copy it there while the peers read.

        returns   False if more is sent than that
        """
        sent = {message.runs for step in planned.steps for message in step.sends}
        if sent != {(("data", *own),)}:
            return False
        self.lent = lent, own[0]
        return True

    def sent(self, run: Run) -> Octets:
        """Bytes of a range that this rank sends."""
        if self.lent is None:
            return octets_of(self.spaces, run)  # type: ignore[arg-type]
        lent, at = self.lent
        return lent.part(run[1] - at, run[2] - at).octets

    def advance(self, looks: int) -> bool:
        words, stamp = self.words, self.stamp
        tasks = self._tasks
        if self._at:
            tasks = tasks[self._at :]
        # Or else: look whether all ranks have ended the call that used the slot before.
        elif self.segment.ended_by_all[self.slot] <= self.ticket - SLOTS and not self._is_free():
            return False
        for at, phase, gate, action in tasks:
            if phase:
                words[self.header] = stamp | phase
            if gate is not None:
                waits, deferred, _ = gate
                for word, least in waits:
                    if not stamp | least <= words[word] < stamp | FAILED and not self._comes(
                        word, least, looks
                    ):
                        return False
                if deferred is not None:
                    if not self._does(deferred):
                        return False
                    self._actions = None
            # From here to the action no call of a function, so that no signal handler runs in between.
            self._at = at
            action()
        words[self.segment.ended + self.slot] = self.ticket + 1
        return True

    def _does(self, deferred: Deferred) -> bool:
        """Do what was deferred until the peers have come."""
        if self._actions is None:
            actions = deferred.actions()
            if actions is None:
                self.awaited = None
                return False
            self._actions = iter(actions)
        for action in self._actions:
            action()
        return True

    def _is_free(self) -> bool:
        """Look whether all ranks have ended the call that used the slot before."""
        self.segment.find_ended()
        if self.segment.ended_by_all[self.slot] > self.ticket - SLOTS:
            return True
        for rank, header in enumerate(self.headers):
            if self.words[header] & PHASE_MASK == FAILED:
                raise self._mismatch(rank)
        self.awaited = None
        return False

    def _comes(self, word: int, least: int, looks: int) -> bool:
        """True if a local rank reaches a phase while this one looks so many times."""
        begin, end = self.stamp | least, self.stamp | FAILED
        for _ in range(looks):
            if begin <= self.words[word] < end:
                return True
        if self.beyond is not None:
            self.beyond.advance(looks)
        return self._has_come(word, least)

    def _has_come(self, word: int, phase: int) -> bool:
        """True when a local rank has reached a phase of this call.

        errors   MismatchError when it makes another call here, or has failed
        """
        state, stamp = self.words[word], self.stamp
        if stamp | phase <= state < stamp | FAILED:
            return True
        is_same_number = state >> NUMBER_SHIFT == stamp >> NUMBER_SHIFT
        is_another = is_same_number and state >> DIGEST_SHIFT != stamp >> DIGEST_SHIFT
        if is_another or state == stamp | FAILED:
            raise self._mismatch(self.headers.index(word))
        self.awaited = None if self.beyond is not None else (self.words, word, state)
        return False

    def glance(self, peers: Sequence[int]) -> None:
        """Look at state words without waiting for any: ranks that make another call here are told."""
        words, begin, end = self.words, self.stamp, self.stamp | FAILED
        for word in peers:
            if not begin <= words[word] < end:
                self._has_come(word, 0)

    def failed(self, text: str) -> MismatchError:
        """Tell all that the call cannot be completed; the error for this rank."""
        self.words[self.header] = self.stamp | FAILED
        self._tell(self.number, text)
        return MismatchError(text)

    def _mismatch(self, rank: int) -> MismatchError:
        other, own = (self.segment.world_ranks[local] for local in (rank, self.segment.rank))
        text = (
            f"rank {other} does something else in the same call, or with another number "
            f"or type of elements, from another root or by another algorithm, or has heard so from a third "
            f"rank; rank {own} does {self.described}. HPCPAR_CHECK=1 tells what each rank asks for"
        )
        return self.failed(text)

    def waiting_for(self) -> tuple[int, ...]:
        ranks, headers, gate = self.segment.ranks, self.headers, self._gate
        users = () if self._at else self.segment.using(self.ticket)
        if users:
            return tuple(sorted(ranks[rank] for rank in users))
        missing = {
            ranks[headers.index(word)]
            for word, phase in (() if gate is None else gate.waits)
            if not self.stamp | phase <= self.words[word] < self.stamp | FAILED
        }
        if self.beyond is not None:
            missing |= set(self.beyond.waiting_for())
        return tuple(sorted(missing))

    def received_nbytes(self) -> int:
        raise AssertionError("point-to-point messages do not go this way")

    def free(self) -> None:
        for elsewhere in self._elsewhere:
            elsewhere.free()
        # These refer to the call.
        self._tasks, self._bind, self._by_slot = (), None, [None] * SLOTS
        self._actions = None


class Beyond:
    """Messages of a step to and from other nodes; complete before the call goes on, or begun."""

    def __init__(self, call: SharedCall, messages: ExecutorStep, *, is_awaited: bool) -> None:
        self._call = call
        self._messages = messages
        self._is_awaited = is_awaited

    def actions(self) -> Sequence[Action] | None:
        is_done = self._messages.advance(1)
        self._call.beyond = None if is_done else self._messages
        return None if self._is_awaited and not is_done else ()
