"""Gradients on GPUs: several ranks train what one does (`hpcpar run -n 2 -- -m pytest --with-mpi -m gpu`)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from hpcpar.comm import Communicator
from hpcpar.data_parallel import broadcast_parameters
from hpcpar.launch.binding import gpu_for
from hpcpar.partition import bounds
from tests.data_parallel.staged import staged, whole

pytestmark = [pytest.mark.mpi, pytest.mark.gpu, pytest.mark.timeout(300)]

SAMPLES, STEPS = 24, 5
TOLERANCE = 1e-9
"""Of float64; sums are made in other orders."""


@pytest.fixture
def gpu(world: Communicator) -> torch.device:
    here = [rank for rank, node in enumerate(world.nodes) if node == world.nodes[world.rank]]
    device = torch.device("cuda", gpu_for(here.index(world.rank), torch.cuda.device_count(), len(here)))
    torch.cuda.set_device(device)
    return device


def network(seed: int, device: torch.device) -> nn.Module:
    torch.manual_seed(seed)
    layers = nn.Sequential(nn.Linear(12, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 3))
    return layers.to(device=device, dtype=torch.float64)


def batch(step: int, device: torch.device) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(SAMPLES, 12, generator=generator, dtype=torch.float64)
    return inputs.to(device), inputs[:, :3].sin().to(device)


def make(parameters: list[nn.Parameter], kind: str) -> torch.optim.Optimizer:
    if kind == "sgd":
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    return torch.optim.AdamW(parameters, lr=1e-2)


def serial(device: torch.device, kind: str) -> list[Tensor]:
    model = network(0, device)
    optimizer = make(list(model.parameters()), kind)
    for step in range(STEPS):
        inputs, targets = batch(step, device)
        functional.mse_loss(model(inputs), targets).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_replicas_on_gpus_follow_one_process(
    world: Communicator, gpu: torch.device, stage: int, kind: str
) -> None:
    expected = serial(gpu, kind)
    model = network(0 if stage == 3 else world.rank, gpu)
    if stage < 3:
        broadcast_parameters(model, world)
    optimizer = staged(model, make(list(model.parameters()), kind), world, stage)
    start, stop = bounds(SAMPLES, world.size)[world.rank]
    for step in range(STEPS):
        inputs, targets = batch(step, gpu)
        # Of unequal shares, each by its part of the samples; the optimizer averages over ranks.
        loss = functional.mse_loss(model(inputs[start:stop]), targets[start:stop])
        (loss * ((stop - start) * world.size / SAMPLES)).backward()
        optimizer.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()
    inputs = batch(99, gpu)[0]
    with torch.no_grad():
        found = model(inputs)
        serial_model = network(0, gpu)
        for parameter, value in zip(serial_model.parameters(), expected, strict=True):
            parameter.copy_(value)
        difference = float((found - serial_model(inputs)).abs().max())
    assert max(world.allgather_object(difference)) < TOLERANCE


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_muon_on_gpus_follows_one_process(world: Communicator, gpu: torch.device, stage: int) -> None:
    """Gradients are the same to the last bit; kernels may differ with the alignment of what they read."""
    from tests.data_parallel.test_matrix_step import Network, gradients_of, muon_with_adamw, take_averages

    alone = Network(Communicator.alone()).to(gpu)
    plain = muon_with_adamw(alone)
    model = Network(Communicator.alone()).to(gpu)
    optimizer = staged(model, muon_with_adamw(model), world, stage)
    for step in range(STEPS):
        given = [gradients_of(step, rank, world.size) for rank in range(world.size)]
        take_averages(alone, given)
        plain.step()
        model(given[world.rank]).backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(whole(model), list(alone.parameters()), rtol=0, atol=1e-3)
