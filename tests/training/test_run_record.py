from __future__ import annotations

import json
import shlex
import subprocess
import sys
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

import hpcpar
from hpcpar.checkpoint.checkpoint_directory import by_step
from hpcpar.comm import run_loopback
from hpcpar.comm.preemption import Preemption
from hpcpar.errors import CheckpointError, DivergenceError
from hpcpar.training import Config, Run, trainer
from hpcpar.training.run_record import attempts_of, git_state
from tests.training.runs import MakeConfig, trained


def attempts(config: Config) -> list[dict[str, Any]]:
    return attempts_of(config.output.directory / "run.json")


def test_a_run_says_what_ran_where_by_which_software_and_that_it_ended(config_of: MakeConfig) -> None:
    config = config_of("optimizer.zero_stage=1")
    before = datetime.now(timezone.utc).replace(microsecond=0)
    trained(config, 2)
    (told,) = attempts(config)
    assert (told["status"], told["error"], told["first_step"], told["steps"]) == ("ended", None, 0, 8)
    started, ended = (datetime.fromisoformat(told[key]) for key in ("started", "ended"))
    assert before <= started <= ended <= datetime.now(timezone.utc)
    assert told["versions"]["hpcpar"] == hpcpar.__version__
    assert {name: told["versions"][name] for name in ("torch", "numpy", "mpi4py")} == {
        name: version(name) for name in ("torch", "numpy", "mpi4py")
    }
    assert sum(each["ranks"] for each in told["hosts"]) == 2
    assert told["command"] == shlex.join(sys.orig_argv)
    assert told["config"]["optimizer"]["zero_stage"] == 1
    assert told["config"]["mesh"]["dp"] == 2  # -1 in the file
    assert told["config"]["model"]["head_size"] == 8  # not in the file
    assert told["config"]["train"]["threads"] == 1


def test_a_resumed_run_adds_an_attempt(config_of: MakeConfig) -> None:
    trained(config_of("train.until=4"))
    trained(config_of("optimizer.clip_norm=2.0"), resume=True)
    first, second = attempts(config_of())
    assert [(each["first_step"], each["steps"]) for each in (first, second)] == [(0, 4), (4, 8)]
    assert [each["config"]["optimizer"]["clip_norm"] for each in (first, second)] == [1.0, 2.0]


def test_a_run_that_was_asked_to_stop_is_preempted(config_of: MakeConfig) -> None:
    def work(comm: Any) -> int:
        with Preemption(comm, ()) as preemption:
            preemption.request("a test")
            return Run(config_of(), comm, preemption=preemption).train().steps

    (steps,) = run_loopback(1, work)
    (told,) = attempts(config_of())
    assert (told["status"], told["steps"]) == ("preempted", steps)
    assert 0 < steps < 8


def test_a_run_that_fails_says_by_which_error_and_how_far_it_came(
    config_of: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = trainer.train_step
    calls = iter(range(100))

    def diverge(*words: Any, **options: Any) -> Any:
        if next(calls) == 6:
            raise DivergenceError("too much\nand more of it")
        return step(*words, **options)

    monkeypatch.setattr(trainer, "train_step", diverge)
    with pytest.raises(DivergenceError):
        trained(config_of())
    (told,) = attempts(config_of())
    assert told["status"] == "failed"
    assert told["error"] == "DivergenceError: step 6: too much"
    assert told["steps"] == 6  # lines of progress after 3, 4 and 6
    assert told["ended"] >= told["started"]


def test_an_attempt_that_was_killed_is_found_so_by_the_next(config_of: MakeConfig) -> None:
    trained(config_of("train.until=4"))
    path = config_of().output.directory / "run.json"
    record = json.loads(path.read_text())
    record["attempts"][0]["status"] = "running"
    path.write_text(json.dumps(record))
    trained(config_of(), resume=True)
    assert [each["status"] for each in attempts(config_of())] == ["failed", "ended"]
    assert "killed" in attempts(config_of())[0]["error"]


@pytest.mark.parametrize("resume", [False, True])
def test_a_run_whose_directory_another_one_took_saves_nothing_into_it(
    resume: bool, config_of: MakeConfig
) -> None:
    config = config_of("output.checkpoint_every=2", "train.until=6")
    other = config_of("train.until=4", "optimizer.learning_rate=0.001")

    def work(comm: Any) -> str:
        run = Run(config, comm)
        batch_of = run.batches.training_batch

        def meanwhile(step: int) -> Any:
            if step == 4 and comm.rank == 0:
                trained(other, resume=resume)
            return batch_of(step)

        run.batches.training_batch = meanwhile  # type: ignore[method-assign]
        with pytest.raises(CheckpointError, match=r"is another run's now.*directory of its own") as caught:
            run.train()
        return str(caught.value)

    assert len(set(run_loopback(2, work))) == 1
    *before, last = attempts(config)
    assert (last["status"], last["steps"], len(before)) == ("ended", 4, resume)
    assert max(by_step(config.output.directory / "checkpoints")) == 4


def test_a_file_that_is_no_record_is_begun_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert attempts_of(tmp_path / "run.json") == []
    for text in ("{", "[]", "{}"):
        (tmp_path / "run.json").write_text(text)
        assert attempts_of(tmp_path / "run.json") == []
    assert caplog.text.count("is no record of a run") == 3


def test_the_commit_is_told_and_whether_files_that_git_knows_are_changed(tmp_path: Path) -> None:
    def git(*words: str) -> str:
        identity = ("-c", "user.name=a", "-c", "user.email=a@example.org")
        command = ["git", "-C", str(tmp_path), *identity, *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    git("init", "-q")
    assert git_state(tmp_path) is None  # without a commit
    file = tmp_path / "file"
    file.write_text("one")
    git("add", "file")
    git("commit", "-qm", "one")
    (tmp_path / "other").write_text("unknown to git")
    assert git_state(tmp_path) == {"commit": git("rev-parse", "HEAD"), "clean": True}
    file.write_text("two")
    assert git_state(tmp_path) == {"commit": git("rev-parse", "HEAD"), "clean": False}
    assert git_state(Path("/")) is None
