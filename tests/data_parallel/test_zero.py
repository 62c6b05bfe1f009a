"""Every stage follows one process with the same global batch, and sends what theory says.

float64, and a tolerance of 1e-10: sums are taken in another order, so the last bits differ, and the steps
carry them on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from hpcpar import partition
from hpcpar.comm import Communicator, run_loopback
from hpcpar.data_parallel import (
    DistributedOptimizer,
    broadcast_parameters,
    summon_full_parameters,
)
from hpcpar.errors import OperationError
from tests.data_parallel.staged import ResidualLayer, fill, ranks, staged, whole
from tests.grid import pairwise

STEPS = 10
STEPS_ON_MPI = 4
"""Few: ranks that are threads take all of them."""

SAMPLES = 72
CLIP = 10.0
TOLERANCE = 1e-10
LIMITS = {"bucket_bytes": 700, "first_bucket_bytes": 100}

Make = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
}


class Network(nn.Module):
    """Layers in a list, a head that is tied to the first matrix, a parameter that is never used."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.embed = nn.Linear(5, 7, bias=False)
        self.layers = nn.ModuleList(ResidualLayer(7, 9) for _ in range(3))
        self.head = nn.Linear(7, 5)
        self.head.weight = nn.Parameter(torch.empty(5, 7))
        self.unembed = nn.Linear(7, 5, bias=False)
        self.embed.weight = nn.Parameter(torch.empty(7, 5))
        self.unembed.weight = self.head.weight
        self.unused = nn.Parameter(torch.empty(3))
        fill(self.double(), seed)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.embed(inputs)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden) + self.unembed(hidden)


class Branches(nn.Module):
    """Branches side by side, walked in an order of their own on every rank, so hooks fire in that order."""

    def __init__(self, seed: int, first_branch: int = 0) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(5, 7) for _ in range(4))
        self.head = nn.Linear(7, 5)
        fill(self.double(), seed, 1.0)
        self.first_branch = first_branch

    def forward(self, inputs: Tensor) -> Tensor:
        walk = [self.branches[(self.first_branch + step) % 4] for step in range(4)]
        return self.head(sum(torch.tanh(branch(inputs)) for branch in walk))


class Course(NamedTuple):
    """Own part of each step's loss, norms before clipping, parameters at the end."""

    losses: list[float]
    norms: list[float]
    parameters: list[Tensor]


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    inputs = torch.randn(SAMPLES, 5, generator=generator, dtype=torch.float64)
    return inputs, torch.randn(SAMPLES, 5, generator=generator, dtype=torch.float64)


def train(
    model: nn.Module,
    optimizer: Any,
    comm: Communicator,
    *,
    steps: int = STEPS,
    microbatches: int = 1,
    set_to_none: bool = True,
) -> Course:
    """Train on this rank's part of each batch; with a plain optimizer on all of it, in one process.

    All steps together send what theory says, on each communicator.
    """
    start, stop = partition.bounds(SAMPLES, comm.size)[comm.rank]
    is_plain = not isinstance(optimizer, DistributedOptimizer)
    for used, _ in {} if is_plain else optimizer.traffic_by_comm():
        used.traffic.reset()
    losses, norms = [], []
    for step in range(steps):
        inputs, targets = (tensor[start:stop].chunk(microbatches) for tensor in batch(step))
        losses.append(0.0)
        for number, (part, target) in enumerate(zip(inputs, targets, strict=True)):
            loss = functional.mse_loss(model(part), target) / microbatches
            losses[-1] += loss.item()
            with nullcontext() if number == microbatches - 1 else optimizer.no_sync():
                loss.backward()
        clipped = (
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            if is_plain
            else optimizer.clip_grad_norm_(CLIP)
        )
        norms.append(float(clipped))
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
    if not is_plain:
        optimizer.wait_for_parameters()
        theory = optimizer.traffic_by_comm(steps, backwards=microbatches, norms=1)
        sent = {key: key[0].traffic.nbytes_sent(key[1]) for key in theory}
        for key in sorted(theory, key=str):
            assert sum(key[0].allgather_object(sent[key])) == theory[key], key
    return Course(losses, norms, whole(model))


def serial(model: nn.Module, make: Make, steps: int = STEPS) -> Course:
    return train(model, make(list(model.parameters())), Communicator.alone(), steps=steps)


def in_stage(
    comm: Communicator, stage: int, make: Make, microbatches: int, *, steps: int = STEPS, **options: Any
) -> Course:
    model = Network()
    if options.pop("overlap", False):
        options |= {"model": model, "overlap_allgather": stage in (1, 2)}
    optimizer = staged(model, make(list(model.parameters())), comm, stage, **LIMITS, **options)
    return train(model, optimizer, comm, steps=steps, microbatches=microbatches)


