"""Running statistics of several ranks become one; what stays apart is said."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from hpcpar.checkpoint import load, save
from hpcpar.comm import Communicator, run_loopback
from hpcpar.data_parallel import (
    DistributedOptimizer,
    SyncBatchNorm,
    average_running_statistics,
    fully_shard,
)

EXACT = {"rtol": 1e-6, "atol": 1e-6}
"""32-bit sums in another order."""


def seen(rank: int, batches: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(4, 3, 5, generator=generator) + rank for _ in range(batches)]


def test_statistics_of_instance_norm_become_those_of_one_process() -> None:
    def body(comm: Communicator) -> list[Tensor]:
        layer = nn.InstanceNorm1d(3, track_running_stats=True)
        for batch in seen(comm.rank):
            layer(batch)
        average_running_statistics(layer, comm)
        return list(layer.buffers())

    whole = nn.InstanceNorm1d(3, track_running_stats=True)
    for parts in zip(seen(0), seen(1), strict=True):
        whole(torch.cat(parts))
    for found in run_loopback(2, body):
        torch.testing.assert_close(found, list(whole.buffers()), **EXACT)


def test_a_rank_counts_by_the_batches_that_it_has_seen() -> None:
    def body(comm: Communicator) -> tuple[list[Tensor], list[Tensor]]:
        layer = nn.BatchNorm1d(3, momentum=None)
        for batch in seen(comm.rank, batches=3 * comm.rank):
            layer(batch)
        before = [buffer.clone() for buffer in layer.buffers()]
        average_running_statistics(layer, comm)
        return before, list(layer.buffers())

    (untouched, first), (whole, second) = run_loopback(2, body)
    assert untouched[2] == 0
    for found in (first, second):
        torch.testing.assert_close(found, whole, **EXACT)


class Odd(nn.Module):
    """Has a buffer of which nobody knows how it comes about."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("clusters", torch.zeros(2))


def test_a_checkpoint_has_what_every_rank_goes_on_with(tmp_path: Path) -> None:
    def body(comm: Communicator) -> tuple[Tensor, Tensor]:
        model = nn.Sequential(nn.BatchNorm1d(3))
        for batch in seen(comm.rank):
            model(batch)
        path = save(tmp_path, step=1, model=model, comm=comm)
        resumed = nn.Sequential(nn.BatchNorm1d(3))
        load(path, model=resumed, comm=comm)
        return model.eval()(seen(5)[0]), resumed.eval()(seen(5)[0])

    (first, again), (second, also) = run_loopback(2, body)
    for other in (again, second, also):
        torch.testing.assert_close(first, other, rtol=0, atol=0)


def test_other_buffers_that_differ_are_named_when_they_are_saved(tmp_path: Path) -> None:
    def body(comm: Communicator) -> None:
        model = Odd()
        model.clusters += comm.rank
        save(tmp_path, step=1, model=model, comm=comm)

    with pytest.warns(UserWarning, match="the buffers clusters differ between ranks"):
        run_loopback(2, body)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda model, comm: DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), comm, model=model
        ),
        fully_shard,
    ],
    ids=["optimizer", "fully_shard"],
)
def test_batch_norm_of_each_ranks_own_batch_is_said_once(
    wrap: Callable[[nn.Module, Communicator], object],
) -> None:
    def body(comm: Communicator, convert: bool) -> None:
        model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
        if convert:
            SyncBatchNorm.convert_sync_batchnorm(model, comm)
        wrap(model, comm)

    with pytest.warns(UserWarning, match=r"1 \(BatchNorm1d\): in training .*convert_sync_batchnorm") as told:
        run_loopback(2, lambda comm: body(comm, False))
    assert len(told) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run_loopback(2, lambda comm: body(comm, True))
        run_loopback(1, lambda comm: body(comm, False))
