"""The command; what makes a checkpoint sound is tested in tests/checkpoint."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest
import torch
from torch import nn

from hpcpar.checkpoint import save
from hpcpar.cli import main
from hpcpar.cli.checkpoint import printable
from hpcpar.comm import Communicator, run_loopback
from hpcpar.data_parallel import DistributedOptimizer
from tests.command import Output

COMMAND = ("checkpoint",)


def sharded(directory: Path, step: int, size: int = 2) -> Path:
    """Save a model whose optimizer is sharded over `size` ranks."""

    def work(comm: Communicator) -> Path:
        model = nn.Linear(3, 4)
        inner = torch.optim.AdamW(model.parameters(), lr=0.5)
        optimizer = DistributedOptimizer(inner, model.named_parameters(), comm, zero_stage=1)
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        return save(directory, step=step, model=model, optimizer=optimizer, extra={"a": 1}, comm=comm)

    return run_loopback(size, work)[0]


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def status_of(*words: object) -> int:
    with pytest.raises(SystemExit) as caught:
        main([*COMMAND, *map(str, words)])
    assert isinstance(caught.value.code, int)
    return caught.value.code


def test_one_checkpoint_is_described(tmp_path: Path, output: Output) -> None:
    path = sharded(tmp_path, 7)
    lines = output("inspect", path).splitlines()
    nfiles = len(list(path.iterdir())) - 1
    assert lines[0].startswith(f"{path}: sound at a glance; step 7, {nfiles} files, ")
    assert lines[1:3] == [
        "saved by      2 ranks, tensor-parallel degree 1, 1 different set of layers",
        "extra         a",
    ]
    assert any(
        line.startswith("group 0") and "2 parameters; " in line and "lr = 0.5" in line for line in lines
    )
    assert "model         16 elements, 64 B; tensors: 2 of float32" in lines
    assert [line.split() for line in lines if line.endswith(" weight")] == [
        ["float32", "4", "x", "3", "whole", "weight"]
    ]
    moments = [line for line in lines if line.endswith("state/weight/exp_avg")]
    assert len(moments) == 1
    assert "1 regions, 2 pieces" in moments[0] or "whole" in moments[0]


def test_all_checkpoints_of_a_run_are_listed_and_their_faults_told(tmp_path: Path, output: Output) -> None:
    sound, damaged, incomplete = (sharded(tmp_path / "checkpoints", step) for step in (1, 2, 3))
    flip_a_bit(damaged / "model.safetensors")
    (incomplete / "state.json").unlink()
    said = output("inspect", tmp_path).splitlines()
    assert said[0].startswith(f"{sound}: sound at a glance; step 1, ")
    assert said[1].startswith(f"{damaged}: NOT SOUND: {damaged}/model.safetensors is damaged: its SHA-256")
    assert said[2].startswith(f"{incomplete}: NOT SOUND: {incomplete}/state.json should have ")
    assert len(said) == 3


def test_verify_finds_damage_that_dates_do_not_show(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = sharded(tmp_path, 1)
    assert status_of("verify", path) == 0
    assert capsys.readouterr().out.startswith(f"{path}: sound; step 1, ")
    flip_a_bit(path / "model.safetensors")
    os.utime(path / "model.safetensors", (0, 0))
    assert status_of("inspect", path) == 0
    assert "sound at a glance" in capsys.readouterr().out
    assert status_of("verify", path) == 1
    assert "NOT SOUND" in capsys.readouterr().out


def test_values_that_are_not_finite_are_told_beside_the_tensors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = nn.Linear(2, 1)
    nn.init.constant_(model.weight, math.nan)
    path = save(tmp_path, step=1, model=model, comm=Communicator.alone())
    assert status_of("inspect", path) == 0
    said = capsys.readouterr().out
    assert "has values that are no finite numbers, the first in weight" in said
    assert "model         3 elements" in said
    assert status_of("verify", tmp_path) == 1


def test_nothing_to_look_at_is_an_error(tmp_path: Path, output: Output) -> None:
    for verb in ("inspect", "verify"):
        assert f"{verb}: {tmp_path / 'x'} does not exist" in output(verb, tmp_path / "x", status=1)


def test_names_cannot_write_to_the_terminal() -> None:
    assert printable("a\x1b[2J\nb ü") == "a\\x1b[2J\\nb ü"
