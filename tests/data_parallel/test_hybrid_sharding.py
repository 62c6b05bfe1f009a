"""HSDP: shards over neighbours, their averages over the others. Held to one process, bytes to theory."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hpcpar
from hpcpar.comm import Communicator, run_loopback
from hpcpar.data_parallel import DistributedOptimizer
from hpcpar.errors import OperationError

STEPS, BACKWARDS = 3, 2


def make_model() -> nn.Sequential:
    """The same on every rank; ranks may be threads, which share torch's generator."""
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 7), nn.Linear(7, 3)).double()
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3, generator=generator)
    return model


def is_layer(name: str, module: nn.Module) -> bool:
    return isinstance(module, nn.Linear)


def batches(rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(4, 6, dtype=torch.float64, generator=generator) for _ in range(STEPS * BACKWARDS)]


def optimizer_of(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    if kind == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def trained(comm: Communicator, kind: str, stage: int, shard_ranks: int | None) -> tuple[Any, ...]:
    model = make_model()
    if stage == 3:
        hpcpar.fully_shard(model, comm, policy=is_layer, shard_ranks=shard_ranks)
    optimizer = DistributedOptimizer(
        optimizer_of(kind, model),
        model.named_parameters(),
        comm,
        zero_stage=stage,
        shard_ranks=shard_ranks if stage in (1, 2) else None,
        bucket_bytes=300,
        first_bucket_bytes=300,
    )
    norms = []
    own = batches(comm.rank)
    for step in range(STEPS):
        for number in range(BACKWARDS):
            loss = model(own[step * BACKWARDS + number]).square().mean() / BACKWARDS
            if stage < 2 and number < BACKWARDS - 1:
                with optimizer.no_sync():
                    loss.backward()
            else:
                loss.backward()
        norms.append(float(optimizer.clip_grad_norm_(0.5)))
        optimizer.step()
        optimizer.zero_grad()
    with hpcpar.summon_full_parameters(model, write_back=False):
        values = [p.detach().clone() for p in model.parameters()]
    return values, norms


def alone(kind: str, ranks: int) -> tuple[list[Tensor], list[float]]:
    model, norms = make_model(), []
    optimizer = optimizer_of(kind, model)
    everything = [batches(rank) for rank in range(ranks)]
    for step in range(STEPS):
        for rank in range(ranks):
            for number in range(BACKWARDS):
                loss = model(everything[rank][step * BACKWARDS + number]).square().mean()
                (loss / BACKWARDS / ranks).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in model.parameters()], norms


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("kind", ["sgd", "adamw"])
@pytest.mark.parametrize(("ranks", "shard_ranks"), [(4, 2), (4, 1), (4, 4), (6, 3), (8, 2)])
def test_training_is_that_of_one_process(ranks: int, shard_ranks: int, kind: str, stage: int) -> None:
    expected, norms = alone(kind, ranks)
    results = run_loopback(ranks, lambda comm: trained(comm, kind, stage, shard_ranks))
    for values, found in results:
        torch.testing.assert_close(values, expected, rtol=1e-10, atol=1e-12)
        assert found == pytest.approx(norms, rel=1e-10)
    for values, _ in results[1:]:
        assert all(map(torch.equal, values, results[0][0])), "replicas have the same bits"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"zero_stage": 1, "shard_ranks": 3}, "give one of 1, 2, 4"),
        ({"zero_stage": 0, "shard_ranks": 2}, "nothing is sharded"),
        ({"zero_stage": 1, "shard_ranks": 2, "shared_parameters": True}, "leave shard_ranks out"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], words: str) -> None:
    def work(comm: Communicator) -> str:
        model = make_model()
        with pytest.raises(OperationError) as refused:
            DistributedOptimizer(optimizer_of("sgd", model), model.named_parameters(), comm, **options)
        return str(refused.value)

    assert all(words in told for told in run_loopback(4, work))


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(("ranks", "shard_ranks"), [(4, 2), (6, 3), (8, 2)])
def test_counted_bytes_equal_the_theory(ranks: int, shard_ranks: int, stage: int) -> None:
    def work(comm: Communicator) -> list[tuple[int, int]]:
        model = make_model()
        if stage == 3:
            hpcpar.fully_shard(model, comm, policy=is_layer, shard_ranks=shard_ranks)
        given = {} if stage == 3 else {"zero_stage": stage, "shard_ranks": shard_ranks}
        optimizer = DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1),
            model.named_parameters(),
            comm,
            bucket_bytes=300,
            **given,
        )
        theory = optimizer.traffic_by_comm(STEPS, backwards=BACKWARDS)
        for used in {used for used, _ in theory}:
            used.traffic.reset()
        for number, batch in enumerate(batches(comm.rank)):
            loss = model(batch).square().mean()
            is_last = number % BACKWARDS == BACKWARDS - 1
            with nullcontext() if stage > 1 or is_last else optimizer.no_sync():
                loss.backward()
            if is_last:
                optimizer.step()
                optimizer.zero_grad()
        counted = {key: key[0].traffic.nbytes_sent(key[1]) for key in theory}
        return [(sum(key[0].allgather_object(counted[key])), theory[key]) for key in sorted(theory, key=str)]

    for told in run_loopback(ranks, work):
        assert told
        assert all(counted == expected for counted, expected in told)


def test_shards_alone_travel_between_the_groups() -> None:
    """Of Φ values a rank sends 2(n-1)/n within its group of n, and 2(r-1)/r of Φ/n to the r - 1 others."""

    def work(comm: Communicator) -> dict[str, int]:
        model = nn.Linear(8, 8, bias=False)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = DistributedOptimizer(inner, model.named_parameters(), comm, zero_stage=2, shard_ranks=4)
        comms = optimizer.replica_comms
        within, across = comms.shard_comm(None), comms.across(None)
        assert across is not None
        for used in (within, across):
            used.traffic.reset()
        model(torch.ones(1, 8)).sum().backward()
        optimizer.step()
        return {
            name: comm.traffic.nbytes_sent(name)
            for comm, name in ((within, "reduce_scatter"), (within, "allgather"), (across, "allreduce"))
        }

    nbytes = 64 * 4
    for sent in run_loopback(8, work):
        assert sent == {
            "reduce_scatter": nbytes * 3 // 4,
            "allgather": nbytes * 3 // 4,
            "allreduce": nbytes // 4,
        }
