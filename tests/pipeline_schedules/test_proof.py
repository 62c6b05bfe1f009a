"""Every schedule of the catalogue is proved on a grid; each planted fault is named; other judges agree."""

from __future__ import annotations

import random
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise

import pytest

from hpcpar.errors import ScheduleError
from hpcpar.pipeline_schedules.action import Action
from hpcpar.pipeline_schedules.pipeline_schedule import Schedule
from hpcpar.pipeline_schedules.pipeline_simulation import Durations
from hpcpar.pipeline_schedules.proof import chunks_kept, in_order, peak_chunks, prove
from hpcpar.pipeline_schedules.schedule_registry import METHODS, Method, make
from hpcpar.pipeline_schedules.stage_placement import loop, v_shape
from hpcpar.pipeline_schedules.text import parse

PATTERNS = [method for method in METHODS.values() if not method.timed]


@pytest.mark.parametrize("method", PATTERNS, ids=lambda method: method.name)
def test_every_schedule_is_right_on_1_to_8_ranks_with_1_to_32_microbatches_and_1_to_4_stages(
    method: Method,
) -> None:
    for per_rank in filter(method.allows, range(1, 5)):
        for ranks in range(1, 9):
            placement = v_shape(ranks) if method.placement == "v" else loop(ranks, per_rank)
            for microbatches in range(1, 33):
                schedule = make(method.name, ranks, microbatches, stages_per_rank=per_rank)
                proof = prove(schedule)
                assert (proof.stages, proof.microbatches) == (ranks * per_rank, microbatches)
                assert [schedule.stages_of(rank) for rank in range(ranks)] == list(placement.stages)


def test_the_automatic_schedule_is_right() -> None:
    for ranks, microbatches in ((1, 3), (2, 5), (4, 8)):
        schedule = make("automatic", ranks, microbatches, durations=Durations(3, 3, 2), memory_limit=ranks)
        assert max(prove(schedule, memory_limit=ranks).peaks) <= ranks


def test_a_proof_tells_peaks_and_messages_of_every_rank() -> None:
    proof = prove(make("interleaved", 3, 6, stages_per_rank=2))
    assert (proof.ranks, proof.stages, proof.microbatches) == (3, 6, 6)
    assert proof.peaks == (8, 6, 4)
    # Stages on ranks 0 1 2 0 1 2: a forward and a backward of six microbatches for each of five neighbours.
    assert proof.sends == (18, 24, 18)
    assert proof.receives == (18, 24, 18)
    # In a V the turn stays on the last rank.
    assert prove(make("zb-v", 3, 6)).sends == (12, 24, 12)


def rows_of(picture: str) -> Schedule:
    """A schedule as drawn, right or wrong."""
    lines = picture.strip().splitlines()
    return Schedule(tuple(tuple(Action.parse(word) for word in line.split()) for line in lines))


RIGHT = """
0F0 0F1 0B0 0F2 0B1 0B2
    1F0 1B0 1F1 1B1 1F2 1B2 1W2
"""

