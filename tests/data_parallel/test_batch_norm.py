"""BatchNorm over the batches of several ranks: what one process makes of the whole batch."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from hpcpar.comm import Communicator, run_loopback
from hpcpar.data_parallel import SyncBatchNorm, summon_full_parameters
from hpcpar.errors import OperationError
from tests.data_parallel.staged import staged

RANKS = 2
ROUNDING = {"rtol": 1e-9, "atol": 1e-10}
"""64-bit: sums in another order, over some steps."""


def network() -> nn.Sequential:
    model = nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.BatchNorm1d(12, momentum=None)
    ).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


def without_statistics() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3, track_running_stats=False, affine=False)).double()


def images(step: int) -> Tensor:
    return torch.randn(8, 2, 4, 4, generator=torch.Generator().manual_seed(step), dtype=torch.float64) + 3


def own_part(batch: Tensor, comm: Communicator) -> Tensor:
    return batch.chunk(comm.size)[comm.rank]


def trained(model: nn.Module, comm: Communicator, stage: int) -> list[Tensor]:
    """Parameters, buffers and an evaluation after some steps."""
    optimizer = staged(model, torch.optim.SGD(model.parameters(), lr=0.1), comm, stage)
    for step in range(3):
        model(own_part(images(step), comm)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        evaluated = model.eval()(images(9))
    with summon_full_parameters(model):
        return [evaluated, *[tensor.clone() for tensor in model.state_dict().values()]]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_training_and_evaluation_are_those_of_one_process(stage: int) -> None:
    def body(comm: Communicator) -> list[Tensor]:
        return trained(SyncBatchNorm.convert_sync_batchnorm(network(), comm), comm, stage)

    expected = trained(network(), Communicator.alone(), 0)
    for found in run_loopback(RANKS, body):
        for mine, other in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, other, **ROUNDING)


@pytest.mark.parametrize("is_training", [True, False])
def test_without_running_statistics_evaluation_goes_by_the_whole_batch_too(is_training: bool) -> None:
    batch = torch.randn(6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    model = without_statistics()

    def body(comm: Communicator) -> Tensor:
        ours = SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(model), comm)
        output: Tensor = ours.train(is_training)(own_part(batch, comm))
        return output.detach()

    expected = model.train(is_training)(batch).detach()
    torch.testing.assert_close(torch.cat(run_loopback(RANKS, body)), expected, **ROUNDING)


def test_gradients_are_not_differentiated_again() -> None:
    def twice(comm: Communicator) -> None:
        x = own_part(images(0), comm).requires_grad_()
        output = SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm2d(2), comm).double()(x)
        torch.autograd.grad((output * torch.arange(4)).sum(), x, create_graph=True)

    with pytest.raises(OperationError, match=r"differentiated again .* SyncBatchNorm"):
        run_loopback(RANKS, twice)


def test_converting_keeps_parameters_mode_and_layers_that_are_used_twice() -> None:
    comm = Communicator.alone()
    shared = nn.BatchNorm1d(3)
    model = nn.ModuleDict({"first": shared, "second": nn.Sequential(shared), "third": nn.LayerNorm(3)}).eval()
    before = dict(model.named_parameters())
    converted = SyncBatchNorm.convert_sync_batchnorm(model, comm)
    assert converted is model
    assert type(model["first"]) is SyncBatchNorm
    assert model["second"][0] is model["first"]
    assert not model["first"].training
    assert {name: id(p) for name, p in model.named_parameters()} == {
        name: id(p) for name, p in before.items()
    }
    alone = SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm3d(2), comm)
    assert type(alone) is SyncBatchNorm
    assert SyncBatchNorm.convert_sync_batchnorm(alone, comm) is alone


class Activated(nn.BatchNorm2d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).relu()


@pytest.mark.parametrize(
    ("build", "match"),
    [
        (lambda: Activated(3), "Sequential.0 is a Activated, a BatchNorm with a forward of its own"),
        (nn.LazyBatchNorm1d, "a LazyBatchNorm1d that has no sizes yet"),
    ],
)
def test_what_would_be_lost_is_not_converted(build: Callable[[], nn.Module], match: str) -> None:
    with pytest.raises(OperationError, match=match):
        SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(build()), Communicator.alone())


def test_a_model_that_speaks_on_a_communicator_is_not_saved_as_a_whole() -> None:
    layer = SyncBatchNorm(3, Communicator.alone())
    with pytest.raises(OperationError, match=r"save its state_dict\(\)"):
        torch.save(layer, io.BytesIO())
    assert list(layer.state_dict()) == list(nn.BatchNorm1d(3).state_dict())
    assert copy.deepcopy(layer).batches is layer.batches
