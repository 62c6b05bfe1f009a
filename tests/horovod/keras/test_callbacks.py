from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import hpcpar.horovod.torch as hvd
from hpcpar.horovod.keras import callbacks

pytestmark = [pytest.mark.mpi, pytest.mark.usefixtures("hvd")]

RNG = np.random.default_rng(0)
X = RNG.normal(size=(12, 4)).astype("float32")
Y = X.sum(axis=1, keepdims=True)


def network(optimizer: Any, seed: int = 0) -> keras.Model:
    """A linear model; weights by the seed."""
    keras.utils.set_random_seed(seed)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1), keras.layers.BatchNormalization()])
    model.compile(optimizer=optimizer, loss="mse")
    return model


def fitted(model: keras.Model, *hooks: keras.callbacks.Callback, **options: Any) -> dict[str, list[float]]:
    options = {"batch_size": 4, "shuffle": False, "verbose": 0, **options}
    return dict(model.fit(X, Y, callbacks=list(hooks), **options).history)


class Look(keras.callbacks.Callback):
    """Looks at the model before every batch."""

    def __init__(self, look: Any) -> None:
        super().__init__()
        self.look = look
        self.seen: list[Any] = []

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.seen.append(self.look(self.model))


class Told(keras.callbacks.Callback):
    """Tells the model a validation loss of this rank's own, as `fit` would."""

    def __init__(self, losses: list[float]) -> None:
        super().__init__()
        self.losses = losses

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        logs["told"] = self.losses[epoch]


@pytest.mark.smoke
def test_the_first_step_is_taken_from_the_roots_weights_and_optimizer_state() -> None:
    root = hvd.size() - 1
    adam = keras.optimizers.Adam(0.01 * (hvd.rank() + 1))
    for _ in range(hvd.rank() + 1):  # so that Keras numbers the layers otherwise on each rank
        model = network(adam, seed=hvd.rank())
    look = Look(lambda m: [keras.ops.convert_to_numpy(v) for v in [*m.weights, *m.optimizer.variables]])
    # Named before the broadcast in the list, and yet it sees what was broadcast.
    fitted(model, look, callbacks.BroadcastGlobalVariablesCallback(root), epochs=1)
    expected = hvd.broadcast_object(look.seen[0], root)
    assert len(expected) == 6 + 2 + 2 * 4
    for found, of_root in zip(look.seen[0], expected, strict=True):
        np.testing.assert_array_equal(found, of_root)
    assert callbacks.learning_rate(adam) != 0.01 * (hvd.rank() + 1) or hvd.rank() == root


def test_local_variables_stay_as_they_are() -> None:
    model = network("sgd")
    bias = model.layers[0].bias
    bias.assign([float(hvd.rank() + 1)])
    model.layers[0].kernel.assign(np.full((4, 1), hvd.rank()))
    look = Look(lambda m: [keras.ops.convert_to_numpy(v).sum() for v in m.layers[0].weights])
    fitted(model, callbacks.BroadcastGlobalVariablesCallback(0, local_variables=bias), look, epochs=1)
    assert look.seen[0] == [0, hvd.rank() + 1]


def test_a_local_variable_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="needs keras"):
        callbacks.BroadcastGlobalVariablesCallback(0, local_variables=["dense/kernel"])


