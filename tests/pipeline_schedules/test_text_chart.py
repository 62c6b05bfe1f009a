"""The text chart of a timetable, drawn by hand beside what is drawn."""

from __future__ import annotations

import pytest

from hpcpar.pipeline_schedules.text_chart import text_chart
from tests.pipeline_schedules.timetables import timetable

ONE_F_ONE_B = timetable(
    "0F0@0-1 0F1@1-2 0B0@4-6 0F2@6-7 0B1@7-9 0B2@10-12",
    "1F0@1-2 1B0@2-4 1F1@4-5 1B1@5-7 1F2@7-8 1B2@8-10",
)

SPLIT = timetable("0F0@10-11 2F0@12-13 2B0@13-14 2W0@14-15 0B0@16-17 0W0@17-18", "1F0@11-12 1B0@14-16")


def chart(drawn: str) -> list[str]:
    return drawn.partition("\n\n")[0].splitlines()


def test_1f1b_is_drawn_to_scale() -> None:
    assert text_chart(ONE_F_ONE_B, peaks=(2, 1)).splitlines() == [
        "rank 0   F0─F1─······B0════F2─B1════···B2════",
        "rank 1      F0─B0════F1─B1════F2─B2════",
        "",
        "bubble rate 25.00%, cost 12 s, a column 0.3333 s",
        "chunks alive at most, by rank: 2  1",
    ]


def test_a_ranks_second_stage_has_small_letters_and_the_first_start_is_the_left_edge() -> None:
    assert chart(text_chart(SPLIT)) == [
        "rank 0   F0─···f0─b0═w0~···B0═W0~",
        "rank 1      F0─······B0════",
    ]


@pytest.mark.parametrize(
    ("width", "drawn"),
    [
        (9 + 24, "F0F1····B0══F2B1══··B2══"),
        (9 + 12, "FF··B0FB1·B2"),
        (9 + 6, "F·BFBB"),  # half a column for a forward: 0F1 from 0.5 to 1 is rounded to nothing
    ],
)
def test_less_room_leaves_less_of_the_number(width: int, drawn: str) -> None:
    assert chart(text_chart(ONE_F_ONE_B, width=width))[0] == f"rank 0   {drawn}"


def test_of_a_long_number_the_last_digits_stay() -> None:
    shown = timetable("0F99@0-1 0F100@1-2 0B99@2-4 0B100@4-6")
    assert chart(text_chart(shown)) == ["rank 0   F99──F100─B99═══════B100══════"]
    assert chart(text_chart(shown, width=9 + 18)) == ["rank 0   F99F00B99═══B100══"]


@pytest.mark.parametrize("width", [1, 20, 45, 81, 120, 400])
def test_no_line_is_wider_than_asked_and_every_rank_has_one(width: int) -> None:
    rows = [" ".join(f"{r}F{m}@{m + r}-{m + r + 1}" for m in range(24)) for r in range(8)]
    lines = chart(text_chart(timetable(*rows), width=width))
    assert [line[:6] for line in lines] == [f"rank {rank}" for rank in range(8)]
    assert all(len(line) <= max(width, 9 + 1) for line in lines)


def test_every_cell_goes_through_the_painter_with_its_kind() -> None:
    seen: list[tuple[str, str]] = []

    def paint(kind: str, text: str) -> str:
        seen.append((kind, text))
        return f"<{text}>"

    assert chart(text_chart(SPLIT, paint=paint))[1] == "rank 1      <F0─>······<B0════>"
    assert seen[-2:] == [("F", "F0─"), ("B", "B0════")]


def test_the_third_stage_has_the_letters_of_the_first() -> None:
    assert chart(text_chart(timetable("0F0@0-1 2F0@1-2 4F0@2-3 6F0@3-4"))) == ["rank 0   F0─f0─F0─f0─"]


def test_a_rank_that_does_nothing_has_an_empty_line() -> None:
    assert chart(text_chart(timetable("0F0@0-1", ""))) == ["rank 0   F0─", "rank 1"]


def test_what_takes_no_time_is_drawn_as_nothing() -> None:
    assert text_chart(timetable("0F0@1-1")) == "rank 0\n\nbubble rate 0.00%, cost 0 s\n"


def test_what_overlaps_the_action_before_it_is_drawn_from_its_end() -> None:
    assert chart(text_chart(timetable("0F0@0-2 0F1@1-3"), width=9 + 6)) == ["rank 0   F0─F1"]
