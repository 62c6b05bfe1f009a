"""Spans, idle time and both forms of the bubble rate, of a timetable written by hand."""

from __future__ import annotations

from hpcpar.pipeline_schedules.action import Action
from hpcpar.pipeline_schedules.timetable import Timed, Timetable

#   seconds   0   1   2   3   4   5   6   7   8
#   rank 0    [ 0F0  ]            [   0B0    ]
#   rank 1            [1F0]   [ 1B0  ]
TIMETABLE = Timetable(
    (
        (Timed(Action(0, "F", 0), 0, 2), Timed(Action(0, "B", 0), 5, 8)),
        (Timed(Action(1, "F", 0), 2, 3), Timed(Action(1, "B", 0), 4, 6)),
    )
)


def test_a_rank_spans_from_its_own_first_start_to_its_own_last_end() -> None:
    assert [TIMETABLE.span_s(rank) for rank in range(2)] == [8, 4]
    assert [TIMETABLE.busy_s(rank) for rank in range(2)] == [5, 3]
    assert [TIMETABLE.idle_s(rank) for rank in range(2)] == [3, 1]
    assert TIMETABLE.seconds == 8


def test_bubble_rate_is_of_the_cost_and_bubble_ratio_of_the_work() -> None:
    assert (TIMETABLE.cost_s, TIMETABLE.work_s) == (8, 4)
    assert (TIMETABLE.bubble_rate, TIMETABLE.bubble_ratio) == (4 / 8, 4 / 4)


def test_without_actions_all_is_nothing() -> None:
    for empty in (Timetable(()), Timetable(((), ()))):
        assert empty.seconds == empty.cost_s == empty.work_s == empty.bubble_rate == empty.bubble_ratio == 0
