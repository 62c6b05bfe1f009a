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
    received into in the same step is sent from a copy.

Whether a call is short follows from the request, so all ranks know it. Where the messages lie in the sender's
memory follows from its schedule, which every rank can generate; only the pieces of an uneven all-to-all are
told, in a table in the body.

The state word holds a digest of the request: a reader compares it before it touches the sender's memory. A
rank that finds another request there fails, marks its header as FAILED, and who waits for it fails, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple
from zlib import crc32

from hpcpar.comm.blocks import Action
from hpcpar.comm.compiled import ExecutorStep
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
    from hpcpar.comm.executors.shared_reads import Group

CLAIMING, COPYING, RECEIVING, READ = range(4)


class SharedStep(NamedTuple):
    """One step of a schedule in shared memory, as actions; messages to other nodes go by a step of their own.

    position    in the rank's schedule
    before      actions before what is sent can be read, and
    posts       for each slot, copies into the body
    beside      actions for which the peers need not wait
    groups      messages of local ranks
    readers     local ranks that read what this step sends, and the phase in which they have done so
    elsewhere   messages of the same step to and from other nodes
    is_held     what comes from local ranks is reduced only when the messages to other nodes have left
    """

    position: int
    before: Sequence[Action]
    posts: Sequence[Sequence[Action]]
    beside: Sequence[Action]
    groups: Sequence[Group]
    readers: Sequence[tuple[int, int]]
    elsewhere: ExecutorStep | None
    is_held: bool


