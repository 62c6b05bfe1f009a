from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import hpcpar
from hpcpar.cli.train import CANNOT_WORK, train
from hpcpar.comm import Communicator
from hpcpar.training.metrics import records_of

RUN = """
[model]
hidden_size = 8
layers = 1
heads = 2
kv_heads = 1
ffn_size = 16
[data]
held_out = 0.3
[train]
steps = 2
sequence = 8
global_batch = 2
threads = 1
held_out_batches = 1
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    text = tmp_path / "text"
    text.mkdir()
    for number in range(10):
        (text / f"{number}.txt").write_text(f"document {number} " * 20)
    path = tmp_path / "run.toml"
    places = f'[data]\npaths = ["{text}"]\ncache = "{tmp_path / "cache"}"\nheld_out = 0.3\n'
    output = f'[output]\ndirectory = "{tmp_path / "run"}"\n'
    path.write_text(RUN.replace("[data]\nheld_out = 0.3\n", places) + output)
    return path


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Result:
    """The command on one rank without MPI."""
    monkeypatch.setattr(hpcpar, "init", Communicator.alone, raising=False)
    return CliRunner().invoke(train, list(arguments), standalone_mode=False, catch_exceptions=False)


def test_a_file_and_overrides_become_a_run(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = call(monkeypatch, str(config), "train.steps=3")
    assert result.return_value == 0
    assert "held-out loss" in result.output
    records = records_of(tmp_path / "run" / "metrics.jsonl")
    assert [record["step"] for record in records if "loss" in record] == [0, 1, 2]


def test_resume_goes_on_from_the_checkpoint(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    call(monkeypatch, str(config))
    result = call(monkeypatch, str(config), "train.steps=3", "--resume")
    assert result.return_value == 0
    assert "resuming after step 2" in result.output


def test_a_file_that_is_not_there_is_said_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = call(monkeypatch, str(tmp_path / "none.toml"))
    assert result.return_value == CANNOT_WORK
    assert result.stderr.startswith(f"hpcpar train: cannot read the configuration {tmp_path / 'none.toml'}")
    assert len(result.stderr.splitlines()) == 1


def test_text_that_is_not_there_is_said_by_its_path(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = call(monkeypatch, str(config), f"data.paths={tmp_path / 'gone'}")
    assert result.return_value == CANNOT_WORK
    assert str(tmp_path / "gone") in result.stderr


def test_a_misspelt_key_ends_a_real_process_with_status_2_and_without_a_traceback(config: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hpcpar", "train", str(config), "train.stpes=3"],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == CANNOT_WORK
    assert done.stderr == (
        "hpcpar train: override 'train.stpes=3': there is no key train.stpes; did you mean train.steps?\n"
    )
