from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.command import Output
from tests.training.test_compared_runs import written

COMMAND = ["compare"]


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path]:
    other = {"config": {"train": {"steps": 4, "seed": 1}}}
    return written(tmp_path / "a", [5.0, 4.0, 2.5, 3.0]), written(tmp_path / "b", [5.0, 4.5, 3.5], **other)


def test_a_table_shows_what_differs_above_what_came_of_it(output: Output, runs: tuple[Path, Path]) -> None:
    rows = [line.split() for line in output(*runs).splitlines()]
    cells = {tuple(row[:-2]): row[-2:] for row in rows if len(row) > 2}
    assert cells["train.seed",] == ["0", "1"]
    assert ("train.steps",) not in cells
    assert cells["held-out", "loss"] == ["1.0000", "2.5000"]
    assert ["sent", "in", "a", "step,", "tp", "50", "B", "50", "B"] in rows
    assert ["step,", "median", "2.5", "s", "2.0", "s"] in rows
    assert ["quartiles", "1.8", "s", "to", "3.2", "s", "1.5", "s", "to", "2.5", "s"] in rows
    assert not [row for row in rows if row[:1] == ["MFU"]]
    assert "nothing differs" in output(runs[0], runs[0])


def test_json_has_the_same_for_programs(output: Output, runs: tuple[Path, Path]) -> None:
    found = json.loads(output(*runs, "--json"))
    assert found["runs"] == list(map(str, runs))
    assert found["differs"] == {"train.seed": [0, 1]}
    assert found["results"]["loss"] == [3.0, 3.5]


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_curves_are_drawn(output: Output, runs: tuple[Path, Path], tmp_path: Path, suffix: str) -> None:
    picture = tmp_path / f"curves.{suffix}"
    assert f"written: {picture}" in output(*runs, "--output", picture)
    assert picture.read_bytes().startswith(b"\x89PNG" if suffix == "png" else b"<?xml")


def test_what_cannot_be_compared_or_drawn_is_said_in_a_line(
    output: Output, runs: tuple[Path, Path], tmp_path: Path
) -> None:
    assert "no output directory of a run" in output(runs[0], tmp_path / "none", status=1)
    assert "--output x.doc" in output(*runs, "--output", "x.doc", status=1)
