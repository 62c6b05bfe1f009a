"""Parameters with copies on some of the optimizer's ranks alone, as experts are, against one process."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from hpcpar.comm import Communicator, run_loopback
from hpcpar.data_parallel import (
    DistributedOptimizer,
    broadcast_parameters,
    fully_shard,
    summon_full_parameters,
)
from hpcpar.errors import MismatchError, OperationError
from hpcpar.mesh import Mesh
from hpcpar.parameter_info import note

WIDTH, STEPS = 5, 3


class Experts(nn.Module):
    """A shared layer that each rank calls with its own rows, and experts that it calls with rows of many."""

    def __init__(self, numbers: range) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        weights = [torch.randn(WIDTH, WIDTH, dtype=torch.float64, generator=generator) for _ in range(4)]
        self.shared = nn.Parameter(weights[3].clone())
        self.experts = nn.ModuleList()
        for number in numbers:
            expert = nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.float64)
            with torch.no_grad():
                expert.weight.copy_(weights[number])
            self.experts.add_module(str(number), expert)

    def forward(self, own: Tensor, gathered: Tensor) -> Tensor:
        total = (own @ self.shared).tanh().square().sum()
        for name, expert in self.experts.named_children():
            total = total + (int(name) + 1) * expert(gathered).tanh().square().sum()
        return total


class Model(nn.Module):
    """One layer of these, a unit of ZeRO-3."""

    def __init__(self, numbers: range) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Experts(numbers)])

    def forward(self, own: Tensor, gathered: Tensor) -> Tensor:
        total: Tensor = self.layers[0](own, gathered)
        return total


def spread_model(mesh: Mesh) -> Model:
    model = Model((range(3), range(2), range(2, 3))[0 if mesh.ep.size == 1 else 1 + mesh.ep.rank])
    for parameter in model.layers[0].experts.parameters():
        note(parameter, replicas=mesh.edp, split_over=(mesh.ep,))
    return model


def rows(step: int, ranks: int) -> Tensor:
    return torch.randn(ranks, 2, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(step))


def plain(name: str, model: nn.Module) -> Optimizer:
    if name == "sgd":
        return SGD(model.parameters(), lr=0.01, momentum=0.9)
    return AdamW(model.parameters(), lr=0.01)


def serial(optimizer_name: str, ranks: int) -> tuple[dict[str, Tensor], list[float]]:
    model = Model(range(3))
    optimizer, norms = plain(optimizer_name, model), []
    for step in range(STEPS):
        optimizer.zero_grad()
        data = rows(step, ranks).flatten(0, 1)
        (model(data, data) / ranks).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
    return dict(model.named_parameters()), norms


def spread(comm: Communicator, ep: int, stage: int, name: str) -> tuple[dict[str, Tensor], list[float], int]:
    mesh = Mesh(comm, ep=ep)
    model = spread_model(mesh)
    broadcast_parameters(model, mesh.dp)
    if stage == 3:
        fully_shard(model, mesh.dp)
    optimizer = DistributedOptimizer(
        plain(name, model), model.named_parameters(), mesh.dp, zero_stage=stage, bucket_bytes=120
    )
    norms = []
    for step in range(STEPS):
        optimizer.zero_grad()
        data = rows(step, comm.size)
        first = mesh.edp.rank * ep
        gathered = data[first : first + ep].flatten(0, 1)
        model(data[mesh.rank], gathered).backward()
        norms.append(optimizer.clip_grad_norm_(1.0).item())
        optimizer.step()
    state = optimizer.state_dict()["state"]
    with summon_full_parameters(model):
        return {key: p.detach().clone() for key, p in model.named_parameters()}, norms, len(state)


@pytest.mark.parametrize("name", ["sgd", "adamw"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(("ranks", "ep"), [(2, 1), (2, 2), (4, 2)])
def test_gradients_are_summed_over_the_copies_and_divided_by_all_ranks(
    ranks: int, ep: int, stage: int, name: str
) -> None:
    expected, expected_norms = serial(name, ranks)
    of_ranks = run_loopback(ranks, lambda comm: spread(comm, ep, stage, name))
    for found, norms, states in of_ranks:
        assert norms == pytest.approx(expected_norms, rel=1e-12)
        assert states == len(found)
        for key, value in found.items():
            torch.testing.assert_close(value, expected[key], rtol=1e-12, atol=1e-13)
    assert set(expected) == set().union(*(found for found, *_ in of_ranks))


def test_what_one_rank_overflows_is_skipped_by_all() -> None:
    def skipped(comm: Communicator) -> tuple[int, list[float]]:
        mesh = Mesh(comm, ep=2)
        model = spread_model(mesh)
        optimizer = DistributedOptimizer(
            SGD(model.parameters(), lr=0.1), model.named_parameters(), mesh.dp, zero_stage=1, nonfinite="skip"
        )
        data = rows(0, comm.size)
        loss = model(data[mesh.rank], data.flatten(0, 1))
        if mesh.rank == 1:
            loss = loss * math.inf
        loss.backward()
        before = [p.sum().item() for p in model.parameters()]
        optimizer.step()
        assert [p.sum().item() for p in model.parameters()] == before
        return optimizer.scaler.skipped, before

    assert [count for count, _ in run_loopback(4, skipped)] == [1, 1, 1, 1]


def make(comm: Communicator, **options: Any) -> None:
    mesh = Mesh(comm, ep=2)
    model = spread_model(mesh)
    if not options:
        for parameter in model.layers[0].experts.parameters():
            note(parameter, replicas=None)
    DistributedOptimizer(plain("sgd", model), model.named_parameters(), mesh.dp, **options)


def test_experts_that_do_not_note_their_copies_are_refused() -> None:
    with pytest.raises(MismatchError, match="split over 'ep'"):
        run_loopback(2, make)


def test_experts_in_memory_that_a_node_shares_are_refused() -> None:
    with pytest.raises(OperationError, match="experts are spread over ranks"):
        run_loopback(2, lambda comm: make(comm, zero_stage=1, shared_parameters=True))


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_bytes_are_those_of_theory(stage: int) -> None:
    def counted(comm: Communicator) -> tuple[int, int, int]:
        mesh = Mesh(comm, ep=2)
        model = spread_model(mesh)
        optimizer = DistributedOptimizer(
            plain("sgd", model), model.named_parameters(), mesh.dp, zero_stage=stage, nonfinite="step"
        )
        mesh.dp.traffic.reset()
        mesh.edp.traffic.reset()
        data = rows(0, comm.size)
        model(data[mesh.rank], data[:2].flatten(0, 1)).backward()
        optimizer.step()
        sent = mesh.dp.traffic.nbytes_sent(), mesh.edp.traffic.nbytes_sent()
        return *sent, sum(optimizer.expected_traffic().values())

    found = run_loopback(4, counted)
    of_dense = sum(dense for dense, _, _ in found)
    for rank, (_, _, expected) in enumerate(found):
        assert of_dense + sum(experts for _, experts, _ in found[rank % 2 :: 2]) == expected