@pytest.mark.parametrize("first", [True, False])
def test_all_ranks_stop_in_the_same_epoch_though_their_own_losses_differ(first: bool) -> None:
    """Rank 0 alone improves: its own losses would let it go on. Validation is of uneven shares."""
    model = network(keras.optimizers.SGD(0.0))
    average = callbacks.MetricAverageCallback()
    stopping = keras.callbacks.EarlyStopping(patience=1, monitor="val_loss")

    class Better(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            shift = -0.1 * epoch if hvd.rank() == 0 and hvd.size() > 1 else 0.1 * hvd.size() * epoch
            self.model.layers[-1].beta.assign([10 + shift])

    share = slice(0, 2 + hvd.rank())
    hooks = [Better(), *((average, stopping) if first else (stopping, average))]
    history = fitted(model, *hooks, epochs=6, validation_data=(X[share], Y[share]))
    everywhere = hvd.allgather_object(history["val_loss"])
    assert everywhere == [everywhere[0]] * hvd.size()
    assert len(everywhere[0]) == 2


def test_numbers_that_another_callback_logs_are_averaged() -> None:
    model = network(keras.optimizers.SGD(0.0))
    told = Told([float(hvd.rank())] * 2)
    history = fitted(model, told, callbacks.MetricAverageCallback(), epochs=2)
    assert history["told"] == pytest.approx([(hvd.size() - 1) / 2] * 2)


def test_warmup_follows_the_formula_batch_by_batch() -> None:
    model = network(keras.optimizers.SGD(0.5, momentum=0.8))
    look = Look(lambda m: (callbacks.learning_rate(m.optimizer), m.optimizer.momentum))
    warmup = callbacks.LearningRateWarmupCallback(0.4, warmup_epochs=2)
    history = fitted(model, warmup, look, epochs=3)
    size, steps = hvd.size(), 3
    rates = [0.4 / size * ((size - 1) / 2 * (step + 1) / steps + 1) for step in range(2 * steps)]
    rates += [rates[-1]] * steps
    momenta = [0.8 * after / before for before, after in zip([0.5, *rates], rates, strict=False)]
    assert [rate for rate, _ in look.seen] == pytest.approx(rates)
    assert [momentum for _, momentum in look.seen] == pytest.approx(momenta)
    assert rates[-1] == pytest.approx(0.4)
    assert model.optimizer.momentum == 0.8
    assert history["lr"] == pytest.approx([rates[2], rates[5], rates[8]])


def test_warmup_tells_on_rank_0_when_it_is_over(capsys: pytest.CaptureFixture[str]) -> None:
    fitted(network("sgd"), callbacks.LearningRateWarmupCallback(0.2, 1, verbose=1), epochs=2)
    printed = "Epoch 1: finished gradual learning rate warmup to 0.2." if hvd.rank() == 0 else ""
    assert capsys.readouterr().out.strip() == printed


def test_a_schedule_by_stairs_sets_the_rate_of_its_epochs_only() -> None:
    model = network(keras.optimizers.SGD(0.3, momentum=0.8))
    look = Look(lambda m: callbacks.learning_rate(m.optimizer))
    schedule = callbacks.LearningRateScheduleCallback(
        0.1, lambda epoch: 1 / (epoch + 1), start_epoch=1, end_epoch=3, momentum_correction=False
    )
    momentum = Look(lambda m: m.optimizer.momentum)
    fitted(model, schedule, look, momentum, epochs=4, batch_size=6)
    assert look.seen == pytest.approx([0.3, 0.3, 0.05, 0.05, 0.1 / 3, 0.1 / 3, 0.1 / 3, 0.1 / 3])
    assert momentum.seen == [0.8] * 8


def test_a_constant_multiplier_decays_by_the_epoch() -> None:
    model = network(keras.optimizers.Adam(0.3))
    look = Look(lambda m: callbacks.learning_rate(m.optimizer))
    fitted(
        model, callbacks.LearningRateScheduleCallback(0.1, 0.5, start_epoch=1), look, epochs=4, batch_size=12
    )
    assert look.seen == pytest.approx([0.3, 0.1, 0.05, 0.025])


def test_the_rate_of_an_optimizer_that_scales_its_loss_is_set_too() -> None:
    model = network(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.3, momentum=0.5)))
    look = Look(lambda m: (callbacks.learning_rate(m.optimizer), m.optimizer.inner_optimizer.momentum))
    fitted(
        model, callbacks.LearningRateScheduleCallback(0.6, lambda epoch: 1.0), look, epochs=1, batch_size=6
    )
    assert look.seen == [pytest.approx((0.6, 1.0)), pytest.approx((0.6, 0.5))]


def test_a_schedule_that_cannot_know_the_steps_of_an_epoch_says_which_argument_tells_them() -> None:
    def batches() -> Any:
        while True:
            yield X, Y

    warmup = callbacks.LearningRateWarmupCallback(0.1)
    warmup.set_params({"steps": None})
    with pytest.raises(ValueError, match="give it steps_per_epoch="):
        warmup.on_train_begin()
    with pytest.raises(ValueError, match="initial_lr=None"):
        callbacks.LearningRateScheduleCallback(None, 1.0)  # type: ignore[arg-type]
    network("sgd").fit(batches(), steps_per_epoch=2, verbose=0, callbacks=[warmup])
    assert warmup.steps_per_epoch == 2


def test_the_best_model_is_written_by_rank_0_alone(tmp_path: Path) -> None:
    best = callbacks.BestModelCheckpoint(monitor="told", mode="min")
    best.filepath = str(tmp_path / "best.keras")
    model = network(keras.optimizers.SGD(0.05))
    fitted(model, Told([3.0, 1.0, 2.0]), best, epochs=3)
    assert (tmp_path / "best.keras").exists() == (hvd.rank() == 0)
    with pytest.raises(ValueError, match="give it filepath="):
        fitted(network("sgd"), callbacks.BestModelCheckpoint(), epochs=1)
