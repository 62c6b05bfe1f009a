from __future__ import annotations

import pytest

from hpcpar.errors import ScheduleError
from hpcpar.pipeline_schedules import catalogue
from hpcpar.pipeline_schedules.measured import measured_durations, predicted, replayed, schedule_of
from hpcpar.pipeline_schedules.price import Durations, price
from hpcpar.pipeline_schedules.timetable import Timed, Timetable


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"])
def test_a_priced_schedule_is_found_again_with_its_durations(name: str) -> None:
    schedule = catalogue.make(name, 2, 4)
    stages = range(schedule.stages)
    # A whole backward is divided evenly.
    given = Durations([2.0 + s for s in stages], [3.0 + s for s in stages], [3.0 + s for s in stages])
    timetable = price(schedule, given)
    assert schedule_of(timetable) == schedule
    assert measured_durations(timetable) == given
    assert predicted(timetable) == timetable


def test_one_slow_action_is_idle_time_and_no_one_elses_work() -> None:
    timetable = price(catalogue.make("1f1b", 2, 5), Durations(1.0, 1.0, 1.0))
    (*early, (action, start_s, end_s)), other = timetable.rows
    late = Timetable(((*early, Timed(action, start_s, end_s + 10)), other))
    assert predicted(late) == timetable
    assert late.bubble_rate > timetable.bubble_rate


def test_replaying_leaves_the_idle_time_that_late_actions_make_and_no_other() -> None:
    first, last = price(catalogue.make("1f1b", 2, 5), Durations(1.0, 1.0, 1.0)).rows
    # Rank 1 takes 3 s longer for its first action, and then does nothing for 7 s.
    slow = [Timed(each.action, each.start_s + 3, each.end_s + 3) for each in last]
    slow[0] = Timed(last[0].action, last[0].start_s, last[0].end_s + 3)
    lazy = [slow[0], *(Timed(each.action, each.start_s + 7, each.end_s + 7) for each in slow[1:])]
    found = replayed(Timetable((first, tuple(lazy))))
    assert found.rows[1] == tuple(slow)
    assert found.span_s(0) == price(catalogue.make("1f1b", 2, 5), Durations(1.0, 1.0, 1.0)).span_s(0) + 3


def test_a_pass_without_backward_has_no_durations() -> None:
    forward = Timetable(tuple(row[:1] for row in price(catalogue.make("gpipe", 2, 2), Durations()).rows))
    with pytest.raises(ScheduleError, match="no B of stage 0; give that of a whole training step"):
        measured_durations(forward)
