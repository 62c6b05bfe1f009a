"""`backward_passes_per_step`, in every stage, and gradients that no backward has made."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hpcpar.comm import Communicator, run_loopback
from hpcpar.data_parallel import DistributedOptimizer, summon_full_parameters
from hpcpar.errors import OperationError
from tests.data_parallel.staged import staged

every_stage = pytest.mark.parametrize("stage", [0, 1, 2, 3])


def model_of() -> nn.Linear:
    model = nn.Linear(4, 3).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.arange(float(parameter.numel())).reshape(parameter.shape))
    return model


def distributed(stage: int, comm: Communicator, passes: int = 1) -> tuple[nn.Linear, DistributedOptimizer]:
    model = model_of()
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    return model, staged(model, inner, comm, stage, backward_passes_per_step=passes)


def values(model: nn.Module) -> list[list[float]]:
    with summon_full_parameters(model):
        return [parameter.flatten().tolist() for parameter in model.parameters()]


def rows(rank: int, number: int) -> torch.Tensor:
    """Whole numbers, so that sums are exact."""
    return torch.arange(4.0, dtype=torch.float64) + rank + 10 * number


@every_stage
@pytest.mark.parametrize("passes", [(1, 1), (3, 3), (3, 2), (2, 2)])
def test_the_sum_of_the_passes_is_averaged(stage: int, passes: tuple[int, int]) -> None:
    declared, taken = passes

    def body(comm: Communicator) -> list[list[float]]:
        model, optimizer = distributed(stage, comm, declared)
        for step in range(2):
            if step == 1:
                optimizer.set_backward_passes_per_step(taken)
            for number in range(taken):
                model(rows(comm.rank, number)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return values(model)

    reference = model_of()
    plain = torch.optim.SGD(reference.parameters(), lr=1.0)
    for _ in range(2):
        for rank in range(2):
            for number in range(taken):
                (reference(rows(rank, number)).sum() / 2).backward()
        plain.step()
        plain.zero_grad()
    assert run_loopback(2, body) == [values(reference)] * 2


@pytest.mark.parametrize("stage", [0, 1])
def test_backwards_inside_no_sync_are_passes_before_those_that_count(stage: int) -> None:
    # As of two steps of a pipeline that are to be one of the optimizer.
    def body(comm: Communicator) -> list[list[float]]:
        model, optimizer = distributed(stage, comm, 2)
        with optimizer.no_sync():
            for number in range(2):
                model(rows(comm.rank, number)).sum().backward()
        for number in range(2, 4):
            model(rows(comm.rank, number)).sum().backward()
        optimizer.step()
        return values(model)

    def at_once(comm: Communicator) -> list[list[float]]:
        model, optimizer = distributed(stage, comm)
        sum(model(rows(comm.rank, number)).sum() for number in range(4)).backward()
        optimizer.step()
        return values(model)

    assert run_loopback(2, body) == run_loopback(2, at_once)


@pytest.mark.parametrize("passes", [0, -1])
def test_there_is_at_least_one(passes: int) -> None:
    _, optimizer = distributed(0, Communicator.alone())
    with pytest.raises(OperationError, match=f"backward_passes_per_step={passes}"):
        optimizer.set_backward_passes_per_step(passes)
    with pytest.raises(OperationError, match=f"backward_passes_per_step={passes}"):
        distributed(1, Communicator.alone(), passes)


@every_stage
def test_gradients_set_by_hand_are_averaged(stage: int) -> None:
    def body(comm: Communicator) -> list[list[float]]:
        model, optimizer = distributed(stage, comm)
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 2.0 * comm.rank)
        optimizer.step()
        return values(model)

    expected = [[value - 1.0 for value in of] for of in values(model_of())]
    assert run_loopback(2, body) == [expected] * 2
