"""Short messages between ranks of a node: each posts what it has once, and all read it there.

In a direct algorithm everybody sends to everybody, and what a message carries lies in the sender's array
where it belongs in the receiver's. So a rank posts the range of its array that it sends, each byte as far
from the beginning of the post as from that of the array; and reads in the others' posts what it receives.

There are no acknowledgements. Every rank posts in every call of a lane, in the same order and into a few
places in turn, and who has posted in a call is done with the one before. So a place may be written again
once all others have posted in the call after the one that wrote there last. After an exchange of all with
all that is known; else it is looked up, and so ranks may run ahead of each other by a few calls only.

In front of a post stands one word: the number of the call, and a code of what is being done. So short
arrays of different lengths or types come out as an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from zlib import crc32

from hpcpar.algorithms.registry import Algorithm
from hpcpar.comm.arena import BOARD_PLACES, Lane, comes_to
from hpcpar.comm.operation import (
    Offsets,
    Plan,
    PlannedStep,
    Run,
    Spaces,
    copies_of,
    copying,
    folds,
    itemsize_of,
    octets_of,
)
from hpcpar.errors import MismatchError
from hpcpar.transport.interface import Exchange
from hpcpar.units import KiB

EXCHANGES = ("direct", "one_shot")
"""Algorithms in which everybody sends to everybody at once."""

MOVED_NBYTES = 16 * KiB
"""Longer messages that are only moved are sooner copied once by the kernel than twice. What is summed is read
anyway, so it may be as long as a post."""

AHEAD = BOARD_PLACES - 2
"""How many calls before the last one of its own a rank must have seen everybody post in, to post again."""

CODE_BITS = 24

STEP_NBYTES = 5000
MESSAGE_NBYTES = 4000
"""What a step takes in memory by itself, and for each message that it receives."""

Calls = Sequence[Callable[[], None]]

Turn = tuple[int, Calls, Calls, Sequence[int], Calls, Sequence[int]]
"""Of a place: the own word; what lays the post out; what is copied beside; the words of those that are heard;
what takes in what they have posted; and the words in which all others show how far they have come."""


def suits(algorithm: Algorithm, size: int, cut: Offsets, itemsize: int, *, combines: bool) -> bool:
    """Whether each step is a short exchange in which all ranks take part, and nobody has nothing.

    cut        where the chunks start, in elements
    combines   the call is a reduction
    """
    if algorithm.name not in EXCHANGES and (algorithm.name, size) != ("recursive_doubling", 2):
        return False
    counts = [stop - start for _, edges in cut for start, stop in pairwise(edges)]
    return min(counts) > 0 and (combines or max(counts) * itemsize <= MOVED_NBYTES)


@dataclass(frozen=True, slots=True)
class Posts:
    """What a call posts, and what all ranks must have in common to understand it.

    planned   as it is for all ranks, before what this one receives was sent elsewhere
    what      the call in words; ranks with other words cannot go on
    """

    planned: Plan
    what: str

    @property
    def code(self) -> int:
        """The words in a few bits."""
        return crc32(self.what.encode()) & (1 << CODE_BITS) - 1


class BoardStep:
    """A step of a direct algorithm by posts; it is its own exchange.

    images   of each message received: which run of the sender's it is
    displaced   how many elements further on than in the array what is sent lies, if it is sent from elsewhere
    nbytes   what it takes in memory itself, roughly
    """

    def __init__(
        self,
        lane: Lane,
        planned: PlannedStep,
        images: Sequence[Run],
        displaced: int,
        spaces: Spaces,
        op: str,
        posts: Posts,
    ) -> None:
        self._lane = lane
        self._words = lane.arena.words
        self._what = posts.what
        self._code = posts.code
        self._sources = tuple(lane.arena.local[message.peer] for message in planned.receives)
        self._others = tuple(number for number in range(lane.arena.size) if number != lane.arena.rank)
        self._hears_all = len(self._sources) == len(self._others)
        self._bound = planned, images, displaced, spaces, op
        self._turns: list[Turn | None] = [None] * BOARD_PLACES
        self._is_posted = False
        self.nbytes = STEP_NBYTES + MESSAGE_NBYTES * len(self._sources)

    def _turn(self, number: int) -> Turn:
        """All for calls with this number, modulo places."""
        turn = self._turns[number % BOARD_PLACES]
        if turn is None:
            turn = self._turns[number % BOARD_PLACES] = self._bind(number)
        return turn

    def _bind(self, number: int) -> Turn:
        lane, rank = self._lane, self._lane.arena.rank
        planned, images, displaced, spaces, op = self._bound
        itemsize = itemsize_of(spaces)
        lay_out, beside = copies_of(planned, spaces)
        sent = sorted({run for message in planned.sends for run in message.runs})
        held = None
        if sent:  # in one piece: between these lies at most what this rank keeps
            space, start, stop = sent[0][0], sent[0][1], sent[-1][2]
            begin = (start - displaced) * itemsize
            post = lane.post(number, rank, begin, begin + (stop - start) * itemsize)
            lay_out.append(copying(post, octets_of(spaces, (space, start, stop))))
            held = (
                post if all(message.runs == ((space, start, stop),) for message in planned.receives) else None
            )
        landed = [
            (message, lane.post(number, source, start * itemsize, stop * itemsize))
            for message, source, (_, start, stop) in zip(planned.receives, self._sources, images, strict=True)
        ]
        return (
            lane.post_word(number, rank),
            lay_out,
            beside,
            [lane.post_word(number, source) for source in self._sources],
            list(folds(spaces, landed, op, held)),
            [lane.post_word(number - 1 - AHEAD, other) for other in self._others],
        )

    def at_once(self, attempts: int, pause: Callable[[int], None]) -> bool:
        """A step from `post` to `settle`; False when it takes longer: go on with `test`, then `settle`.

        Nothing here is a call that need not be one: it would not be cheap beside what it does.
        """
        lane, words = self._lane, self._words
        last = lane.posted
        number = last + 1
        own, lay_out, beside, heard, take_in, others = self._turns[number % BOARD_PLACES] or self._turn(
            number
        )
        if lane.all_posted < last - AHEAD:
            least = last - AHEAD << CODE_BITS
            for word in others:
                if words[word] < least and not comes_to(lane, word, least, attempts, pause):
                    self._is_posted = False
                    return False
        for call in lay_out:
            call()
        expected = number << CODE_BITS | self._code
        words[own] = expected  # after the post: whoever sees the word sees the post
        lane.posted = number
        for call in beside:
            call()
        for word in heard:
            if words[word] != expected and (
                not comes_to(lane, word, expected, attempts, pause) or words[word] != expected
            ):
                self._is_posted = True
                return False
        for call in take_in:
            call()
        if self._hears_all:
            lane.all_posted = number
        return True

    def post(self) -> Exchange:
        self._is_posted = False
        return self

    def test(self) -> bool:
        lane, words = self._lane, self._words
        if not self._is_posted:
            own, lay_out, beside, _, _, others = self._turn(lane.posted + 1)
            least = lane.posted - AHEAD
            if lane.all_posted < least and any(words[word] >> CODE_BITS < least for word in others):
                return False
            for call in lay_out:
                call()
            lane.posted += 1
            words[own] = lane.posted << CODE_BITS | self._code
            self._is_posted = True
            for call in beside:
                call()
        _, _, _, heard, _, _ = self._turn(lane.posted)
        for source, word in zip(self._sources, heard, strict=True):
            number, code = divmod(words[word], 1 << CODE_BITS)
            if number < lane.posted:
                return False
            if code != self._code:
                raise self._misunderstanding(source)
        return True

    def settle(self) -> None:
        lane = self._lane
        _, _, _, _, take_in, _ = self._turn(lane.posted)
        for call in take_in:
            call()
        if self._hears_all:
            lane.all_posted = lane.posted

    def waiting_for(self) -> tuple[int, ...]:
        lane = self._lane
        awaited = self._sources if self._is_posted else self._others
        least = lane.posted if self._is_posted else lane.posted - AHEAD
        words = {number: self._words[lane.post_word(least, number)] for number in awaited}
        return tuple(lane.arena.ranks[number] for number in awaited if words[number] >> CODE_BITS < least)

    def received_nbytes(self) -> int:
        raise AssertionError("only point-to-point counts what came, and it does not go this way")

    def _misunderstanding(self, source: int) -> MismatchError:
        rank = self._lane.arena.ranks[source]
        return MismatchError(
            f"rank {rank} does something else in the same call, or with another number or type of elements, "
            f"from another root or by another algorithm; this rank does {self._what}. HPCPAR_CHECK=1 tells "
            f"what each rank asks for"
        )


def board_steps(lane: Lane, planned: Plan, spaces: Spaces, op: str, posts: Posts) -> list[BoardStep]:
    """The plan's steps on this memory, in this lane."""
    return [
        BoardStep(lane, step, _images(before), _displaced(step, before), spaces, op, posts)
        for step, before in zip(planned.steps, posts.planned.steps, strict=True)
    ]


def _displaced(step: PlannedStep, before: PlannedStep) -> int:
    """How much further on than in the plan for all ranks lies what is sent."""
    return step.sends[0].runs[0][1] - before.sends[0].runs[0][1] if step.sends else 0


def _images(step: PlannedStep) -> list[Run]:
    """What senders call the runs that they send here: as this rank does, or what it would send to itself."""
    if step.copies:  # an all-to-all, of which every rank's input has the same pieces
        ((source, _),) = step.copies
        return [source] * len(step.receives)
    return [run for message in step.receives for run in message.runs]
