"""A schedule derives from its rows: stages and their ranks, split backwards, needs of an action."""

from __future__ import annotations

import pytest

from hpcpar.errors import ScheduleError
from hpcpar.pipeline_schedules.action import Action
from hpcpar.pipeline_schedules.pipeline_schedule import Schedule


def rows_of(*lines: str) -> tuple[tuple[Action, ...], ...]:
    return tuple(tuple(Action.parse(word) for word in line.split()) for line in lines)


SCHEDULE = Schedule(rows_of("0F0 2F0 2B0 2W0 0B0", "1F0 1B0"), "by hand")


def written(actions: tuple[Action, ...]) -> str:
    return " ".join(map(str, actions))


def test_counts_and_places_follow_from_the_rows() -> None:
    assert (SCHEDULE.ranks, SCHEDULE.stages, SCHEDULE.microbatches) == (2, 3, 1)
    assert SCHEDULE.rank_of_stage == {0: 0, 1: 1, 2: 0}
    assert [SCHEDULE.stages_of(rank) for rank in range(2)] == [(0, 2), (1,)]
    assert written(tuple(SCHEDULE.actions())) == "0F0 2F0 2B0 2W0 0B0 1F0 1B0"


def test_a_backward_is_split_where_it_has_a_w() -> None:
    assert [SCHEDULE.is_split(stage, 0) for stage in range(3)] == [False, False, True]


@pytest.mark.parametrize(
    ("action", "needs"),
    [("0F0", ""), ("1F0", "0F0"), ("2B0", "2F0"), ("1B0", "1F0 2B0"), ("0B0", "0F0 1B0"), ("2W0", "2B0")],
)
def test_an_action_needs_its_stage_and_its_neighbour(action: str, needs: str) -> None:
    assert written(SCHEDULE.needs(Action.parse(action))) == needs


def test_a_stage_on_two_ranks_is_refused() -> None:
    with pytest.raises(ScheduleError, match="0B0 is in the row of rank 1, but rank 0 has stage 0"):
        Schedule(rows_of("0F0", "0B0"))


def test_schedules_of_equal_rows_are_equal_whatever_they_are_called() -> None:
    assert Schedule(SCHEDULE.rows, "otherwise") == SCHEDULE
    assert Schedule(()).stages == Schedule(()).microbatches == 0
