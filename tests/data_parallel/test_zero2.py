"""Gradients in shards: what is sent, what is kept between microbatches, and in which order buckets leave."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from hpcpar.autograd.held_parameter import own_gradient
from hpcpar.comm import Communicator, run_loopback
from hpcpar.data_parallel import DistributedOptimizer
from hpcpar.data_parallel.buckets import Bucket
from hpcpar.data_parallel.zero2 import ShardedGradients
from hpcpar.errors import BufferTypeError, GradientOrderError, OperationError
from tests.data_parallel.staged import ranks, staged
from tests.grid import checkered

MICROBATCHES = 3


class Chain(nn.Module):
    """Parameters of 10, 6, 7 and 5 elements of 8 bytes; in stage 3 the middle ones are units."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.arange(10, dtype=torch.float64))
        self.layers = nn.ModuleList(Scale(numel) for numel in (6, 7))
        self.last = nn.Parameter(torch.ones(5, dtype=torch.float64))

    def forward(self, value: Tensor) -> Tensor:
        value = value * self.first.sum()
        for layer in self.layers:
            value = layer(value)
        return value * self.last.sum()


class Scale(nn.Module):
    def __init__(self, numel: int) -> None:
        super().__init__()
        self.factors = nn.Parameter(torch.ones(numel, dtype=torch.float64))

    def forward(self, value: Tensor) -> Tensor:
        return value * self.factors.sum()


def one() -> Tensor:
    return torch.ones((), dtype=torch.float64)


def optimizer_of(model: Chain, comm: Communicator, stage: int) -> DistributedOptimizer:
    return staged(
        model,
        torch.optim.SGD(model.parameters(), lr=0.001),
        comm,
        stage,
        bucket_bytes=80,
        first_bucket_bytes=80,
    )


def padded(numels: list[int], size: int) -> int:
    return sum(numel + -numel % size for numel in numels)


# Buckets of at most 80 bytes, or a root and two units: their elements.
BUCKETS = {1: [10, 6, 7, 5], 2: [10, 6, 7, 5], 3: [15, 6, 7]}


@pytest.mark.parametrize(("stage", "size"), checkered([1, 2, 3], [1, 2, 3, 4]))
def test_k_microbatches_send_what_theory_says(stage: int, size: int) -> None:
    def body(comm: Communicator) -> tuple[int, int, list[int]]:
        model = Chain()
        optimizer = optimizer_of(model, comm, stage)
        # The first step finds the order of units; the second has all that every later one has.
        for _ in range(2):
            comm.traffic.reset()
            for number in range(MICROBATCHES):
                if number < MICROBATCHES - 1:
                    with optimizer.no_sync():
                        model(one()).backward()
                else:
                    model(one()).backward()
            optimizer.step()
            optimizer.zero_grad()
        sent = comm.traffic.nbytes_sent
        return sent("reduce_scatter"), sent("allgather"), [b.numel for b in optimizer.reducer.buckets]

    results = run_loopback(size, body)
    scattered, gathered = (sum(each) for each in list(zip(*results, strict=True))[:2])
    assert sorted(results[0][2]) == sorted(padded([numel], size) for numel in BUCKETS[stage])
    # Φ as it lies in buckets, in bytes; (p - 1)/p of which each of p ranks sends.
    phi = 8 * padded(BUCKETS[stage], size)
    share = size - 1
    k = MICROBATCHES
    if stage < 3:
        assert scattered == (1 if stage == 1 else k) * phi * share
        assert gathered == phi * share
        return
    # The root and the last unit stay from forward to backward: they are gathered k times, the other one 2k.
    kept = 8 * padded([15, 7], size)
    assert scattered == k * phi * share
    assert gathered == (2 * k * phi - k * kept) * share


@pytest.mark.parametrize(("stage", "size"), checkered([2, 3], [1, 2, 3, 4]))
def test_between_microbatches_there_is_no_whole_gradient(stage: int, size: int) -> None:
    def body(comm: Communicator) -> tuple[list[bool], int, int, list[float]]:
        model = Chain()
        optimizer = optimizer_of(model, comm, stage)
        alive = []
        for _ in range(MICROBATCHES):
            with optimizer.no_sync():
                (model(one()) * (1 + comm.rank)).backward()
            alive += [own_gradient(parameter) is not None for parameter in model.parameters()]
        optimizer.synchronize()
        gradients = optimizer.reducer
        assert isinstance(gradients, ShardedGradients)
        shard_nbytes = sum(shard.nbytes for shard in gradients.shards)
        total = sum(float(g.sum()) for name, _, g in optimizer.named_gradients() if name == "last")
        return alive, gradients.staging_nbytes, shard_nbytes, total

    results = run_loopback(size, body)
    largest = max(numel + -numel % size for numel in BUCKETS[stage])
    for alive, staging_nbytes, shard_nbytes, _ in results:
        assert not any(alive)
        assert staging_nbytes == 2 * 8 * largest
        assert shard_nbytes == 8 * padded(BUCKETS[stage], size) // size
    # d/d last = 45 · 6 · 7 for each of its 5 elements, times the average of 1 … p, and k microbatches.
    assert sum(total for *_, total in results) == 5 * 45 * 42 * (1 + size) / 2 * MICROBATCHES


