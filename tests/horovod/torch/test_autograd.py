"""Gradients through every collective, by Horovod's conventions; some are not the mathematical adjoint.

allreduce      the same all-reduce of the gradients, with the same factors
allgather      the average over the ranks, of which each takes its own rows
broadcast      the average on the root, zero elsewhere
alltoall       back where it came from
reducescatter  all-gather; of a sum, times the number of ranks; times both factors
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.mpi

TYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def leaf(values: Tensor) -> Tensor:
    return values.clone().requires_grad_()


@pytest.fixture
def weight(brought: Any) -> Any:
    """Gradients of a rank's result: other small numbers on every rank."""
    return lambda rank, shape, dtype=torch.float32, salt=0: brought(rank, shape, dtype, salt + 50)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("op", ["Sum", "Average"])
def test_the_gradient_of_an_allreduce_is_the_allreduce_of_gradients(
    hvd, brought, weight, assert_same, op, dtype
):
    own = leaf(brought(hvd.rank(), (4, 3), dtype))
    result = hvd.allreduce(own, op=getattr(hvd, op))
    result.backward(weight(hvd.rank(), (4, 3), dtype))
    total = sum(weight(rank, (4, 3), dtype) for rank in range(hvd.size()))
    assert_same([("gradient", own.grad, total / hvd.size() if op == "Average" else total)])


def test_the_factors_of_an_allreduce_apply_to_its_gradient(hvd, weight, assert_same):
    own = leaf(torch.ones(5))
    hvd.allreduce(own, op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.25).backward(
        weight(hvd.rank(), (5,))
    )
    total = sum(weight(rank, (5,)) for rank in range(hvd.size()))
    assert_same([("gradient", own.grad, total * 0.5)])


def test_the_gradient_of_an_allreduce_in_a_process_set_stays_in_it(hvd, half, weight, assert_same):
    own = leaf(torch.ones(5))
    hvd.allreduce(own, op=hvd.Average, process_set=half).backward(weight(hvd.rank(), (5,)))
    total = sum(weight(rank, (5,)) for rank in half.ranks)
    assert_same([("gradient", own.grad, total / half.size())])


@pytest.mark.parametrize("op", ["Sum", "Average"])
def test_the_gradients_of_grouped_allreduces_come_to_each_tensor(hvd, half, weight, assert_same, op):
    shapes = [(3,), (2, 2), ()]
    checks = []
    for process_set in (hvd.global_process_set, half):
        own = [leaf(torch.ones(shape)) for shape in shapes]
        results = hvd.grouped_allreduce(own, op=getattr(hvd, op), process_set=process_set)
        sum((x * weight(hvd.rank(), x.shape, salt=k)).sum() for k, x in enumerate(results)).backward()
        for k, shape in enumerate(shapes):
            total = sum(weight(rank, shape, salt=k) for rank in process_set.ranks)
            divisor = process_set.size() if op == "Average" else 1
            checks.append((f"{process_set} {k}", own[k].grad, total / divisor))
    assert_same(checks)


def test_the_gradient_of_a_compressed_allreduce_has_the_inputs_type(hvd, assert_same):
    own = leaf(torch.ones(4))
    hvd.allreduce(own, op=hvd.Sum, compression=hvd.Compression.fp16).sum().backward()
    assert_same([("gradient", own.grad, torch.full((4,), float(hvd.size())))])


@pytest.mark.parametrize("dtype", TYPES)
def test_the_gradient_of_an_allgather_is_the_average_of_its_rows(hvd, half, weight, assert_same, dtype):
    checks = []
    for process_set in (hvd.global_process_set, half):
        rows = [rank + 1 for rank in process_set.ranks]
        place = process_set.rank()
        own = leaf(torch.ones(rows[place], 2, dtype=dtype))
        result = hvd.allgather(own, process_set=process_set)
        result.backward(weight(hvd.rank(), (sum(rows), 2), dtype))
        total = sum(weight(rank, (sum(rows), 2), dtype) for rank in process_set.ranks)
        mine = torch.split(total / process_set.size(), rows)[place]
        checks.append((f"{process_set}", own.grad, mine))
    assert_same(checks)


