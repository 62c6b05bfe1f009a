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
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple
from zlib import crc32

import numpy as np

from hpcpar.algorithms.registry import Algorithm
from hpcpar.algorithms.step import Receive, Send, Space, Step
from hpcpar.algorithms.topology import Nodes
from hpcpar.comm.blocks import Action
from hpcpar.comm.compiled import ExecutorStep
from hpcpar.comm.plan import Edges, Message, Offsets, Plan, PlannedStep, Run, overlapping, runs_of
from hpcpar.comm.shm_segment import (
    DIGEST_MASK,
    DIGEST_SHIFT,
    FAILED,
    LINE_NBYTES,
    NUMBER_MASK,
    NUMBER_SHIFT,
    PHASE_MASK,
    PRIVATE,
    SHARED,
    SLOTS,
    ShmSegment,
)
from hpcpar.comm.spaces import Spaces, copies_of, copying, folds, octets_of
from hpcpar.errors import MismatchError
from hpcpar.transport import peer_memory
from hpcpar.transport.buffers import HostBuffer
from hpcpar.transport.interface import Octets
from hpcpar.units import KiB

MOVED_NBYTES = 64 * KiB
"""Longer messages that are only moved are copied once, by the kernel. What is reduced is read anyway, so it
may be as long as a body."""

SUMMED_AT_ONCE_NBYTES = 1536 * KiB
"""Private memory, of all operands together, that is copied before it is summed: it is still in the cache."""

BASES_KEPT = 8
"""Places of the peers' arrays for which a step keeps its actions."""

BASE_OF: dict[str, int] = {"data": 1, "input": 1, "output": 2, "work": 3, "copy": 4}
"""Word of the header that holds the base of a space."""

CLAIMING, COPYING, RECEIVING, READ, DONE = range(5)


class Source(NamedTuple):
    """Place of a message in its sender's memory.

    rank     number of the sender among the local ranks
    phase    state that its header must have reached
    space    of the sender; "copy": its send copy
    runs     ranges of that space; None: told in the sender's table
    offset   bytes from the beginning of the sender's body to element 0 of the space, in a short call
    """

    rank: int
    phase: int
    space: str
    runs: tuple[Run, ...] | None
    offset: int


