"""A run that takes no time, of a text that takes no room."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hpcpar.comm import run_loopback
from hpcpar.data_parallel import matrix_exchange, matrix_step, sharded_step
from hpcpar.planner import muon
from hpcpar.training import Config, Outcome, Run, parse
from tests.training.runs import MakeConfig, OfOneProcess

RUN = """
[model]
hidden_size = 16
layers = 1
heads = 2
kv_heads = 1
ffn_size = 32
[data]
held_out = 0.3
[train]
steps = 8
sequence = 16
global_batch = 5
microbatch = 2
precision = "float64"
threads = 1
evaluate_every = 4
held_out_batches = 2
[optimizer]
learning_rate = 1e-2
algorithm = "ring"
[output]
log_every = 3
"""


def configs_in(directory: Path) -> MakeConfig:
    """Configurations of runs below a directory, over a dozen small documents."""
    text = directory / "text"
    text.mkdir()
    for number in range(12):
        (text / f"{number}.txt").write_text(
            f"document {number}: " + "the cat sat on the mat. " * (20 + number)
        )

    def make(*overrides: str, name: str = "run") -> Config:
        places = (
            f"data.paths={text}",
            f"data.cache={directory / 'cache'}",
            f"output.directory={directory / name}",
        )
        return parse(RUN, source="run.toml", overrides=[*places, *overrides])

    return make


@pytest.fixture
def config_of(tmp_path: Path) -> MakeConfig:
    return configs_in(tmp_path)


@pytest.fixture(scope="session")
def of_one_process(tmp_path_factory: pytest.TempPathFactory) -> OfOneProcess:
    """`of_one_process(*overrides)`: what the run of one process leaves, once for all that compare with it."""

    @cache
    def trained(*overrides: str) -> tuple[Config, Outcome]:
        config = configs_in(tmp_path_factory.mktemp("alone"))(*overrides)
        return config, run_loopback(1, lambda comm: Run(config, comm).train())[0]

    return trained


@pytest.fixture
def in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Newton-Schulz iterate, and updates travel, in float64."""

    def iterated(update: Tensor, coefficients: Any, steps: int, eps: float) -> Tensor:
        a, b, c = coefficients
        x = update.double() if update.shape[0] <= update.shape[1] else update.double().T
        x = x / x.norm().clamp(min=eps)
        for _ in range(steps):
            gram = x @ x.T
            x = a * x + (b * gram + c * gram @ gram) @ x
        result: Tensor = x if update.shape[0] <= update.shape[1] else x.T
        return result

    monkeypatch.setattr("torch.optim._muon._zeropower_via_newtonschulz", iterated)
    for module in (matrix_step, matrix_exchange, sharded_step):
        monkeypatch.setattr(module, "TRAVELS_AS", torch.float64)
    monkeypatch.setattr(muon, "UPDATE_ITEMSIZE", torch.float64.itemsize)