def test_the_gradients_of_grouped_allgathers_come_to_each_tensor(hvd, weight, assert_same):
    size, rank = hvd.size(), hvd.rank()
    own = [leaf(torch.ones(rank + 1)), leaf(torch.ones(2, 3))]
    results = hvd.grouped_allgather(own)
    sum((x * weight(rank, x.shape, salt=k)).sum() for k, x in enumerate(results)).backward()
    rows = [[r + 1 for r in range(size)], [2] * size]
    checks = []
    for k, x in enumerate(results):
        total = sum(weight(r, x.shape, salt=k) for r in range(size))
        checks.append((f"{k}", own[k].grad, torch.split(total / size, rows[k])[rank]))
    assert_same(checks)


@pytest.mark.parametrize("dtype", TYPES)
def test_the_gradient_of_a_broadcast_is_the_average_on_the_root(hvd, half, weight, assert_same, dtype):
    checks = []
    for process_set in (hvd.global_process_set, half):
        for root in process_set.ranks:
            own = leaf(torch.ones(3, dtype=dtype))
            hvd.broadcast(own, root, process_set=process_set).backward(weight(hvd.rank(), (3,), dtype))
            total = sum(weight(rank, (3,), dtype) for rank in process_set.ranks)
            mean = total / process_set.size()
            checks.append((f"from {root}", own.grad, mean if hvd.rank() == root else torch.zeros_like(mean)))
    assert_same(checks)


def test_complex_tensors_that_move_have_gradients(hvd, weight, assert_same):
    values = torch.tensor([1 + 2j, 3j])
    sent, gathered = leaf(values), leaf(values)
    parts = [weight(rank, (2, 2)) for rank in range(hvd.size())]
    factor = torch.view_as_complex(parts[hvd.rank()])
    hvd.broadcast(sent, 0).backward(factor)
    hvd.allgather(gathered).backward(factor.conj().repeat(hvd.size()))
    mean = torch.view_as_complex(sum(parts) / hvd.size())
    checks = [("broadcast", sent.grad, mean if hvd.rank() == 0 else torch.zeros_like(mean))]
    assert_same([*checks, ("allgather", gathered.grad, mean.conj().resolve_conj())])


def test_the_gradient_of_a_broadcast_has_a_gradient_itself_on_every_rank(hvd, assert_same):
    own = leaf(torch.arange(3.0))
    (first,) = torch.autograd.grad((hvd.broadcast(own, 0) ** 3).sum(), own, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), own)
    is_root = hvd.rank() == 0
    # On the root 3x², whose ones come back averaged with the others' zeros; then 6x, averaged again.
    expected = 6 * own.detach() / hvd.size() if is_root else torch.zeros(3)
    assert_same([("second", second, expected)])


def test_the_gradient_of_an_alltoall_goes_back_where_it_came_from(hvd, weight, assert_same):
    size, rank = hvd.size(), hvd.rank()
    splits = [[(source + 2 * to) % 3 for to in range(size)] for source in range(size)]
    own = leaf(torch.ones(sum(splits[rank]) + 2, 2))  # two rows stay at home
    result, received = hvd.alltoall(own, splits=torch.tensor(splits[rank], dtype=torch.int32))
    result.backward(weight(rank, result.shape))
    expected = []
    for to in range(size):
        counts = [splits[source][to] for source in range(size)]
        theirs = weight(to, (sum(counts), 2))
        expected.append(torch.split(theirs, counts)[rank])
    truth = torch.cat([*expected, torch.zeros(2, 2)])
    assert_same([("gradient", own.grad, truth), ("received has none", received.requires_grad, False)])


