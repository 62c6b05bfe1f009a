"""A parameter whose `.grad` another object answers for is an ordinary one to everybody else."""

from __future__ import annotations

import copy
import gc
import io

import pytest
import torch
from torch import Tensor, nn

from hpcpar.autograd.held_parameter import (
    HeldParameter,
    hold,
    is_ordinary,
    own_gradient,
    release,
    set_holder,
    set_own_gradient,
)


class Holder:
    """It answers with a number, and remembers what was set."""

    def __init__(self) -> None:
        self.told: list[Tensor | None] = []

    def gradient_of(self, parameter: Tensor) -> Tensor | None:
        return torch.full_like(parameter, 7.0)

    def set_gradient_of(self, parameter: Tensor, gradient: Tensor | None) -> None:
        self.told.append(gradient)


def held() -> tuple[nn.Linear, Holder]:
    layer, holder = nn.Linear(2, 1, bias=False), Holder()
    set_holder(layer.weight, holder)
    hold(layer.weight)
    return layer, holder


def test_who_reads_or_sets_the_gradient_asks_the_holder_and_autograd_does_not() -> None:
    layer, holder = held()
    layer(torch.ones(1, 2)).sum().backward()
    assert own_gradient(layer.weight).tolist() == [[1.0, 1.0]]  # type: ignore[union-attr]
    assert layer.weight.grad.tolist() == [[7.0, 7.0]]  # type: ignore[union-attr]
    layer.zero_grad()
    del layer.weight.grad
    assert holder.told == [None, None]
    assert own_gradient(layer.weight) is not None
    set_own_gradient(layer.weight, None)
    assert own_gradient(layer.weight) is None


def test_released_or_without_its_holder_it_answers_for_itself() -> None:
    layer, holder = held()
    release(layer.weight)
    assert type(layer.weight) is nn.Parameter
    assert layer.weight.grad is None
    hold(layer.weight)
    assert is_ordinary(layer.weight)
    del holder
    gc.collect()
    layer.weight.grad = torch.ones(1, 2)
    assert layer.weight.grad is own_gradient(layer.weight)


def test_copies_and_files_of_it_are_ordinary_parameters() -> None:
    layer, holder = held()
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    for other in (copy.deepcopy(layer), torch.load(file, weights_only=False)):
        assert type(other.weight) is nn.Parameter
        assert other.weight.grad is None
        assert torch.equal(other.weight, layer.weight)
    assert isinstance(layer.weight, HeldParameter)
    assert holder.told == []


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_the_compiler_takes_it_as_what_it_is(backend: str) -> None:
    layer, holder = held()
    compiled = torch.compile(layer, backend=backend)
    compiled(torch.ones(1, 2)).sum().backward()
    assert own_gradient(layer.weight).tolist() == [[1.0, 1.0]]  # type: ignore[union-attr]
    assert holder.told == []
