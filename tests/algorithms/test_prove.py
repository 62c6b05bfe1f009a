"""Every algorithm is proved for every size from 1 to 33 and a few large; wrong schedules are named."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hpcpar.algorithms.prove import prove, prove_schedules
from hpcpar.algorithms.registry import Algorithm, find
from hpcpar.algorithms.step import Copy, Receive, Send, Step
from hpcpar.errors import OperationError, ScheduleError
from tests.algorithms.every import EVERY, name_of
from tests.grid import checkered

# Every rank speaks to every other, or n - 1 times to its neighbour: proving n ranks takes n² messages.
QUADRATIC = {"ring", "direct", "one_shot", "pairwise", "hierarchical"}


def roots_of(algorithm: Algorithm, size: int) -> range | tuple[int, ...]:
    """All roots of few ranks, the outer and middle ones of many."""
    if not algorithm.rooted:
        return (0,)
    return range(size) if size <= 9 else (0, 1, size // 2, size - 1)


def sizes(largest: int) -> tuple[int, ...]:
    """1 to the largest: odd ones first, so that every second of them are not all odd or all even."""
    return (*range(1, largest + 1, 2), *range(2, largest + 1, 2))


ONE_SEGMENT = [(size, 1) for size in sizes(33)]


@pytest.mark.parametrize("algorithm", EVERY, ids=name_of)
def test_every_algorithm_is_right_for_1_to_33_ranks(algorithm: Algorithm) -> None:
    for size, segments in checkered(sizes(33), (1, 2, 5)) if algorithm.segmented else ONE_SEGMENT:
        for root in roots_of(algorithm, size):
            prove(algorithm, size, root, segments)


def placements(size: int) -> list[tuple[int, ...]]:
    """Nodes full and not, large and small, of neighbouring ranks and of distant ones."""
    return [
        (0,) * size,
        tuple(rank // 3 for rank in range(size)),
        tuple(rank // 4 for rank in range(size)),
        tuple(rank % 3 for rank in range(size)),
        tuple(rank * rank % 7 for rank in range(size)),
    ]


@pytest.mark.parametrize("algorithm", [one for one in EVERY if one.placed], ids=name_of)
def test_a_hierarchical_algorithm_is_right_wherever_the_ranks_are(algorithm: Algorithm) -> None:
    segments_of = (1, 3) if algorithm.segmented else (1,)
    for size, segments, nodes in checkered(sizes(22), segments_of, range(len(placements(1)))):
        for root in sorted({0, size // 2, size - 1}) if algorithm.rooted else (0,):
            prove(algorithm, size, root, segments, placements(size)[nodes])


@pytest.mark.parametrize("algorithm", EVERY, ids=name_of)
def test_every_algorithm_is_right_for_many_ranks(algorithm: Algorithm) -> None:
    many_messages = (algorithm.name in QUADRATIC and not algorithm.rooted) or (
        algorithm.name == "hierarchical_pipelined"
    )
    for size in (48,) if many_messages else (64, 100, 128, 257):
        nodes = tuple(rank // 8 for rank in range(size)) if algorithm.placed else None
        prove(algorithm, size, size // 3, 4, nodes)


def test_the_ring_allreduce_is_right_for_128_ranks() -> None:
    prove(find("allreduce", "ring"), 128)


def test_ranks_that_all_send_before_they_receive_deadlock_and_the_circle_is_named() -> None:
    schedules = [
        [
            Step(sends=(Send((rank + 1) % 3, (rank,)),)),
            Step(receives=(Receive((rank - 1) % 3, ((rank - 1) % 3,)),)),
        ]
        for rank in range(3)
    ]
    with pytest.raises(ScheduleError) as caught:
        prove_schedules("allgather", schedules)
    assert str(caught.value) == (
        "allgather schedule on 3 ranks: deadlock: rank 0 (step 0) waits to send chunk 0 to rank 1; "
        "rank 1 (step 0) waits to send chunk 1 to rank 2; rank 2 (step 0) waits to send chunk 2 to rank 0"
    )


EXCHANGE = [Step((Send(peer, (0,)),), (Receive(peer, (0,), combine=True),)) for peer in (1, 0)]
"""Each of two ranks adds what the other has."""

# collective, schedules, message
WRONG_SCHEDULES = {
    "a wait for one that has finished": (
        "broadcast",
        [[], [Step(receives=(Receive(0, (0,)),))]],
        r"rank 1 \(step 0\) waits to receive chunk 0 from rank 0, but rank 0 has fin",
    ),
    "a barrier that lets a rank leave too early": (
        "barrier",
        [[Step((Send((rank + 1) % 3),), (Receive((rank - 1) % 3),))] for rank in range(3)],
        "rank 0, at the end: leaves the barrier without having heard of rank 1",
    ),
    "a contribution that comes in twice": (
        "allreduce",
        [[step, step] for step in EXCHANGE],
        r"rank 0, step 1: combines .* has the contribution of ranks 0, 1 already",
    ),
    "a contribution that is lost": (
        "reduce",
        [[], []],
        "rank 0, at the end: chunk 0 of data lacks the contribution of rank 1",
    ),
    "a chunk that never came": (
        "broadcast",
        [[], []],
        "rank 1, at the end: chunk 0 of data was never received",
    ),
    "a chunk that is sent before it holds anything": (
        "allgather",
        [[Step((), (Receive(1, (1,)),))], [Step((Send(0, (0,)),))]],
        "rank 1, step 0: sends chunk 0 of data, which holds nothing yet",
    ),
    "two ends that disagree on the number of chunks": (
        "broadcast",
        [[Step((Send(1, (0,)),))], [Step((), (Receive(0, (0, 1)),))]],
        "rank 1, step 0: expects 2 chunks from rank 0, which sends 1 in its step 0",
    ),
    "a chunk that lands in the place of another": (
        "broadcast",
        [[Step((Send(1, (0,)),))], [Step((), (Receive(0, (1,)),))]],
        "rank 1, step 0: puts what is chunk 0 elsewhere into the place of chunk 1",
    ),
    "a write to the input of an all-to-all": (
        "alltoall",
        [[Step((), (Receive(1, (1,), "input"),))], [Step((Send(0, (0,), "input"),))]],
        "rank 0, step 0: writes to the input",
    ),
}


@pytest.mark.parametrize("planted", WRONG_SCHEDULES)
def test_a_schedule_that_is_wrong_is_refused_with_rank_and_step(planted: str) -> None:
    collective, schedules, message = WRONG_SCHEDULES[planted]
    with pytest.raises(ScheduleError, match=message):
        prove_schedules(collective, schedules, chunks=2)


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_that_combine_in_different_orders_are_refused_because_their_bits_differ(size: int) -> None:
    def one_shot(own_turns: tuple[int, ...]) -> list[list[Step]]:
        others = [[peer for peer in range(size) if peer != rank] for rank in range(size)]
        return [
            [
                Step(
                    tuple(Send(peer, (0,)) for peer in others[rank]),
                    tuple(Receive(peer, (0,), combine=True) for peer in others[rank]),
                    own_turn=own_turns[rank],
                )
            ]
            for rank in range(size)
        ]

    prove_schedules("allreduce", one_shot(tuple(range(size))))
    # 1 op 0 is not 0 op 1: not for products of complex numbers, nor for max(0.0, -0.0).
    with pytest.raises(
        ScheduleError, match="rank 1, at the end: chunk 0 was combined in another order than on rank 0"
    ):
        prove_schedules("allreduce", one_shot((0,) * size))


@pytest.mark.parametrize("name", ["recursive_doubling", "leaders", "one_shot"])
def test_an_allreduce_in_which_each_rank_puts_its_own_value_first_is_refused(name: str) -> None:
    for size in (2, 4, 5):
        schedules = find("allreduce", name).schedules(size)
        prove_schedules("allreduce", schedules)
        own_first = [[replace(step, own_turn=0) for step in steps] for steps in schedules]
        with pytest.raises(ScheduleError, match="combined in another order than on rank 0"):
            prove_schedules("allreduce", own_first)


WRONG_STEPS = {
    "a peer beyond the last rank": (Step((Send(2, (0,)),)), "speaks to rank 2"),
    "a message to itself": (Step((Send(0, (0,)),)), "speaks to rank 0"),
    "a chunk that does not exist": (Step((Send(1, (7,)),)), "names chunk 7 of data, which has 2 chunks"),
    "a space that the collective has not": (
        Step((Send(1, (0,), "output"),)),
        "chunk 0 of output, which has 0",
    ),
    "a copy of a chunk that holds nothing yet": (
        Step(copies=(Copy((1,), "data", (0,), "data"),)),
        "copies chunk 1 of data, which holds nothing yet",
    ),
    "a chunk sent and overwritten at once": (
        Step((Send(1, (0,)),), (Receive(1, (0,)),)),
        "chunk 0 of data is overwritten while it is sent",
    ),
    "a chunk overwritten twice at once": (
        Step((), (Receive(1, (1,)), Receive(1, (1,)))),
        "chunk 1 of data is written twice at once",
    ),
    "a chunk overwritten and combined at once": (
        Step((), (Receive(1, (0,), combine=True), Receive(1, (0,)))),
        "chunk 0 of data is written twice at once",
    ),
    "a copy of unequal length": (
        Step(copies=(Copy((0,), "data", (0, 1), "data"),)),
        "copies 1 chunks into 2",
    ),
    "a copy to another chunk's place": (
        Step(copies=(Copy((0,), "data", (1,), "data"),)),
        "puts what is chunk 0 elsewhere into the place of chunk 1",
    ),
}


@pytest.mark.parametrize("planted", WRONG_STEPS)
def test_a_step_that_is_wrong_by_itself_is_refused(planted: str) -> None:
    step, message = WRONG_STEPS[planted]
    with pytest.raises(ScheduleError, match=f"allgather schedule on 2 ranks: rank 0, step 0: .*{message}"):
        prove_schedules("allgather", [[step], []])


def test_what_cannot_be_proved_at_all_is_refused() -> None:
    with pytest.raises(OperationError, match="no collective 'gossip'"):
        prove_schedules("gossip", [[]])
    with pytest.raises(OperationError, match="root 3 is none of the 2 ranks"):
        prove_schedules("broadcast", [[], []], root=3)
