"""`hpcpar draw compare`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpcpar.planner.approaches import approaches
from hpcpar.planner.memory import STATE
from hpcpar.planner.model_shapes import ModelShape
from hpcpar.planner.stage_memory import ACTIVATIONS
from hpcpar.training.comparison import Measured
from hpcpar.training.prediction import PredictedLine, Prediction
from hpcpar.units import GiB, MiB
from tests.command import Output

COMMAND = ("draw", "compare")


def rows(told: str) -> dict[str, list[str]]:
    """Cells of each approach, by its name."""
    names = [each.name for each in approaches(8)]
    return {
        name: line[30:].split()
        for name in names
        for line in told.split("\n\n")[1].splitlines()
        if line.startswith(f"{name:<30}")
    }


def test_state_and_bytes_follow_the_formulas(output: Output) -> None:
    """ZeRO's 2 + 2 + 12 bytes, and bytes in parameters x 7/8: 2, 2, k + 1, 3k of k = 4 microbatches."""
    found = rows(output("llama3-8b", "--ranks", "8"))
    whole = ModelShape.named("llama3-8b").parameters()
    for name, state, sent in (
        ("data parallel", (2, 2, 12), 2),
        ("ZeRO-1", (2, 2, 12 / 8), 2),
        ("ZeRO-2", (2, 2 / 8, 12 / 8), 5),
        ("ZeRO-3", (2 / 8, 2 / 8, 12 / 8), 12),
    ):
        assert [float(cell) for cell in found[name][:3]] == pytest.approx(
            [width * whole / GiB for width in state], abs=0.06
        )
        assert float(found[name][6]) == pytest.approx(sent * 2 * whole * 7 / 8 / GiB, abs=0.06)
    assert float(found["ZeRO-2"][7]) == pytest.approx(9 / 5, abs=0.006)  # twice the batch: k + 1 = 9
    # 4 all-reduces of 2 x 7/8 of bsh values of two bytes, in 32 layers and for 32 sequences.
    layers = 4 * 2 * 7 / 8 * 8192 * 4096 * 2 * 32 * 32 / GiB
    assert float(found["tensor parallel"][6]) == pytest.approx(layers, abs=0.06)
    assert found["data parallel"][5].endswith("*")
    assert not found["ZeRO-3"][5].endswith("*")


def test_every_approach_has_a_line_or_a_reason(output: Output) -> None:
    told = output("tiny", "--ranks", "6")
    assert "cannot be: heads=4 do not divide among tp=6 ranks" in told
    assert set(rows(told)) == {each.name for each in approaches(6)}
    assert "experts, data parallel" not in output("tiny-moe", "--ranks", "2")


@pytest.fixture
def measured(tmp_path: Path) -> Path:
    """A comparison of one approach on 4 ranks, in 2 steps."""
    figures = [
        *(
            PredictedLine(what, "bytes", float(place * MiB), float(place * MiB + MiB / 2))
            for place, what in enumerate([*STATE, ACTIVATIONS], 1)
        ),
        PredictedLine("bytes sent", "bytes", 80.0 * MiB, 80.0 * MiB),
        PredictedLine("step", "seconds", 0.5, 0.25),
    ]
    one = Measured(
        "ZeRO-2",
        "dp=4",
        Prediction(tuple(figures)),
        40 * MiB,
        0,
        12.0,
        (0.2, 0.3),
        "tiny, 16 sequences of 128 tokens, float32",
        4,
        (1.5, 1.25),
    )
    path = tmp_path / "compare.jsonl"
    path.write_text(json.dumps(one.as_record()) + "\n")
    return path


def test_planned_stands_above_measured(measured: Path, output: Output) -> None:
    told = output("--measured", measured).splitlines()
    assert told[0] == "tiny, 16 sequences of 128 tokens, float32, measured on 4 ranks"
    assert told[3].split()[1:] == ["1.0", "2.0", "3.0", "4.0", "10.0", "10.0", "500.00", "ms"]
    assert told[4].split() == [
        *("measured:", "dp=4", "1.5", "2.5", "3.5", "4.5", "12.0", "10.0", "1.50"),
        *("250.00", "ms", "1.25", "12"),
    ]


def test_the_picture_has_the_figures_of_the_table(measured: Path, output: Output, tmp_path: Path) -> None:
    output("--measured", measured, "--output", f"{tmp_path}/compare.svg")
    drawn = (tmp_path / "compare.svg").read_text()
    assert all(f"> {figure}<" in drawn for figure in ("10", "12", "10 x1.50", "0.5", "0.25"))
    output("tiny", "--ranks", "2", "--output", f"{tmp_path}/compare.png")
    assert (tmp_path / "compare.png").read_bytes().startswith(b"\x89PNG")


def test_a_wrong_call_is_refused(output: Output, tmp_path: Path) -> None:
    assert "name a MODEL" in output(status=2)
    (tmp_path / "other.jsonl").write_text("{}\n")
    assert "has no lines of a comparison" in output("--measured", tmp_path / "other.jsonl", status=1)
    assert "did you mean 'tiny'" in output("tinny", status=1)
