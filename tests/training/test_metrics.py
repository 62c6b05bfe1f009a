from __future__ import annotations

import io
import json
import math
from datetime import datetime
from pathlib import Path

import pytest
from rich.console import Console

from hpcpar.training.metrics import Metrics, draw_losses, keep_lines_before, records_of, running_mean


def record(step: int) -> dict[str, float]:
    return {"step": step, "loss": 5.0 - step, "tokens_per_s": 1000.0}


def test_every_step_and_every_held_out_loss_is_a_line_of_json(tmp_path: Path) -> None:
    with Metrics(tmp_path, first_step=0, steps=3, console=None) as metrics:
        metrics.steps([record(0), record(1)])
        metrics.held_out(2, 4.5)
        metrics.steps([record(2)])
    lines = records_of(tmp_path / "metrics.jsonl")
    datetime.fromisoformat(lines[2].pop("time"))
    assert lines == [
        record(0),
        record(1),
        {"step": 2, "held_out_loss": 4.5},
        record(2),
    ]


def test_a_resumed_run_drops_what_it_will_train_again_and_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [
        record(0),
        record(1),
        {"step": 2, "held_out_loss": 4.5},
        record(2),
        {"step": 3, "held_out_loss": 4},
    ]
    path.write_text("\n".join(json.dumps(line) for line in lines) + '\n{"step": 3, "lo')
    keep_lines_before(path, 2)
    assert records_of(path) == lines[:3]


def test_a_run_that_is_only_evaluated_drops_that_loss_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [{"step": 1, "held_out_loss": 4.5}, record(1), {"step": 2, "held_out_loss": 4.0}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for _ in range(2):
        with Metrics(tmp_path, first_step=2, steps=2, console=None) as metrics:
            metrics.held_out(2, 4.0)
    found = records_of(path)
    assert "time" in found[-1]
    assert [{key: each[key] for key in each if key != "time"} for each in found] == lines


def refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is no JSON")


def test_what_is_no_finite_number_is_null_and_so_it_stays_when_a_run_is_resumed(tmp_path: Path) -> None:
    skipped = [record(0) | {"gradient_norm": math.nan}, record(1) | {"gradient_norm": math.inf}]
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps(skipped[0]) + "\n")
    with Metrics(tmp_path, first_step=1, steps=2, console=None) as metrics:
        metrics.steps(skipped[1:])
        metrics.held_out(2, math.nan)
    lines = [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]
    del lines[2]["time"]
    assert lines == [
        record(0) | {"gradient_norm": None},
        record(1) | {"gradient_norm": None},
        {"step": 2, "held_out_loss": None},
    ]
    draw_losses(lines, tmp_path / "loss.png", vocabulary=256)


def test_a_new_run_starts_with_an_empty_file(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(json.dumps(record(0)) + "\n")
    with Metrics(tmp_path, first_step=0, steps=3, console=None):
        pass
    assert records_of(tmp_path / "metrics.jsonl") == []


def test_a_batch_job_is_told_lines_with_loss_speed_and_time_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = io.StringIO()
    console = Console(file=output, force_terminal=False, width=100)
    with Metrics(tmp_path, first_step=0, steps=3, console=console) as metrics:
        metrics.steps([record(0)])  # too soon after the start for a line
        monkeypatch.setattr("hpcpar.training.metrics.LINE_INTERVAL_S", 0.0)
        metrics.steps([record(1)])
        metrics.steps([record(2)])
        metrics.held_out(3, 4.5)
    said = output.getvalue().splitlines()
    assert said[0].startswith("step 2/3  loss 4.000  1,000 tokens/s  ")
    assert said[0].endswith(" left")
    assert said[1:] == ["step 3/3  loss 3.000  1,000 tokens/s", "step 3: held-out loss 4.500 nats"]


def test_a_terminal_has_a_bar(tmp_path: Path) -> None:
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=100)
    with Metrics(tmp_path, first_step=0, steps=2, console=console) as metrics:
        metrics.steps([record(0)])
    assert "1/2" in output.getvalue()
    assert "1,000 tokens/s" in output.getvalue()


def test_losses_become_a_picture(tmp_path: Path) -> None:
    draw_losses(
        [record(0), record(1), {"step": 2, "held_out_loss": 4.5}], tmp_path / "loss.png", vocabulary=256
    )
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_no_losses_are_a_picture_too(tmp_path: Path) -> None:
    draw_losses([], tmp_path / "loss.png", vocabulary=256)
    assert (tmp_path / "loss.png").stat().st_size > 0


def test_a_running_mean_starts_at_the_first_value_and_keeps_a_constant() -> None:
    assert running_mean([], 0.9) == []
    assert running_mean([4.0], 0.9) == pytest.approx([4.0])
    assert running_mean([2.0] * 5, 0.9) == pytest.approx([2.0] * 5)
    assert running_mean([0.0, 1.0], 0.5) == pytest.approx([0.0, 0.5 / 0.75])
