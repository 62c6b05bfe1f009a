"""Bugs planted in every place of every algorithm's schedules: the proof finds each of them."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import pytest

from hpcpar.algorithms.prove import prove_schedules
from hpcpar.algorithms.registry import Algorithm
from hpcpar.algorithms.step import Receive, Send, Step
from hpcpar.errors import ScheduleError
from tests.algorithms.every import EVERY, name_of
from tests.grid import checkered

SIZES = (4, 5)  # with and without a fold
NODES = {4: (0, 0, 1, 1), 5: (0, 1, 1, 0, 1)}
ROOT, SEGMENTS = 1, 2

Schedules = list[list[Step]]
Place = tuple[int, int, int]  # rank, step, which of its sends or receives
Mutants = Iterator[tuple[str, Schedules]]


def schedules_of(algorithm: Algorithm, size: int) -> Schedules:
    return list(map(list, algorithm.schedules(size, root=ROOT, segments=SEGMENTS, nodes=NODES[size])))


def with_steps(schedules: Schedules, rank: int, start: int, stop: int, *steps: Step) -> Schedules:
    """The same schedules with some steps of one rank replaced."""
    changed = list(schedules)
    changed[rank] = [*schedules[rank][:start], *steps, *schedules[rank][stop:]]
    return changed


def with_sends(schedules: Schedules, place: Place, *sends: Send) -> Schedules:
    rank, at, index = place
    step = schedules[rank][at]
    changed = (*step.sends[:index], *sends, *step.sends[index + 1 :])
    return with_steps(schedules, rank, at, at + 1, replace(step, sends=changed))


def with_receives(schedules: Schedules, place: Place, *receives: Receive) -> Schedules:
    rank, at, index = place
    step = schedules[rank][at]
    changed = (*step.receives[:index], *receives, *step.receives[index + 1 :])
    return with_steps(schedules, rank, at, at + 1, replace(step, receives=changed))


def all_sends(schedules: Schedules) -> Iterator[tuple[Place, Send]]:
    for rank, steps in enumerate(schedules):
        for at, step in enumerate(steps):
            yield from (((rank, at, index), send) for index, send in enumerate(step.sends))


def all_receives(schedules: Schedules) -> Iterator[tuple[Place, Receive]]:
    for rank, steps in enumerate(schedules):
        for at, step in enumerate(steps):
            yield from (((rank, at, index), receive) for index, receive in enumerate(step.receives))


def messages(schedules: Schedules) -> Iterator[tuple[Place, Send, Place, Receive]]:
    """Both ends of every message."""
    posted: dict[tuple[int, int], deque[tuple[Place, Receive]]] = defaultdict(deque)
    for place, receive in all_receives(schedules):
        posted[receive.source, place[0]].append((place, receive))
    for place, send in all_sends(schedules):
        yield (place, send, *posted[place[0], send.to].popleft())


def wrong_peer(schedules: Schedules, chunks: int) -> Mutants:
    size = len(schedules)
    for place, send in all_sends(schedules):
        for to in set(range(size)) - {place[0], send.to}:
            yield f"{send} goes to rank {to}", with_sends(schedules, place, replace(send, to=to))
    for place, receive in all_receives(schedules):
        for source in set(range(size)) - {place[0], receive.source}:
            wrong = with_receives(schedules, place, replace(receive, source=source))
            yield f"{receive} comes from rank {source}", wrong


def wrong_chunk(schedules: Schedules, chunks: int) -> Mutants:
    """The next chunk instead of the first one; where there is only one chunk, the next does not exist."""

    def shifted(named: tuple[int, ...]) -> tuple[int, ...]:
        return ((named[0] + 1) % chunks if chunks > 1 else 1, *named[1:])

    for place, send in all_sends(schedules):
        if send.chunks:
            yield f"{send}", with_sends(schedules, place, replace(send, chunks=shifted(send.chunks)))
    for place, receive in all_receives(schedules):
        if receive.chunks:
            wrong = with_receives(schedules, place, replace(receive, chunks=shifted(receive.chunks)))
            yield f"{receive}", wrong


def lost_chunk(schedules: Schedules, chunks: int) -> Mutants:
    for sender, send, receiver, receive in messages(schedules):
        if send.chunks:
            yield f"{send}", with_sends(schedules, sender, replace(send, chunks=send.chunks[1:]))
            shorter = with_sends(schedules, sender, replace(send, chunks=send.chunks[1:]))
            both = with_receives(shorter, receiver, replace(receive, chunks=receive.chunks[1:]))
            yield f"{send} and {receive}", both


def dropped_end(schedules: Schedules, chunks: int) -> Mutants:
    for place, send in all_sends(schedules):
        yield f"{send}", with_sends(schedules, place)
    for place, receive in all_receives(schedules):
        yield f"{receive}", with_receives(schedules, place)


def dropped_message(schedules: Schedules, chunks: int) -> Mutants:
    for sender, send, receiver, receive in messages(schedules):
        yield f"{send} and {receive}", with_receives(with_sends(schedules, sender), receiver)


def doubled_message(schedules: Schedules, chunks: int) -> Mutants:
    for sender, send, receiver, receive in messages(schedules):
        if send.chunks:
            twice = with_sends(schedules, sender, send, send)
            yield f"{send} and {receive}", with_receives(twice, receiver, receive, receive)


def flipped_combine(schedules: Schedules, chunks: int) -> Mutants:
    for place, receive in all_receives(schedules):
        if receive.chunks:
            flipped = with_receives(schedules, place, replace(receive, combine=not receive.combine))
            yield f"{receive}", flipped


def passes_on(first: Step, second: Step) -> bool:
    """Whether the second step sends, or copies for sending, what the first one receives."""
    received = {(receive.space, chunk) for receive in first.receives for chunk in receive.chunks}
    sent = {(send.space, chunk) for send in second.sends for chunk in send.chunks}
    copied = {(copy.space, chunk) for copy in second.copies for chunk in copy.chunks}
    return bool(received & (sent | copied))


def sent_too_early(schedules: Schedules, chunks: int) -> Mutants:
    """A rank sends what it has not received yet: two of its steps swapped, or made into one."""
    for rank, steps in enumerate(schedules):
        for at, (first, second) in enumerate(pairwise(steps)):
            if passes_on(first, second):
                yield (
                    f"rank {rank}, step {at} swapped",
                    with_steps(schedules, rank, at, at + 2, second, first),
                )
                merged = Step(
                    first.sends + second.sends, first.receives + second.receives, first.copies + second.copies
                )
                yield f"rank {rank}, step {at} merged", with_steps(schedules, rank, at, at + 2, merged)


def send_before_receive(schedules: Schedules, chunks: int) -> Mutants:
    """Every rank finishes its sends before it posts its receives; wrong wherever ranks form a circle."""
    split: Schedules = [[] for _ in schedules]
    for rank, steps in enumerate(schedules):
        for step in steps:
            split[rank].append(Step(step.sends, (), step.copies))
            split[rank].append(Step((), step.receives))
    if any(step.sends and step.receives for steps in schedules for step in steps):
        yield "everywhere", split


BUGS = (
    wrong_peer,
    wrong_chunk,
    lost_chunk,
    dropped_end,
    dropped_message,
    doubled_message,
    flipped_combine,
    sent_too_early,
    send_before_receive,
)


def harmless(algorithm: Algorithm, bug: object, size: int) -> bool:
    """Where the planted change is no bug."""
    if bug is dropped_message and algorithm.name == "dissemination":
        return size & (size - 1) != 0  # then a rank hears of some others twice
    # In a chain nobody waits for a rank behind it.
    return bug is send_before_receive and algorithm.collective in ("broadcast", "reduce")


@pytest.mark.parametrize("algorithm", EVERY, ids=name_of)
def test_a_planted_bug_is_found(algorithm: Algorithm) -> None:
    for bug, size in checkered(BUGS, SIZES) if EVERY.index(algorithm) % 2 else checkered(BUGS, SIZES[::-1]):
        if harmless(algorithm, bug, size):
            continue
        chunks = algorithm.chunks(size, SEGMENTS, NODES[size])
        for where, schedules in bug(schedules_of(algorithm, size), chunks):
            with pytest.raises(ScheduleError, match="rank"):
                prove_schedules(
                    algorithm.collective,
                    schedules,
                    root=ROOT,
                    chunks=chunks,
                    work_chunks=algorithm.work_chunks(size),
                    name=f"{algorithm.name} with {bug.__name__} in {where}",
                )


def test_most_kinds_of_bug_can_be_planted_in_most_algorithms() -> None:
    """The search above is not empty: this is how many places it has, at four ranks."""
    places = {
        bug.__name__: sum(
            1 for one in EVERY for _ in bug(schedules_of(one, 4), one.chunks(4, SEGMENTS, NODES[4]))
        )
        for bug in BUGS
    }
    assert all(
        count >= 100
        for name, count in places.items()
        if name not in ("sent_too_early", "send_before_receive")
    )
    assert places["sent_too_early"] >= 50
    assert places["send_before_receive"] >= 12
