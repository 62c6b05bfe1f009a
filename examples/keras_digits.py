"""Recognise handwritten digits with Keras: six lines make a program of one process one of many.

    python examples/keras_digits.py                    on one rank
    srun python examples/keras_digits.py               on those of a Slurm job
    mpirun -n 2 python examples/keras_digits.py        on two
    hpcpar run -np 2 examples/keras_digits.py          the same

The images are scikit-learn's digits, real scans of 8 x 8 pixels that come with the package
(`pip install hpcpar[keras,examples]`). The batch is that of all ranks together, so that any number of them
takes the same steps: losses differ by rounding alone.
"""

from __future__ import annotations

import argparse

import hpcpar.horovod.keras as hvd  # isort: skip  before keras, for which it chooses torch
import keras
import numpy as np
from sklearn.datasets import load_digits

TRAINING = 1440  # of 1797 images; the rest is held out


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Digits with Keras.")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=64, help="images of a step, all ranks together")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--save", metavar="FILE", help="rank 0 writes the model there, as a .keras file")
    return parser.parse_args()


def images_and_digits() -> tuple[np.ndarray, np.ndarray]:
    """(1797, 8, 8, 1) in [0, 1], in an order that is the same on every rank; and their digits."""
    digits = load_digits()
    order = np.random.default_rng(1).permutation(len(digits.images))
    return digits.images[order][..., None].astype("float32") / 16, digits.target[order]


def network() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(16, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10),
        ]
    )


def main() -> None:
    args = arguments()
    hvd.init()
    x, y = images_and_digits()
    training = hvd.data.shard(x[:TRAINING], y[:TRAINING], batch_size=args.batch_size, shuffle=True)
    held_out = hvd.data.shard(x[TRAINING:], y[TRAINING:], batch_size=args.batch_size)

    keras.utils.set_random_seed(hvd.rank())  # ranks start differently, and are made equal by the callback
    model = network()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(args.lr, momentum=0.9))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(loss=loss, optimizer=optimizer, metrics=["accuracy"])
    history = model.fit(
        training,
        epochs=args.epochs,
        validation_data=held_out,
        callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()],
        verbose=0,
    ).history

    if hvd.rank() == 0:
        for epoch, (train, accuracy) in enumerate(zip(history["loss"], history["val_accuracy"], strict=True)):
            print(f"epoch {epoch + 1}  loss {train:.6f}  held-out accuracy {accuracy:.4f}", flush=True)
        print(f"trained on {hvd.size()} ranks", flush=True)
        if args.save:
            model.save(args.save)


if __name__ == "__main__":
    main()
