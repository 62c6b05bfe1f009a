"""A converted checkpoint goes on in torch alone as the training that was saved would have."""

from __future__ import annotations

import resource
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint import load as load_distributed

from hpcpar.checkpoint import save
from hpcpar.checkpoint.conversion import convert
from hpcpar.cli import main
from hpcpar.comm import Communicator, run_loopback
from hpcpar.data_parallel import DistributedOptimizer, fully_shard
from hpcpar.errors import CheckpointError

OPTIMIZERS: dict[str, Any] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, 0.01, momentum=0.9),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, 0.01, betas=(0.8, 0.9)),
}
lock = threading.Lock()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with lock:  # ranks are threads, which share torch's generator
            torch.manual_seed(0)
            self.first = nn.Linear(6, 5, dtype=torch.float64)
            self.second = nn.Linear(5, 6, dtype=torch.float64)
        self.again = nn.Linear(6, 5, bias=False, dtype=torch.float64)
        self.again.weight = self.first.weight
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.again(self.second(self.first(x)))
        return found.square().sum()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(3, 6, dtype=torch.float64)).backward()
        optimizer.step()


def saved(directory: Path, kind: str, stage: int) -> Path:
    """Save after two steps of two ranks, which have the same data."""

    def work(comm: Communicator) -> Path:
        model = Tied()
        if stage == 3:
            fully_shard(model, comm)
        inner = OPTIMIZERS[kind](model.parameters())
        optimizer = DistributedOptimizer(inner, model.named_parameters(), comm, zero_stage=stage)
        train(model, optimizer, 2)
        return save(directory, step=2, model=model, optimizer=optimizer, extra={"a": 1}, comm=comm)

    return run_loopback(2, work)[0]


def restored(kind: str, model: dict[str, Tensor], optimizer: dict[str, Any]) -> tuple[nn.Module, Any]:
    """A model and optimizer of torch's own, from states by names."""
    found = Tied()
    found.load_state_dict(model)
    stepped = OPTIMIZERS[kind](found.parameters())
    numbers = {name: number for number, (name, _) in enumerate(found.named_parameters())}
    states = {numbers[name]: state for name, state in optimizer["state"].items()}
    groups = [
        {**each, "params": [numbers[name] for name in each["params"]]} for each in optimizer["param_groups"]
    ]
    stepped.load_state_dict({"state": states, "param_groups": groups})
    return found, stepped


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_torch_goes_on_from_a_file_as_if_it_had_trained_itself(tmp_path: Path, kind: str, stage: int) -> None:
    path = saved(tmp_path / "run", kind, stage)
    assert convert(tmp_path / "run", tmp_path / "out" / "whole.pt") == path
    found = torch.load(tmp_path / "out" / "whole.pt", weights_only=True)
    assert (found["step"], found["extra"]) == (2, {"a": 1})
    assert [each.name for each in (tmp_path / "out").iterdir()] == ["whole.pt"]
    model, optimizer = restored(kind, found["model"], found["optimizer"])
    expected = Tied()
    serial = OPTIMIZERS[kind](expected.parameters())
    train(expected, serial, 5)
    train(model, optimizer, 3)
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=1e-12, atol=1e-12, msg=name)


@pytest.mark.parametrize("stage", [1, 3])
def test_all_formats_hold_the_same(tmp_path: Path, stage: int) -> None:
    saved(tmp_path / "run", "AdamW", stage)
    for name in ("a.pth", "a.safetensors", "a"):
        with pytest.raises(SystemExit) as ended:
            main(["checkpoint", "convert", str(tmp_path / "run"), str(tmp_path / name)])
        assert ended.value.code in (0, None)
    whole = torch.load(tmp_path / "a.pth", weights_only=True)
    plain = load_file(tmp_path / "a.safetensors")
    assert plain.keys() == whole["model"].keys() == Tied().state_dict().keys()
    model = {name: torch.zeros_like(value) for name, value in whole["model"].items()}
    states = {
        name: {key: torch.zeros_like(value) for key, value in state.items()}
        for name, state in whole["optimizer"]["state"].items()
    }
    into = {"model": model, "optimizer": {"state": states}}
    load_distributed(into, checkpoint_id=tmp_path / "a", no_dist=True)
    for name, value in whole["model"].items():
        assert torch.equal(plain[name], value)
        assert torch.equal(model[name], value)
    for name, state in whole["optimizer"]["state"].items():
        assert all(torch.equal(states[name][key], value) for key, value in state.items())


def test_what_cannot_be_converted_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    path = saved(tmp_path / "run", "SGD", 1)
    (tmp_path / "there.pt").write_text("mine")
    for target, words in (("there.pt", "exists"), ("a.onnx", "no known format"), ("b.pt", "is damaged")):
        if target == "b.pt":
            content = bytearray((path / "model.safetensors").read_bytes())
            content[-1] ^= 1
            (path / "model.safetensors").write_bytes(content)
        with pytest.raises(CheckpointError, match=words):
            convert(path, tmp_path / target)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["run", "there.pt"]
    assert (tmp_path / "there.pt").read_text() == "mine"


@pytest.mark.parametrize("target", ["a.safetensors", "a.pt", "a"])
def test_a_disk_without_room_is_told_and_nothing_is_left(target: str, tmp_path: Path) -> None:
    path = saved(tmp_path / "run", "SGD", 1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(CheckpointError, match=f"/{target} cannot be written: .*; make room there"):
            convert(path, tmp_path / "new" / target)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list((tmp_path / "new").iterdir())
