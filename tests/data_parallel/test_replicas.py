"""Writes to parameters between two steps: the same on every rank, or refused on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from hpcpar.comm import Communicator, run_loopback
from hpcpar.data_parallel import DistributedOptimizer, fully_shard
from hpcpar.errors import OperationError
from tests.data_parallel.staged import ranks, staged

every_stage = pytest.mark.parametrize("stage", [0, 1, 2])

MANY = torch.arange(8)


class Looking(nn.Module):
    """Looks words up, by a layer or by a function."""

    def __init__(self, table: nn.Module, *, by_function: bool = False) -> None:
        super().__init__()
        self.table, self.by_function = table, by_function
        nn.init.normal_(table.weight, std=3.0, generator=torch.Generator().manual_seed(0))

    def forward(self, words: Tensor) -> Tensor:
        if self.by_function:
            return functional.embedding(words, self.table.weight, max_norm=1.0)
        found: Tensor = self.table(words)
        return found


def table(**options: Any) -> Looking:
    return Looking(nn.Embedding(8, 4, **options))


def bag() -> Looking:
    return Looking(nn.EmbeddingBag(8, 4, max_norm=1.0))


def by_function() -> Looking:
    return Looking(nn.Embedding(8, 4), by_function=True)


def wrapped(of: nn.Module, comm: Communicator, **options: Any) -> DistributedOptimizer:
    return DistributedOptimizer(
        torch.optim.SGD(of.parameters(), lr=0.1), of.named_parameters(), comm, **options
    )


def stepped(model: nn.Module, optimizer: DistributedOptimizer, words: Tensor) -> None:
    model(words.reshape(-1, 2)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def refused(body: Callable[[Communicator], None], match: str) -> None:
    """Every rank raises it."""

    def caught(comm: Communicator) -> None:
        with pytest.raises(OperationError, match=match):
            body(comm)

    run_loopback(2, caught)


@every_stage
@pytest.mark.parametrize("build", [lambda: table(max_norm=1.0), bag, by_function])
def test_a_forward_that_writes_by_what_is_in_the_batch_is_refused(
    build: Callable[[], Looking], stage: int
) -> None:
    def body(comm: Communicator) -> None:
        model = build()
        optimizer = wrapped(model, comm, zero_stage=stage)
        stepped(model, optimizer, MANY[:4] + 4 * comm.rank)

    refused(body, r"written to \(to table\.weight here\), and ranks now have different .*torch\.renorm")


@pytest.mark.parametrize("build", [lambda: table(max_norm=1.0), bag])
def test_where_the_model_is_known_its_layer_is_named(build: Callable[[], Looking]) -> None:
    named = r"^table is an Embedding(Bag)? with max_norm=1, whose forward .*torch\.renorm"

    def body(comm: Communicator) -> None:
        model = build()
        wrapped(model, comm, model=model)

    refused(body, named)
    refused(lambda comm: fully_shard(build(), comm) and None, named)
    model = build()
    wrapped(model, Communicator.alone(), model=model)


def test_what_a_forward_writes_to_a_sharded_model_is_refused() -> None:
    def body(comm: Communicator) -> None:
        model = fully_shard(by_function(), comm)
        stepped(model, wrapped(model, comm), MANY[:4])

    refused(body, r"^table\.weight was written to while unit '' was gathered, .*write_back=True")


@every_stage
def test_writes_that_are_the_same_on_every_rank_are_none_of_anybodys_business(stage: int) -> None:
    def body(comm: Communicator) -> list[Tensor]:
        model = table()
        optimizer = wrapped(model, comm, zero_stage=stage)
        for step in range(3):
            stepped(model, optimizer, MANY[:4] + 4 * (comm.rank ^ step & 1))
            with torch.no_grad():
                model.table.weight.copy_(torch.renorm(model.table.weight, 2, 0, 1.0))
        return [parameter.detach() for parameter in model.parameters()]

    first, second = run_loopback(2, body)
    assert torch.equal(first[0], second[0])


@every_stage
@ranks(2)
def test_one_rank_may_write_what_it_takes_back(comm: Communicator, stage: int) -> None:
    # Rank 0 alone evaluates on averages, and puts the weights back.
    model = table()
    optimizer = wrapped(model, comm, zero_stage=stage)
    for _ in range(2):
        if comm.rank == 0:
            before = model.state_dict()["table.weight"].clone()
            with torch.no_grad():
                model.table.weight.zero_()
                model.table.weight.copy_(before)
        stepped(model, optimizer, MANY[:4] + 4 * comm.rank)


@every_stage
def test_one_rank_may_not_write_alone(stage: int) -> None:
    def body(comm: Communicator) -> None:
        model = table()
        optimizer = wrapped(model, comm, zero_stage=stage)
        if comm.rank == 1:
            with torch.no_grad():
                model.table.weight.clamp_(-1.0, 1.0)
        stepped(model, optimizer, MANY[:4])

    refused(body, r"parameters were written to \((to table\.weight|not) here\), and ranks now have different")


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_one_rank_may_not_have_another_learning_rate(stage: int) -> None:
    """As of ReduceLROnPlateau, which looks at the rank's own loss."""

    def body(comm: Communicator) -> None:
        model = table()
        optimizer = staged(model, torch.optim.SGD(model.parameters(), lr=0.1), comm, stage)
        stepped(model, optimizer, MANY)
        optimizer.param_groups[0]["lr"] /= 1 + comm.rank
        stepped(model, optimizer, MANY)

    refused(body, r"^rank 1 of 'world.*' was to step with lr=0\.05, and rank 0 with lr=0\.1, so that")


@ranks(2)
def test_parameters_of_all_kinds_are_compared(comm: Communicator) -> None:
    parameters = {
        "complex": nn.Parameter(torch.zeros(3, 2, dtype=torch.complex64).t()),
        "half": nn.Parameter(torch.zeros(3, dtype=torch.bfloat16)),
        "scalar": nn.Parameter(torch.tensor(0.0, dtype=torch.float64)),
    }
    inner = torch.optim.SGD(parameters.values(), lr=0.1)
    optimizer = DistributedOptimizer(inner, parameters.items(), comm)
    for name, parameter in parameters.items():
        for value, is_same in ((1.0, True), (1.0 + comm.rank, False), (1.0, True)):
            parameter.detach().fill_(value)
            sum(p.abs().sum().float() for p in parameters.values()).backward()
            if is_same:
                optimizer.synchronize()
            else:
                with pytest.raises(OperationError, match=f"to {name} here"):
                    optimizer.synchronize()
            optimizer.zero_grad()
        optimizer.reducer.next_step()
