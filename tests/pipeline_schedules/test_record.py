"""Timetables kept as JSON."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcpar.errors import ScheduleError
from hpcpar.pipeline_schedules.action import Action
from hpcpar.pipeline_schedules.record import from_json, read, to_json, write
from hpcpar.pipeline_schedules.timetable import Timed, Timetable

TIMETABLE = Timetable(
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
    assert from_json(to_json(TIMETABLE)) == TIMETABLE
    write(TIMETABLE, tmp_path / "measured.json")
    assert read(tmp_path / "measured.json") == TIMETABLE


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
        read(path)
