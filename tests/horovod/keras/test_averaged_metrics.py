"""Metrics over ranks against one process that sees all ranks' samples."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

import hpcpar.horovod.torch as hvd
from hpcpar.errors import HpcparError
from hpcpar.horovod.keras.averaged_metrics import adds_up, average_numbers, summed_over_ranks
from hpcpar.horovod.keras.callbacks import MetricAverageCallback

pytestmark = [pytest.mark.mpi, pytest.mark.usefixtures("hvd")]

RNG = np.random.default_rng(0)
X = RNG.normal(size=(29, 6)).astype("float32")
Y = (X[:, :1].sum(axis=1, keepdims=True) > 0).astype("float32")
LABELS = (X.argmax(axis=1) % 3).astype("int32")


def own(whole: np.ndarray) -> np.ndarray:
    """This rank's rows: the more, the higher the rank."""
    bounds = [len(whole) * r * (r + 1) // (hvd.size() * (hvd.size() + 1)) for r in range(hvd.size() + 1)]
    return whole[bounds[hvd.rank()] : bounds[hvd.rank() + 1]]


def classifier(outputs: int, **compiled: Any) -> keras.Model:
    keras.utils.set_random_seed(3)
    activation = "sigmoid" if outputs == 1 else "softmax"
    layers = [keras.Input((6,)), keras.layers.Dense(outputs, activation=activation)]
    model = keras.Sequential(layers)
    model.compile(optimizer=keras.optimizers.SGD(0.0), **compiled)
    return model


def evaluated(model: keras.Model, y: np.ndarray, batch_size: int = 4) -> tuple[dict[str, float], ...]:
    """Results over ranks, of uneven shares, and of one process."""
    together = model.evaluate(
        own(X),
        own(y),
        batch_size=batch_size,
        verbose=0,
        return_dict=True,
        callbacks=[MetricAverageCallback()],
    )
    alone = model.evaluate(X, y, batch_size=batch_size, verbose=0, return_dict=True)
    return tuple({name: np.asarray(value).item() for name, value in of.items()} for of in (together, alone))


class Largest(keras.metrics.Metric):
    """A metric whose variable is no sum."""

    def __init__(self) -> None:
        super().__init__(name="largest")
        self.value = self.add_variable(shape=(), initializer="zeros", name="value")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.value.assign(keras.ops.maximum(self.value, keras.ops.max(keras.ops.cast(y_true, "float32"))))

    def result(self) -> Any:
        return keras.ops.convert_to_tensor(self.value)


@pytest.mark.smoke
def test_evaluate_on_uneven_shares_equals_one_process_with_all_samples() -> None:
    metrics = [
        "accuracy",
        keras.metrics.AUC(),
        keras.metrics.Precision(),
        keras.metrics.SensitivityAtSpecificity(0.5),
        keras.metrics.RootMeanSquaredError(),
        keras.metrics.R2Score(),
        keras.metrics.FBetaScore(threshold=0.5),
        keras.metrics.BinaryIoU(),
        lambda y_true, y_pred: keras.ops.mean(keras.ops.abs(y_true - y_pred), axis=-1),
    ]
    together, alone = evaluated(classifier(1, loss="binary_crossentropy", metrics=metrics), Y)
    assert len(alone) == 10
    assert together == pytest.approx(alone, abs=1e-6)


def test_results_that_are_arrays_keep_their_shapes() -> None:
    model = classifier(
        3, loss="sparse_categorical_crossentropy", metrics=[keras.metrics.MeanIoU(3, sparse_y_pred=False)]
    )
    scores = keras.metrics.F1Score(average=None)
    scores.update_state(np.eye(3)[LABELS], np.eye(3)[LABELS][::-1])
    together, alone = evaluated(model, LABELS)
    averaged = average_numbers({"scores": scores.result(), "name": "kept", "loss": 1})
    assert together == pytest.approx(alone, abs=1e-6)
    assert averaged["scores"] == pytest.approx(keras.ops.convert_to_numpy(scores.result()))
    assert (averaged["name"], averaged["loss"]) == ("kept", 1.0)


def test_weighted_metrics_and_the_losses_of_several_outputs_are_of_all_samples() -> None:
    entry = keras.Input((6,))
    outputs = {"a": keras.layers.Dense(1, name="a")(entry), "b": keras.layers.Dense(1, name="b")(entry)}
    model = keras.Model(entry, outputs)
    model.compile(
        optimizer="sgd", loss={"a": "mse", "b": "mae"}, weighted_metrics={"a": ["mse"], "b": ["mse"]}
    )
    weights = np.linspace(0.1, 2, len(X)).astype("float32")
    hooks = [MetricAverageCallback()]
    options: dict[str, Any] = {"batch_size": 5, "verbose": 0, "return_dict": True}
    both = {"a": own(Y), "b": own(Y)}
    weights_of = {"a": own(weights), "b": own(weights)}
    hvd.broadcast_parameters([v.value for v in model.weights], 0)
    together = model.evaluate(own(X), both, sample_weight=weights_of, callbacks=hooks, **options)
    alone = model.evaluate(X, {"a": Y, "b": Y}, sample_weight={"a": weights, "b": weights}, **options)
    assert len(alone) == 5
    assert together == pytest.approx(alone, abs=1e-6)


def test_a_metric_of_another_kind_is_averaged_and_keeps_its_own_value() -> None:
    metric = Largest()
    model = classifier(1, loss="mse", metrics=[metric])
    shares = np.full_like(X[:2], hvd.rank()), np.full_like(Y[:2], hvd.rank())
    results = model.evaluate(*shares, verbose=0, return_dict=True, callbacks=[MetricAverageCallback()])
    assert not adds_up(metric)
    assert results["largest"] == pytest.approx((hvd.size() - 1) / 2)
    assert float(metric.result()) == hvd.rank()


def test_a_subclass_with_its_own_result_does_not_add_up_and_one_without_does() -> None:
    class Renamed(keras.metrics.Mean):
        pass

    class Doubled(keras.metrics.Mean):
        def result(self) -> Any:
            return 2 * super().result()

    assert adds_up(Renamed())
    assert not adds_up(Doubled())


def test_evaluate_without_the_callback_is_of_this_rank_alone() -> None:
    model = classifier(1, loss="mse")
    evaluated(model, Y)
    if hvd.rank() == 0:  # a collective would wait for the others
        model.evaluate(own(X), own(Y), verbose=0)


def test_a_metric_has_the_sums_of_all_ranks_within_and_its_own_afterwards() -> None:
    mean = keras.metrics.Mean()
    mean.update_state([hvd.rank() + 1.0])
    with summed_over_ranks([mean]):
        total = float(mean.total)
    assert total == hvd.size() * (hvd.size() + 1) / 2
    assert float(mean.total) == hvd.rank() + 1


@pytest.mark.usefixtures("needs_two")
def test_ranks_with_different_logs_are_named_on_every_rank(error_of: Any) -> None:
    error = error_of(lambda: average_numbers({"loss": 1.0} if hvd.rank() else {"loss": 1.0, "extra": 2.0}))
    assert isinstance(error, HpcparError)
    assert "extra" in str(error)