def assert_same_course(courses: Sequence[Course], expected: Course) -> None:
    """Norms and parameters of all ranks are those of one process, and their losses on average."""
    means = [
        sum(losses) / len(courses) for losses in zip(*(course.losses for course in courses), strict=True)
    ]
    torch.testing.assert_close(means, expected.losses, rtol=TOLERANCE, atol=TOLERANCE)
    for found in courses:
        torch.testing.assert_close(found.norms, expected.norms, rtol=TOLERANCE, atol=TOLERANCE)
        torch.testing.assert_close(found.parameters, expected.parameters, rtol=TOLERANCE, atol=TOLERANCE)
        assert all(torch.equal(a, b) for a, b in zip(found.parameters, courses[0].parameters, strict=True))


@pytest.mark.parametrize(
    ("stage", "size", "optimizer", "microbatches"), pairwise([0, 1, 2, 3], [1, 2, 3, 4], OPTIMIZERS, [1, 3])
)
def test_every_stage_follows_one_process(stage: int, size: int, optimizer: str, microbatches: int) -> None:
    make = OPTIMIZERS[optimizer]
    expected = serial(Network(), make)
    assert min(expected.norms) < CLIP < max(expected.norms), "clipping is to be seen at work and at rest"
    found = run_loopback(size, lambda comm: in_stage(comm, stage, make, microbatches))
    assert_same_course(found, expected)


HYBRID = {"1 of 4": (4, 1), "2 of 4": (4, 2), "4 of 4": (4, 4), "3 of 6": (6, 3), "2 of 8": (8, 2)}
"""Numbers of ranks, and over how many of them shards are cut."""


@pytest.mark.parametrize(
    ("stage", "hybrid", "optimizer", "microbatches"), pairwise([1, 2, 3], HYBRID, OPTIMIZERS, [1, 3])
)
def test_shards_over_some_of_the_ranks_follow_one_process(
    stage: int, hybrid: str, optimizer: str, microbatches: int
) -> None:
    make, (size, shard_ranks) = OPTIMIZERS[optimizer], HYBRID[hybrid]
    found = run_loopback(size, lambda c: in_stage(c, stage, make, microbatches, shard_ranks=shard_ranks))
    assert_same_course(found, serial(Network(), make))


def test_shards_alone_travel_between_the_groups() -> None:
    """Of Φ values a rank sends 2(n-1)/n within its group of n, and 2(r-1)/r of Φ/n to the r - 1 others."""

    def work(comm: Communicator) -> list[int]:
        model = nn.Linear(8, 8, bias=False)
        optimizer = staged(model, torch.optim.SGD(model.parameters(), lr=0.1), comm, 2, shard_ranks=4)
        within, across = optimizer.replica_comms.shard_comm(None), optimizer.replica_comms.across(None)
        assert across is not None
        calls = ((within, "reduce_scatter"), (within, "allgather"), (across, "allreduce"))
        for used, _ in calls:
            used.traffic.reset()
        model(torch.ones(1, 8)).sum().backward()
        optimizer.step()
        return [used.traffic.nbytes_sent(collective) for used, collective in calls]

    nbytes = 64 * 4
    assert run_loopback(8, work) == [[nbytes * 3 // 4, nbytes * 3 // 4, nbytes // 4]] * 8


@pytest.mark.parametrize(
    ("stage", "options", "words"),
    [
        (1, {"shard_ranks": 3}, "give one of 1, 2, 4"),
        (0, {"shard_ranks": 2}, "nothing is sharded"),
        (1, {"shard_ranks": 2, "shared_parameters": True}, "leave shard_ranks out"),
    ],
    ids=["no divisor", "stage 0", "shared"],
)
def test_shard_ranks_that_cannot_be_are_refused(stage: int, options: dict[str, Any], words: str) -> None:
    with pytest.raises(OperationError, match=words):
        run_loopback(4, lambda comm: in_stage(comm, stage, OPTIMIZERS["sgd"], 1, **options))


@pytest.mark.mpi
@pytest.mark.parametrize(("shared", "stage", "microbatches"), pairwise([False, True], [1, 2, 3], [1, 3]))
def test_every_stage_on_mpi_follows_one_process(
    world: Communicator, shared: bool, stage: int, microbatches: int
) -> None:
    make = OPTIMIZERS["adamw"]
    expected = serial(Network(), make, STEPS_ON_MPI)
    course = in_stage(
        world, stage, make, microbatches, steps=STEPS_ON_MPI, overlap=True, shared_parameters=shared
    )
    assert_same_course(world.allgather_object(course), expected)


def replicas(
    comm: Communicator, make: Make, microbatches: int, *, stage: int = 0, set_to_none: bool = True
) -> tuple[Course, str]:
    """Train replicas whose hooks fire in an order of each rank's own; return that order, too."""
    model = Branches(seed=comm.rank, first_branch=comm.rank)
    broadcast_parameters(model, comm)
    limits = {"bucket_bytes": 100, "first_bucket_bytes": 100}  # more buckets than staging buffers
    optimizer = staged(model, make(list(model.parameters())), comm, stage, **limits)
    order: list[str] = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))
    course = train(model, optimizer, comm, microbatches=microbatches, set_to_none=set_to_none)
    return course, " ".join(order)


