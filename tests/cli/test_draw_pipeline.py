"""`hpcpar draw pipeline`."""

from __future__ import annotations

import errno
import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import click
import pytest

from hpcpar.cli import main
from hpcpar.cli.draw_pipeline import KIND_COLOURS, Panel, figure_of
from hpcpar.cli.picture import Colour, save, shade
from hpcpar.cli.picture import Output as PictureFile
from hpcpar.errors import ScheduleError
from hpcpar.pipeline_schedules import schedule_registry, text
from hpcpar.pipeline_schedules.pipeline_schedule import Schedule
from hpcpar.pipeline_schedules.pipeline_simulation import Durations, simulate
from hpcpar.pipeline_schedules.proof import prove
from hpcpar.pipeline_schedules.text_chart import text_chart
from hpcpar.pipeline_schedules.timetable import Timed, Timetable, trace_json, write_timetable
from tests.command import Output
from tests.pipeline_schedules.timetables import timetable

COMMAND = ("draw", "pipeline")

SMALL = ("--ranks", "2", "--microbatches", "3")

OURS = "0F0 0F1 0B0 0F2 0B1 0B2\n1F0 1B0 1F1 1B1 1F2 1B2\n"

DRAWN = """\
rank 0   F0─F1─······B0════F2─B1════···B2════
rank 1      F0─B0════F1─B1════F2─B2════

bubble rate 25.00%, cost 12 s, a column 0.3333 s
chunks alive at most, by rank: 2  1
"""


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    path = tmp_path / "ours.txt"
    path.write_text(OURS)
    return path


def test_a_name_draws_its_chart_with_bubble_rate_and_peaks(output: Output) -> None:
    assert output("1f1b", *SMALL) == f"1f1b: 2 ranks, 2 stages, 3 microbatches\n\n{DRAWN}\n"


def test_a_file_in_either_form_draws_the_same_under_its_own_name(output: Output, ours: Path) -> None:
    torchs = ours.with_suffix(".csv")
    text.write(text.read(ours), torchs)
    assert torchs.read_text().startswith("0F0,0F1,0B0,")
    assert output(ours) == output(torchs)
    assert output(ours) == f"ours: 2 ranks, 2 stages, 3 microbatches\n\n{DRAWN}\n"


def test_durations_and_stages_per_rank_are_as_asked(output: Output) -> None:
    times = ("--forward", "2", "--backward", "1.5", "--weight", "0.5", "--hop", "0.25")
    drawn = output("interleaved", "--ranks", "2", "--microbatches", "4", "--stages-per-rank", "3", *times)
    schedule = schedule_registry.make("interleaved", 2, 4, stages_per_rank=3)
    each = Durations(2 / 3, 1.5 / 3, 0.5 / 3, 0.25)  # a rank's three stages share its layers
    expected = text_chart(simulate(schedule, each), peaks=prove(schedule).peaks)
    assert drawn == f"interleaved: 2 ranks, 6 stages, 4 microbatches\n\n{expected}\n"


def test_a_reader_that_leaves_early_is_no_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def gone(*_: object) -> None:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    monkeypatch.setattr(click, "echo", gone)
    for stream in ("stdout", "stderr"):  # click replaces them then
        monkeypatch.setattr(sys, stream, getattr(sys, stream))
    with pytest.raises(SystemExit):
        main(["draw", "pipeline", "1f1b", *SMALL])
    assert capsys.readouterr().err == ""


def test_without_a_name_all_are_listed_with_a_line_each(output: Output) -> None:
    lines = output().splitlines()
    assert [line.split()[0] for line in lines] == list(schedule_registry.METHODS)
    assert all(len(line.split()) > 2 for line in lines)


