"""The order that is found: all actions, each after its needs and in its row's order."""

from __future__ import annotations

import pytest

from hpcpar.errors import ScheduleError
from hpcpar.pipeline_schedules.order import in_order
from hpcpar.pipeline_schedules.pipeline_schedule import Schedule
from hpcpar.pipeline_schedules.schedule_registry import METHODS, make


@pytest.mark.parametrize("name", [method.name for method in METHODS.values() if not method.timed])
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
