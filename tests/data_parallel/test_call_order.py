"""Ranks that call units of a sharded model in different orders hear of it at once, all of them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hpcpar.comm import Communicator, run_loopback
from hpcpar.data_parallel import DistributedOptimizer, fully_shard, summon_full_parameters
from hpcpar.errors import MismatchError, StallError

Route = Callable[[int, int], list[int]]
"""(rank, number of the forward) -> the experts that it calls, in order."""


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.head = nn.Linear(4, 1)
        with torch.no_grad():
            for number, parameter in enumerate(self.parameters()):
                parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter) + number / 10)

    def forward(self, inputs: Tensor, experts: list[int]) -> Tensor:
        for number in experts:
            inputs = torch.tanh(self.experts[number](inputs))
        return self.head(inputs)


def trained(comm: Communicator, route: Route, *, sharded: bool = True, **options: Any) -> list[Tensor]:
    model = Routed()
    if sharded:
        fully_shard(model, comm, **options)
    optimizer = DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), comm
    )
    for number in range(3):
        model(torch.full((2, 4), 1.0 + comm.rank), route(comm.rank, number)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    with summon_full_parameters(model):
        return [parameter.detach().clone() for parameter in model.parameters()]


@torch.no_grad()
def evaluated(comm: Communicator, route: Route, **options: Any) -> None:
    model = fully_shard(Routed(), comm, **options)
    for number in range(3):
        model(torch.ones(2, 4), route(comm.rank, number))


ROUTES: dict[str, tuple[Route, str, str]] = {
    "one that others leave out": (
        lambda rank, _: [0, 1, 2, 3] if rank else [0, 2, 3],
        "unit 'experts.1'",
        "unit 'experts.2'",
    ),
    "another of the same size": (lambda rank, _: [0, 1 + rank, 3], "unit 'experts.1'", "unit 'experts.2'"),
    "one more at the end": (
        lambda rank, _: [0, 1, 2] if rank else [0, 1],
        "unit 'experts.2'",
        "nothing more before the end of forward",
    ),
    "another order": (lambda rank, _: [0, 1, 2] if rank else [2, 1, 0], "unit 'experts.0'", "'experts.2'"),
    "later": (lambda rank, number: [0, 3 - rank * number, 1], "unit 'experts.1'", "unit 'experts.2'"),
}


@pytest.mark.parametrize("is_trained", [True, False], ids=["trained", "evaluated"])
@pytest.mark.parametrize(("route", "first", "last"), ROUTES.values(), ids=ROUTES)
def test_every_rank_hears_which_units_were_called_and_of_the_policy(
    route: Route, first: str, last: str, is_trained: bool
) -> None:
    def body(comm: Communicator) -> str:
        with pytest.raises(MismatchError) as caught:
            (trained if is_trained else evaluated)(comm, route, prefetch=0)
        return str(caught.value)

    for told in run_loopback(2, body, timeout_s=30):
        assert "policy=" in told
    if route is not ROUTES["later"][0]:
        assert first in told
        assert last in told


def test_with_the_policy_that_is_named_they_train_as_replicas_do() -> None:
    def route(rank: int, number: int) -> list[int]:
        return [rank, 2 + (rank + number) % 2]

    def policy(name: str, module: nn.Module) -> bool:
        return name == "head"

    found = run_loopback(2, lambda comm: trained(comm, route, policy=policy))
    expected = run_loopback(2, lambda comm: trained(comm, route, sharded=False))
    for mine, other in zip(found, expected, strict=True):
        for parameter, same in zip(mine, other, strict=True):
            torch.testing.assert_close(parameter, same)


def test_who_waits_in_vain_is_told_for_which_unit() -> None:
    over = threading.Event()

    def body(comm: Communicator) -> str:
        comm._runtime.progress._watch.timeout_s = 0.1
        model = fully_shard(Routed(), comm)
        if comm.rank:
            assert over.wait(60)
            return ""
        try:
            with pytest.raises(StallError) as caught:
                model(torch.ones(2, 4), [0])
        finally:
            over.set()
        return str(caught.value)

    told, _ = run_loopback(2, body)
    assert "waits in the call of the model" in told
    assert "policy=" in told
