"""`hpcpar draw balance`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpcpar.cli.draw_balance import read, table
from hpcpar.errors import ConfigError
from tests.command import Output

COMMAND = ("draw", "balance")


def run_of(directory: Path, loads: list[list[float]]) -> Path:
    """Write the metrics of a run with layers 1 and 2, and an evaluation between its steps."""
    directory.mkdir()
    lines = [
        {"step": step, "loss": 1.0, "experts": {"layer": [1, 2], "max_over_mean": of_step}}
        for step, of_step in enumerate(loads)
    ]
    lines.insert(1, {"step": 1, "held_out_loss": 2.0})
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return directory


def test_a_line_for_each_layer_counts_from_a_step_on(tmp_path: Path) -> None:
    run = run_of(tmp_path / "even", [[3.0, 2.0], [2.5, 1.0], [1.25, 1.5], [1.0, 1.75]])
    assert table([read(run)], 1).splitlines() == [
        "run                  layer  first step   median    worst   of steps from 1 on",
        "even                     1        3.00     1.25     2.50",
        "even                     2        2.00     1.50     1.75",
    ]


def test_a_run_without_experts_or_without_such_a_step_is_refused(tmp_path: Path) -> None:
    run = run_of(tmp_path / "even", [[3.0, 2.0]])
    with pytest.raises(ConfigError, match="--after 7, but even has steps up to 0"):
        table([read(run)], 7)
    (run / "metrics.jsonl").write_text('{"step": 0, "loss": 1.0}\n')
    with pytest.raises(ConfigError, match="no steps of a model with experts"):
        read(run)
    with pytest.raises(ConfigError, match="no steps of a model with experts"):
        read(tmp_path)


def test_runs_are_drawn_side_by_side(output: Output, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    runs = [str(run_of(tmp_path / name, [[2.0, 1.5], [1.0, 1.0]])) for name in ("a", "b")]
    picture = tmp_path / "balance.png"
    told = output(*runs, "--output", str(picture))
    assert [line.split()[0] for line in told.splitlines()[1:5]] == ["a", "a", "b", "b"]
    assert picture.read_bytes().startswith(b"\x89PNG")
