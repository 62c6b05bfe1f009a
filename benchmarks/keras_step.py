"""A step of Keras's `fit` with hpcpar.horovod.keras, beside the same step whose ranks do not communicate.

    hpcpar run -n 2 benchmarks/keras_step.py [--cases mlp,transformer] [--json FILE]

    mlp           5 M parameters in 20 dense layers, 128 rows on each rank
    transformer   5 M parameters in 6 layers of attention and feed-forward, 8 sequences of 64 on each rank

Both are Keras, each with a model of its own, Adam, and batches that differ by rank; a step is the model's
`train_step`. Bounds stand beside them: "copy" copies as many bytes as the gradients have, as buckets take
them; "allreduce" is one all-reduce of them, and nothing else; "apply" is the plain optimizer's `apply` on
gradients that are there. A turn is some steps of one player; wall time is that of the slowest rank, processor
time that of all ranks together. Ratios are of turns of one round. Where ranks use all cores, nothing
overlaps: a step is not shorter than alone + copy + allreduce.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "torch")

import keras
import torch
from common import add_options, append_json, give_up, header, in_turn, print_header, quartiles, ratios, turn
from keras import layers

import hpcpar
import hpcpar.horovod.keras as hvd

PLAYERS = ("hpcpar", "alone", "copy", "allreduce", "apply")
Step = Callable[[], Any]


def mlp() -> tuple[keras.Model, tuple[int, ...]]:
    """Return the model, and the shape of a rank's inputs."""
    model = keras.Sequential([layers.Input((512,)), *[layers.Dense(512, "relu") for _ in range(19)]])
    model.add(layers.Dense(256))
    return model, (128, 512)


def transformer() -> tuple[keras.Model, tuple[int, ...]]:
    width, sequence = 256, 64
    inputs = layers.Input((sequence,), dtype="int32")
    x = layers.Embedding(256, width)(inputs)
    for _ in range(6):
        y = layers.LayerNormalization()(x)
        x = x + layers.MultiHeadAttention(4, width // 4)(y, y, use_causal_mask=True)
        y = layers.LayerNormalization()(x)
        x = x + layers.Dense(width)(layers.Dense(4 * width, "gelu")(y))
    return keras.Model(inputs, layers.Dense(256)(x)), (8, sequence)


CASES: dict[str, tuple[Callable[[], tuple[keras.Model, tuple[int, ...]]], int]] = {
    "mlp": (mlp, 5),
    "transformer": (transformer, 2),
}
"""Makes the model; steps of a turn."""


def compiled(
    make: Callable[[], tuple[keras.Model, tuple[int, ...]]], wrap: Any, rank: int
) -> tuple[Any, Step]:
    """Return a model that is trained with the wrapped Adam, and its step."""
    keras.utils.set_random_seed(0)
    model, shape = make()
    chance = torch.Generator().manual_seed(rank)
    if len(model.output_shape) == 3:
        inputs = torch.randint(256, shape, generator=chance)
        labels = torch.randint(256, shape, generator=chance)
    else:
        inputs = torch.randn(shape, generator=chance)
        labels = torch.randint(256, shape[:1], generator=chance)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(wrap(keras.optimizers.Adam(1e-4)), loss)
    return model, lambda: model.train_step((inputs, labels))


def players(case: str, comm: Any) -> tuple[dict[str, Step], keras.Model]:
    """Return a step of each player, and the model that is trained over all ranks."""
    make, _ = CASES[case]
    ours, step = compiled(make, hvd.DistributedOptimizer, comm.rank)
    alone, step_alone = compiled(make, lambda optimizer: optimizer, comm.rank)
    weights = alone.trainable_weights
    step_alone()
    gradients = [torch.zeros_like(weight.value) for weight in weights]
    flat = torch.zeros(sum(gradient.numel() for gradient in gradients))
    places = flat.split([gradient.numel() for gradient in gradients])

    def apply() -> None:
        with torch.no_grad():
            alone.optimizer.apply(gradients, weights)

    def copy() -> None:
        for place, gradient in zip(places, gradients, strict=True):
            place.copy_(gradient.view(-1))

    return {
        "hpcpar": step,
        "alone": step_alone,
        "copy": copy,
        "allreduce": lambda: comm.allreduce(flat),
        "apply": apply,
    }, ours


def require_equal_on_all_ranks(model: keras.Model, comm: Any) -> None:
    """End the job unless the weights are the same everywhere, which they are not where nothing is reduced."""
    sums = torch.stack([weight.value.detach().double().sum() for weight in model.trainable_weights])
    if not torch.equal(comm.allreduce(sums.clone(), "min"), comm.allreduce(sums.clone(), "max")):
        give_up(comm, "the ranks' weights differ after training with DistributedOptimizer")


def measure(case: str, comm: Any, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Return each player's turns: wall and processor seconds of a step."""
    steps, model = players(case, comm)
    for step in steps.values():
        for _ in range(3):
            step()
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in PLAYERS}
    for name in in_turn(PLAYERS, rounds):
        found[name].append(turn(steps[name], CASES[case][1], comm))
    require_equal_on_all_ranks(model, comm)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="A step of a Keras model on several ranks, and alone.")
    parser.add_argument("--cases", default="mlp,transformer")
    add_options(parser, rounds=20, threads=1, json=None)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    comm = hpcpar.init()
    hvd.init()
    about = header(comm, rounds=options.rounds, keras=keras.__version__)
    lines = [{"benchmark": "keras step", **about}]
    if comm.rank == 0:
        print_header(about)
        print("case         player       median        quartiles (ms)       cpu   is × alone (cpu ×)")
    for case in options.cases.split(","):
        found = measure(case, comm, options.rounds)
        for name in PLAYERS:
            walls, cpus = ([1000 * each[part] for each in found[name]] for part in (0, 1))
            by, by_cpu = (
                ratios([each[part] for each in found[name]], [each[part] for each in found["alone"]])
                for part in (0, 1)
            )
            low, middle, high = quartiles(walls)
            lines.append(
                {"case": case, "player": name, "ms": [low, middle, high], "cpu_ms": quartiles(cpus)}
                | {"ratio": by, "cpu_ratio": by_cpu}
            )
            if comm.rank == 0:
                print(
                    f"{case:<12} {name:<10} {middle:>8.3f} {low:>10.3f} {high:>10.3f} "
                    f"{quartiles(cpus)[1]:>9.3f}   {by[1]:.3f} ({by_cpu[1]:.3f})",
                    flush=True,
                )
    if comm.rank == 0:
        append_json(options.json, lines)


if __name__ == "__main__":
    main()