@dataclass(frozen=True)
class Layout:
    """All that the ranks of a node know of each other's schedules.

    algorithm, size, root, segments, nodes   which schedules
    edges       where the chunks lie, on every rank; without "input" where that is each rank's own affair
    itemsize    bytes of an element
    """

    algorithm: Algorithm
    size: int
    root: int
    segments: int
    nodes: Nodes
    offsets: Offsets
    itemsize: int
    is_uneven: bool

    def schedule(self, rank: int) -> tuple[Step, ...]:
        return self.algorithm.schedule(
            rank, self.size, root=self.root, segments=self.segments, nodes=self.nodes
        )

    def posts(self, rank: int, local: Sequence[int]) -> dict[int, tuple[Space, int, int, int]]:
        """For each step in which a rank sends to local ones: (space, start, stop, byte in the body)."""
        edges, at = dict(self.offsets), 0
        found: dict[int, tuple[Space, int, int, int]] = {}
        for index, step in enumerate(self.schedule(rank)):
            sends = [send for send in step.sends if send.to in local and send.chunks]
            if not sends:
                continue
            space = sends[0].space
            start = min(edges[space][chunk] for send in sends for chunk in send.chunks)
            stop = max(edges[space][chunk + 1] for send in sends for chunk in send.chunks)
            if any(send.space != space for send in sends):
                raise AssertionError(f"{self.algorithm.name} sends from two spaces in one step")
            found[index] = space, start, stop, at
            at += -(-((stop - start) * self.itemsize) // LINE_NBYTES) * LINE_NBYTES
        return found

    def post_nbytes(self, local: Sequence[int]) -> int:
        """Bytes that the body of the busiest rank would need."""
        most = 0
        for rank in local:
            for _, start, stop, at in self.posts(rank, local).values():
                most = max(most, at + (stop - start) * self.itemsize)
        return most


class SharedCall:
    """One compiled call in the memory of a node: its slot, its digest, and where all of it lies.

    described   the request in words, for errors
    is_short    what is sent is copied into the body
    tell        called with the number of a call, and in words how another rank's differs: tells all ranks
    """

    def __init__(
        self,
        segment: ShmSegment,
        layout: Layout,
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
        self.lent: tuple[HostBuffer, int] | None = None
        self._before = 0
        self.bases: list[tuple[int, int]] = []
        self.table: list[int] = []
        self.number, self.slot, self.stamp = -1, 0, 0
        self.headers: Sequence[int] = segment.headers[0]
        self.header = self.headers[segment.rank]

    def begin(self, number: int) -> None:
        self.number = number
        self.slot = slot = number % SLOTS
        self.stamp = (number & NUMBER_MASK) << NUMBER_SHIFT | self._digest
        segment = self.segment
        self.headers = headers = segment.headers[slot]
        self.header = headers[segment.rank]
        if (
            segment.begun[slot] != number + 1
        ):  # else a handler's exception has left the same call before it began
            segment.before[slot] = segment.begun[slot]
            segment.begun[slot] = number + 1
        self._before = segment.before[slot]

    def lend(self, lent: HostBuffer, own: tuple[int, int], planned: Plan) -> bool:
        """Send from `lent` what the data will hold in `own`, and copy it there while the peers read.

        returns   False if more is sent than that
        """
        sent = {message.runs for step in planned.steps for message in step.sends}
        is_mapped = self.segment.base_of(lent.address, lent.octets.size) & SHARED  # an offset, from 0 on
        if sent != {(("data", *own),)} or (is_mapped and not self.is_short):
            return False
        self.lent = lent, own[0]
        return True

    def sent(self, run: Run) -> Octets:
        """Bytes of a range that this rank sends."""
        if self.lent is None:
            return octets_of(self.spaces, run)  # type: ignore[arg-type]
        lent, at = self.lent
        return lent.part(run[1] - at, run[2] - at).octets

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
        text = (
            f"rank {self.segment.ranks[rank]} does something else in the same call, or with another number "
            f"or type of elements, from another root or by another algorithm, or has heard so from a third "
            f"rank; rank {self.rank} does {self.described}. HPCPAR_CHECK=1 tells what each rank asks for"
        )
        return self.failed(text)


class Group:
    """Messages that one or several local peers send for the same ranges."""

    def __init__(
        self, call: SharedCall, messages: Sequence[Message], sources: Sequence[Source], op: str
    ) -> None:
        self.call = call
        self.messages = messages
        self.sources = sources
        self.waits = [(source.rank, source.phase) for source in sources]
        self._op = op
        self.by_slot: list[list[Action] | None] = [None] * SLOTS
        self._by_bases: dict[tuple[int, ...], list[Action]] = {}

    def actions(self) -> list[Action]:
        """Actions that read and reduce these messages, once all of them are there."""
        if self.call.is_short:
            slot = self.call.slot
            found = self.by_slot[slot]
            if found is None:
                found = self.by_slot[slot] = self._from_bodies(slot)
            return found
        words, headers = self.call.words, self.call.headers
        bases = tuple(words[headers[source.rank] + BASE_OF[source.space]] for source in self.sources)
        if any(source.runs is None for source in self.sources):
            return self._from_bases(bases)
        known = self._by_bases.get(bases)
        if known is None:
            if len(self._by_bases) >= BASES_KEPT:
                self._by_bases.clear()
            known = self._by_bases[bases] = self._from_bases(bases)
        return known

    def _from_bodies(self, slot: int) -> list[Action]:
        """Read the messages in their senders' bodies."""
        call, itemsize = self.call, self.call.layout.itemsize
        landed: list[tuple[Message, Octets]] = []
        actions: list[Action] = []
        for message, source in zip(self.messages, self.sources, strict=True):
            if not message.count:
                continue
            body = call.segment.body(slot, source.rank)
            runs = source.runs or ()
            parts = [
                body[source.offset + start * itemsize : source.offset + stop * itemsize]
                for _, start, stop in runs
            ]
            if len(parts) == 1:
                landed.append((message, parts[0]))
            elif message.combine:
                # Several ranges in the sender's body: side by side first.
                together = np.empty(message.count * itemsize, dtype=np.uint8)
                at = 0
                for part in parts:
                    actions.append(copying(together[at : at + part.size], part))
                    at += part.size
                landed.append((message, together))
            else:
                actions += _scattering(self.call.spaces, message.runs, parts, itemsize)
        return [*actions, *folds(call.spaces, landed, self._op)]  # type: ignore[arg-type]

    def _from_bases(self, bases: tuple[int, ...]) -> list[Action]:
        """Read the messages where they lie in their senders' memory."""
        itemsize = self.call.layout.itemsize
        actions: list[Action] = []
        reads = [
            (message, self._stretches(source, base, message.count))
            for message, source, base in zip(self.messages, self.sources, bases, strict=True)
            if message.count
        ]
        if not reads:
            return []
        first = reads[0][0]
        if not first.combine:
            for message, stretches in reads:
                actions += self._moving(message, stretches)
            return actions
        nbytes = first.count * itemsize
        at_once = max(LINE_NBYTES, SUMMED_AT_ONCE_NBYTES // len(reads) // LINE_NBYTES * LINE_NBYTES)
        if all(isinstance(stretches, list) and not stretches[0].pid for _, stretches in reads):
            at_once = nbytes
        for begin in range(0, nbytes, at_once):
            end = min(begin + at_once, nbytes)
            actions += self._summing(reads, begin, end)
        return actions

    def _summing(self, reads: Sequence[tuple[Message, list[Stretch]]], begin: int, end: int) -> list[Action]:
        """Reduce the bytes from `begin` to `end` of all messages."""
        call, itemsize = self.call, self.call.layout.itemsize
        actions: list[Action] = []
        landed: list[tuple[Message, Octets]] = []
        stride = -(-(end - begin) // LINE_NBYTES) * LINE_NBYTES
        for at, (message, stretches) in enumerate(reads):
            part = _part(message, begin // itemsize, end // itemsize)
            pieces = list(_within(stretches, begin, end))
            if len(pieces) == 1 and pieces[0].memory is not None:
                landed.append((part, pieces[0].memory))
                continue
            landing = call.segment.landing(
                max(SUMMED_AT_ONCE_NBYTES + LINE_NBYTES * len(reads), stride * len(reads))
            )
            memory = landing[at * stride :][: end - begin]
            actions += _filling([memory], pieces)
            landed.append((part, memory))
        return [*actions, *folds(call.spaces, landed, self._op)]  # type: ignore[arg-type]

    def _moving(self, message: Message, stretches: list[Stretch]) -> list[Action]:
        """Overwrite the message's ranges with its bytes."""
        return _filling([octets_of(self.call.spaces, run) for run in message.runs], stretches)  # type: ignore[arg-type]

    def _stretches(self, source: Source, base: int, count: int) -> list[Stretch]:
        """The bytes of a message in its sender's memory."""
        segment, itemsize = self.call.segment, self.call.layout.itemsize
        if source.runs is not None:
            runs = source.runs
        else:
            word = segment.table_word(self.call.slot, source.rank) + 2 * segment.rank
            start, told = self.call.words[word], self.call.words[word + 1]
            if told != count:
                raise self.call.failed(
                    f"rank {segment.ranks[source.rank]} sends {told} elements to rank {self.call.rank}, "
                    f"which expects {count} of it in {self.call.described}: send_counts and receive_counts "
                    f"must fit"
                )
            runs = (("input", start, start + count),)
        found: list[Stretch] = []
        for _, start, stop in runs:
            offset, nbytes = start * itemsize, (stop - start) * itemsize
            if base & PRIVATE:
                found.append(Stretch(segment.pids[source.rank], (base & ~PRIVATE) + offset, nbytes, None))
            else:
                found.append(Stretch(0, 0, nbytes, segment.shared_part(base, offset, nbytes)))
        return found


class Stretch(NamedTuple):
    """Bytes in a peer's memory: in its private memory at an address, or mapped here."""

    pid: int
    address: int
    nbytes: int
    memory: Octets | None


def _within(stretches: Sequence[Stretch], begin: int, end: int) -> Iterator[Stretch]:
    """The bytes from `begin` to `end` of a message."""
    at = 0
    for pid, address, nbytes, memory in stretches:
        start, stop = max(begin, at) - at, min(end, at + nbytes) - at
        if start < stop:
            part = None if memory is None else memory[start:stop]
            yield Stretch(pid, address + start, stop - start, part)
        at += nbytes


def _filling(targets: Sequence[Octets], stretches: Sequence[Stretch]) -> list[Action]:
    """Copy stretches, one after the other, into targets, one after the other."""
    actions: list[Action] = []
    at = 0
    for target in targets:
        end = at + target.size
        filled = 0
        for piece in _within(stretches, at, end):
            into = target[filled : filled + piece.nbytes]
            if piece.memory is not None:
                actions.append(copying(into, piece.memory))
            else:
                actions += peer_memory.reading(piece.pid, [(piece.address, piece.nbytes)], [into])
            filled += piece.nbytes
        at = end
    return actions


def _scattering(
    spaces: dict[str, HostBuffer], runs: Sequence[Run], parts: Sequence[Octets], itemsize: int
) -> list[Action]:
    """Copy parts that lie apart into ranges that may be cut in other places."""
    stretches = [Stretch(0, 0, part.size, part) for part in parts]
    return _filling([octets_of(spaces, run) for run in runs], stretches)  # type: ignore[arg-type]


def _part(message: Message, begin: int, end: int) -> Message:
    """The elements from `begin` to `end` of a message that is reduced."""
    if begin == 0 and end == message.count:
        return message
    own = None if message.own is None else _cut(message.own, begin, end)
    return Message(
        message.peer, _cut(message.runs, begin, end), end - begin, message.combine, message.own_turn, own
    )


def _cut(runs: Sequence[Run], begin: int, end: int) -> tuple[Run, ...]:
    found: list[Run] = []
    at = 0
    for space, start, stop in runs:
        first, last = max(begin, at), min(end, at + stop - start)
        if first < last:
            found.append((space, start + first - at, start + last - at))
        at += stop - start
    return tuple(found)


class SharedStep:
    """One step of a schedule in shared memory; messages to other nodes go by a step of their own.

    index       position in the rank's schedule
    readers     local ranks that read what this step sends, and the phase in which they have done so
    glances     local ranks that this rank does not wait for in the whole call, and looks at once
    elsewhere   messages of the same step to and from other nodes
    is_held     what comes from local ranks is reduced only when the messages to other nodes have left
    """

    def __init__(
        self,
        call: SharedCall,
        index: int,
        before: Sequence[Action],
        posts: Sequence[Sequence[Action]],
        beside: Sequence[Action],
        groups: Sequence[Group],
        readers: Sequence[tuple[int, int]],
        glances: Sequence[int],
        elsewhere: ExecutorStep | None,
        *,
        is_first: bool,
        is_last: bool,
        is_held: bool,
    ) -> None:
        self._call = call
        self._words = call.words
        self._fence = call.segment.fence
        self._readable = 2 * index + 1
        self._read = 2 * index + 2
        self._before = before
        self._posts = posts
        self._beside = beside
        self._groups = groups
        self._count = len(groups)
        self._readers = readers if not call.is_short else ()
        self._glances = glances
        self._elsewhere = elsewhere
        self._is_elsewhere_done = elsewhere is None
        self._is_first = is_first
        self._is_last = is_last
        self._is_held = is_held
        self._tells = not call.is_short
        self._state = CLAIMING
        self._at = 0
        self._actions: Iterator[Action] | None = None

    def begin(self, number: int) -> None:
        if self._is_first:
            self._call.begin(number)
        self._state = CLAIMING
        self._at = 0
        self._actions = None
        if self._elsewhere is not None:
            self._elsewhere.begin(number)
            self._is_elsewhere_done = False

    def advance(self, looks: int) -> bool:
        call, words, fence = self._call, self._words, self._fence
        if self._state < RECEIVING:
            if self._state == CLAIMING:
                if self._is_first:
                    if not call.claim():
                        return False
                    if call.bases or call.table:
                        call.publish_bases()
                if self._before:
                    self._actions = iter(self._before)
                self._state = COPYING
            if self._actions is not None:
                for action in self._actions:
                    action()
                self._actions = None
            for action in self._posts[call.slot]:
                action()
            if fence is not None:
                fence()
            words[call.header] = call.stamp | self._readable
            for action in self._beside:  # the peers need not wait for these
                action()
            self._state = RECEIVING
        if not self._is_elsewhere_done:
            assert self._elsewhere is not None
            self._is_elsewhere_done = self._elsewhere.advance(looks)
            if self._is_held and not self._is_elsewhere_done:
                return False
        if self._state == RECEIVING:
            if self._at < self._count and not self._receive(looks):
                return False
            if self._tells:
                if fence is not None:
                    fence()
                words[call.header] = call.stamp | self._read
            self._state = READ
        if self._readers and not self._is_reached(self._readers, looks):
            return False
        if not self._is_elsewhere_done:
            return False
        if self._is_last and self._state == READ:
            for rank in self._glances:
                call.has_come(rank, 0)
            if fence is not None:
                fence()
            words[call.segment.ended + call.slot] = call.number + 1
        self._state = DONE
        return True

    def _is_reached(self, waits: Sequence[tuple[int, int]], looks: int) -> bool:
        """True when all these local ranks have reached these phases."""
        call, words = self._call, self._words
        headers, stamp = call.headers, call.stamp
        failed = stamp | FAILED
        for rank, phase in waits:
            header, least = headers[rank], stamp | phase
            if least <= words[header] < failed:
                continue
            for _ in range(looks):
                if least <= words[header] < failed:
                    break
            else:
                if not call.has_come(rank, phase):
                    return False
        return True

    def _receive(self, looks: int) -> bool:
        """Read and reduce all that has come; True when that is everything."""
        call, groups = self._call, self._groups
        while self._at < self._count:
            if self._actions is None:
                group = groups[self._at]
                if not self._is_reached(group.waits, looks):
                    return False
                if self._fence is not None:
                    self._fence()
                self._actions = iter(group.by_slot[call.slot] or group.actions())
            for action in self._actions:
                action()
            self._at += 1
            self._actions = None
        return True

    def waiting_for(self) -> tuple[int, ...]:
        call, ranks = self._call, self._call.segment.ranks
        states = [self._words[header] for header in call.headers]
        missing: set[int] = set()
        if self._state == CLAIMING:
            missing = {ranks[r] for r in call.segment.using(call.slot)}
        waits = [wait for group in self._groups[self._at :] for wait in group.waits]
        if self._state == READ:
            waits = list(self._readers)
        if self._state in (RECEIVING, READ):
            missing = {
                ranks[rank]
                for rank, phase in waits
                if not call.stamp | phase <= states[rank] < call.stamp | FAILED
            }
        if self._elsewhere is not None and not self._is_elsewhere_done:
            missing |= set(self._elsewhere.waiting_for())
        return tuple(sorted(missing))

    def received_nbytes(self) -> int:
        raise AssertionError("point-to-point messages do not go this way")

    def free(self) -> None:
        if self._elsewhere is not None:
            self._elsewhere.free()


def is_short(segment: ShmSegment, layout: Layout, nbytes: int, *, combines: bool) -> bool:
    """True if a call's messages are copied into the bodies. The same on every rank of the node."""
    if layout.is_uneven or nbytes > (segment.post_nbytes if combines else MOVED_NBYTES):
        return False
    return layout.post_nbytes(segment.ranks) <= segment.post_nbytes


def shared_steps(
    call: SharedCall, planned: Plan, op: str, elsewhere: dict[int, ExecutorStep]
) -> list[SharedStep]:
    """Bind a plan to the memory of the node.

    elsewhere   for each step, by index, its messages to and from other nodes
    """
    segment, layout, spaces = call.segment, call.layout, call.spaces
    steps = {step.index: step for step in planned.steps}
    if not steps:  # takes part, so that the others see its end
        steps = {0: PlannedStep((), (), ())}
    matching = _Matching(call)
    posts = layout.posts(call.rank, segment.ranks) if call.is_short else {}
    receives = any(step.receives for step in steps.values())
    glances = [] if receives or not call.is_short else [r for r in range(segment.size) if r != segment.rank]
    bound: list[SharedStep] = []
    for number, (index, step) in enumerate(steps.items()):
        before, beside = copies_of(step, spaces)  # type: ignore[arg-type]
        local = PlannedStep(
            step.copies,
            tuple(message for message in step.sends if message.peer in segment.local),
            tuple(message for message in step.receives if message.peer in segment.local),
            index,
        )
        post_actions: list[list[Action]] = [[]] * SLOTS
        if call.is_short and index in posts:
            space, start, stop, at = posts[index]
            source = call.sent((space, start, stop))
            post_actions = [
                [copying(segment.body(slot, segment.rank)[at : at + source.size], source)]
                for slot in range(SLOTS)
            ]
        elif not call.is_short:
            before = [*before, *matching.send_copies(local)]
        if call.lent is not None and step.sends:
            lent, at = call.lent
            beside = [*beside, copying(spaces["data"].part(at, at + lent.count).octets, lent.octets)]
        beyond = elsewhere.get(index)
        sent_beyond = [run for m in step.sends if m.peer not in segment.local for run in m.runs]
        bound.append(
            SharedStep(
                call,
                index,
                before,
                post_actions,
                beside,
                _groups(call, local, matching, op),
                matching.readers(local),
                glances,
                beyond,
                is_first=number == 0,
                is_last=number == len(steps) - 1,
                is_held=any(
                    overlapping(run, other)
                    for message in local.receives
                    for run in message.runs
                    for other in sent_beyond
                ),
            )
        )
    if not call.is_short:
        call.bases = matching.bases()
    return bound


def _groups(call: SharedCall, step: PlannedStep, matching: _Matching, op: str) -> list[Group]:
    groups: list[Group] = []
    by_ranges = groupby(step.receives, key=lambda message: (message.runs, message.combine))
    sources = iter(matching.sources(step))
    for (_, combine), alike in by_ranges:
        messages = list(alike)
        found = [next(sources) for _ in messages]
        if combine:
            groups.append(Group(call, messages, found, op))
        else:
            groups += [Group(call, [m], [s], op) for m, s in zip(messages, found, strict=True)]
    return groups


class _Matching:
    """Find, for each message of this rank's schedule, the step of the peer's that it meets.

    The k-th message from one rank to another meets the k-th receive that the other posts from it.
    """

    def __init__(self, call: SharedCall) -> None:
        self._call = call
        self._layout = call.layout
        self._edges: dict[Space, Edges] = dict(call.layout.offsets)
        self._copy: tuple[Space, int, int] | None = None
        self._sends: dict[int, list[tuple[int, Send]]] = {}
        self._receives: dict[int, list[int]] = {}
        own = self._layout.schedule(call.rank)
        local = set(call.segment.ranks)
        copied = [
            (send.space, chunk)
            for step in own
            for send in step.sends
            if send.to in local and _is_overwritten(step, send)
            for chunk in send.chunks
        ]
        if copied and not call.is_short:
            space = copied[0][0]
            start = min(self._edges[space][chunk] for _, chunk in copied)
            stop = max(self._edges[space][chunk + 1] for _, chunk in copied)
            self._copy = space, start, stop
            call.spaces["copy"] = call.spaces[space].scratch(stop - start)
        self._taken: dict[tuple[str, int], int] = {}

    def sources(self, step: PlannedStep) -> list[Source]:
        """Places of the messages that a step receives, in the order of its receives."""
        return [self._source(message.peer, step.index) for message in step.receives]

    def _source(self, peer: int, index: int) -> Source:
        layout, call = self._layout, self._call
        position = self._position("receive", peer, index)
        sent = self._sends_to_me(peer)
        number, send = sent[position]
        step = layout.schedule(peer)[number]
        local = call.segment.local[peer]
        phase = 2 * number + 1
        if not send.chunks:  # a barrier's
            return Source(local, phase, "data", (), 0)
        if layout.is_uneven and send.space == "input":
            return Source(local, phase, "input", None, 0)
        runs, _ = runs_of(send, self._edges)
        if call.is_short:
            space, start, _, at = layout.posts(peer, call.segment.ranks)[number]
            return Source(local, phase, space, runs, at - start * layout.itemsize)
        space_name: str = "copy" if _is_overwritten(step, send) else send.space
        return Source(local, phase, space_name, runs, 0)

    def readers(self, step: PlannedStep) -> list[tuple[int, int]]:
        """Who reads what a step sends, and the phase in which that is done."""
        found = []
        for message in step.sends:
            position = self._position("send", message.peer, step.index)
            number = self._receives_from_me(message.peer)[position]
            found.append((self._call.segment.local[message.peer], 2 * number + 2))
        return found

    def send_copies(self, step: PlannedStep) -> list[Action]:
        """Copy what a step both sends and receives into."""
        if self._copy is None:
            return []
        space, begin, _ = self._copy
        itemsize, spaces = self._layout.itemsize, self._call.spaces
        original = self._layout.schedule(self._call.rank)[step.index]
        runs = {
            run
            for send in original.sends
            if send.to in self._call.segment.local and _is_overwritten(original, send)
            for run in runs_of(send, self._edges)[0]
        }
        return [
            copying(
                spaces["copy"].octets[(start - begin) * itemsize : (stop - begin) * itemsize],
                octets_of(spaces, (space, start, stop)),  # type: ignore[arg-type]
            )
            for _, start, stop in sorted(runs)
        ]

    def bases(self) -> list[tuple[int, int]]:
        """(word of the header, base) of each space of this rank."""
        segment, itemsize = self._call.segment, self._layout.itemsize
        found = []
        for name, buffer in self._call.spaces.items():
            if name not in BASE_OF or not buffer.octets.size:
                continue
            base = segment.base_of(buffer.address, buffer.octets.size)
            if name == "data" and self._call.lent is not None:
                lent, at = self._call.lent
                base = segment.base_of(lent.address, lent.octets.size) - at * itemsize
            if name == "copy" and self._copy is not None:
                base -= self._copy[1] * itemsize
            found.append((BASE_OF[name], base))
        return found

    def _position(self, kind: str, peer: int, index: int) -> int:
        """Count the messages to, or from, that peer before this one."""
        before = 0
        for number, step in enumerate(self._layout.schedule(self._call.rank)):
            parts: Sequence[Send | Receive]
            if kind == "send":
                parts = [send for send in step.sends if send.to == peer]
            else:
                parts = [receive for receive in step.receives if receive.source == peer]
            if number == index:
                taken = self._taken.get((f"{kind} {index}", peer), 0)
                self._taken[f"{kind} {index}", peer] = taken + 1
                # The plan has left out messages of no elements.
                there = [at for at, part in enumerate(parts) if not part.chunks or self._count(part)]
                return before + there[taken]
            before += len(parts)
        raise AssertionError(f"no step {index}")

    def _count(self, part: Send | Receive) -> int:
        return runs_of(part, self._edges)[1]

    def _sends_to_me(self, peer: int) -> list[tuple[int, Send]]:
        if peer not in self._sends:
            self._sends[peer] = [
                (number, send)
                for number, step in enumerate(self._layout.schedule(peer))
                for send in step.sends
                if send.to == self._call.rank
            ]
        return self._sends[peer]

    def _receives_from_me(self, peer: int) -> list[int]:
        if peer not in self._receives:
            self._receives[peer] = [
                number
                for number, step in enumerate(self._layout.schedule(peer))
                for receive in step.receives
                if receive.source == self._call.rank
            ]
        return self._receives[peer]


def _is_overwritten(step: Step, send: Send) -> bool:
    """True if a step receives into chunks that it sends."""
    return any(
        receive.space == send.space and set(receive.chunks) & set(send.chunks) for receive in step.receives
    )
