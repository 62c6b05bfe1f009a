"""Training on divided data equals one process with whole batches: losses, metrics and weights."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import hpcpar.horovod.keras as hvd

pytestmark = [pytest.mark.mpi, pytest.mark.usefixtures("hvd")]

RNG = np.random.default_rng(7)
X = RNG.normal(size=(45, 6)).astype("float32")
LABELS = ((X[:, 0] > 0).astype("int32") + (X[:, 1] > 0)).astype("int32")
BATCH = 16  # the last has 13
OPTIMIZERS = {
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "adam and clipping": lambda: keras.optimizers.Adam(0.02, clipnorm=0.1),
    "scaled": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=64.0),
}


class Steps(keras.Sequential):
    """A train_step of one's own, as in Keras's guide for torch: it knows no weights of batches."""

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y, *_ = data
        predicted = self(x, training=True)
        loss = self.compute_loss(y=y, y_pred=predicted)
        self.zero_grad()
        loss.backward()
        variables = self.trainable_weights[:]
        gradients = [variable.value.grad for variable in variables]
        with torch.no_grad():
            self.optimizer.apply(gradients, variables)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss, sample_weight=len(y))
            else:
                metric.update_state(y, predicted)
        return {metric.name: metric.result() for metric in self.metrics}


def network(optimizer: Any, kind: Any = keras.Sequential) -> keras.Model:
    keras.utils.set_random_seed(1)
    regularizer = keras.regularizers.L2(0.01)
    model = kind(
        [
            keras.Input((6,)),
            keras.layers.Dense(8, activation="tanh", kernel_regularizer=regularizer),
            keras.layers.Dense(3, activation="softmax"),
        ]
    )
    metrics = ["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(2)] if kind is keras.Sequential else []
    model.compile(optimizer=optimizer, loss="sparse_categorical_crossentropy", metrics=metrics)
    return model


def weights_of(model: keras.Model) -> np.ndarray:
    return np.concatenate([np.ravel(weight) for weight in model.get_weights()])


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("kind", [keras.Sequential, Steps])
def test_fit_on_divided_arrays_equals_one_process(name: str, kind: Any) -> None:
    alone, model = (
        network(OPTIMIZERS[name](), kind),
        network(hvd.DistributedOptimizer(OPTIMIZERS[name]()), kind),
    )
    options: dict[str, Any] = {"epochs": 3, "verbose": 0}
    expected = alone.fit(
        X, LABELS, batch_size=BATCH, shuffle=False, validation_data=(X[:21], LABELS[:21]), **options
    )
    found = model.fit(
        hvd.data.shard(X, LABELS, batch_size=BATCH),
        validation_data=hvd.data.shard(X[:21], LABELS[:21], batch_size=BATCH),
        callbacks=[hvd.callbacks.MetricAverageCallback()],
        **options,
    )
    assert found.history.keys() == expected.history.keys()
    for key, values in expected.history.items():
        np.testing.assert_allclose(found.history[key], values, atol=1e-6, rtol=2e-6, err_msg=key)
    np.testing.assert_allclose(weights_of(model), weights_of(alone), atol=2e-6)


def test_shuffled_epochs_with_class_weights_equal_one_process_in_that_order() -> None:
    alone, model = network("sgd"), network(hvd.DistributedOptimizer(keras.optimizers.get("sgd")))
    weights = {0: 0.5, 1: 2.0}
    losses = []
    for epoch in range(2):
        order = torch.randperm(len(X), generator=torch.Generator().manual_seed(5 + epoch)).numpy()
        history = alone.fit(
            X[order], LABELS[order], batch_size=BATCH, shuffle=False, class_weight=weights, verbose=0
        )
        losses += history.history["loss"]
    data = hvd.data.shard(X, LABELS, batch_size=BATCH, shuffle=True, seed=5, class_weight=weights)
    found = model.fit(data, epochs=2, verbose=0, callbacks=[hvd.callbacks.MetricAverageCallback()])
    np.testing.assert_allclose(found.history["loss"], losses, rtol=2e-6)
    np.testing.assert_allclose(weights_of(model), weights_of(alone), atol=2e-6)


def test_a_divided_loader_and_passes_per_step_equal_one_process() -> None:
    def compiled(optimizer: Any) -> keras.Model:
        return network(optimizer)

    alone = compiled(keras.optimizers.SGD(0.1, gradient_accumulation_steps=3))
    model = compiled(
        hvd.DistributedOptimizer(
            keras.optimizers.SGD(0.1), backward_passes_per_step=3, average_aggregated_gradients=True
        )
    )
    loader = DataLoader(TensorDataset(torch.tensor(X), torch.tensor(LABELS)), batch_size=BATCH)
    alone.fit(loader, epochs=2, verbose=0)
    model.fit(hvd.data.shard(loader), epochs=2, verbose=0)
    np.testing.assert_allclose(weights_of(model), weights_of(alone), atol=2e-6)


def test_a_hand_written_loop_over_divided_data_equals_one_process() -> None:
    def loop(model: keras.Model, batches: Any) -> None:
        for x, y in batches:
            loss = keras.ops.mean(keras.losses.sparse_categorical_crossentropy(y, model(x, training=True)))
            variables = model.trainable_weights
            gradients = torch.autograd.grad(loss, [variable.value for variable in variables])
            model.optimizer.apply_gradients(zip(gradients, variables, strict=True))

    alone = network(keras.optimizers.Adam(0.02))
    model = network(hvd.DistributedOptimizer(keras.optimizers.Adam(0.02)))
    for of in (alone, model):
        of.optimizer.build(of.trainable_variables)
    loop(alone, [(X[at : at + BATCH], LABELS[at : at + BATCH]) for at in range(0, len(X), BATCH)])
    loop(model, hvd.data.shard(X, LABELS, batch_size=BATCH))
    np.testing.assert_allclose(weights_of(model), weights_of(alone), atol=2e-6)
