"""Muon with AdamW in every stage and over tensor-parallel ranks is Muon with AdamW in one process.

Muon orthogonalizes in bfloat16, where a last bit that differs may grow to a hundredth. So gradients are
small integers times the number of ranks, whose averages are exact, and parameters are the same to the last
bit: a loss that is the sum of products of parameters and numbers has these numbers as its gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW, Muon

from hpcpar.comm import Communicator, run_loopback
from hpcpar.data_parallel import CombinedOptimizer, DistributedOptimizer, fully_shard
from hpcpar.tensor_parallel.split import Split, own_shard, place, split_evenly, split_sections
from tests.data_parallel.staged import whole
from tests.grid import pairwise

STEPS = 10
LIMITS: dict[str, Any] = {"bucket_bytes": 2_000, "first_bucket_bytes": 500}
SHAPES = {"wide": (6, 16), "tall": (24, 8), "square": (8, 8), "bias": (8,)}
TALL, WIDE = 0, 1
SPLITS: dict[str, Callable[[int], Split]] = {
    "wide": lambda size: split_evenly(16, size, dim=1),
    "tall": lambda size: split_sections((16, 8), size, dim=0),
}
"""A row-parallel matrix, a fused column-parallel one; the others are whole on every rank."""


class Products(nn.Module):
    """Parameters whose gradients are what the forward is given."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], tp: Communicator, generator: torch.Generator):
        super().__init__()
        for name, shape in shapes.items():
            value = torch.randn(shape, generator=generator, dtype=torch.float64)
            split = SPLITS[name](tp.size) if name in SPLITS else None
            parameter = nn.Parameter(value if split is None else split.shard(value, tp.rank))
            if split is not None:
                place(parameter, split, tp)
            self.register_parameter(name, parameter)

    def forward(self, gradients: Iterator[Tensor]) -> Tensor:
        return torch.stack([(p * own_shard(p, next(gradients))).sum() for p in self.parameters()]).sum()


class Network(nn.Module):
    def __init__(self, tp: Communicator) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.embed = Products({"weight": (11, 8)}, tp, generator)
        self.layers = nn.ModuleList(Products(SHAPES, tp, generator) for _ in range(3))

    def forward(self, gradients: Sequence[Tensor]) -> Tensor:
        given = iter(gradients)
        return torch.stack([self.embed(given), *(layer(given) for layer in self.layers)]).sum()


WHOLE_SHAPES = [(11, 8), *(shape for _ in range(3) for shape in SHAPES.values())]


def gradients_of(step: int, rank: int, size: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return [torch.randint(-9, 9, s, generator=generator).double() * size for s in WHOLE_SHAPES]


def muon_with_adamw(model: Network, **options: Any) -> CombinedOptimizer:
    matrices = [p for layer in model.layers for p in layer.parameters() if p.dim() == 2]
    rest = [p for p in model.parameters() if not any(p is each for each in matrices)]
    return CombinedOptimizer(Muon(matrices, lr=0.02, **options), AdamW(rest, lr=0.01))


def serial(size: int, steps: int = STEPS, **options: Any) -> list[Tensor]:
    model = Network(Communicator.alone())
    optimizer = muon_with_adamw(model, **options)
    for step in range(steps):
        given = [gradients_of(step, rank, size) for rank in range(size)]
        for parameter, each in zip(model.parameters(), zip(*given, strict=True), strict=True):
            parameter.grad = sum(each) / size
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def axes(world: Communicator, tp_size: int) -> tuple[Communicator, Communicator]:
    """Return dp and tp."""
    tp = world.split(world.rank // tp_size, name="tp")
    dp = world.split(world.rank % tp_size, name="dp")
    assert tp is not None
    assert dp is not None
    return dp, tp


def trained(
    world: Communicator, stage: int, tp_size: int, *, steps: int = STEPS, muon: Any = None, **options: Any
) -> tuple[list[Tensor], dict[str, int], dict[str, int]]:
    """Train; return parameters, bytes sent in the last step by theory and as counted, on dp and tp."""
    dp, tp = axes(world, tp_size)
    model = Network(tp)
    inner = muon_with_adamw(model, **(muon or {}))
    if stage == 3:
        fully_shard(model, dp)
    optimizer = DistributedOptimizer(
        inner, model.named_parameters(), dp, zero_stage=stage, **LIMITS, **options
    )
    for step in range(steps):
        for comm in (dp, tp):
            comm.traffic.reset()
        model(gradients_of(step, dp.rank, dp.size)).backward()
        optimizer.step()
        optimizer.zero_grad()
    theory = optimizer.traffic_by_comm(norms=1)
    expected = {
        f"{name} {collective}": theory.get((comm, collective), 0)
        for name, comm in (("dp", dp), ("tp", tp))
        for collective in ("reduce_scatter", "allgather", "alltoall")
    }
    sent = {
        key: sum(comm.allgather_object(comm.traffic.nbytes_sent(key.split()[1])))
        for key, comm in ((key, dp if key.startswith("dp") else tp) for key in expected)
    }
    return whole_of(model, tp), expected, sent


def whole_of(model: Network, tp: Communicator) -> list[Tensor]:
    """Return the parameters, whole over dp and tp."""
    values = whole(model)
    found = []
    for (name, _), own in zip(model.named_parameters(), values, strict=True):
        kind = name.rpartition(".")[2]
        parts = tp.allgather_object(own)
        found.append(SPLITS[kind](tp.size).whole(parts) if kind in SPLITS else own)
    return found


@pytest.mark.parametrize(
    ("stage", "size", "nesterov", "adjust"),
    pairwise([0, 1, 2, 3], [1, 2, 3, 4], [True, False], [None, "match_rms_adamw"]),
)
def test_every_stage_has_the_bits_of_one_process(
    stage: int, size: int, nesterov: bool, adjust: str | None
) -> None:
    options: dict[str, Any] = {"nesterov": nesterov, "adjust_lr_fn": adjust}
    expected = serial(size, **options)
    for parameters, theory, sent in run_loopback(size, lambda comm: trained(comm, stage, 1, muon=options)):
        torch.testing.assert_close(parameters, expected, rtol=0, atol=0)
        assert sent == theory


@pytest.mark.parametrize(("stage", "dp_size"), [(0, 1), (0, 2), (1, 2), (2, 2), (3, 2), (3, 1)])
def test_matrices_that_tensor_parallel_ranks_share_have_the_bits_of_one_process(
    stage: int, dp_size: int
) -> None:
    expected = serial(dp_size)
    for parameters, theory, sent in run_loopback(2 * dp_size, lambda comm: trained(comm, stage, 2)):
        torch.testing.assert_close(parameters, expected, rtol=0, atol=0)
        assert sent == theory
        assert sent["tp alltoall"] > 0
