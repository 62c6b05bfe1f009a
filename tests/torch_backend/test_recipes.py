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


@pytest.mark.parametrize(
    ("name", "words", "package"),
    [
        ("fsdp2", (), "torch"),
        ("tensor_parallel", (), "torch"),
        ("pipeline", (), "torch"),
        pytest.param("accelerate", (), "accelerate", marks=pytest.mark.long),
        pytest.param("fabric", (), "lightning", marks=pytest.mark.long),
        pytest.param("lightning", (), "lightning", marks=pytest.mark.long),
        pytest.param("hf_trainer", (), "accelerate", marks=pytest.mark.long),
        pytest.param("deepspeed", (), "deepspeed", marks=pytest.mark.long),
        pytest.param("deepspeed", ("3",), "deepspeed", marks=pytest.mark.long),
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


def serial_losses() -> list[float]:
    """Of torch_ddp.py's training, without any ranks."""
    torch.manual_seed(0)
    inputs = torch.randn(96, 32)
    targets = inputs.sum(1, keepdim=True).sin()
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    losses = []
    for _ in range(20):
        loss = (model(inputs) - targets).square().mean()
        losses.append(loss.item())
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter -= 0.1 * gradient
    return losses


def test_a_program_of_ddp_learns_alike_over_gloo_unchanged_over_ours_and_with_our_optimizer(
    run_ranks: RunRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = pytest.approx(serial_losses(), rel=0, abs=TOLERANCE)
    assert losses_of(run_ranks(2, str(Path(example("ddp")).with_name("ddp_by_hpcpar.py")))) == expected
    assert losses_of(over_gloo(2, example("ddp"))) == expected
    monkeypatch.setenv("BACKEND", "gloo")  # which it names, and does not get
    assert losses_of(run_ranks(2, "-m", "hpcpar.torch_backend", example("ddp"))) == expected


def test_a_checkpoint_of_two_ranks_is_gone_on_with_by_three(run_ranks: RunRanks, tmp_path: Path) -> None:
    program, ours, gloo = example("checkpoint"), str(tmp_path / "ours"), str(tmp_path / "gloo")
    saved = last_loss(run_ranks(2, program, ours))
    assert saved == pytest.approx(last_loss(over_gloo(2, program, gloo)), rel=0, abs=TOLERANCE)
    found = last_loss(run_ranks(3, program, ours))
    assert found < saved / 2  # from the beginning it would be the same again
    # One process goes on with what was saved over gloo.
    assert found == pytest.approx(last_loss(run_ranks(1, program, gloo)), rel=0, abs=TOLERANCE)


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


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_no_rank_listens_on_a_port_but_for_what_mpi_itself_opens(run_ranks: RunRanks) -> None:
    by_mpi = sockets(run_ranks(2, LISTENING))
    assert sorted(by_mpi) == ["0", "1"]
    assert sockets(run_ranks(2, LISTENING, example("ddp"))) == by_mpi
    assert all(count > 0 for count in sockets(over_gloo(2, LISTENING, example("ddp"))).values())


@pytest.mark.long
def test_fsdp_of_hugging_faces_trainer_is_refused_where_it_would_be_ddp() -> None:
    require("accelerate")
    done = run(sys.executable, example("hf_trainer"), "fsdp", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 1
    assert "on CPUs take torch_fsdp2.py" in done.stderr