def test_all_draws_every_schedule_that_can_be_made_so_and_names_the_others(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    make = schedule_registry.make

    def all_but_gpipe(name: str, *numbers: Any, **others: Any) -> Schedule:
        if name == "gpipe":
            raise ScheduleError("too many microbatches")
        return make(name, *numbers, **others)

    monkeypatch.setattr(schedule_registry, "make", all_but_gpipe)
    with pytest.raises(SystemExit) as caught:
        main(
            [
                "draw",
                "pipeline",
                "--all",
                "--ranks",
                "2",
                "--microbatches",
                "4",
                "--output",
                str(tmp_path / "all.svg"),
            ]
        )
    shown = capsys.readouterr()
    assert caught.value.code == 0
    assert shown.err == "gpipe is left out: too many microbatches\n"
    picture = (tmp_path / "all.svg").read_text()
    for name in schedule_registry.METHODS:
        assert (f"{name}: 2 ranks, " in shown.out) == (name != "gpipe")
        assert (f">{name}: 2 ranks, " in picture) == (name != "gpipe")


def test_the_suffix_of_the_output_says_what_is_written(output: Output, ours: Path, tmp_path: Path) -> None:
    schedule = text.read(ours)
    for name in ("picture.png", "picture.svg", "trace.json", "schedule.csv", "schedule.txt"):
        assert f"written: {tmp_path / name}" in output(ours, "--output", tmp_path / name)
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    assert (
        ">ours: 2 ranks, 2 stages, 3 microbatches: bubble rate 25.00%"
        in (tmp_path / "picture.svg").read_text()
    )
    events = json.loads((tmp_path / "trace.json").read_text())
    assert events == json.loads(trace_json(simulate(schedule, Durations(1.0, 1.0, 1.0, 0.0))))
    assert text.read(tmp_path / "schedule.csv") == text.read(tmp_path / "schedule.txt") == schedule


def test_schedules_with_more_stages_per_rank_do_the_same_work_and_count_memory_in_whole_microbatches(
    output: Output, tmp_path: Path
) -> None:
    path = tmp_path / "both.svg"
    shown = output("1f1b", "zb-v", "--output", path)
    assert "bubble rate 27.27%, cost 33 s" in shown
    assert "bubble rate 0.00%, cost 24 s" in shown  # 8 microbatches of 3 s, and nothing else
    assert "chunks alive at most, by rank: 4  3  2  1" in shown
    assert "chunks alive at most, by rank: 8  8  8  8" in shown
    assert path.read_text().count(">4 alive<") == 1 + 4
    output("1f1b", "zb-v", "--output", path, "--until", "0.75")
    numbers = re.findall(r">(\d+)</text>", path.read_text())
    assert len(numbers) == 1 + 2 + 1  # rank 0's first forward, its first two; and on rank 1 one from 0.5 s on


def test_a_measured_timetable_is_proved_and_drawn_beside_the_priced_one(
    output: Output, ours: Path, tmp_path: Path
) -> None:
    measured = tmp_path / "run.json"
    write_timetable(simulate(text.read(ours), Durations(2, 1, 1)), measured)
    shown = output(ours, "--measured", measured, "--output", tmp_path / "both.svg")
    assert "measured: run.json: 2 ranks, 2 stages, 3 microbatches" in shown
    assert shown.count("chunks alive at most, by rank: 2  1") == 2
    assert ">measured: run.json: 2 ranks" in (tmp_path / "both.svg").read_text()
    alone = output("--measured", measured)
    # F took 2 s, and B with W 2 s: as it was, so it is to be expected.
    expected, as_it_was = alone.split("measured: ")
    assert f"measured: {as_it_was}".rstrip() in shown
    assert expected.splitlines()[0] == "predicted: 2 ranks, 2 stages, 3 microbatches"
    assert expected.splitlines()[1:] == as_it_was.splitlines()[1:]
    assert "ours" not in alone


def test_a_run_that_did_not_do_all_of_a_schedule_is_named(output: Output, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"ranks": [[["0F0", 0, 1]]]}')
    assert "0B0 is missing" in output("--measured", tmp_path / "run.json", status=1)


@pytest.mark.parametrize(
    ("written", "words"),
    [
        ("0F0 0B0\n1F0 1X0", "mine.txt:2:5: expected an action"),
        ("0F0 0B0\n1F0", "1B0 is missing"),
        ("0F0 0B0\n1B0 1F0", "1B0"),  # waits for itself
    ],
)
def test_a_file_that_is_wrong_is_not_drawn(written: str, words: str, output: Output, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text(written)
    assert words in output(tmp_path / "mine.txt", status=1)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("1f2b",), "no pipeline schedule '1f2b': "),
        (("mine.txt",), "there is no file mine.txt"),
        (("gpipe", *SMALL, "--memory-limit", "2"), "the limit is 2"),
        (("1f1b", "gpipe", "--output", "two.csv"), "two.csv has room for one schedule, not for 2"),
        (("1f1b", "gpipe", "--output", "two.json"), "two.json has room for one schedule, not for 2"),
        (("1f1b", "--output", "no/such/directory/x.svg"), "no/such/directory/x.svg"),
        (("1f1b", "--output", "x.xyz"), "--output x.xyz: Format 'xyz' is not supported"),
        (("1f1b", "--output", "nothing"), "--output nothing: Format '' is not supported"),
        (("--measured", "no-such-file.json"), "no-such-file.json"),
    ],
)
def test_what_cannot_be_drawn_is_named(arguments: tuple[str, ...], words: str, output: Output) -> None:
    assert words in output(*arguments, status=1)


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--ranks", "ours.txt has 2 ranks, but --ranks is 7: leave the option out"),
        ("--microbatches", "ours.txt has 3 microbatches, but --microbatches is 7"),
        ("--stages-per-rank", "ours.txt has 1 stages-per-rank, but --stages-per-rank is 7"),
    ],
)
def test_a_file_and_an_option_that_disagree_are_named(
    option: str, words: str, output: Output, ours: Path
) -> None:
    assert words in output(ours, option, "7", status=1)
    assert output(ours, *SMALL, "--stages-per-rank", "1")


