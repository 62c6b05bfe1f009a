"""A Keras model with two inputs and a train_step of its own: which of two digits is the larger?

    python examples/keras_two_inputs.py                    on one rank
    srun python examples/keras_two_inputs.py               on those of a Slurm job
    mpirun -n 2 python examples/keras_two_inputs.py        on two

The train_step is that of Keras's guide for torch, unchanged: gradients are averages over all ranks when
`loss.backward()` returns, so that what it clips and looks at is the same on each.
"""

from __future__ import annotations

import argparse
from typing import Any

import hpcpar.horovod.keras as hvd  # isort: skip  before keras, for which it chooses torch
import keras
import numpy as np
import torch
from sklearn.datasets import load_digits


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The larger of two digits.")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=50, help="pairs of a step, all ranks together")
    return parser.parse_args()


class Comparison(keras.Model):
    """Says whether the image `left` shows a larger digit than `right`."""

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        predicted = self(x, training=True)
        loss = self.compute_loss(y=y, y_pred=predicted)
        self.zero_grad()
        loss.backward()
        variables = self.trainable_weights[:]
        gradients = [variable.value.grad for variable in variables]
        torch.nn.utils.clip_grad_norm_([variable.value for variable in variables], max_norm=1.0)
        with torch.no_grad():
            self.optimizer.apply(gradients, variables)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss, sample_weight=len(y))  # a mean over so many
            else:
                metric.update_state(y, predicted)
        return {metric.name: metric.result() for metric in self.metrics}


def pairs() -> tuple[dict[str, np.ndarray], np.ndarray]:
    """898 pairs of images, (898, 64) each in [0, 1], and 1.0 where the left digit is larger."""
    digits = load_digits()
    images = (digits.data / 16).astype("float32")
    left, right = images[0:1796:2], images[1:1796:2]
    larger = digits.target[0:1796:2] > digits.target[1:1796:2]
    return {"left": left, "right": right}, larger[:, None].astype("float32")


def network() -> keras.Model:
    left, right = keras.Input((64,), name="left"), keras.Input((64,), name="right")
    read = keras.Sequential([keras.layers.Dense(64, activation="relu"), keras.layers.Dense(8)])
    together = keras.layers.Concatenate()([read(left), read(right)])
    hidden = keras.layers.Dense(32, activation="relu")(together)
    return Comparison(
        inputs={"left": left, "right": right}, outputs=keras.layers.Dense(1, activation="sigmoid")(hidden)
    )


def main() -> None:
    args = arguments()
    hvd.init()
    x, y = pairs()
    keras.utils.set_random_seed(hvd.rank())
    model = network()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.01))
    model.compile(loss="binary_crossentropy", optimizer=optimizer, metrics=["accuracy"])
    history = model.fit(
        hvd.data.shard(x, y, batch_size=args.batch_size, shuffle=True),
        epochs=args.epochs,
        callbacks=[
            hvd.callbacks.BroadcastGlobalVariablesCallback(0),
            hvd.callbacks.MetricAverageCallback(),
            keras.callbacks.EarlyStopping("loss", patience=2),
        ],
        verbose=0,
    ).history
    if hvd.rank() == 0:
        for epoch, (loss, accuracy) in enumerate(zip(history["loss"], history["accuracy"], strict=True)):
            print(f"epoch {epoch + 1}  loss {loss:.6f}  accuracy {accuracy:.4f}", flush=True)
        print(f"trained on {hvd.size()} ranks", flush=True)


if __name__ == "__main__":
    main()
