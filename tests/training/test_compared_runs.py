from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hpcpar.errors import ConfigError
from hpcpar.training.compared_runs import compare, read_run
from tests.training.runs import MakeConfig, trained


def written(directory: Path, losses: list[float], **attempt: Any) -> Path:
    """Return a run of steps that took 1, 2, 3 … seconds, evaluated after each two steps at 2 less."""
    directory.mkdir()
    records: list[dict[str, Any]] = []
    for step, loss in enumerate(losses):
        sent = {"dp": 1000.0 + step, "tp": 50.0}
        records.append({"step": step, "loss": loss, "step_s": step + 1.0, "tokens_per_s": 8 / (step + 1)})
        records[-1] |= {"tokens": 8 * (step + 1), "nbytes_sent": sent}
        if step % 2:
            records.append({"step": step + 1, "held_out_loss": loss - 2})
    (directory / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    facts = {
        "status": "ended",
        "error": None,
        "launcher": "slurm",
        "parameters": 10,
        "versions": {"torch": "2.9", "mpi": "Open MPI 5"},
        "hosts": [{"host": "a", "ranks": 2}, {"host": "b", "ranks": 2}],
        "git": {"commit": "abc", "clean": True},
        "config": {"train": {"steps": 4, "seed": 0}, "output": {"directory": str(directory)}},
        **attempt,
    }
    (directory / "run.json").write_text(json.dumps({"attempts": [{"status": "failed"}, facts]}))
    return directory


def test_figures_are_those_of_the_lines(tmp_path: Path) -> None:
    run = read_run(written(tmp_path / "a", [5.0, 4.0, 2.5, 3.0]))
    assert run.seconds() == [1, 3, 6, 10]
    found = {name: values[0] for name, values in compare([run])["results"].items()}
    assert (found["status"], found["steps"], found["tokens"]) == ("ended", 4, 32)
    assert (found["loss"], found["lowest loss"]) == (3.0, 2.5)
    assert (found["held-out loss"], found["lowest held-out loss"], found["after step"]) == (1.0, 1.0, 4)
    assert (found["step_s"], found["step_s, quartiles"]) == (2.5, [1.75, 3.25])
    assert found["tokens_per_s"] == (8 / 2 + 8 / 3) / 2
    assert (found["nbytes_sent, dp"], found["nbytes_sent, tp"]) == (1001.5, 50)
    assert found["peak_nbytes"] is None


def test_only_what_differs_is_told_and_the_place_of_the_files_is_not(tmp_path: Path) -> None:
    one = written(tmp_path / "a", [5.0])
    other = written(
        tmp_path / "b",
        [5.0],
        versions={"torch": "2.10", "mpi": "Open MPI 5"},
        hosts=[{"host": "a", "ranks": 4}],
        git=None,
        config={"train": {"steps": 9, "seed": 0}, "output": {"directory": "elsewhere"}},
    )
    assert compare([read_run(each) for each in (one, other)])["differs"] == {
        "hosts": [["a", "b"], ["a"]],
        "git.commit": ["abc", None],
        "git.clean": [True, None],
        "versions.torch": ["2.9", "2.10"],
        "train.steps": [4, 9],
    }


def test_a_run_of_an_earlier_version_or_one_that_has_just_begun_is_compared(tmp_path: Path) -> None:
    begun = written(tmp_path / "a", [])
    old = written(tmp_path / "b", [5.0])
    (old / "run.json").unlink()
    found = compare([read_run(begun), read_run(old)])
    assert found["results"]["loss"] == [None, 5.0]
    assert found["results"]["step_s, quartiles"] == [None, [1.0, 1.0]]
    assert found["results"]["status"] == ["ended", None]
    assert found["differs"]["train.steps"] == [4, None]


def test_a_directory_without_metrics_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no metrics\.jsonl"):
        read_run(tmp_path)


def test_runs_of_the_trainer_are_compared_by_what_was_changed(config_of: MakeConfig) -> None:
    steps = ("train.steps=2", "train.evaluate_every=0")
    one = config_of(*steps, name="one")
    other = config_of(*steps, "optimizer.zero_stage=1", "optimizer.algorithm=ring", name="other")
    outcomes = [trained(each, 2)[0] for each in (one, other)]
    found = compare([read_run(each.output.directory) for each in (one, other)])
    assert found["differs"] == {"optimizer.zero_stage": [0, 1]}
    results = found["results"]
    assert results["held-out loss"] == [each.held_out_loss for each in outcomes]
    assert results["peak_nbytes"] == [float(each.memory.worst.peak_nbytes) for each in outcomes]
