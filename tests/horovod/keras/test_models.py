"""A model that is saved and loaded trains on as if nothing had happened, on another number of ranks too."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import pytest

import hpcpar.horovod.keras as hvd
from hpcpar.horovod.torch import broadcast_object
from tests.horovod.keras.training import assert_as_alone, data, fit, go_on, model_of

pytestmark = [pytest.mark.mpi, pytest.mark.usefixtures("hvd")]


class Halved(keras.optimizers.SGD):
    """An optimizer of one's own, which steps half as far."""

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        super().update_step(gradient, variable, 0.5 * learning_rate)


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "Adam": lambda: keras.optimizers.Adam(0.01, use_ema=True),
    "accumulation": lambda: keras.optimizers.Adam(0.01, gradient_accumulation_steps=4),
    "loss scale": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01)),
    "own": lambda: Halved(0.1, momentum=0.9),
}


@pytest.fixture
def shared_path(tmp_path: Path) -> Path:
    """One directory for all ranks."""
    return Path(broadcast_object(str(tmp_path)))


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_model_that_all_ranks_load_goes_on_as_one_process_does(
    make: Callable[[], Any], shared_path: Path
) -> None:
    """Saved by one process that was alone, so by another number of ranks than load it."""
    model, reference, file = model_of(), model_of(), shared_path / "model.keras"
    fit(reference, make(), data())
    if hvd.rank() == 0:
        fit(model, make(), data())
        model.save(file)
    hvd.allreduce(0.0)
    loaded = hvd.load_model(file, custom_optimizers=[Halved])
    assert type(loaded.optimizer).__name__ == type(make()).__name__
    go_on(loaded, data())
    go_on(reference, data())
    assert_as_alone(loaded, reference)


def test_what_ranks_save_is_loaded_by_one_process_that_goes_on(shared_path: Path) -> None:
    model, reference, file = model_of(), model_of(), shared_path / "model.keras"
    fit(model, hvd.DistributedOptimizer(keras.optimizers.Adam(0.01), name="ours"), data())
    if hvd.rank() == 0:
        model.save(file)
    hvd.allreduce(0.0)
    alone = keras.saving.load_model(file)
    assert type(alone.optimizer) is type(keras.optimizers.Adam(0.01))
    go_on(alone, data())
    fit(reference, keras.optimizers.Adam(0.01), data())
    go_on(reference, data())
    assert_as_alone(alone, reference)
    assert os.path.exists(file)


def test_compression_is_that_of_the_loaded_optimizer(shared_path: Path) -> None:
    model = model_of()
    model.compile(loss="mse", optimizer=keras.optimizers.SGD(0.1))
    file = Path(shared_path) / "model.keras"
    if hvd.rank() == 0:
        model.save(file)
    hvd.allreduce(0.0)
    loaded = hvd.load_model(file, compression=hvd.Compression.fp16)
    assert loaded.optimizer.distribution.compression is hvd.Compression.fp16


def test_an_h5_file_is_refused_because_keras_loses_the_optimizer(shared_path: Path) -> None:
    model, file = model_of(), shared_path / "model.h5"
    if hvd.rank() == 0:
        fit(model, keras.optimizers.Adam(0.01), data())
        model.save(file)
    hvd.allreduce(0.0)
    with pytest.raises(ValueError, match=r"Save as \.keras"):
        hvd.load_model(file)


def test_a_model_without_optimizer_is_loaded_as_it_is(shared_path: Path) -> None:
    file = shared_path / "model.keras"
    if hvd.rank() == 0:
        model_of().save(file)
    hvd.allreduce(0.0)
    assert not hasattr(hvd.load_model(file), "optimizer")
