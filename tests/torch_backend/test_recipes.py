"""The examples of torch.distributed end with the loss that they have over gloo, and in one process.

All have batches of a global size, so that any number of ranks makes the same steps. What differs is the order
in which float32 is added up: 1e-6 is some thirty roundings of a loss around 0.3.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.command import run
from tests.torch_backend.recipes import (
    LIMIT_S,
    LISTENING,
    TOLERANCE,
    example,
    last_loss,
    over_gloo,
    require,
    sockets,
)

pytestmark = pytest.mark.timeout(400)

RunRanks = Callable[..., subprocess.CompletedProcess[str]]


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "words", "package"),
    [
        ("fsdp2", (), "torch"),
        ("tensor_parallel", (), "torch"),
        ("pipeline", (), "torch"),
        ("accelerate", (), "accelerate"),
        ("fabric", (), "lightning"),
        ("lightning", (), "lightning"),
        ("hf_trainer", (), "accelerate"),
        ("deepspeed", (), "deepspeed"),
        ("deepspeed", ("3",), "deepspeed"),
    ],
)
def test_an_example_ends_with_the_loss_of_gloo_and_of_one_process(
    run_ranks: RunRanks, name: str, words: tuple[str, ...], package: str
) -> None:
    require(package)
    found = last_loss(run_ranks(2, example(name), *words, timeout_s=LIMIT_S))
    assert found == pytest.approx(last_loss(over_gloo(2, example(name), *words)), rel=0, abs=TOLERANCE)
    alone = last_loss(run_ranks(1, example(name), *words, timeout_s=LIMIT_S))
    assert found == pytest.approx(alone, rel=0, abs=TOLERANCE)


def losses_of(done: subprocess.CompletedProcess[str]) -> list[float]:
    last_loss(done)
    return [float(loss) for loss in re.findall(r"^loss (\d\.\d{8})$", done.stdout, re.MULTILINE)]


def network() -> torch.nn.Sequential:
    return torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))


def serial_losses(
    model: torch.nn.Module, inputs: torch.Tensor, optimizer: torch.optim.Optimizer, steps: int
) -> list[float]:
    """Train without any ranks to the targets that the examples have; the loss of each step."""
    losses = []
    for _ in range(steps):
        loss = (model(inputs) - inputs.sum(1, keepdim=True).sin()).square().mean()
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return losses


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_program_of_ddp_learns_as_without_ranks_and_over_ours_no_rank_listens_but_for_mpi_itself(
    run_ranks: RunRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    inputs, model = torch.randn(96, 32), network()
    losses = serial_losses(model, inputs, torch.optim.SGD(model.parameters(), lr=0.1), 20)
    expected = pytest.approx(losses, rel=0, abs=TOLERANCE)
    gloo = over_gloo(2, LISTENING, example("ddp"))
    assert losses_of(gloo) == expected
    assert all(count > 0 for count in sockets(gloo).values())
    monkeypatch.setenv("BACKEND", "gloo")  # which it names, and does not get
    ours = run_ranks(2, "-m", "hpcpar.torch_backend", LISTENING, example("ddp"))
    assert losses_of(ours) == expected
    by_mpi = sockets(run_ranks(2, LISTENING))
    assert sorted(by_mpi) == ["0", "1"]
    assert sockets(ours) == by_mpi


def test_a_checkpoint_of_two_ranks_is_gone_on_with_by_three(run_ranks: RunRanks, tmp_path: Path) -> None:
    program, directory = example("checkpoint"), str(tmp_path / "saved")
    torch.manual_seed(0)
    model, inputs = network(), torch.randn(96, 32)
    losses = serial_losses(model, inputs, torch.optim.AdamW(model.parameters(), lr=0.01), 40)
    for size, expected in ((2, losses[19]), (3, losses[39])):
        found = last_loss(run_ranks(size, program, directory))
        assert found == pytest.approx(expected, rel=0, abs=TOLERANCE)


@pytest.mark.long
def test_a_program_that_names_no_backend_runs_as_it_is(run_ranks: RunRanks, tmp_path: Path) -> None:
    require("accelerate")
    text = Path(example("accelerate")).read_text()
    named = re.findall(r"^dist\.init_process_group.*\n", text, re.MULTILINE)
    program = tmp_path / "program.py"
    program.write_text(text.replace(*named, "").replace("\nmean =", "\nprint(dist.get_backend())\nmean ="))
    done = run_ranks(2, "-m", "hpcpar.torch_backend", str(program), timeout_s=LIMIT_S)
    alone = last_loss(run_ranks(1, example("accelerate"), timeout_s=LIMIT_S))
    assert last_loss(done) == pytest.approx(alone, rel=0, abs=TOLERANCE)
    assert done.stdout.count("hpcpar\n") == 2


@pytest.mark.long
def test_fsdp_of_hugging_faces_trainer_is_refused_where_it_would_be_ddp() -> None:
    require("accelerate")
    done = run(sys.executable, example("hf_trainer"), "fsdp", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 1
    assert "on CPUs take torch_fsdp2.py" in done.stderr
