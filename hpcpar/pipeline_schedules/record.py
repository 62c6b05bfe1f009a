"""A timetable as JSON, so that what a run measured can be kept and drawn beside what was priced.

    {"ranks": [[["0F0", 0.0, 0.012], ["0F1", 0.012, 0.024]], [["1F0", 0.013, 0.025]]]}

For each rank its actions in their order, with the seconds at which each started and ended.
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

from hpcpar.errors import ScheduleError
from hpcpar.pipeline_schedules.action import Action
from hpcpar.pipeline_schedules.timetable import Timed, Timetable


def to_json(timetable: Timetable) -> str:
    """The text from which `from_json` makes an equal timetable, to the last bit."""
    rows = [[[str(action), float(start), float(end)] for action, start, end in row] for row in timetable.rows]
    return json.dumps({"ranks": rows})


def from_json(text: str, *, source: str = "text") -> Timetable:
    """The timetable that `to_json` wrote.

    source   what errors call the text
    errors   ScheduleError that names the rank and the entry that are not understood, or not in order
    """
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ScheduleError(f"{source}: expected a timetable in JSON, found other text: {error}") from error
    rows = found.get("ranks") if isinstance(found, dict) else None
    if not isinstance(rows, list) or not all(isinstance(row, list) for row in rows):
        raise ScheduleError(f'{source}: expected {{"ranks": [[["0F0", 0.0, 0.1], ...], ...]}}')
    return Timetable(tuple(_row(row, f"{source}: rank {rank}") for rank, row in enumerate(rows)))


def write(timetable: Timetable, path: Path) -> None:
    path.write_text(to_json(timetable) + "\n", encoding="utf-8")


def read(path: Path) -> Timetable:
    """The timetable of a file; ScheduleError where it has none."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ScheduleError(f"{path} is no text: byte {error.start} is not UTF-8") from error
    return from_json(text, source=str(path))


def _row(entries: list[Any], whose: str) -> tuple[Timed, ...]:
    row = tuple(_timed(entry, f"{whose}, entry {place}") for place, entry in enumerate(entries))
    for place, (before, timed) in enumerate(pairwise(row), start=1):
        if timed.start_s < before.start_s:
            raise ScheduleError(
                f"{whose}, entry {place}: {timed.action} starts at {timed.start_s} s, but {before.action} "
                f"before it at {before.start_s} s; list a rank's actions in the order of their times"
            )
    return row


def _timed(entry: Any, place: str) -> Timed:
    match entry:
        case [str(written), int() | float() as start_s, int() | float() as end_s]:
            if not start_s <= end_s:
                raise ScheduleError(f"{place}: {written} ends at {end_s} s, before it starts at {start_s} s")
            try:
                return Timed(Action.parse(written), float(start_s), float(end_s))
            except ScheduleError as error:
                raise ScheduleError(f"{place}: {error}") from error
    raise ScheduleError(
        f'{place}: expected an action, its start and its end as in ["0F0", 0.0, 0.1], found {entry!r}'
    )
