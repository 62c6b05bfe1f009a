"""The model of a run is exported once for each checkpoint and type; the last run is found."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models

from hpcpar.cli.serve.served_model import last_run, served_model
from hpcpar.errors import CheckpointError, ConfigError, DataError
from tests.cli.serve.small_run import train


def test_a_run_is_exported_once_in_a_type_that_vllm_has(trained: Path) -> None:
    model = served_model(trained, dtype=None)
    assert re.fullmatch(r"step-00000001-float32-[0-9a-f]{8}", model.directory.name)
    assert model.directory.parent == trained / "served"
    assert (model.name, model.dtype) == ("small", "float32")
    assert model.origin.endswith("step-00000001, in float32; a token is a byte")
    weights = model.directory / "model.safetensors"
    assert model.weight_nbytes == weights.stat().st_size
    first_ns = weights.stat().st_mtime_ns
    assert served_model(trained, dtype=None).directory == model.directory
    checkpoint = trained / "checkpoints" / "step-00000001"
    again = served_model(checkpoint, dtype=None)
    assert (again.directory, again.name) == (model.directory, "small")
    assert weights.stat().st_mtime_ns == first_ns
    other = served_model(trained, dtype="bfloat16")
    assert (other.dtype, other.directory.parent) == ("bfloat16", model.directory.parent)
    assert other.weight_nbytes < model.weight_nbytes


def test_another_training_in_the_same_place_is_exported_anew(
    trained: Path, trained_anew: Callable[[], None]
) -> None:
    first = (served_model(trained, dtype=None).directory / "model.safetensors").read_bytes()
    trained_anew()
    assert first != (served_model(trained, dtype=None).directory / "model.safetensors").read_bytes()


def test_a_model_directory_is_served_as_it_is(trained: Path) -> None:
    exported = served_model(trained, dtype=None).directory
    model = served_model(exported, dtype="bfloat16")
    assert (model.directory, model.name) == (exported, exported.name)


def test_the_last_run_is_that_of_the_newest_checkpoint(trained: Path, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    assert last_run(runs) == trained
    newer = runs / "ray-7" / "training" / "checkpoints" / "step-00000002" / "manifest.json"
    newer.parent.mkdir(parents=True)
    newer.write_text("{}")
    now_s = (trained / "checkpoints" / "step-00000001" / "manifest.json").stat().st_mtime
    os.utime(newer, (now_s + 5, now_s + 5))
    assert last_run(runs) == runs / "ray-7" / "training"
    os.utime(newer, (now_s - 5, now_s - 5))
    assert last_run(runs) == trained


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no trained model in .*/runs/: train one first .`make train`"):
        last_run(tmp_path / "runs")
    with pytest.raises(ConfigError, match=r"no directory .*/none: name a run of `hpcpar train`, or a model"):
        served_model(tmp_path / "none", dtype=None)
    with pytest.raises(CheckpointError, match=re.escape(str(tmp_path))):
        served_model(tmp_path, dtype=None)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json cannot be read"):
        served_model(tmp_path, dtype=None)


def test_a_tokenizer_that_has_gone_is_to_be_named_at_the_export(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    vocabulary = {letter: number for number, letter in enumerate("abcdefghijklmnopqrstuvwxyz 0123456789")}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary | {"<eos>": 37}, merges=[]))
    tokenizer.save(str(file))
    run = train(tmp_path, f"data.tokenizer={file}", "data.eos_token=<eos>")
    model = served_model(run, dtype=None)
    assert model.origin.endswith("in float32")
    shutil.rmtree(model.directory)
    file.unlink()
    with pytest.raises(DataError, match=r"hpcpar export \S+ DIRECTORY --tokenizer FILE"):
        served_model(run, dtype=None)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_somebody_elses_run_is_to_be_exported_elsewhere(trained: Path) -> None:
    trained.chmod(0o555)
    with pytest.raises(ConfigError, match="export where you may write, `hpcpar export"):
        served_model(trained, dtype=None)
