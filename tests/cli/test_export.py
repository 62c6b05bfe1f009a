"""The command; what it writes is in tests/training/test_export.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcpar.cli import main
from hpcpar.comm import Communicator
from hpcpar.training import Run, parse

SMALL = (
    "train.steps=1",
    "train.sequence=16",
    "train.global_batch=2",
    "train.microbatch=2",
    "data.held_out=0.3",
)


def status_of(*words: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(["export", *words])
    assert isinstance(caught.value.code, int)
    return caught.value.code


def test_a_run_is_exported_and_told_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(8):
        (tmp_path / f"{number}.txt").write_text(f"document {number} " * 30)
    places = (
        f"data.paths={tmp_path}",
        f"data.cache={tmp_path / 'cache'}",
        f"output.directory={tmp_path / 'run'}",
    )
    sizes = ("model.hidden_size=16", "model.layers=1", "model.heads=2", "model.kv_heads=1", "train.threads=1")
    config = parse("", source="nothing", overrides=[*places, *sizes, *SMALL])
    Run(config, Communicator.alone()).train()

    assert status_of(str(tmp_path / "run"), str(tmp_path / "model"), "--dtype", "bfloat16") == 0
    parameters = config.model_config_for(256).parameters()
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000001"
    assert capsys.readouterr().out == (
        f"{parameters:,} parameters in bfloat16, of step 1 ({checkpoint}), are in {tmp_path / 'model'}\n"
    )
    modes = {file.stat().st_mode for file in (tmp_path / "model").iterdir()}
    assert len(modes) == 1, "whoever may read one file may read all"
    assert (tmp_path / "model" / "model.safetensors").exists()
    assert status_of(str(tmp_path / "run"), str(tmp_path / "model")) == 1
    assert "is there already" in capsys.readouterr().err
    assert status_of(str(tmp_path / "run"), "/proc/model") == 1
    assert "hpcpar export: cannot write /proc/model: [Errno 2] No such file" in capsys.readouterr().err