@pytest.mark.parametrize(
    ("stage", "size", "optimizer", "microbatches", "set_to_none"),
    pairwise([0, 1, 2], [1, 2, 3, 4], OPTIMIZERS, [1, 3], [True, False]),
)
def test_replicas_follow_one_process(
    stage: int, size: int, optimizer: str, microbatches: int, set_to_none: bool
) -> None:
    make = OPTIMIZERS[optimizer]
    found = run_loopback(
        size, lambda comm: replicas(comm, make, microbatches, stage=stage, set_to_none=set_to_none)
    )
    assert_same_course([course for course, _ in found], serial(Branches(seed=0), make))
    assert len({order for _, order in found}) == size, "hooks fire in other orders"


@pytest.mark.mpi
@pytest.mark.parametrize(("optimizer", "microbatches"), pairwise(OPTIMIZERS, [1, 3]))
def test_replicas_on_mpi_follow_one_process(world: Communicator, optimizer: str, microbatches: int) -> None:
    course, _ = replicas(world, OPTIMIZERS[optimizer], microbatches)
    assert_same_course(world.allgather_object(course), serial(Branches(seed=0), OPTIMIZERS[optimizer]))


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
        inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer = staged(model, inner, comm, stage)
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
        return whole(model)

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


@ranks(2)
def test_a_loss_factor_of_nothing_is_none_and_of_no_counts_an_error_on_every_rank(comm: Communicator) -> None:
    model = nn.Linear(2, 1)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = DistributedOptimizer(inner, model.named_parameters(), comm)
    for odd in (-1.0, float("nan")):
        with pytest.raises(OperationError, match="loss_factor"):
            optimizer.loss_factor(odd if comm.rank else 2)
    assert optimizer.loss_factor(torch.tensor(0)) == 0.0


class Withheld(torch.autograd.Function):
    """inputs @ weight, whose backward has a gradient of the weight only where it is to `tell` it."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, tell: bool) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.tell = tell
        return inputs @ weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        inputs, weight = ctx.saved_tensors
        return gradient @ weight.t(), inputs.t() @ gradient if ctx.tell else None, None


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 1, dtype=torch.float64))

    def forward(self, tell: bool) -> Tensor:
        inputs = torch.eye(2, dtype=torch.float64)
        return Withheld.apply(inputs, self.weight, tell)  # type: ignore[no-any-return, no-untyped-call]


@pytest.mark.smoke
@pytest.mark.parametrize("by", ["hook", "function"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@ranks(2)
def test_a_gradient_that_is_withheld_on_one_rank_counts_as_zero(
    comm: Communicator, stage: int, by: str
) -> None:
    """The second step must not find in its bucket what the first one has left there."""
    model, tells = Weighted(), True

    def drop(parameter: Tensor) -> None:
        if not tells:
            parameter.grad = None

    if by == "hook":
        model.weight.register_post_accumulate_grad_hook(drop)  # type: ignore[no-untyped-call]
    optimizer = staged(model, torch.optim.SGD(model.parameters(), lr=0.25), comm, stage)
    for step in range(2):
        tells = step == 0 or comm.rank == 0
        model(tells or by == "hook").sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    with summon_full_parameters(model):
        found: list[float] = model.weight.flatten().tolist()
    assert found == [1 - 0.25 - 0.125] * 2


@pytest.mark.parametrize("stage", [1, 3])
def test_a_compiled_step_is_the_step(stage: int) -> None:
    """The compiler is not to trace into what talks to other ranks, nor into what counts steps."""

    def course(compiled: bool) -> list[Tensor]:
        model, alone = nn.Linear(5, 2, bias=False), Communicator.alone()
        nn.init.ones_(model.weight)
        optimizer = staged(model, torch.optim.SGD(model.parameters(), lr=0.1), alone, stage, model=model)

        def step(inputs: Tensor) -> None:
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()

        taken = torch.compile(step, backend="eager") if compiled else step
        for number in range(2):
            taken(torch.full((2, 5), number + 1.0))
        return whole(model)

    torch.testing.assert_close(course(compiled=True), course(compiled=False))
