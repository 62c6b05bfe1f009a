"""Common mistakes in programs that use DistributedOptimizer and nothing else of ours."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import hpcpar.horovod.keras as hvd
from hpcpar.errors import MismatchError
from hpcpar.horovod.keras.averaged_metrics import is_averaged
from hpcpar.horovod.torch import allgather_object

pytestmark = [pytest.mark.mpi, pytest.mark.usefixtures("hvd")]

RNG = np.random.default_rng(3)
X = RNG.normal(size=(24, 4)).astype("float32")
Y = X.sum(axis=1, keepdims=True)


def network(lr: float = 0.01) -> keras.Model:
    keras.utils.set_random_seed(2)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dense(1)])
    model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(lr)), loss="mse", metrics=["mae"])
    return model


def own_rows() -> slice:
    return slice(4 * hvd.rank(), 4 * hvd.rank() + 4)


def fitted(model: keras.Model, *hooks: Any, same: bool = False, **options: Any) -> tuple[Any, list[str]]:
    """The history and the warnings of a fit; on rows of this rank's own, or the same on all."""
    rows = slice(0, 4) if same else own_rows()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        options = {"epochs": 1, "batch_size": 2, "verbose": 0, "shuffle": False, **options}
        history = model.fit(X[rows], Y[rows], callbacks=list(hooks), **options).history
    ours = [str(warning.message) for warning in caught if "rank" in str(warning.message)]
    return history, ours


class Act(keras.callbacks.Callback):
    """Does something at the end of each epoch."""

    def __init__(self, act: Any) -> None:
        super().__init__()
        self.act = act

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.act(self.model, epoch)


def error_of(call: Any) -> Exception | None:
    try:
        call()
    except Exception as error:
        return error
    return None


def test_the_same_samples_on_every_rank_are_named_once_on_rank_0() -> None:
    model = network()
    _, told = fitted(model, same=True, epochs=2)
    _, of_own_rows = fitted(network())
    expected = 1 if hvd.rank() == 0 and hvd.size() > 1 else 0
    assert len(told) == expected, told
    assert all("hvd.data.shard(" in text for text in told)
    assert of_own_rows == []


@pytest.mark.smoke
def test_all_ranks_stop_in_the_same_epoch_and_see_the_same_metrics_without_our_callbacks() -> None:
    seen: list[float] = []

    class Look(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            seen.append(logs["val_loss"])

    rows = slice(0, 3 + hvd.rank())  # ranks' own validation losses differ
    hooks = [Look(), keras.callbacks.EarlyStopping(patience=0), keras.callbacks.ReduceLROnPlateau(patience=1)]
    model = network(lr=0.5)
    history, _ = fitted(model, *hooks, epochs=5, validation_data=(X[rows], 0 * Y[rows]))
    everywhere = allgather_object((history, seen))
    assert everywhere == [everywhere[0]] * hvd.size()
    assert seen == history["val_loss"]
    assert not is_averaged(model)


def test_a_rank_that_stops_by_itself_stops_all() -> None:
    def act(model: keras.Model, epoch: int) -> None:
        if hvd.rank() == hvd.size() - 1 and epoch == 1:
            model.stop_training = True

    history, _ = fitted(network(), Act(act), epochs=5)
    assert len(history["loss"]) == 2


def test_a_loss_that_is_not_a_number_on_one_rank_stops_all_in_that_step() -> None:
    x = X[own_rows()].copy()
    if hvd.rank() == hvd.size() - 1:
        x[2:] = np.nan
    model = network()
    steps: list[int] = []
    count = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: steps.append(batch))
    hooks = [keras.callbacks.TerminateOnNaN(), count]
    model.fit(x, Y[own_rows()], batch_size=2, epochs=3, verbose=0, shuffle=False, callbacks=hooks)
    assert steps == [0, 1]


@pytest.mark.usefixtures("needs_two")
def test_a_learning_rate_of_one_ranks_own_is_named_on_every_rank() -> None:
    def act(model: keras.Model, epoch: int) -> None:
        if hvd.rank() == 1:
            model.optimizer.learning_rate = 0.25

    from_start = error_of(lambda: fitted(network(lr=0.5 if hvd.rank() == 1 else 0.01)))
    later = error_of(lambda: fitted(network(), Act(act), epochs=3))
    for error in (from_start, later):
        assert isinstance(error, MismatchError)
        assert "rank 0 by 0.01, rank 1 by 0." in str(error)


def test_callbacks_that_write_one_file_do_so_on_rank_0_alone(tmp_path_factory: Any) -> None:
    folder = Path(tmp_path_factory.mktemp("same"))
    name = str(folder / "{epoch}.weights.h5") if hvd.size() == 1 else "same-{epoch}.weights.h5"
    own = folder / f"own-{hvd.rank()}.csv"
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)  # each rank's own: what it writes is seen there
        hooks = [
            keras.callbacks.ModelCheckpoint(name, save_weights_only=True),
            keras.callbacks.CSVLogger(str(own)),
        ]
        fitted(network(), *hooks, epochs=2)
    written = len(list(folder.glob("*.weights.h5")))
    assert written == (2 if hvd.rank() == 0 else 0)
    assert own.read_text().count("\n") == 3


def test_a_save_on_every_rank_is_named_on_all_but_the_first(tmp_path: Path) -> None:
    model = network()
    fitted(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.save(tmp_path / "model.keras")
    told = [str(warning.message) for warning in caught if "hvd.rank() == 0" in str(warning.message)]
    assert len(told) == (hvd.rank() > 0)


def test_arguments_that_keras_ignores_beside_divided_data_are_refused() -> None:
    data = hvd.data.shard(X, Y, batch_size=8)
    error = error_of(lambda: network().fit(data, class_weight={0: 1.0}, verbose=0))
    assert isinstance(error, ValueError)
    assert "class_weight=" in str(error)


def test_evaluate_by_one_rank_within_a_fit_waits_for_nobody() -> None:
    results: list[Any] = []

    def act(model: keras.Model, epoch: int) -> None:
        if hvd.rank() == 0:
            results.append(model.evaluate(X, Y, verbose=0))

    fitted(network(), Act(act), hvd.callbacks.MetricAverageCallback(), epochs=2)
    assert len(results) == (2 if hvd.rank() == 0 else 0)


def test_callbacks_and_validation_of_one_rank_alone_wait_for_nobody() -> None:
    hooks, options = [], {}
    if hvd.rank() == 0:
        hooks = [keras.callbacks.TerminateOnNaN(), keras.callbacks.EarlyStopping(patience=0)]
        options = {"validation_data": (X[:5], Y[:5])}
    model = network(lr=0.0)
    history, _ = fitted(model, *hooks, epochs=4, **options)
    assert len(history["loss"]) == 2  # as rank 0 sees no better val_loss
    told = allgather_object((history["loss"], "val_loss" in history))
    assert told == [(told[0][0], rank == 0) for rank in range(hvd.size())]
    if hvd.rank() == 0:
        assert history["val_loss"][-1] == pytest.approx(model.evaluate(X[:5], Y[:5], verbose=0)[0])


def test_a_second_fit_is_checked_like_the_first() -> None:
    model = network()
    fitted(model, epochs=1)
    _, told = fitted(model, same=True)
    assert len(told) == (1 if hvd.rank() == 0 and hvd.size() > 1 else 0)
