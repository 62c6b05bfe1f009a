"""Collectives of what Keras users hold: tensors and variables come back as tensors, all else as arrays."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import torch

import hpcpar.horovod.keras as hvd
from hpcpar.horovod.torch import allgather_object
from tests.horovod.keras.training import data, fit, model_of, weights

pytestmark = [pytest.mark.mpi, pytest.mark.usefixtures("hvd")]


def ranks() -> np.ndarray:
    return np.arange(hvd.size(), dtype=np.float64)


def gathered(found: Any, kind: type) -> list[Any]:
    """Return every rank's result as lists, after asserting its type."""
    told = allgather_object((isinstance(found, kind), np.asarray(found).tolist()))
    assert all(is_kind for is_kind, _ in told), type(found)
    return [values for _, values in told]


def everywhere(expected: Any) -> list[Any]:
    return [np.asarray(expected).tolist()] * hvd.size()


@pytest.mark.smoke
def test_a_number_is_averaged_into_an_array() -> None:
    found = hvd.allreduce(float(hvd.rank()), name="metric")
    assert gathered(found, np.ndarray) == everywhere(ranks().mean())
    assert gathered(hvd.allreduce(hvd.rank(), average=False), np.ndarray) == everywhere(ranks().sum())


def test_an_allreduce_takes_an_operation_factors_and_compression() -> None:
    found = hvd.allreduce([float(hvd.rank())] * 3, op=hvd.Max)
    assert gathered(found, np.ndarray) == everywhere([hvd.size() - 1.0] * 3)
    scaled = hvd.allreduce(np.float32(hvd.rank()), None, None, 2.0, 3.0, hvd.Sum, hvd.Compression.fp16)
    assert gathered(scaled, np.ndarray) == everywhere(6 * ranks().sum())


def test_a_tensor_and_a_variable_come_back_as_tensors() -> None:
    tensor = torch.full((2,), float(hvd.rank()))
    assert gathered(hvd.allreduce(tensor), torch.Tensor) == everywhere([ranks().mean()] * 2)
    with torch.no_grad():
        found = hvd.allreduce(keras.Variable(tensor))
    assert gathered(found, torch.Tensor) == everywhere([ranks().mean()] * 2)


def test_rows_are_gathered_in_the_order_of_ranks() -> None:
    found = hvd.allgather(np.full((hvd.rank() + 1, 2), hvd.rank()))
    assert gathered(found, np.ndarray) == everywhere(
        np.repeat(ranks().astype(int), ranks().astype(int) + 1)[:, None].repeat(2, 1)
    )


def test_the_roots_value_is_everybodys() -> None:
    root = hvd.size() - 1
    assert gathered(hvd.broadcast(hvd.rank() * 10, root, name="value"), np.ndarray) == everywhere(root * 10)


def test_each_rank_gets_its_rows_of_a_reduction() -> None:
    rows = np.arange(2.0 * hvd.size())[:, None] * (hvd.rank() + 1)
    told = gathered(hvd.reducescatter(rows), np.ndarray)
    mean = np.arange(2.0 * hvd.size())[:, None] * (ranks() + 1).mean()
    assert [row for of_rank in told for row in of_rank] == mean.tolist()
    told = gathered(hvd.reducescatter(torch.as_tensor(rows), op=hvd.Sum), torch.Tensor)
    assert [row for of_rank in told for row in of_rank] == (mean * hvd.size()).tolist()


def test_what_is_no_number_is_refused() -> None:
    with pytest.raises(ValueError, match="found dict where a tensor"):
        hvd.allreduce({})


def test_variables_of_model_and_optimizer_become_the_roots() -> None:
    model = model_of(seed=hvd.rank())
    model.compile(
        loss="mse", optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(0.01 * (1 + hvd.rank())))
    )
    root = hvd.size() - 1
    hvd.broadcast_global_variables(root, model=model)
    told = allgather_object((weights(model).tolist(), float(model.optimizer.learning_rate)))
    assert told == [told[root]] * hvd.size()
    assert weights(model).tolist() == weights(model_of(seed=root)).tolist()
    assert model.optimizer.built


def test_random_generators_stay_each_ranks_own() -> None:
    keras.utils.set_random_seed(hvd.rank())
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dropout(0.5), keras.layers.Dense(2)])
    before = np.asarray(model.layers[0].seed_generator.state).tolist()
    hvd.broadcast_global_variables(0, model=[model])
    told = allgather_object((before, np.asarray(model.layers[0].seed_generator.state).tolist()))
    assert all(before == after for before, after in told)
    assert len({tuple(after) for _, after in told}) == hvd.size()


def test_slots_of_a_trained_optimizer_are_broadcast_too() -> None:
    model = model_of()
    fit(model, keras.optimizers.SGD(0.1 + 0.1 * hvd.rank(), momentum=0.9), data())
    hvd.broadcast_global_variables(0, model=model)
    told = allgather_object([np.asarray(variable).tolist() for variable in model.optimizer.variables])
    assert told == [told[0]] * hvd.size()


def test_without_a_built_model_a_broadcast_is_refused() -> None:
    with pytest.raises(ValueError, match=r"broadcast_global_variables\(root_rank, model=model\)"):
        hvd.broadcast_global_variables(0)
    with pytest.raises(ValueError, match="has no variables yet"):
        hvd.broadcast_global_variables(0, model=keras.Sequential([keras.layers.Dense(2)]))