FAULTS = {
    "a forward is missing": (" 0F1", "", "0F1 is missing: .* 0 to 2; put it into the row of rank 0"),
    "a backward is missing": ("1B2 1W2", "", "1B2 is missing: .* 0 to 2; put it into the row of rank 1"),
    "an action is doubled": ("0B1", "0B1 0B1", "0B1 is twice in the row of rank 0, at places 4 and 5"),
    "a W is doubled": ("1W2", "1W2 1W2", "1W2 is twice in the row of rank 1, at places 6 and 7"),
    "a backward is before its own forward": (
        "1F1 1B1",
        "1B1 1F1",
        "1B1 .rank 1, place 2. cannot start: it needs 1F1, which comes later .*, at place 3; put 1F1 first",
    ),
    "W is before B": (
        "1B2 1W2",
        "1W2 1B2",
        "1W2 .rank 1, place 5. cannot start: it needs 1B2, which comes later .*, at place 6; put 1B2 first",
    ),
    "W has no B": ("1W2", "1W2 1W3", "0F3 is missing"),
    "ranks wait for each other": (
        "0F0 0F1 0B0 0F2 0B1 0B2\n    1F0 1B0 1F1",
        "0F0 0B0 0F1 0F2 0B1 0B2\n    1F0 1F1 1B0",
        "0B0 .rank 0, place 1. needs 1B0 of rank 1, 1F1 .rank 1, place 1. needs 0F1 of rank 0",
    ),
    "a stage is on two ranks": (
        "1W2",
        "1W2 0W0",
        "0W0 is in the row of rank 1, but rank 0 has stage 0",
    ),
    "a stage is missing": ("1W2", "1W2 3F0", "2F0 is missing: .* stages 0 to 3 .* the row of one rank"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_named(fault: str) -> None:
    right, wrong, message = FAULTS[fault]
    assert right in RIGHT
    with pytest.raises(ScheduleError, match=message):
        prove(rows_of(RIGHT.replace(right, wrong)))


def test_the_schedule_that_faults_are_planted_in_is_right() -> None:
    assert prove(rows_of(RIGHT)).peaks == (2, 1)


def test_ranks_that_wait_for_each_other_are_told_from_those_that_wait_for_them() -> None:
    # Ranks 1 and 2 wait for each other, 0 and 3 only for them.
    picture = """
    0F0 0B0 0F1 0B1
    1F0 1B0 1F1 1B1
    2F0 2F1 2B0 2B1
    3F0 3B0 3F1 3B1
    """
    with pytest.raises(ScheduleError) as caught:
        prove(rows_of(picture))
    assert str(caught.value) == (
        "ranks wait for each other: 1B0 (rank 1, place 1) needs 2B0 of rank 2, 2F1 (rank 2, place 1) needs "
        "1F1 of rank 1; let one of them do earlier what another needs"
    )


@pytest.mark.parametrize("action", [Action(-1, "F", 0), Action(0, "F", -1), Action(0, "X", 0)])  # type: ignore[arg-type]
def test_what_is_no_action_is_named(action: Action) -> None:
    with pytest.raises(ScheduleError, match=r"rank 0, place 1. is no action: stages and microbatches count"):
        prove(Schedule(((Action(0, "F", 0), action),)))


def test_a_schedule_without_actions_is_wrong() -> None:
    with pytest.raises(ScheduleError, match="2 ranks has no actions"):
        prove(Schedule(((), ())))


def test_a_memory_limit_that_is_passed_is_named_with_the_action_that_passes_it() -> None:
    schedule = make("gpipe", 2, 4)
    assert prove(schedule, memory_limit=4).peaks == (4, 4)
    with pytest.raises(ScheduleError, match=r"0F3 .rank 0, place 3. makes 4 chunks alive .* limit is 3"):
        prove(schedule, memory_limit=3)


def shuffled(schedule: Schedule, seed: int) -> Schedule:
    """Swap a few neighbours in the rows."""
    choose = random.Random(seed)
    rows = [list(row) for row in schedule.rows]
    for _ in range(choose.randint(1, 8)):
        row = choose.choice(rows)
        place = choose.randrange(len(row) - 1)
        row[place], row[place + 1] = row[place + 1], row[place]
    return Schedule(tuple(map(tuple, rows)))


def is_proved(schedule: Schedule) -> bool:
    try:
        prove(schedule)
    except ScheduleError:
        return False
    return True


def has_no_cycle(schedule: Schedule) -> bool:
    """Ask the standard library: each action comes after its needs and after its neighbour in the row."""
    before = {action: set(schedule.needs(action)) for action in schedule.actions()}
    for row in schedule.rows:
        for first, second in pairwise(row):
            before[second].add(first)
    try:
        TopologicalSorter(before).prepare()
    except CycleError:
        return False
    return True


def runs_unbuffered(schedule: Schedule, seed: int) -> bool:
    """Ranks in any turn, messages that pass only when both ends have posted them; True if all is done.

    A rank posts a receive when it comes to the action that needs it; it holds a send until it has passed.
    """
    choose = random.Random(seed)
    home = schedule.rank_of_stage
    at = [0] * schedule.ranks
    made: set[Action] = set()
    sent: set[tuple[Action, int]] = set()
    posted: set[tuple[Action, int]] = set()
    users: dict[Action, set[int]] = {}
    for action in schedule.actions():
        for need in schedule.needs(action):
            users.setdefault(need, set()).add(home[action.stage])
    while True:
        moved = False
        for rank in choose.sample(range(schedule.ranks), schedule.ranks):
            if at[rank] == len(schedule.rows[rank]):
                continue
            action = schedule.rows[rank][at[rank]]
            arrived = True
            for need in schedule.needs(action):
                if home[need.stage] == rank:
                    arrived &= need in made
                else:
                    posted.add((need, rank))
                    arrived &= (need, rank) in sent
            if arrived:
                at[rank] += 1
                made.add(action)
                sent |= {(action, user) for user in users.get(action, ()) if user != rank}
                moved = True
        if not moved:
            return at == [len(row) for row in schedule.rows] and sent == posted


@pytest.mark.parametrize("name", [method.name for method in PATTERNS])
def test_a_proof_agrees_with_the_graph_and_with_a_run_of_unbuffered_messages(name: str) -> None:
    wrong = 0
    for seed in range(40):
        schedule = shuffled(make(name, 3, 5), seed)
        proved = is_proved(schedule)
        assert proved == has_no_cycle(schedule) == runs_unbuffered(schedule, seed)
        wrong += not proved
    assert 0 < wrong < 40


@pytest.mark.parametrize("name", [method.name for method in PATTERNS])
def test_every_action_comes_once_after_its_needs_and_in_its_rows_order(name: str) -> None:
    schedule = make(name, 4, 6)
    order = in_order(schedule)
    place = {action: number for number, action in enumerate(order)}
    assert len(order) == len(place) == sum(map(len, schedule.rows))
    for action in order:
        assert all(place[need] < place[action] for need in schedule.needs(action))
    for row in schedule.rows:
        assert [place[action] for action in row] == sorted(place[action] for action in row)


def test_what_no_rank_does_is_named_before_those_that_wait_for_it_in_turn() -> None:
    right = make("gpipe", 3, 1)
    # 2F0 is gone: rank 2 waits for it, and ranks 1 and 0 for rank 2.
    with pytest.raises(
        ScheduleError, match=r"^2B0 \(rank 2, place 0\) cannot start: it needs 2F0, which no rank does"
    ):
        in_order(Schedule((*right.rows[:2], right.rows[2][1:])))


SPLIT = """
0F0 0F1 0B0 0F2 0W0 0B1 0B2 0W2
    1F0 1B0 1F1 1B1 1F2 1B2
"""


def test_a_chunk_is_alive_from_its_forward_to_its_w_or_whole_backward() -> None:
    assert chunks_kept(parse(SPLIT)) == ((1, 2, 2, 3, 3, 2, 1, 1), (1, 1, 1, 1, 1, 1))
    assert peak_chunks(parse(SPLIT)) == (3, 1)
