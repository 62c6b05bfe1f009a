"""Timetables: spans and bubbles by hand, as JSON, and as the events of a trace viewer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpcpar.errors import ScheduleError
from hpcpar.pipeline_schedules.action import Action
from hpcpar.pipeline_schedules.timetable import (
    Timed,
    Timetable,
    from_json,
    read_timetable,
    to_json,
    trace_events,
    trace_json,
    write_timetable,
)

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
    assert TIMETABLE.seconds == 8


def test_the_bubble_rate_is_the_idle_share_of_the_cost() -> None:
    assert (TIMETABLE.cost_s, TIMETABLE.work_s, TIMETABLE.bubble_rate) == (8, 4, 4 / 8)


def test_without_actions_all_is_nothing() -> None:
    for empty in (Timetable(()), Timetable(((), ()))):
        assert empty.seconds == empty.cost_s == empty.work_s == empty.bubble_rate == 0


# --- JSON

WRITTEN = Timetable(
    (
        (Timed(Action(0, "F", 0), 0.1, 1 / 3), Timed(Action(0, "B", 0), 1.0, 1.0 + 1e-9)),
        (Timed(Action(1, "F", 0), 0.5, 0.75), Timed(Action(1, "W", 11), 0.75, 0.75)),
        (),
    )
)


def test_the_form_is_a_list_for_each_rank() -> None:
    text = '{"ranks": [[["0F0", 0, 0.5], ["0B0", 0.5, 2]], []]}'
    expected = Timetable(((Timed(Action(0, "F", 0), 0.0, 0.5), Timed(Action(0, "B", 0), 0.5, 2.0)), ()))
    assert from_json(text) == expected


def test_what_was_written_is_read_to_the_last_bit(tmp_path: Path) -> None:
    assert from_json(to_json(WRITTEN)) == WRITTEN
    write_timetable(WRITTEN, tmp_path / "measured.json")
    assert read_timetable(tmp_path / "measured.json") == WRITTEN


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0F0 0F1", "here: expected a timetable in JSON"),
        ("[]", 'here: expected {"ranks": '),
        ('{"ranks": [7]}', 'here: expected {"ranks": '),
        ('{"ranks": [[], [["0F0", 0, 1], ["0X0", 1, 2]]]}', "here: rank 1, entry 1: '0X0' is no action"),
        ('{"ranks": [[["0F0", 0]]]}', "here: rank 0, entry 0: expected an action, its start and its end"),
        ('{"ranks": [[["0F0", "0", 1]]]}', "found ['0F0', '0', 1]"),
        ('{"ranks": [[["0F0", 2, 1]]]}', "rank 0, entry 0: 0F0 ends at 1 s, before it starts at 2 s"),
        ('{"ranks": [[["0F0", NaN, 1]]]}', "rank 0, entry 0: "),
        (
            '{"ranks": [[], [["1F0", 5, 6], ["1B0", 1, 2]]]}',
            "here: rank 1, entry 1: 1B0 starts at 1.0 s, but 1F0 before it at 5.0 s",
        ),
    ],
)
def test_what_is_no_timetable_is_named_by_its_place(text: str, words: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        from_json(text, source="here")
    assert words in str(caught.value)


def test_a_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    path = tmp_path / "measured.json"
    path.write_bytes(b"\xff")
    with pytest.raises(ScheduleError, match=r"measured\.json is no text"):
        read_timetable(path)


# --- trace viewers

TRACED = Timetable(
    (
        (Timed(Action(0, "F", 0), 5.0, 5.25), Timed(Action(3, "B", 0), 5.5, 6.0)),
        (Timed(Action(1, "W", 7), 5.25, 5.5),),
    )
)


def test_ranks_are_processes_and_stages_threads_with_names() -> None:
    named = [
        (event["name"], event["pid"], event["tid"], event["args"]["name"])
        for event in trace_events(TRACED)
        if event["ph"] == "M"
    ]
    assert named == [
        ("process_name", 0, 0, "rank 0"),
        ("thread_name", 0, 0, "stage 0"),
        ("thread_name", 0, 3, "stage 3"),
        ("process_name", 1, 0, "rank 1"),
        ("thread_name", 1, 1, "stage 1"),
    ]


def test_every_action_is_an_event_in_microseconds_from_the_first_start() -> None:
    fields = ("name", "cat", "pid", "tid", "ts", "dur")
    shown = [tuple(event[field] for field in fields) for event in trace_events(TRACED) if event["ph"] == "X"]
    assert shown == [
        ("0F0", "forward", 0, 0, 0.0, 250_000.0),
        ("3B0", "backward", 0, 3, 500_000.0, 500_000.0),
        ("1W7", "weights", 1, 1, 250_000.0, 250_000.0),
    ]


def test_the_file_is_the_events_and_names_each_microbatch() -> None:
    found = json.loads(trace_json(TRACED))
    assert found["traceEvents"] == trace_events(TRACED)
    assert found["traceEvents"][-1]["args"] == {"stage": 1, "microbatch": 7}


def test_of_nothing_there_are_no_events() -> None:
    assert trace_events(Timetable(())) == []
