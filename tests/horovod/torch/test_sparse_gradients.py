"""Sparse gradients of DistributedOptimizer against those of one process.

What ranks find is gathered first and asserted after, so that no rank fails alone while others wait.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Optimizer, SparseAdam

import hpcpar.horovod.torch as hvd
from tests.grid import pairwise
from tests.horovod.torch.training import (
    NARROW,
    ROUNDING,
    STEPS,
    all_ranks,
    assert_as_alone,
    errors_everywhere,
    expected_sum,
    here,
    model_alone,
    part,
    sum_of_ranks,
    train,
    train_on,
    wrapped,
)

pytestmark = [pytest.mark.mpi, pytest.mark.usefixtures("hvd")]


# Sparse gradients


class Bag(nn.Module):
    """A table, of which each rank looks up other rows, some twice, and a head."""

    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.table = nn.Embedding(9, 3, sparse=sparse).double()
        self.head = nn.Linear(3, 1).double()

    def forward(self, indices: Tensor) -> Tensor:
        return self.head(torch.tanh(self.table(indices)))


def lookup_loss(model: nn.Module, number: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * number + rank)
    indices = torch.randint(0, 9, (4 + rank,), generator=generator)
    return model(torch.cat([indices, indices[:1]])).square().mean()


def absent_loss(model: nn.Module, number: int, rank: int) -> Tensor:
    """Step 0: nobody looks anything up; step 1: rank 0 alone; step 2: nobody; then all but rank 0."""
    looks_up = [False, rank == 0, False, rank > 0 or hvd.size() == 1][number // 10]
    assert isinstance(model, Bag)
    return lookup_loss(model, number, rank) if looks_up else model.head(torch.ones(2, 3).double()).mean()


class Both(Optimizer):
    """An optimizer of the table and one of the head, stepped together."""

    def __init__(self, *optimizers: Any) -> None:
        self.optimizers = optimizers

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=set_to_none)

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for optimizer in self.optimizers:
            optimizer.step()


SPARSE: dict[str, Callable[[Bag, Callable[[Any, str], Any]], Optimizer]] = {
    "SGD": lambda model, wrap: wrap(SGD(model.parameters(), lr=0.1), ""),
    "SparseAdam": lambda model, wrap: Both(
        wrap(SparseAdam(model.table.parameters(), lr=0.01), "table."),
        wrap(SGD(model.head.parameters(), lr=0.1, momentum=0.9), "head."),
    ),
}


def wrapping(model: Bag, **options: Any) -> Callable[[Any, str], Any]:
    def wrap(optimizer: Optimizer, prefix: str) -> Any:
        named = [(name, p) for name, p in model.named_parameters() if name.startswith(prefix)]
        return hvd.DistributedOptimizer(optimizer, named, **options)

    return wrap


def not_wrapped(optimizer: Optimizer, _: str) -> Any:
    return optimizer


@pytest.mark.parametrize(
    ("loss", "passes", "as_dense", "make"),
    pairwise([lookup_loss, absent_loss], [1, 2], [False, True], SPARSE.values()),
)
def test_sparse_gradients_are_those_of_one_process_and_sparse_however_they_travel(
    make: Callable[[Bag, Any], Optimizer],
    as_dense: bool,
    passes: int,
    loss: Callable[[nn.Module, int, int], Tensor],
) -> None:
    model, reference = Bag(sparse=True), Bag(sparse=True)
    options = {"backward_passes_per_step": passes, "sparse_as_dense": as_dense}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train_on(model, make(model, wrapping(model, **options)), here(), passes=passes, loss=loss)
    gradient = model.table.weight.grad
    train_on(reference, make(reference, not_wrapped), all_ranks(), passes=passes, loss=loss)
    assert_as_alone(model, reference)
    assert gradient.layout is torch.sparse_coo
    assert gradient.sparse_dim() == reference.table.weight.grad.sparse_dim() == 1


@pytest.mark.parametrize("as_dense", [False, True])
def test_rows_of_sparse_gradients_that_add_up_to_zero_are_there_as_in_one_process(as_dense: bool) -> None:
    parameter = nn.Parameter(torch.zeros(5, 2))
    optimizer = hvd.DistributedOptimizer(SGD([parameter], lr=1.0), op=hvd.Sum, sparse_as_dense=as_dense)
    sign = {0: 1.0, 1: -1.0}.get(hvd.rank(), 0.0)
    (F.embedding(torch.tensor([2, 4]), parameter, sparse=True) * sign).sum().backward()
    optimizer.synchronize()
    expected = 0.0 if hvd.size() > 1 else 1.0
    found = parameter.grad.coalesce()
    assert found.indices().tolist() == [[2, 4]]
    assert found.values().tolist() == [[expected] * 2] * 2


@pytest.mark.parametrize("as_dense", [False, True])
def test_gradients_that_are_sparse_in_all_dimensions_need_not_be_on_every_rank(as_dense: bool) -> None:
    def steps(parameter: nn.Parameter, optimizer: Optimizer, ranks: list[int]) -> None:
        for step in range(3):
            optimizer.zero_grad()
            for rank in ranks:
                if rank == step % hvd.size() or rank == 0:
                    places = torch.tensor([[rank % 2, 2]])
                    loss = torch.gather(parameter, 1, places, sparse_grad=True).sum() * (1 + rank)
                    (loss / hvd.size()).backward()
            optimizer.step()

    one, two = (nn.Parameter(torch.ones(2, 3, dtype=torch.float64)) for _ in range(2))
    wrapped = hvd.DistributedOptimizer(SGD([one], lr=0.5), op=hvd.Sum, sparse_as_dense=as_dense)
    steps(one, wrapped, here())
    steps(two, SGD([two], lr=0.5), all_ranks())
    assert torch.allclose(one, two, rtol=0, atol=ROUNDING)
    assert (one.grad is None) == (two.grad is None)
    if one.grad is not None:
        assert one.grad.sparse_dim() == two.grad.sparse_dim() == 2


FORMS = {
    "sparse, dense, sparse": [[True], [False], [True]],
    "dense, sparse, dense": [[False], [True], [False]],
    "sparse, then dense on the last rank": [[True], [True, False], [True]],
    "dense, then sparse on the last rank": [[False], [False, True], [False]],
}


@pytest.mark.parametrize("as_dense", [False, True])
@pytest.mark.parametrize("forms", FORMS.values(), ids=FORMS)
def test_gradients_may_be_sparse_in_one_step_and_dense_in_another(
    forms: list[list[bool]], as_dense: bool
) -> None:
    """Over ranks as over the backwards of one process: what is dense somewhere is dense in sum."""

    def steps(parameter: nn.Parameter, optimizer: Optimizer, ranks: list[int]) -> list[bool]:
        found = []
        for step, form in enumerate(forms):
            optimizer.zero_grad()
            for rank in ranks:
                is_sparse = form[-1] if rank == hvd.size() - 1 else form[0]
                rows = F.embedding(torch.tensor([step, rank % 4]), parameter, sparse=is_sparse)
                (rows.square().sum() / hvd.size()).backward()
            optimizer.step()
            assert parameter.grad is not None
            found.append(parameter.grad.is_sparse)
        return found

    one, two = (nn.Parameter(torch.ones(4, 2, dtype=torch.float64)) for _ in range(2))
    told = steps(
        one, hvd.DistributedOptimizer(SGD([one], lr=0.1), op=hvd.Sum, sparse_as_dense=as_dense), here()
    )
    expected = steps(two, SGD([two], lr=0.1), all_ranks())
    assert torch.allclose(one, two, rtol=0, atol=ROUNDING)
    # What has a bucket stays dense.
    assert told == (expected if forms[0] == [True] or hvd.size() == 1 else [False] * 3)


def test_sparse_on_one_rank_and_dense_on_another_is_dense_as_dense_ones(needs_two: None) -> None:
    parameter = nn.Parameter(torch.zeros(3, 2))
    optimizer = hvd.DistributedOptimizer(SGD([parameter], lr=1.0), sparse_as_dense=True)
    values = torch.ones(3, 2)
    parameter.grad = values if hvd.rank() == 0 else values.to_sparse()
    optimizer.step()
    assert parameter.grad.layout is torch.strided
    assert parameter.tolist() == (-values).tolist()


@pytest.mark.parametrize("name", NARROW)
@pytest.mark.parametrize("as_dense", [False, True])
def test_sparse_gradients_can_be_compressed(name: str, as_dense: bool) -> None:
    model, reference = Bag(sparse=True), Bag(sparse=True)
    options = {"compression": getattr(hvd.Compression, name), "sparse_as_dense": as_dense}
    train_on(model, SPARSE["SGD"](model, wrapping(model, **options)), here(), loss=lookup_loss)
    train_on(reference, SGD(reference.parameters(), lr=0.1), all_ranks(), loss=lookup_loss)
    assert_as_alone(model, reference, STEPS * 0.1 * 8 * torch.finfo(NARROW[name]).eps)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_sparse_gradients_can_be_zeroed_either_way(set_to_none: bool) -> None:
    model, reference = Bag(sparse=True), Bag(sparse=True)
    optimizer = hvd.DistributedOptimizer(SGD(model.parameters(), lr=0.1))
    other = SGD(reference.parameters(), lr=0.1)
    for each, its, ranks in ((model, optimizer, here()), (reference, other, all_ranks())):
        for step in range(3):
            for rank in ranks:
                (lookup_loss(each, step, rank) / len(ranks)).backward()
            its.step()
            its.zero_grad(set_to_none=set_to_none)
    assert_as_alone(model, reference)


def test_sparse_on_one_rank_and_dense_on_another_is_an_error_everywhere_and_nothing_else_fails(
    needs_two: None,
) -> None:
    parameter = nn.Parameter(torch.zeros(3, 2))
    optimizer = hvd.DistributedOptimizer(SGD([parameter], lr=1.0), [("table", parameter)])
    values = torch.ones(3, 2)
    parameter.grad = values if hvd.rank() == 0 else values.to_sparse()
    told = errors_everywhere(optimizer.step)
    working = sum_of_ranks()
    model, other = wrapped()
    train(model, other, part)
    assert_as_alone(model, model_alone())
    assert all("HorovodInternalError" in kinds for kinds, _ in told)
    assert all("table" in text and "sparse_as_dense" in text for _, text in told)
    assert working == expected_sum()
    assert not any("STALL" in text for _, text in told), "it took as long as a stall"


def test_more_sparse_backwards_than_declared_are_an_error_in_later_steps_too(needs_two: None) -> None:
    model = Bag(sparse=True)
    optimizer = hvd.DistributedOptimizer(SGD(model.parameters(), lr=0.1), model.named_parameters())
    train_on(model, optimizer, here(), loss=lookup_loss, steps=range(2))
    optimizer.zero_grad()
    model.table(torch.tensor([1])).sum().backward()
    told = errors_everywhere(lambda: model.table(torch.tensor([1])).sum().backward())
    optimizer.step()
    assert all("AssertionError" in kinds and "table.weight" in text for kinds, text in told)
