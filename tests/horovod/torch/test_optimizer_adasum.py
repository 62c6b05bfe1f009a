"""DistributedOptimizer with op=Adasum against all ranks' optimizers in one process.

What ranks find is gathered first and asserted after, so that no rank fails alone while others wait.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

import hpcpar.horovod.torch as hvd
from hpcpar.errors import OperationError
from tests.grid import pairwise
from tests.horovod.torch.training import (
    OPTIMIZERS,
    ROWS,
    STEPS,
    Branches,
    Make,
    alone,
    assert_as_alone,
    backward,
    batch,
    bits,
    errors_everywhere,
    model_of,
    part,
    wrapped,
)

pytestmark = [pytest.mark.mpi, pytest.mark.usefixtures("hvd")]


# Adasum


def pair(a: Tensor, b: Tensor) -> Tensor:
    dot, aa, bb = a @ b, a @ a, b @ b
    return (1 - dot / (2 * aa) if aa else 1) * a + (1 - dot / (2 * bb) if bb else 1) * b


def combined(changes: list[Tensor]) -> Tensor:
    """Adasum of the ranks' changes of one tensor: the tree (0 ⊕ 1) ⊕ (2 ⊕ 3)."""
    level = [change.flatten() for change in changes]
    while len(level) > 1:
        level = [pair(a, b) for a, b in zip(level[::2], level[1::2], strict=True)]
    return level[0].view(changes[0].shape)


def adasum_alone(make: Make, uses: Callable[[int, int], str], passes: int) -> Branches:
    """All ranks' optimizers in one process: each steps by itself, then the changes are combined."""
    models = [Branches() for _ in range(hvd.size())]
    optimizers = [make(model.parameters()) for model in models]
    for step in range(STEPS):
        before = [parameter.detach().clone() for parameter in models[0].parameters()]
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            adasum_step(model, optimizer, step, rank, uses(step, rank), passes)
        for index, old in enumerate(before):
            own = [list(model.parameters())[index] for model in models]
            new = old + combined([parameter.detach() - old for parameter in own])
            for parameter in own:
                parameter.data.copy_(new)
    return models[0]


def adasum_step(model: Branches, optimizer: Optimizer, step: int, rank: int, used: str, passes: int) -> None:
    optimizer.zero_grad()
    for number in range(passes):
        x, y = (rows[ROWS * rank : ROWS * (rank + 1)] for rows in batch(10 * step + number))
        F.mse_loss(model(x, used), y).backward()
    optimizer.step()


@pytest.mark.parametrize(
    ("make", "passes", "use"),
    pairwise(OPTIMIZERS.values(), [1, 2], ["the same layers", "other layers on the first rank"]),
)
def test_adasum_combines_what_each_ranks_own_step_changes(make: Make, passes: int, use: str) -> None:
    if hvd.size() == 3:
        pytest.skip("Adasum is for powers of two")

    def uses(step: int, rank: int) -> str:
        return "ab" if use == "the same layers" or rank else "ac"

    model = Branches()
    optimizer = hvd.DistributedOptimizer(
        make(model.parameters()), model.named_parameters(), op=hvd.Adasum, backward_passes_per_step=passes
    )
    for step in range(STEPS):
        adasum_step(model, optimizer, step, hvd.rank(), uses(step, hvd.rank()), passes)
    assert_as_alone(model, adasum_alone(make, uses, passes), 1e-11)


def test_adasum_among_three_ranks_is_refused_before_anything_changes() -> None:
    if hvd.size() != 3:
        pytest.skip("for three ranks")
    model = model_of()
    before = bits(model)

    def use() -> None:
        optimizer = hvd.DistributedOptimizer(SGD(model.parameters(), lr=0.1), op=hvd.Adasum)
        backward(model, part, 0)
        optimizer.step()

    told = errors_everywhere(use)
    assert all("NotImplementedError" in kinds for kinds, _ in told)
    assert bits(model) == before


def test_adasum_on_a_process_set_is_refused_before_anything_changes(half: Any, needs_two: None) -> None:
    model = model_of()
    before = bits(model)

    def use() -> None:
        optimizer = hvd.DistributedOptimizer(SGD(model.parameters(), lr=0.1), op=hvd.Adasum, process_set=half)
        backward(model, part, 0)
        optimizer.step()

    told = errors_everywhere(use)
    lone = [half.size() == 1 for half in hvd.allgather_object(half.ranks) for half in [_Sized(half)]]
    assert all(
        is_lone or "NotImplementedError" in kinds for (kinds, _), is_lone in zip(told, lone, strict=True)
    )
    assert bits(model) == before or half.size() == 1


class _Sized:
    def __init__(self, ranks: list[int]) -> None:
        self.size = lambda: len(ranks)


def test_adasum_has_no_step_without_its_combination(needs_two: None) -> None:
    if hvd.size() == 3:
        pytest.skip("Adasum is for powers of two")
    model, optimizer = wrapped(op=hvd.Adasum)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(part(batch(0)[0])).sum()).backward()
    with pytest.raises(OperationError, match="GradScaler was to step an optimizer with op=Adasum"):
        scaler.step(optimizer)
    with pytest.raises(AssertionError, match="Adasum"):
        optimizer.skip_synchronize()
    with pytest.raises(ValueError, match="backward_passes_per_step=-2"):
        optimizer.set_backward_passes_per_step(-2)


def test_adasum_of_one_rank_is_an_ordinary_step() -> None:
    if hvd.size() > 1:
        pytest.skip("for one rank")
    model, optimizer = wrapped(op=hvd.Adasum)
    for step in range(STEPS):
        optimizer.zero_grad()
        backward(model, part, 10 * step)
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            optimizer.step()
    assert_as_alone(model, alone()[0])


def test_adasum_takes_a_closure() -> None:
    if hvd.size() == 3:
        pytest.skip("Adasum is for powers of two")
    models = [model_of(), model_of()]
    for model, with_closure in zip(models, (True, False), strict=True):
        optimizer = hvd.DistributedOptimizer(OPTIMIZERS["SGD"](model.parameters()), op=hvd.Adasum)
        for step in range(3):

            def closure(step: int = step, model: nn.Module = model, optimizer: Any = optimizer) -> Tensor:
                optimizer.zero_grad()
                return backward(model, part, step)

            if with_closure:
                optimizer.step(closure)
            else:
                closure()
                optimizer.step()
    assert_as_alone(*models)
