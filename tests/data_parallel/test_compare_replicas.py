"""A bit that flips on one rank is found, and its rank is named where there are three replicas."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hpcpar.comm import Communicator, run_loopback
from hpcpar.data_parallel import DistributedOptimizer, fully_shard
from hpcpar.errors import DivergenceError


def trained(comm: Communicator, stage: int, **options: Any) -> tuple[nn.Module, DistributedOptimizer]:
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4))
    for parameter in model.parameters():
        nn.init.normal_(parameter, generator=torch.Generator().manual_seed(1))
    given = {"zero_stage": stage, **options}
    if stage == 3:
        fully_shard(model, comm, **options)
        given = {}
    inner = torch.optim.AdamW(model.parameters(), lr=0.1)
    optimizer = DistributedOptimizer(inner, model.named_parameters(), comm, **given)
    for _ in range(2):
        optimizer.zero_grad()
        model((torch.ones(2, 6) + comm.rank).to(next(model.parameters()).dtype)).square().sum().backward()
        optimizer.step()
        optimizer.require_same_replicas()
    return model, optimizer


def flip(values: Tensor) -> None:
    with torch.no_grad():
        values.view(-1).view(torch.int32)[0] ^= 1


def own(optimizer: DistributedOptimizer, key: str) -> tuple[str, Tensor]:
    """What this rank has of a state, or for "" of parameters: the first that is not empty."""
    if not key and optimizer._sharding is not None:
        return next((piece.name, own) for piece, own in optimizer._sharding.own_pieces() if own.numel())
    if not key:
        return optimizer._named[0]
    if optimizer.update is None:
        name, parameter = optimizer._named[0]
        return f"{key} of {name}", optimizer.inner.state[parameter][key]
    piece, state = next((piece, state) for piece, state in optimizer.own_states() if state[key].numel())
    return f"{key} of {piece.name}", state[key]


def told(ranks: int, stage: int, key: str, broken: int, **options: Any) -> list[str]:
    def body(comm: Communicator) -> str:
        _model, optimizer = trained(comm, stage, **options)
        name, values = own(optimizer, key)
        if comm.rank == broken:
            flip(values)
        with pytest.raises(DivergenceError) as caught:
            optimizer.require_same_replicas()
        return str(caught.value).replace(name, "IT")

    return run_loopback(ranks, body)


@pytest.mark.parametrize("broken", [0, 2])
@pytest.mark.parametrize(("stage", "key"), [(0, ""), (0, "exp_avg"), (0, "exp_avg_sq"), (1, ""), (2, "")])
def test_of_three_replicas_the_odd_one_is_named(stage: int, key: str, broken: int) -> None:
    found = told(3, stage, key, broken)
    assert all(
        text.startswith(f"replicas are not the same any more: IT on rank {broken}. ") for text in found
    )


@pytest.mark.parametrize(("stage", "key"), [(1, "exp_avg"), (2, "exp_avg_sq"), (3, ""), (3, "exp_avg")])
def test_shards_of_groups_of_neighbours_are_compared_across_them(stage: int, key: str) -> None:
    found = told(6, stage, key, 3, shard_ranks=2)
    assert "IT on rank 3. " in found[3]
    assert "IT on rank 3. " in found[1]


def test_of_two_replicas_both_are_named() -> None:
    assert all("IT on ranks 0, 1. " in text for text in told(2, 0, "exp_avg", 1))


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_master_weights_are_compared_too(precision: str) -> None:
    assert all("IT on rank 1. " in text for text in told(3, 0, "master_weight", 1, precision=precision))
