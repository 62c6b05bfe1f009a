"""A timetable as the events of a trace viewer."""

from __future__ import annotations

import json

from hpcpar.pipeline_schedules.action import Action
from hpcpar.pipeline_schedules.timetable import Timed, Timetable
from hpcpar.pipeline_schedules.trace_events import to_json, trace_events

TIMETABLE = Timetable(
    (
        (Timed(Action(0, "F", 0), 5.0, 5.25), Timed(Action(3, "B", 0), 5.5, 6.0)),
        (Timed(Action(1, "W", 7), 5.25, 5.5),),
    )
)


def test_ranks_are_processes_and_stages_threads_with_names() -> None:
    named = [
        (event["name"], event["pid"], event["tid"], event["args"]["name"])
        for event in trace_events(TIMETABLE)
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
    shown = [
        tuple(event[field] for field in fields) for event in trace_events(TIMETABLE) if event["ph"] == "X"
    ]
    assert shown == [
        ("0F0", "forward", 0, 0, 0.0, 250_000.0),
        ("3B0", "backward", 0, 3, 500_000.0, 500_000.0),
        ("1W7", "weights", 1, 1, 250_000.0, 250_000.0),
    ]


def test_the_file_is_the_events_and_names_each_microbatch() -> None:
    found = json.loads(to_json(TIMETABLE))
    assert found["traceEvents"] == trace_events(TIMETABLE)
    assert found["traceEvents"][-1]["args"] == {"stage": 1, "microbatch": 7}


def test_of_nothing_there_are_no_events() -> None:
    assert trace_events(Timetable(())) == []
