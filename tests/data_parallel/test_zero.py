"""Every stage of ZeRO follows one process with the same global batch, and sends what theory says.

float64, and a tolerance of 1e-10: sums are taken in another order, so the last bits differ, and the steps
carry them on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from hpcpar import partition
from hpcpar.comm import Communicator, run_loopback
from hpcpar.data_parallel import DistributedOptimizer, fully_shard, summon_full_parameters
from tests.grid import pairwise

STEPS = 10
STEPS_ON_MPI = 4
"""Few: ranks that are threads take all of them."""

SAMPLES = 36
CLIP = 10.0
TOLERANCE = 1e-10

Make = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(7, 9)
        self.outer = nn.Linear(9, 7, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + self.outer(torch.tanh(self.inner(inputs)))


class Network(nn.Module):
    """Layers in a list, a head that is tied to the first matrix, a parameter that is never used."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.embed = nn.Linear(5, 7, bias=False)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(7, 5)
        self.head.weight = nn.Parameter(torch.empty(5, 7))
        self.unembed = nn.Linear(7, 5, bias=False)
        self.embed.weight = nn.Parameter(torch.empty(7, 5))
        self.unembed.weight = self.head.weight
        self.unused = nn.Parameter(torch.empty(3))
        self.double()
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 2)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.embed(inputs)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden) + self.unembed(hidden)


class Course(NamedTuple):
    """Norms before clipping, parameters at the end, bytes sent in the last step by collective."""

    norms: list[float]
    parameters: list[Tensor]
    sent: dict[str, int]
    theory: dict[str, int]


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    inputs = torch.randn(SAMPLES, 5, generator=generator, dtype=torch.float64)
    return inputs, torch.randn(SAMPLES, 5, generator=generator, dtype=torch.float64)


def serial(make: Make, clip: float = CLIP, steps: int = STEPS) -> Course:
    model = Network()
    optimizer = make(list(model.parameters()))
    norms = []
    for step in range(steps):
        inputs, targets = batch(step)
        functional.mse_loss(model(inputs), targets).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), clip)))
        optimizer.step()
        optimizer.zero_grad()
    return Course(norms, [p.detach().clone() for p in model.parameters()], {}, {})


def parallel(
    comm: Communicator,
    stage: int,
    make: Make,
    microbatches: int,
    *,
    steps: int = STEPS,
    overlap: bool = False,
    **options: Any,
) -> Course:
    model = Network()
    if stage == 3:
        fully_shard(
            model, comm, **{key: options.pop(key) for key in ("shared_parameters",) if key in options}
        )
    optimizer = DistributedOptimizer(
        make(list(model.parameters())),
        model.named_parameters(),
        comm,
        zero_stage=stage,
        bucket_bytes=700,
        first_bucket_bytes=100,
        model=model if overlap else None,
        overlap_allgather=overlap and stage in (1, 2),
        **options,
    )
    start, stop = partition.bounds(SAMPLES, comm.size)[comm.rank]
    norms = []
    for step in range(steps):
        comm.traffic.reset()
        inputs, targets = (tensor[start:stop].chunk(microbatches) for tensor in batch(step))
        for number, (part, target) in enumerate(zip(inputs, targets, strict=True)):
            loss = functional.mse_loss(model(part), target) / microbatches
            if number < microbatches - 1:
                with optimizer.no_sync():
                    loss.backward()
            else:
                loss.backward()
        norms.append(float(optimizer.clip_grad_norm_(CLIP)))
        optimizer.step()
        optimizer.zero_grad()
    optimizer.wait_for_parameters()
    sent = {name: comm.traffic.nbytes_sent(name) for name in ("allreduce", "reduce_scatter", "allgather")}
    theory = optimizer.expected_traffic(1, backwards=microbatches, norms=1)
    with summon_full_parameters(model):
        return Course(norms, [p.detach().clone() for p in model.parameters()], sent, theory)


def assert_same_course(found: Course, expected: Course) -> None:
    torch.testing.assert_close(found.norms, expected.norms, rtol=TOLERANCE, atol=TOLERANCE)
    torch.testing.assert_close(found.parameters, expected.parameters, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("stage", "size", "optimizer", "microbatches"), pairwise([0, 1, 2, 3], [1, 2, 3, 4], OPTIMIZERS, [1, 3])
)
def test_every_stage_follows_one_process(stage: int, size: int, optimizer: str, microbatches: int) -> None:
    expected = serial(OPTIMIZERS[optimizer])
    assert min(expected.norms) < CLIP < max(expected.norms), "clipping is to be seen at work and at rest"
    courses = run_loopback(size, lambda comm: parallel(comm, stage, OPTIMIZERS[optimizer], microbatches))
    for course in courses:
        assert_same_course(course, expected)
        assert all(torch.equal(a, b) for a, b in zip(course.parameters, courses[0].parameters, strict=True))
    for name, theory in courses[0].theory.items():
        assert sum(course.sent[name] for course in courses) == theory, name


@pytest.mark.mpi
@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("shared", [False, True], ids=["apart", "in common"])
def test_every_stage_on_mpi_follows_one_process(
    world: Communicator, shared: bool, stage: int, microbatches: int
) -> None:
    make = OPTIMIZERS["adamw"]
    expected = serial(make, steps=STEPS_ON_MPI)
    course = parallel(
        world, stage, make, microbatches, steps=STEPS_ON_MPI, overlap=True, shared_parameters=shared
    )
    for found in world.allgather_object(course):
        assert_same_course(found, expected)


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
def test_a_gradient_that_is_withheld_on_one_rank_counts_as_zero(stage: int, by: str) -> None:
    """The second step must not find in its bucket what the first one has left there."""

    def body(comm: Communicator) -> list[float]:
        model, tells = Weighted(), True

        def drop(parameter: Tensor) -> None:
            if not tells:
                parameter.grad = None

        if by == "hook":
            model.weight.register_post_accumulate_grad_hook(drop)  # type: ignore[no-untyped-call]
        if stage == 3:
            fully_shard(model, comm)
        optimizer = DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.25), model.named_parameters(), comm, zero_stage=stage
        )
        for step in range(2):
            tells = step == 0 or comm.rank == 0
            model(tells or by == "hook").sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        with summon_full_parameters(model):
            found: list[float] = model.weight.flatten().tolist()
        return found

    assert run_loopback(2, body) == [[1 - 0.25 - 0.125] * 2] * 2


@pytest.mark.parametrize("stage", [1, 3])
def test_a_compiled_step_is_the_step(stage: int) -> None:
    """The compiler is not to trace into what talks to other ranks, nor into what counts steps."""

    def course(compiled: bool) -> list[Tensor]:
        model, alone = nn.Linear(5, 2, bias=False), Communicator.alone()
        nn.init.ones_(model.weight)
        if stage == 3:
            fully_shard(model, alone)
        optimizer = DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1),
            model.named_parameters(),
            alone,
            zero_stage=stage,
            model=model,
        )

        def step(inputs: Tensor) -> None:
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()

        taken = torch.compile(step, backend="eager") if compiled else step
        for number in range(2):
            taken(torch.full((2, 5), number + 1.0))
        with summon_full_parameters(model):
            return [parameter.detach().clone() for parameter in model.parameters()]

    torch.testing.assert_close(course(compiled=True), course(compiled=False))
