"""Keras trainings on this rank's samples, and the same in one process on the samples of all ranks.

In float32, and equal up to its rounding: sums over ranks are in another order than sums over a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

import hpcpar.horovod.keras as hvd
from hpcpar.horovod.keras.keras_optimizer import Distributed
from hpcpar.horovod.torch import allgather_object

BATCH = 24
"""Samples of all ranks in one batch; 1, 2, 3 and 4 ranks have equal shares."""
STEPS = 6
ROUNDING = 1e-6

Arrays = tuple[np.ndarray, np.ndarray]


def data(steps: int = STEPS) -> Arrays:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(steps * BATCH, 8)).astype("float32")
    return x, np.tanh(x @ rng.normal(size=(8, 2))).astype("float32")


def share(array: np.ndarray) -> np.ndarray:
    """This rank's samples of each batch."""
    return of_ranks(array, [hvd.rank()]).reshape(-1, *array.shape[1:])


def of_ranks(array: np.ndarray, ranks: Sequence[int]) -> np.ndarray:
    """Return batches of the samples of these ranks: shape (steps, samples, ...)."""
    batches = array.reshape(-1, hvd.size(), BATCH // hvd.size(), *array.shape[1:])
    return batches[:, list(ranks)].reshape(len(batches), -1, *array.shape[1:])


def model_of(seed: int = 0) -> keras.Model:
    keras.utils.set_random_seed(seed)
    layers = [keras.layers.Dense(16, activation="tanh"), keras.layers.Dense(2)]
    return keras.Sequential([keras.Input((8,)), *layers])


def fit(model: keras.Model, optimizer: Any, arrays: Arrays, **options: Any) -> list[float]:
    """Train one epoch; a rank's optimizer takes batches of its share. Returns the losses of epochs."""
    model.compile(loss=keras.losses.MeanSquaredError(), optimizer=optimizer)
    return go_on(model, arrays, **options)


def go_on(model: keras.Model, arrays: Arrays, **options: Any) -> list[float]:
    """Train one more epoch."""
    inner = getattr(model.optimizer, "inner_optimizer", None)
    is_rank = isinstance(model.optimizer, Distributed) or isinstance(inner, Distributed)
    size = BATCH // hvd.size() if is_rank else BATCH
    arrays = tuple(map(share, arrays)) if is_rank else arrays
    history = model.fit(*arrays, batch_size=size, shuffle=False, verbose=0, **options).history
    losses: list[float] = history["loss"]
    return losses


def weights(model: keras.Model) -> np.ndarray:
    return np.concatenate([weight.ravel() for weight in model.get_weights()])


def assert_as_alone(model: keras.Model, reference: keras.Model, bound: float = ROUNDING) -> None:
    """Assert that weights are those of one process, and on all ranks the same to the last bit."""
    own, alone = weights(model), weights(reference)
    told = allgather_object((float(np.abs(own - alone).max()), own.tobytes()))
    assert max(far for far, _ in told) <= bound
    assert len({bits for _, bits in told}) == 1, "ranks differ"


def assert_same(pairs: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
    """Assert that arrays are the same on every rank, after all have come here."""
    told = allgather_object([bool(np.array_equal(found, expected)) for found, expected in pairs])
    assert all(all(of_rank) for of_rank in told), told


def compare(make: Callable[[], Any], bound: float = ROUNDING, **options: Any) -> keras.Model:
    """Hold a training with the distributed optimizer to one process; `options` of DistributedOptimizer."""
    model, reference = model_of(), model_of()
    fit(model, hvd.DistributedOptimizer(make(), **options), data())
    fit(reference, make(), data())
    assert_as_alone(model, reference, bound)
    return model
