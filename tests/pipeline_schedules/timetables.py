"""Timetables written as text."""

from __future__ import annotations

from hpcpar.pipeline_schedules.action import Action
from hpcpar.pipeline_schedules.timetable import Timed, Timetable


def timetable(*rows: str) -> Timetable:
    """Parse rows such as "0F0@0-1 0B0@3-5"."""

    def timed(word: str) -> Timed:
        written, _, times = word.partition("@")
        start_s, end_s = map(float, times.split("-"))
        return Timed(Action.parse(written), start_s, end_s)

    return Timetable(tuple(tuple(map(timed, row.split())) for row in rows))
