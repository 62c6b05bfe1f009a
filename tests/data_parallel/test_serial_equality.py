"""Data parallelism follows one process with the same global batch, in loss and parameters.

float64, and a tolerance of 1e-10: sums are taken in another order, so the last bits differ, and 20 steps
carry them on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from hpcpar import partition
from hpcpar.comm import Communicator, run_loopback
from hpcpar.data_parallel import (
    DistributedOptimizer,
    broadcast_parameters,
    fully_shard,
    summon_full_parameters,
)
from hpcpar.errors import OperationError
from tests.grid import pairwise

STEPS = 20
SAMPLES = 36
CLIP = 8.0
TOLERANCE = 1e-10

Make = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
}


class Branches(nn.Module):
    """Branches side by side, walked in an order of their own on every rank, so hooks fire in that order."""

    def __init__(self, seed: int, first_branch: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.branches = nn.ModuleList(nn.Linear(5, 7) for _ in range(4))
        self.head = nn.Linear(7, 3)
        self.double()
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
        self.first_branch = first_branch

    def forward(self, inputs: Tensor) -> Tensor:
        walk = [self.branches[(self.first_branch + step) % 4] for step in range(4)]
        return self.head(sum(torch.tanh(branch(inputs)) for branch in walk))


class Course(NamedTuple):
    """What training went through: loss of each step, norms before clipping, parameters at the end."""

    losses: list[float]
    norms: list[float]
    parameters: list[Tensor]
    hook_order: list[str]


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    inputs = torch.randn(SAMPLES, 5, generator=generator, dtype=torch.float64)
    return inputs, torch.randn(SAMPLES, 3, generator=generator, dtype=torch.float64)


def serial(make: Make, clip: float) -> Course:
    model = Branches(seed=0)
    optimizer = make(list(model.parameters()))
    losses, norms = [], []
    for step in range(STEPS):
        inputs, targets = batch(step)
        loss = functional.mse_loss(model(inputs), targets)
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), clip)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return Course(losses, norms, [p.detach().clone() for p in model.parameters()], [])


def parallel(comm: Communicator, make: Make, clip: float, microbatches: int, set_to_none: bool) -> Course:
    model = Branches(seed=comm.rank, first_branch=comm.rank)
    broadcast_parameters(model, comm)
    optimizer = DistributedOptimizer(
        make(list(model.parameters())),
        model.named_parameters(),
        comm,
        bucket_bytes=700,
        first_bucket_bytes=100,
    )
    order: list[str] = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))
    start, stop = partition.bounds(SAMPLES, comm.size)[comm.rank]
    losses, norms = [], []
    for step in range(STEPS):
        inputs, targets = (tensor[start:stop].chunk(microbatches) for tensor in batch(step))
        total = torch.zeros(1, dtype=torch.float64)
        for number, (part, target) in enumerate(zip(inputs, targets, strict=True)):
            loss = functional.mse_loss(model(part), target) / microbatches
            total += loss.detach()
            if number < microbatches - 1:
                with optimizer.no_sync():
                    loss.backward()
            else:
                loss.backward()
        norms.append(float(optimizer.clip_grad_norm_(clip)))
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
        losses.append(comm.allreduce(total, "average").item())
    return Course(losses, norms, [p.detach().clone() for p in model.parameters()], order)


def assert_same_course(found: Course, expected: Course) -> None:
    torch.testing.assert_close(found.losses, expected.losses, rtol=TOLERANCE, atol=TOLERANCE)
    torch.testing.assert_close(found.norms, expected.norms, rtol=TOLERANCE, atol=TOLERANCE)
    torch.testing.assert_close(found.parameters, expected.parameters, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize(("size", "optimizer", "microbatches"), pairwise([1, 2, 3, 4], OPTIMIZERS, [1, 3]))
def test_replicas_follow_one_process(size: int, optimizer: str, microbatches: int) -> None:
    expected = serial(OPTIMIZERS[optimizer], CLIP)
    assert min(expected.norms) < CLIP < max(expected.norms), "clipping is to be seen at work and at rest"
    courses = run_loopback(
        size, lambda comm: parallel(comm, OPTIMIZERS[optimizer], CLIP, microbatches, set_to_none=True)
    )
    for course in courses:
        assert_same_course(course, expected)
        assert all(torch.equal(a, b) for a, b in zip(course.parameters, courses[0].parameters, strict=True))
    assert len({tuple(course.hook_order) for course in courses}) == size, "hooks fire in other orders"


def test_buckets_filled_with_zeros_do_as_well_as_fresh_gradients() -> None:
    expected = serial(OPTIMIZERS["adamw"], CLIP)
    for course in run_loopback(
        2, lambda comm: parallel(comm, OPTIMIZERS["adamw"], CLIP, 3, set_to_none=False)
    ):
        assert_same_course(course, expected)


@pytest.mark.mpi
@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_replicas_on_mpi_follow_one_process(world: Communicator, optimizer: str, microbatches: int) -> None:
    expected = serial(OPTIMIZERS[optimizer], CLIP)
    course = parallel(world, OPTIMIZERS[optimizer], CLIP, microbatches, set_to_none=True)
    for found in world.allgather_object(course):
        assert_same_course(found, expected)


IGNORED = -100

VALID = (((7, 1), (0, 0)), ((0, 3), (5, 2)), ((0, 0), (0, 4)))
"""Labels that count, by step, rank and microbatch, of 9 each."""


def labels_of(step: int, rank: int, number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + 10 * rank + number)
    inputs = torch.randn(9, 5, generator=generator, dtype=torch.float64)
    labels = torch.randint(3, (9,), generator=generator)
    labels[VALID[step][rank][number] :] = IGNORED
    return inputs, labels


@pytest.mark.smoke
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_sums_times_the_loss_factor_are_the_mean_of_unequal_parts(stage: int) -> None:
    def body(comm: Communicator) -> list[Tensor]:
        model = Branches(seed=0)
        if stage == 3:
            fully_shard(model, comm)
        inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer = DistributedOptimizer(inner, model.named_parameters(), comm, zero_stage=stage)
        for step in range(len(VALID)):
            parts = [labels_of(step, comm.rank, number) for number in range(2)]
            factor = optimizer.loss_factor(sum((labels != IGNORED).sum() for _, labels in parts))
            for number, (inputs, labels) in enumerate(parts):
                total = functional.cross_entropy(model(inputs), labels, ignore_index=IGNORED, reduction="sum")
                with optimizer.no_sync() if number == 0 else nullcontext():
                    (total * factor).backward()
            optimizer.clip_grad_norm_(0.5)
            optimizer.step()
            optimizer.zero_grad()
        with summon_full_parameters(model):
            return [parameter.detach().clone() for parameter in model.parameters()]

    model = Branches(seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(len(VALID)):
        parts = [labels_of(step, rank, number) for rank in range(2) for number in range(2)]
        inputs, labels = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        functional.cross_entropy(model(inputs), labels, ignore_index=IGNORED).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    for found in run_loopback(2, body):
        for mine, expected in zip(found, model.parameters(), strict=True):
            torch.testing.assert_close(mine, expected.detach(), rtol=TOLERANCE, atol=TOLERANCE)


def test_a_loss_factor_of_nothing_is_none_and_of_no_counts_an_error_on_every_rank() -> None:
    def body(comm: Communicator) -> float:
        model = nn.Linear(2, 1)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = DistributedOptimizer(inner, model.named_parameters(), comm)
        for odd in (-1.0, float("nan")):
            with pytest.raises(OperationError, match="loss_factor"):
                optimizer.loss_factor(odd if comm.rank else 2)
        return optimizer.loss_factor(torch.tensor(0))

    assert run_loopback(2, body) == [0.0, 0.0]
