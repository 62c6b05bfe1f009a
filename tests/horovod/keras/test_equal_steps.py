"""Optimizers that write otherwise on one rank are found, without a pass over all variables in each step."""

from __future__ import annotations

import keras
import pytest
import torch

import hpcpar.horovod.keras as hvd
from hpcpar.data_parallel import replicas
from hpcpar.errors import OperationError
from tests.horovod.keras.training import data, model_of, share

pytestmark = [pytest.mark.mpi, pytest.mark.usefixtures("hvd")]


def steps(model: keras.Model, count: int) -> None:
    arrays = tuple(torch.from_numpy(share(array)) for array in data(1))
    for _ in range(count):
        model.train_step(arrays)


def compiled() -> keras.Model:
    model = model_of()
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    return model


def test_only_the_smallest_variable_is_compared_after_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[int] = []

    def sum_of_bits(parameter: torch.Tensor) -> torch.Tensor:
        compared.append(parameter.numel())
        return original(parameter)

    original = replicas.sum_of_bits
    model = compiled()
    steps(model, 1)
    monkeypatch.setattr(replicas, "sum_of_bits", sum_of_bits)
    steps(model, 3)
    assert compared == ([2] * 3 if hvd.size() > 1 else [])


def test_a_learning_rate_that_is_changed_on_one_rank_is_refused_on_all() -> None:
    if hvd.size() == 1:
        pytest.skip("needs two ranks")
    model = compiled()
    steps(model, 2)
    model.optimizer.learning_rate = 0.1 if hvd.rank() else 0.05
    steps(model, 1)
    with pytest.raises(OperationError, match="with one learning rate"):
        steps(model, 1)
