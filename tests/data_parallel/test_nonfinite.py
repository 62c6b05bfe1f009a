"""NaN and infinity in one rank's gradients: all ranks skip the step, and learn who brought it."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW

from hpcpar.comm import Communicator, run_loopback
from hpcpar.data_parallel import DistributedOptimizer, fully_shard, summon_full_parameters
from hpcpar.data_parallel.nonfinite import NonfiniteGradients
from hpcpar.errors import DivergenceError, OperationError
from tests.data_parallel.staged import ranks

PRECISIONS = [None, "float32", "bfloat16", "float16"]


def distributed(
    comm: Communicator, stage: int, precision: str | None, optimizer: type = SGD, **options: Any
) -> tuple[nn.Module, DistributedOptimizer]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2))
    if stage == 3:
        fully_shard(model, comm, precision=precision)
    given = {} if stage == 3 else {"zero_stage": stage, "precision": precision}
    options = {"nonfinite": "skip", "bucket_bytes": 100, **given, **options}
    inner = optimizer(model.parameters(), lr=0.1)
    return model, DistributedOptimizer(inner, model.named_parameters(), comm, **options)


def backward(model: nn.Module, optimizer: DistributedOptimizer, *, broken: float = 1.0) -> None:
    """Run a backward in which the gradient of the second layer's output is multiplied by `broken`."""
    x = torch.ones(4, 3, dtype=next(model.parameters()).dtype)
    hook = model[2].register_forward_hook(  # type: ignore[index]
        lambda module, args, output: output.register_hook(lambda gradient: gradient * broken) and None
    )
    optimizer.scale_loss(model(x).float().square().sum() / 1000).backward()  # type: ignore[no-untyped-call]
    hook.remove()


def state(model: nn.Module, optimizer: DistributedOptimizer) -> list[Tensor]:
    with summon_full_parameters(model, write_back=False):
        values = [parameter.detach().clone() for parameter in model.parameters()]
    moments = [value for each in optimizer.state_dict()["state"].values() for value in each.values()]
    return values + [value.clone() for value in moments if isinstance(value, Tensor)]


@pytest.mark.parametrize("broken", [math.nan, math.inf])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_one_rank_brings_is_skipped_by_all_and_it_is_named(
    stage: int, precision: str | None, broken: float, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)

    def body(comm: Communicator) -> tuple[NonfiniteGradients | None, bool, int, bool]:
        model, optimizer = distributed(comm, stage, precision, AdamW)
        backward(model, optimizer)
        optimizer.step()
        assert optimizer.last_skip is None
        before = state(model, optimizer)
        optimizer.zero_grad()
        backward(model, optimizer, broken=broken if comm.rank == 1 else 1.0)
        optimizer.step()
        told, skipped = optimizer.last_skip, optimizer.scaler.skipped
        unchanged = all(map(torch.equal, before, state(model, optimizer)))
        optimizer.zero_grad()
        backward(model, optimizer)
        optimizer.step()
        goes_on = optimizer.last_skip is None and not torch.equal(before[0], state(model, optimizer)[0])
        return told, unchanged, skipped, goes_on

    assert run_loopback(3, body) == [(NonfiniteGradients("0.weight", (1,)), True, 1, True)] * 3
    (line,) = [each.getMessage() for each in caplog.records]
    assert "the average gradient of 0.weight is not finite: NaN or infinity came from rank 1" in line


@pytest.mark.parametrize("broken", [math.nan, math.inf])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@ranks(2)
def test_clipping_does_not_hide_which_parameter_it_was(comm: Communicator, stage: int, broken: float) -> None:
    model, optimizer = distributed(comm, stage, None)
    model[2].bias.register_hook(lambda gradient: gradient * broken)  # type: ignore[index, union-attr]
    backward(model, optimizer)
    optimizer.clip_grad_norm_(1.0)
    optimizer.step()
    assert optimizer.last_skip == NonfiniteGradients("2.bias", (0, 1))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@ranks(3)
def test_of_many_microbatches_one_is_enough(comm: Communicator, stage: int) -> None:
    model, optimizer = distributed(comm, stage, None)
    with optimizer.no_sync():
        backward(model, optimizer, broken=math.nan if comm.rank != 1 else 1.0)
    backward(model, optimizer)
    optimizer.step()
    assert optimizer.last_skip == NonfiniteGradients("0.weight", (0, 2))


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_sum_that_overflows_is_nobodys(stage: int, clips: bool) -> None:
    def body(comm: Communicator) -> NonfiniteGradients | None:
        model, optimizer = distributed(comm, stage, None)
        model[4].bias.register_hook(lambda gradient: torch.tensor([3e38, 0.0]))  # type: ignore[index, union-attr]
        backward(model, optimizer)
        if clips:
            optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        return optimizer.last_skip

    assert run_loopback(3, body) == [NonfiniteGradients("4.bias", ())] * 3
    assert "their sum is too large" in str(NonfiniteGradients("4.bias", ()))


@ranks(2)
def test_finite_gradients_whose_norm_overflows_are_clipped_to_zero_as_by_torch(comm: Communicator) -> None:
    model, optimizer = distributed(comm, 1, None)
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: torch.full_like(gradient, 1e25))
    backward(model, optimizer)
    assert optimizer.clip_grad_norm_(1.0).isinf()
    optimizer.step()
    assert optimizer.last_skip is None


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("precision", [None, "float16"])
@ranks(2)
def test_so_many_in_a_row_end_the_run(comm: Communicator, stage: int, precision: str | None) -> None:
    model, optimizer = distributed(comm, stage, precision, skip_limit=3)
    before = state(model, optimizer)
    for broken in (True, True, False, True, True):
        if not broken:  # ends the row
            optimizer.scaler.scale = 1.0
        backward(model, optimizer, broken=math.nan if broken and comm.rank == 1 else 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if not broken:
            before = state(model, optimizer)
    backward(model, optimizer, broken=math.nan if comm.rank == 1 else 1.0)
    with pytest.raises(
        DivergenceError, match=r"from rank 1; that was number 3 of such steps in a row \(skip_l"
    ):
        optimizer.step()
    assert optimizer.scaler.skipped == 5
    assert all(map(torch.equal, before, state(model, optimizer)))


def test_a_limit_below_one_is_refused() -> None:
    with pytest.raises(OperationError, match="skip_limit=0"):
        distributed(Communicator.alone(), 0, None, skip_limit=0)