class SharedCall:
    """One compiled call in the memory of a node: its slot, its digest, where all of it lies, and its steps.

    described   the request in words, for errors
    is_short    what is sent is copied into the body
    tell        called with the number of a call, and in words how another rank's differs: tells all ranks
    glances     local ranks that this rank does not wait for in the whole call, and looks at once
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
        self._fence = segment.fence
        self.segment = segment
        self.layout = layout
        self.rank = rank
        self.described = described
        self.is_short = is_short
        self.words = segment.words
        self._digest = (crc32(described.encode()) & DIGEST_MASK) << DIGEST_SHIFT
        self.spaces: dict[str, HostBuffer] = {str(name): buffer for name, buffer in spaces.items()}
        self.lent: tuple[HostBuffer, int] | None = None
        self._before = 0
        self.bases: list[tuple[int, int]] = []
        self.table: list[int] = []
        self.glances: Sequence[int] = ()
        self.steps: Sequence[SharedStep] = ()
        self._elsewhere: Sequence[ExecutorStep] = ()
        self.number, self.slot, self.stamp = -1, 0, 0
        self.headers: Sequence[int] = segment.headers[0]
        self.header = self.headers[segment.rank]
        self._state = CLAIMING
        self.done = 0
        self._at = 0
        self._actions: Iterator[Action] | None = None
        self._is_elsewhere_done = False

    @property
    def count(self) -> int:
        """Number of steps."""
        return len(self.steps)

    def bind(self, steps: Sequence[SharedStep]) -> None:
        """Take the steps of the schedule; at least one, so that the others see the end of the call."""
        self.steps = steps
        self._elsewhere = [step.elsewhere for step in steps if step.elsewhere is not None]

    def begin(self, number: int) -> None:
        segment = self.segment
        self.number = number
        self.slot = slot = number % SLOTS
        self.stamp = (number & NUMBER_MASK) << NUMBER_SHIFT | self._digest
        self.headers = headers = segment.headers[slot]
        self.header = headers[segment.rank]
        self._before = segment.before[slot] = segment.begun[slot]
        segment.begun[slot] = number + 1
        self._state = CLAIMING
        self.done = self._at = 0
        self._actions = None
        self._is_elsewhere_done = False
        for elsewhere in self._elsewhere:
            elsewhere.begin(number)

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
        if self._state == CLAIMING:
            if not self.claim():
                return False
            if self.bases or self.table:
                self.publish_bases()
            self._state = COPYING
        steps = self.steps
        while True:
            step = steps[self.done]
            if self._state == COPYING:
                self._post(step)
            elsewhere = step.elsewhere
            if elsewhere is not None and not self._is_elsewhere_done:
                self._is_elsewhere_done = elsewhere.advance(looks)
                if step.is_held and not self._is_elsewhere_done:
                    return False
            if self._state == RECEIVING and not self._receive(step, looks):
                return False
            if step.readers and not self._is_reached(step.readers, looks):
                return False
            if elsewhere is not None and not self._is_elsewhere_done:
                return False
            if self.done + 1 == len(steps):
                break
            self.done += 1
            self._at, self._is_elsewhere_done, self._state = 0, False, COPYING
        for rank in self.glances:
            self.has_come(rank, 0)
        if self._fence is not None:
            self._fence()
        self.words[self.segment.ended + self.slot] = self.number + 1
        return True

    def _post(self, step: SharedStep) -> None:
        """Let the peers read what a step sends."""
        if step.before:
            if self._actions is None:
                self._actions = iter(step.before)
            for action in self._actions:
                action()
        for action in step.posts[self.slot]:
            action()
        if self._fence is not None:
            self._fence()
        self.words[self.header] = self.stamp | 2 * step.position + 1
        for action in step.beside:
            action()
        self._actions = None
        self._state = RECEIVING

    def _receive(self, step: SharedStep, looks: int) -> bool:
        """Read and reduce all that has come; True when that is everything, of which the senders are told."""
        fence, groups = self._fence, step.groups
        while self._at < len(groups):
            if self._actions is None:
                group = groups[self._at]
                if not self._is_reached(group.waits, looks):
                    return False
                if fence is not None:
                    fence()
                self._actions = iter(group.by_slot[self.slot] or group.actions())
            for action in self._actions:
                action()
            self._at += 1
            self._actions = None
        if not self.is_short:
            if fence is not None:
                fence()
            self.words[self.header] = self.stamp | 2 * step.position + 2
        self._state = READ
        return True

    def claim(self) -> bool:
        """True when all ranks have ended the call that used the slot before. May be repeated."""
        segment, slot = self.segment, self.slot
        used = segment.used[slot]
        if used != self._before:  # it has claimed the slot itself, or has to wait for the call before it
            return used == self.number + 1
        if not segment.free[slot]:
            segment.find_free_slots()
            if not segment.free[slot]:
                for rank, header in enumerate(self.headers):
                    if self.words[header] & PHASE_MASK == FAILED:
                        raise self._mismatch(rank)
                return False
        segment.used[slot] = self.number + 1
        segment.free[slot] = False
        return True

    def publish_bases(self) -> None:
        """Write where the own arrays lie, before the first state that lets others read them."""
        for word, base in self.bases:
            self.words[self.header + word] = base
        if self.table:
            at = self.segment.table_word(self.slot, self.segment.rank)
            for number, value in enumerate(self.table):
                self.words[at + number] = value

    def has_come(self, rank: int, phase: int) -> bool:
        """True when a local rank has reached a phase of this call.

        errors   MismatchError when it makes another call here, or has failed
        """
        state = self.words[self.headers[rank]]
        least = self.stamp | phase
        if least <= state < self.stamp | FAILED:
            return True
        if (
            state >> NUMBER_SHIFT == self.stamp >> NUMBER_SHIFT
            and state >> DIGEST_SHIFT != self.stamp >> DIGEST_SHIFT
        ):
            raise self._mismatch(rank)
        if state == self.stamp | FAILED:
            raise self._mismatch(rank)
        return False

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

    def _is_reached(self, waits: Sequence[tuple[int, int]], looks: int) -> bool:
        """True when all these local ranks have reached these phases."""
        words, headers, stamp = self.words, self.headers, self.stamp
        failed = stamp | FAILED
        for rank, phase in waits:
            header, least = headers[rank], stamp | phase
            if least <= words[header] < failed:
                continue
            for _ in range(looks):
                if least <= words[header] < failed:
                    break
            else:
                if not self.has_come(rank, phase):
                    return False
        return True

    def waiting_for(self) -> tuple[int, ...]:
        ranks, step = self.segment.ranks, self.steps[self.done]
        states = [self.words[header] for header in self.headers]
        missing: set[int] = set()
        if self._state == CLAIMING:
            missing = {ranks[rank] for rank in self.segment.using(self.slot)}
        waits = [wait for group in step.groups[self._at :] for wait in group.waits]
        if self._state == READ:
            waits = list(step.readers)
        if self._state in (RECEIVING, READ):
            missing = {
                ranks[rank]
                for rank, phase in waits
                if not self.stamp | phase <= states[rank] < self.stamp | FAILED
            }
        if step.elsewhere is not None and not self._is_elsewhere_done:
            missing |= set(step.elsewhere.waiting_for())
        return tuple(sorted(missing))

    def received_nbytes(self) -> int:
        raise AssertionError("point-to-point messages do not go this way")

    def free(self) -> None:
        for elsewhere in self._elsewhere:
            elsewhere.free()
        self.steps = ()  # which refer to the call
