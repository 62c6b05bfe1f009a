"""`hpcpar draw memory`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hpcpar.cli.draw_memory import read
from hpcpar.units import KiB, MiB
from tests.command import Output

COMMAND = ("draw", "memory")


def span(category: str, name: str, start_ms: float, stop_ms: float, **arguments: Any) -> Any:
    times = {"ts": start_ms * 1e3, "dur": (stop_ms - start_ms) * 1e3}
    return {"ph": "X", "name": name, "cat": category, "pid": 0, "tid": 0, "args": arguments, **times}


def counter(name: str, at_ms: float, **values: float) -> Any:
    return {"ph": "C", "name": name, "pid": 0, "ts": at_ms * 1e3, "args": values}


def state(at_ms: float, optimizer: float) -> Any:
    values = {"parameters": MiB, "gradients": MiB, "optimizer state": optimizer}
    return counter("model state", at_ms, **values)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two steps of one rank; in the second one two microbatches go forward before they go back."""
    events = [
        span("compute", "data", 0, 0),
        span("compute", "forward", 0, 10),
        span("compute", "backward", 10, 18),
        span("compute", "optimizer", 18, 20),
        state(22, 2 * MiB),
        span("compute", "0F0", 23, 26),  # of an evaluation
        span("compute", "data", 30, 30),
        span("compute", "0F0", 40, 50),
        counter("activations", 45, nbytes=4 * MiB),
        span("compute", "0F1", 50, 60),
        counter("activations", 55, nbytes=9 * MiB),
        span("units", "hold layers.0", 54, 58, nbytes=MiB),
        span("units", "gather layers.1", 57, 62, nbytes=2 * MiB),
        span("compute", "0B0", 60, 80),
        counter("activations", 70, nbytes=4 * MiB),
        span("compute", "0B1", 80, 100),
        counter("activations", 90, nbytes=0),
        span("compute", "optimizer", 110, 130),
        state(130.5, 8 * MiB),
    ]
    (tmp_path / "timeline.json").write_text(json.dumps({"traceEvents": events}))
    predicted = {"parameters": MiB, "gradients": MiB, "optimizer state": 2 * MiB, "activations": 8 * MiB}
    figures = [{"what": what, "predicted": nbytes} for what, nbytes in predicted.items()]
    (tmp_path / "summary.json").write_text(json.dumps({"prediction": {"figures": figures}}))
    return tmp_path


def test_a_step_by_hand(run: Path, output: Output) -> None:
    told = output(run).splitlines()
    # Of the state that the step begins with; 9 MiB of activations while 3 MiB of units are gathered.
    assert told[1].split("MiB")[0].split() == ["rank", "0", "1.0"]
    assert [float(word) for word in told[1].split()[2::2]] == [1, 1, 2, 9, 3, 16]
    assert [float(word) for word in told[2].split()[1::2]] == [1, 1, 2, 8]
    assert told[4] == "activations of rank 0, at most 9.0 MiB, in 100.0 ms"
    assert [len(line) for line in told[5:7]] == [72, 72]
    assert told[5][0] == " "
    assert told[5].count("█") == pytest.approx(72 * 15 / 100, abs=1)  # from 55 to 70 ms
    of_passes = [told[6].count(kind) / 72 for kind in "FB"]
    assert of_passes == pytest.approx([0.2, 0.4], abs=1.5 / 72)  # 20 and 40 ms of 100


def test_the_plan_rises_in_forwards_and_falls_in_backwards(run: Path) -> None:
    (found,) = read(run, 2)
    assert [(round(at * 1e3), nbytes / MiB) for at, nbytes in found.planned_activations] == [
        *[(0, 0), (10, 0), (20, 4), (20, 4), (30, 8)],
        *[(30, 8), (50, 4), (50, 4), (70, 0), (100, 0)],
    ]
    assert [(round(at * 1e3), nbytes / MiB) for at, nbytes in found.gathered] == [
        (24, 1),
        (27, 3),
        (28, 2),
        (32, 0),
    ]


def test_the_first_step_has_the_state_that_it_made(run: Path, output: Output) -> None:
    told = output(run, "--step", "1").splitlines()
    assert told[1].split()[2:8] == ["1.0", "MiB", "1.0", "MiB", "2.0", "MiB"]


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_a_picture(run: Path, suffix: str, output: Output, tmp_path: Path) -> None:
    output(run, "--output", f"{tmp_path}/memory.{suffix}")
    assert (tmp_path / f"memory.{suffix}").stat().st_size > 5 * KiB
    if suffix == "svg":
        drawn = (tmp_path / "memory.svg").read_text()
        assert all(f">{what}<" in drawn for what in ("activations", "gathered units", "optimizer state"))
        assert "planned" in drawn


def test_what_was_not_recorded_is_refused(run: Path, output: Output, tmp_path: Path) -> None:
    assert "the timeline has 2 steps" in output(run, "--step", "3", status=1)
    assert "the run had ranks 0 to 0" in output(run, "--rank", "1", status=1)
    older = tmp_path / "older.json"
    older.write_text(
        json.dumps({"traceEvents": [span("compute", name, 0, 1) for name in ("data", "optimizer")]})
    )
    assert "has no counters of memory" in output(older, "--step", "1", status=1)
