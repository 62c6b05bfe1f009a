"""A timetable as a file for a trace viewer (chrome://tracing, Perfetto, Speedscope).

One process for each rank, one thread for each of its stages:

    rank 0   stage 0   |0F0|0F1|       |0B0|0W0|
             stage 3           |3F0|3B0|

source   Trace Event Format (Google, 2016), "complete" events: ph = X, ts and dur in microseconds
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from hpcpar.pipeline_schedules.action import Kind
from hpcpar.pipeline_schedules.timetable import Timed, Timetable

CATEGORIES: dict[Kind, str] = {"F": "forward", "B": "backward", "W": "weights"}

Event = dict[str, Any]


def trace_events(timetable: Timetable) -> list[Event]:
    """Every action as an event, after the names of the processes and threads; the first start is 0."""
    origin_s = min((each.start_s for row in timetable.rows for each in row), default=0.0)
    return [event for rank, row in enumerate(timetable.rows) for event in _of_rank(rank, row, origin_s)]


def to_json(timetable: Timetable) -> str:
    """The whole file."""
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": trace_events(timetable)})


def _of_rank(rank: int, row: tuple[Timed, ...], origin_s: float) -> Iterator[Event]:
    yield _name("process_name", rank, 0, f"rank {rank}")
    for stage in sorted({each.action.stage for each in row}):
        yield _name("thread_name", rank, stage, f"stage {stage}")
    for timed in row:
        stage, kind, microbatch = timed.action
        yield {
            "ph": "X",
            "name": str(timed.action),
            "cat": CATEGORIES[kind],
            "pid": rank,
            "tid": stage,
            "ts": (timed.start_s - origin_s) * 1e6,
            "dur": timed.seconds * 1e6,
            "args": {"stage": stage, "microbatch": microbatch},
        }


def _name(kind: str, rank: int, thread: int, name: str) -> Event:
    return {"ph": "M", "name": kind, "pid": rank, "tid": thread, "args": {"name": name}}
