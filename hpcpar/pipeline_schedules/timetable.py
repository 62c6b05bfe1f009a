"""Start and end times of a schedule's actions: simulated beforehand, or measured in a run.

Files hold each rank's actions in order, with the seconds at which each started and ended:

    {"ranks": [[["0F0", 0.0, 0.012], ["0F1", 0.012, 0.024]], [["1F0", 0.013, 0.025]]]}

`trace_events` writes the same for a trace viewer (chrome://tracing, Perfetto, Speedscope): a process for each
rank, a thread for each of its stages.

source   Trace Event Format (Google, 2016), "complete" events: ph = X, ts and dur in microseconds
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from hpcpar.errors import ScheduleError
from hpcpar.pipeline_schedules.action import Action, Kind

CATEGORIES: dict[Kind, str] = {"F": "forward", "B": "backward", "W": "weights"}

Event = dict[str, Any]


class Timed(NamedTuple):
    """An action with its start and end."""

    action: Action
    start_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True)
class Timetable:
    """Every rank's timed actions, in the order in which it ran them."""

    rows: tuple[tuple[Timed, ...], ...]

    @property
    def origin_s(self) -> float:
        """The first start on any rank."""
        return min((each.start_s for row in self.rows for each in row), default=0.0)

    @property
    def seconds(self) -> float:
        """The time from the first start to the last end on any rank."""
        return max((each.end_s for row in self.rows for each in row), default=0.0) - self.origin_s

    def span_s(self, rank: int) -> float:
        """The time from a rank's own first start to its own last end."""
        row = self.rows[rank]
        return row[-1].end_s - row[0].start_s if row else 0.0

    def busy_s(self, rank: int) -> float:
        return sum(each.seconds for each in self.rows[rank])

    @property
    def cost_s(self) -> float:
        """The longest span of a rank."""
        return max((self.span_s(rank) for rank in range(len(self.rows))), default=0.0)

    @property
    def work_s(self) -> float:
        """The mean of the ranks' busy times."""
        return sum(self.busy_s(rank) for rank in range(len(self.rows))) / max(1, len(self.rows))

    @property
    def bubble_rate(self) -> float:
        """Idle share of the time, (cost - work) / cost, as in arXiv 2401.10241."""
        return (self.cost_s - self.work_s) / self.cost_s if self.cost_s else 0.0

    def shifted(self, seconds: float) -> Timetable:
        """Return a copy with every time later by `seconds`."""
        return Timetable(tuple(shifted(row, seconds) for row in self.rows))


def shifted(row: tuple[Timed, ...] | list[Timed], seconds: float) -> tuple[Timed, ...]:
    """Return a copy of a row with every time later by `seconds`."""
    return tuple(Timed(action, start_s + seconds, end_s + seconds) for action, start_s, end_s in row)


# --- files ----------------------------------------------------------------------------------------


def to_json(timetable: Timetable) -> str:
    """Format a timetable; `from_json` reads back an equal one, to the last bit."""
    rows = [[[str(action), float(start), float(end)] for action, start, end in row] for row in timetable.rows]
    return json.dumps({"ranks": rows})


def from_json(text: str, *, source: str = "text") -> Timetable:
    """Parse the text of `to_json`.

    source   name of the text in errors
    errors   ScheduleError that names the rank and the entry that are not understood, or not in order
    """
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ScheduleError(f"{source}: expected a timetable in JSON, found other text: {error}") from error
    rows = found.get("ranks") if isinstance(found, dict) else None
    if not isinstance(rows, list) or not all(isinstance(row, list) for row in rows):
        raise ScheduleError(f'{source}: expected {{"ranks": [[["0F0", 0.0, 0.1], ...], ...]}}')
    return Timetable(tuple(_parsed_row(row, f"{source}: rank {rank}") for rank, row in enumerate(rows)))


def write_timetable(timetable: Timetable, path: Path) -> None:
    path.write_text(to_json(timetable) + "\n", encoding="utf-8")


def read_timetable(path: Path) -> Timetable:
    """Read the timetable in a file; ScheduleError where there is none."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ScheduleError(f"{path} is no text: byte {error.start} is not UTF-8") from error
    return from_json(text, source=str(path))


def _parsed_row(entries: list[Any], whose: str) -> tuple[Timed, ...]:
    row = tuple(_parsed(entry, f"{whose}, entry {position}") for position, entry in enumerate(entries))
    for position, (before, timed) in enumerate(pairwise(row), start=1):
        if timed.start_s < before.start_s:
            raise ScheduleError(
                f"{whose}, entry {position}: {timed.action} starts at {timed.start_s} s, but {before.action} "
                f"before it at {before.start_s} s; list a rank's actions in the order of their times"
            )
    return row


def _parsed(entry: Any, where: str) -> Timed:
    match entry:
        case [str(written), int() | float() as start_s, int() | float() as end_s]:
            if not start_s <= end_s:
                raise ScheduleError(f"{where}: {written} ends at {end_s} s, before it starts at {start_s} s")
            try:
                return Timed(Action.parse(written), float(start_s), float(end_s))
            except ScheduleError as error:
                raise ScheduleError(f"{where}: {error}") from error
    raise ScheduleError(
        f'{where}: expected an action, its start and its end as in ["0F0", 0.0, 0.1], found {entry!r}'
    )


# --- trace viewers --------------------------------------------------------------------------------


def trace_json(timetable: Timetable) -> str:
    """Format a file for a trace viewer."""
    return trace_file(trace_events(timetable))


def trace_events(timetable: Timetable) -> list[Event]:
    """List an event for every action, after the names of processes and threads; the first start is 0."""
    origin_s = timetable.origin_s
    return [event for rank, row in enumerate(timetable.rows) for event in _events(rank, row, origin_s)]


def _events(rank: int, row: tuple[Timed, ...], origin_s: float) -> Iterator[Event]:
    yield name_event("process_name", rank, 0, f"rank {rank}")
    for stage in sorted({each.action.stage for each in row}):
        yield name_event("thread_name", rank, stage, f"stage {stage}")
    for timed in row:
        stage, kind, microbatch = timed.action
        yield {
            **span_event(str(timed.action), CATEGORIES[kind], timed.start_s - origin_s, timed.seconds),
            **{"pid": rank, "tid": stage, "args": {"stage": stage, "microbatch": microbatch}},
        }


def trace_file(events: Sequence[Event]) -> str:
    """Format a file of events for a trace viewer."""
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events})


def span_event(name: str, category: str, start_s: float, seconds: float) -> Event:
    """Describe a complete event; the caller adds pid, tid and args."""
    return {"ph": "X", "name": name, "cat": category, "ts": start_s * 1e6, "dur": seconds * 1e6}


def name_event(kind: str, rank: int, thread: int, name: str) -> Event:
    """Name a process or a thread."""
    return {"ph": "M", "name": kind, "pid": rank, "tid": thread, "args": {"name": name}}