def test_the_gradient_of_an_even_alltoall_goes_back(hvd, half, weight, assert_same):
    checks = []
    for process_set in (hvd.global_process_set, half):
        size, place = process_set.size(), process_set.rank()
        own = leaf(torch.ones(2 * size, dtype=torch.float64))
        hvd.alltoall(own, process_set=process_set).backward(weight(hvd.rank(), (2 * size,), torch.float64))
        of_ranks = [weight(rank, (2 * size,), torch.float64) for rank in process_set.ranks]
        checks.append(("back", own.grad, torch.cat([x[2 * place : 2 * place + 2] for x in of_ranks])))
    assert_same(checks)


def scattered(total: int, size: int) -> list[int]:
    return [total // size + (rank < total % size) for rank in range(size)]


@pytest.mark.parametrize("op", ["Sum", "Average"])
def test_the_gradient_of_a_reducescatter_is_gathered(hvd, half, weight, assert_same, op):
    checks = []
    for process_set in (hvd.global_process_set, half):
        size = process_set.size()
        rows = scattered(2 * size + 1, size)
        own = leaf(torch.ones(2 * size + 1, 2))
        factors = {"prescale_factor": 2.0, "postscale_factor": 0.25}
        plain = hvd.reducescatter(own, op=getattr(hvd, op), process_set=process_set)
        scaled = hvd.reducescatter(own, op=getattr(hvd, op), process_set=process_set, **factors)
        given = weight(hvd.rank(), plain.shape)
        (first,) = torch.autograd.grad(plain, own, given)
        (second,) = torch.autograd.grad(scaled, own, given)
        of_ranks = zip(process_set.ranks, rows, strict=True)
        total = torch.cat([weight(rank, (count, 2)) for rank, count in of_ranks])
        total = total * size if op == "Sum" else total
        checks += [("plain", first, total), ("scaled", second, total * 0.5)]
    assert_same(checks)


def test_the_gradients_of_grouped_reducescatters_are_gathered(hvd, weight, assert_same):
    size, rank = hvd.size(), hvd.rank()
    own = [leaf(torch.ones(size)), leaf(torch.ones(2 * size, 2))]
    results = hvd.grouped_reducescatter(own, op=hvd.Sum)
    sum((x * weight(rank, x.shape, salt=k)).sum() for k, x in enumerate(results)).backward()
    checks = []
    for k, x in enumerate(results):
        total = torch.cat([weight(r, x.shape, salt=k) for r in range(size)])
        checks.append((f"{k}", own[k].grad, total * size))
    assert_same(checks)


def test_collectives_in_a_chain_carry_gradients_back_through_all(hvd, assert_same):
    """y = mean over ranks of x²; z = all rows of y: dz/dx by hand."""
    size, rank = hvd.size(), hvd.rank()
    own = leaf(torch.tensor([1.0 + rank, 2.0]))
    middle = hvd.allreduce(own * own, op=hvd.Average)
    hvd.allgather(middle).sum().backward()
    # Ones come back to the gather; averaged they stay ones; the same all-reduce leaves them ones; then 2x.
    assert_same(
        [("gradient", own.grad, 2 * own.detach()), ("gathered", middle.shape, (2,)), ("size", size, size)]
    )


def test_nothing_is_recorded_without_need(hvd):
    own = torch.ones(hvd.size(), requires_grad=True)
    with torch.no_grad():
        results = [hvd.allreduce(own), hvd.allgather(own), hvd.broadcast(own, 0), hvd.alltoall(own)]
    plain = own.detach()
    results += [hvd.reducescatter(plain), hvd.allreduce(plain)]
    results += [hvd.synchronize(hvd.allreduce_async(own))]
    assert not any(result.requires_grad for result in results)


def test_gradients_in_any_order_of_memory_are_taken(hvd, assert_same):
    own = leaf(torch.ones(2, 3))
    result = hvd.allreduce(own, op=hvd.Sum)
    result.backward(torch.arange(6.0).reshape(3, 2).t())
    again = leaf(torch.ones(2, 3))
    hvd.allreduce(again, op=hvd.Sum).sum().backward()  # an expanded gradient
    n = float(hvd.size())
    assert_same([("transposed", own.grad, torch.arange(6.0).reshape(3, 2).t() * n)])
    assert_same([("expanded", again.grad, torch.full((2, 3), n))])
