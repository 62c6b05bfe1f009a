"""Pictures of pipeline schedules: what stands in the SVG is what is in the timetable."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from hpcpar.cli import schedule_picture
from hpcpar.cli.picture import Colour, Output, save, shade
from hpcpar.cli.schedule_picture import COLOURS, Panel
from hpcpar.pipeline_schedules.action import Action
from hpcpar.pipeline_schedules.timetable import Timed, Timetable


def timetable(*rows: str) -> Timetable:
    """From rows such as "0F0@0-1 0B0@3-5"."""

    def timed(word: str) -> Timed:
        written, _, times = word.partition("@")
        start_s, end_s = map(float, times.split("-"))
        return Timed(Action.parse(written), start_s, end_s)

    return Timetable(tuple(tuple(map(timed, row.split())) for row in rows))


ONE_STAGE = timetable("0F0@0-1 0F12@1-2 0B0@4-6 0B12@7-9", "1F0@1-2 1B0@2-4 1F12@4-5 1B12@5-7")

TWO_STAGES = timetable("0F0@5-6 2F0@7-8 2B0@8-9 2W0@9-10 0B0@11-12 0W0@12-13", "1F0@6-7 1B0@9-11")


def draw(panels: list[Panel], path: Path, *, until_s: float | None = None) -> None:
    save(schedule_picture.draw(panels, until_s=until_s), Output(path))


def hexadecimal(colour: Colour) -> str:
    return "#" + "".join(f"{round(255 * part):02x}" for part in colour)


def bars(svg: str) -> Counter[str]:
    """Count the bars of each colour."""
    return Counter(re.findall(r'style="fill: (#\w+); stroke: #ffffff; stroke-width: 0.4"', svg))


def texts(svg: str) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>", svg)


def test_every_action_is_a_bar_of_its_kind_and_stage(tmp_path: Path) -> None:
    draw([Panel("one", ONE_STAGE), Panel("two", TWO_STAGES)], tmp_path / "both.svg")
    full = {kind: hexadecimal(colour) for kind, colour in COLOURS.items()}
    light = {kind: hexadecimal(shade(colour, 1, 2)) for kind, colour in COLOURS.items()}
    assert bars((tmp_path / "both.svg").read_text()) == {
        full["F"]: 4 + 2,
        full["B"]: 4 + 2,
        full["W"]: 1,
        light["F"]: 1,
        light["B"]: 1,
        light["W"]: 1,
    }


def test_titles_have_the_bubble_rate_and_bars_their_microbatch(tmp_path: Path) -> None:
    draw([Panel("one", ONE_STAGE, peaks=(2, 1))], tmp_path / "one.svg")
    written = texts((tmp_path / "one.svg").read_text())
    assert "one: bubble rate 33.33%, cost 9 s" in written
    assert "alive: microbatches whose activations the rank keeps, at most" in written
    assert {"rank 0", "rank 1", "2 alive", "1 alive", "forward", "backward", "idle"} <= set(written)
    assert Counter(written)["12"] == 4
    assert not any("weights" in each or "paler" in each for each in written)


def test_a_number_that_does_not_fit_into_its_bar_is_left_out(tmp_path: Path) -> None:
    draw([Panel("long", timetable("0F123@0-1 0B123@1-1000"))], tmp_path / "long.svg")
    assert Counter(texts((tmp_path / "long.svg").read_text()))["123"] == 1


def test_panels_share_one_axis_and_each_begins_at_its_first_start(tmp_path: Path) -> None:
    late = Timetable(tuple(tuple(Timed(a, s + 100, e + 100) for a, s, e in row) for row in ONE_STAGE.rows))
    draw([Panel("one", ONE_STAGE)], tmp_path / "one.svg")
    draw([Panel("one", late)], tmp_path / "late.svg")
    path = re.compile(r'<path d="([^"]*)" clip-path="[^"]*" style="fill')
    one, other = (path.findall((tmp_path / name).read_text()) for name in ("one.svg", "late.svg"))
    assert one == other
    assert len(one) == 8 + 2  # the bars, and the grey below each rank's


def test_time_may_end_before_the_schedule_does(tmp_path: Path) -> None:
    draw([Panel("cut", ONE_STAGE)], tmp_path / "cut.svg", until_s=5)
    svg = (tmp_path / "cut.svg").read_text()
    assert bars(svg) == {hexadecimal(COLOURS["F"]): 4, hexadecimal(COLOURS["B"]): 2}
    assert "cut: bubble rate 33.33%, cost 9 s" in texts(svg)
    draw([Panel("cut", ONE_STAGE)], tmp_path / "cut.svg", until_s=0.5)
    assert bars((tmp_path / "cut.svg").read_text()) == {hexadecimal(COLOURS["F"]): 1}


def test_shades_of_a_ranks_stages_grow_lighter() -> None:
    shades = [shade(COLOURS["F"], place, 4) for place in range(4)]
    assert shades[0] == COLOURS["F"]
    assert sorted(shades) == shades
    assert len(set(shades)) == 4
    assert shade(COLOURS["B"], 0, 1) == COLOURS["B"]


@pytest.mark.parametrize(("suffix", "magic"), [("png", b"\x89PNG"), ("pdf", b"%PDF"), ("svg", b"<?xml")])
def test_the_suffix_says_the_format(suffix: str, magic: bytes, tmp_path: Path) -> None:
    path = tmp_path / f"picture.{suffix}"
    draw([Panel("idle too", timetable("0F0@0-1", ""), peaks=(1, 0))], path)
    assert path.read_bytes().startswith(magic)