def gradients_of(numels: list[int], comm: Communicator, **options: Any) -> tuple[list[Tensor], Any]:
    parameters = [nn.Parameter(torch.ones(numel)) for numel in numels]
    size = comm.size
    buckets = [
        Bucket((number,), (0, numel), 4, (torch.float32, torch.device("cpu")), -numel % size)
        for number, numel in reversed(list(enumerate(numels)))
    ]
    names = [f"p{number}" for number in range(len(numels))]
    return parameters, ShardedGradients(names, parameters, buckets, comm, **options)


def test_padding_holds_no_rest_of_another_bucket() -> None:
    # Two rooms: those of the short buckets have held long ones.
    def body(comm: Communicator) -> list[list[float]]:
        parameters, gradients = gradients_of([3, 3, 8, 8], comm)
        sum(parameter.sum() * 7 for parameter in parameters).backward()
        gradients.synchronize()
        return [shard.tolist() for shard in gradients.shards]

    first, second = run_loopback(2, body)
    assert first == [[7.0] * 4, [7.0] * 4, [7.0] * 2, [7.0] * 2]
    assert second == [[7.0] * 4, [7.0] * 4, [7.0, 0.0], [7.0, 0.0]]


@ranks(2)
def test_forgetting_gradients_awaits_what_is_under_way_and_begins_anew(comm: Communicator) -> None:
    (a, b), gradients = gradients_of([2, 2], comm)
    (a.sum() * 100 + b.sum()).backward()
    gradients.zero()
    (a.sum() * (1 + comm.rank)).backward()
    gradients.synchronize()
    assert ([shard.tolist() for shard in gradients.shards], gradients.used) == ([[0.0], [1.5]], [1, 0])


def test_averaging_twice_and_inside_no_sync_is_refused() -> None:
    (a,), gradients = gradients_of([2], Communicator.alone())
    with gradients.no_sync():
        a.sum().backward()
        with pytest.raises(OperationError, match=r"inside no_sync\(\); leave it for the last microbatch"):
            gradients.synchronize()
    gradients.synchronize()
    with pytest.raises(OperationError, match="the gradients are averages already"):
        gradients.synchronize()


@ranks(2)
def test_sums_are_kept_in_the_type_that_was_asked_for(comm: Communicator) -> None:
    value = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    bucket = Bucket((0,), (0, 2), 2, (torch.bfloat16, torch.device("cpu")))
    gradients = ShardedGradients(["value"], [value], [bucket], comm, dtype=torch.float32)
    for factor in (256.0, 1.0):  # whose sum bfloat16 cannot hold
        (value.sum() * factor).backward()
    gradients.synchronize()
    assert (gradients.shards[0].dtype, gradients.shards[0].tolist()) == (torch.float32, [257.0])


def test_sparse_gradients_are_refused_by_name() -> None:
    table = nn.Embedding(4, 2, sparse=True)
    bucket = Bucket((0,), (0, 8), 4, (torch.float32, torch.device("cpu")))
    gradients = ShardedGradients(["table"], [table.weight], [bucket], Communicator.alone())
    with pytest.raises(
        BufferTypeError, match=r"the gradient of table is torch\.sparse_coo, but buckets hold"
    ):
        table(torch.tensor([1])).sum().backward()
    gradients.close()


@pytest.mark.filterwarnings("ignore")
def test_a_second_gradient_in_one_backward_is_refused_with_advice() -> None:
    (a,), gradients = gradients_of([2], Communicator.alone())
    inputs = torch.ones(2, requires_grad=True)
    recomputed = torch.utils.checkpoint.checkpoint(lambda value: value * a, inputs, use_reentrant=True)
    with pytest.raises(
        GradientOrderError, match=r"p0 got a second gradient in one backward.*use_reentrant=F"
    ):
        (recomputed * a).sum().backward()
    gradients.close()


@pytest.mark.filterwarnings("ignore")
@ranks(2)
def test_parts_that_are_recomputed_by_backwards_of_their_own_add_up(comm: Communicator) -> None:
    (a, b), gradients = gradients_of([2, 2], comm)
    value = torch.ones(2, requires_grad=True)
    for parameter in (a, b, a):
        value = torch.utils.checkpoint.checkpoint(
            lambda value, parameter=parameter: value * parameter * 3, value, use_reentrant=True
        )
    value.sum().backward()
    gradients.synchronize()
    assert [shard.tolist() for shard in gradients.shards] == [[27.0], [54.0]]


def test_a_forgotten_one_answers_no_more() -> None:
    (a,), gradients = gradients_of([2], Communicator.alone())
    del gradients
    a.sum().backward()
    assert a.grad.tolist() == [1.0, 1.0]


@ranks(2)
def test_an_error_in_a_backward_leaves_a_state_that_zero_grad_mends(comm: Communicator) -> None:
    (a, b), gradients = gradients_of([2, 2], comm)

    def fail(_: Tensor) -> None:
        raise ValueError("in the middle")

    between = a * 2
    between.register_hook(fail)
    with pytest.raises(ValueError, match="in the middle"):
        (between * b).sum().backward()
    with pytest.raises(GradientOrderError, match=r"error ended the backward before.*zero_grad\(\)"):
        (a * b).sum().backward()
    gradients.zero()
    (a * b).sum().backward()
    gradients.synchronize()
    assert [shard.tolist() for shard in gradients.shards] == [[1.0], [1.0]]