def test_all_and_names_together_are_a_usage_error(output: Output) -> None:
    assert "leave the names out" in output("1f1b", "--all", status=2)


@pytest.mark.parametrize("option", ["--ranks", "--microbatches", "--stages-per-rank", "--memory-limit"])
def test_a_number_below_one_is_a_usage_error(option: str, output: Output) -> None:
    assert option in output("1f1b", option, "0", status=2)


@pytest.mark.parametrize("option", ["--forward", "--backward", "--weight", "--hop", "--until"])
def test_negative_seconds_are_a_usage_error(option: str, output: Output) -> None:
    assert option in output("1f1b", option, "-1", status=2)


ONE_STAGE = timetable("0F0@0-1 0F12@1-2 0B0@4-6 0B12@7-9", "1F0@1-2 1B0@2-4 1F12@4-5 1B12@5-7")

TWO_STAGES = timetable("0F0@5-6 2F0@7-8 2B0@8-9 2W0@9-10 0B0@11-12 0W0@12-13", "1F0@6-7 1B0@9-11")


def draw(panels: list[Panel], path: Path, *, until_s: float | None = None) -> None:
    save(figure_of(panels, until_s=until_s), PictureFile(path))


def hexadecimal(colour: Colour) -> str:
    return "#" + "".join(f"{round(255 * part):02x}" for part in colour)


def bars(svg: str) -> Counter[str]:
    """Count the bars of each colour."""
    return Counter(re.findall(r'style="fill: (#\w+); stroke: #ffffff; stroke-width: 0.4"', svg))


def texts(svg: str) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>", svg)


def test_every_action_is_a_bar_of_its_kind_and_stage(tmp_path: Path) -> None:
    draw([Panel("one", ONE_STAGE), Panel("two", TWO_STAGES)], tmp_path / "both.svg")
    full = {kind: hexadecimal(colour) for kind, colour in KIND_COLOURS.items()}
    light = {kind: hexadecimal(shade(colour, 1, 2)) for kind, colour in KIND_COLOURS.items()}
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
    assert bars(svg) == {hexadecimal(KIND_COLOURS["F"]): 4, hexadecimal(KIND_COLOURS["B"]): 2}
    assert "cut: bubble rate 33.33%, cost 9 s" in texts(svg)
    draw([Panel("cut", ONE_STAGE)], tmp_path / "cut.svg", until_s=0.5)
    assert bars((tmp_path / "cut.svg").read_text()) == {hexadecimal(KIND_COLOURS["F"]): 1}


def test_shades_of_a_ranks_stages_grow_lighter() -> None:
    shades = [shade(KIND_COLOURS["F"], place, 4) for place in range(4)]
    assert shades[0] == KIND_COLOURS["F"]
    assert sorted(shades) == shades
    assert len(set(shades)) == 4
    assert shade(KIND_COLOURS["B"], 0, 1) == KIND_COLOURS["B"]


@pytest.mark.parametrize(("suffix", "magic"), [("png", b"\x89PNG"), ("pdf", b"%PDF"), ("svg", b"<?xml")])
def test_the_suffix_says_the_format(suffix: str, magic: bytes, tmp_path: Path) -> None:
    path = tmp_path / f"picture.{suffix}"
    draw([Panel("idle too", timetable("0F0@0-1", ""), peaks=(1, 0))], path)
    assert path.read_bytes().startswith(magic)
