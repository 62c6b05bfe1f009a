from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

import hpcpar.horovod.keras as hvd
from hpcpar.horovod.exceptions import HorovodInternalError

pytestmark = [pytest.mark.mpi, pytest.mark.usefixtures("hvd")]

RNG = np.random.default_rng(5)
X = RNG.normal(size=(24, 4)).astype("float32")
Y = X.sum(axis=1, keepdims=True)
EPOCHS = 4


def network(seed: int = 1, scaled: bool = False) -> keras.Model:
    keras.utils.set_random_seed(seed)
    model = keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(3, activation="tanh"), keras.layers.Dense(1)]
    )
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.05))
    if scaled:
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=8.0)
    model.compile(optimizer=optimizer, loss="mse")
    return model


class Fail(keras.callbacks.Callback):
    """Fails once, as a collective would: on every rank, in a batch of an epoch."""

    def __init__(self, epoch: int) -> None:
        super().__init__()
        self.at, self.epoch, self.failed = epoch, 0, False

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if not self.failed and self.epoch == self.at and batch == 1:
            self.failed = True
            raise HorovodInternalError("a collective failed")


def trained(model: keras.Model, *hooks: Any, relative: bool = False) -> tuple[list[Any], Any, list[int]]:
    """Weights, the state, and the epoch that each call began with."""
    state = hvd.elastic.KerasState(model, epoch=0, batch=0)
    began: list[int] = []

    @hvd.elastic.run
    def train(state: Any) -> None:
        began.append(state.epoch)
        span = (
            {"epochs": EPOCHS - state.epoch} if relative else {"initial_epoch": state.epoch, "epochs": EPOCHS}
        )
        callbacks = [
            hvd.elastic.UpdateBatchStateCallback(state),
            hvd.elastic.UpdateEpochStateCallback(state),
            hvd.elastic.CommitStateCallback(state, batches_per_commit=100),
            *hooks,
        ]
        data = hvd.data.shard(X, Y, batch_size=8)
        model.fit(data, verbose=0, shuffle=False, callbacks=callbacks, **span)

    train(state)
    return model.get_weights(), state, began


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("relative", [True, False])
def test_a_training_that_failed_once_goes_on_to_what_it_would_have_been(relative: bool, scaled: bool) -> None:
    expected, _, _ = trained(network(scaled=scaled))
    fail_at = 0 if relative else 2  # with relative epochs each call counts from 0 again
    model = network(seed=hvd.rank() + 1, scaled=scaled)  # all begin with rank 0's weights
    found, state, began = trained(model, Fail(fail_at), relative=relative)
    assert began == [0, fail_at]
    assert (state.epoch, state.batch) == (EPOCHS, 0)
    for value, of_expected in zip(found, expected, strict=True):
        np.testing.assert_allclose(value, of_expected, atol=1e-6)


def test_a_state_goes_back_to_its_commit_with_weights_slots_and_objects() -> None:
    model = network()
    state = hvd.elastic.KerasState(model, epoch=0)
    model.fit(X, Y, batch_size=8, verbose=0)
    state.epoch = 1
    state.commit()
    variables = [*model.variables, *model.optimizer.variables]
    at_commit = [keras.ops.convert_to_numpy(variable).copy() for variable in variables]
    model.fit(X, Y, batch_size=8, verbose=0)
    state.epoch = 2
    state.restore()
    assert state.epoch == 1
    for variable, saved in zip(variables, at_commit, strict=True):
        np.testing.assert_array_equal(keras.ops.convert_to_numpy(variable), saved)


def test_commits_come_after_so_many_batches_and_each_epoch() -> None:
    model = network()
    state = hvd.elastic.KerasState(model, batch=0)
    before = state.commit_count
    model.fit(X, Y, batch_size=4, verbose=0, callbacks=[hvd.elastic.CommitStateCallback(state, 4)])
    assert state.commit_count - before == 2  # after 4 of 6 batches, and at the end


def test_a_model_without_variables_is_refused() -> None:
    with pytest.raises(ValueError, match="has no variables yet"):
        hvd.elastic.KerasState(keras.Sequential([keras.layers.Dense(1)]))
