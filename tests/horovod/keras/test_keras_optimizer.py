"""DistributedOptimizer for Keras against one process that sees all ranks' samples."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import keras
import pytest
import torch

import hpcpar.horovod.keras as hvd
from hpcpar.horovod.torch import allgather_object
from tests.horovod.keras.training import (
    ROUNDING,
    STEPS,
    assert_as_alone,
    compare,
    data,
    fit,
    model_of,
    of_ranks,
    share,
    weights,
)

pytestmark = [pytest.mark.mpi, pytest.mark.usefixtures("hvd")]

OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "SGD": lambda: keras.optimizers.SGD(0.1),
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "Adam": lambda: keras.optimizers.Adam(0.01),
    "weight decay": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1),
    "clipvalue": lambda: keras.optimizers.SGD(0.1, clipvalue=0.01),
    "clipnorm": lambda: keras.optimizers.SGD(0.1, momentum=0.9, clipnorm=0.05),
    "global_clipnorm": lambda: keras.optimizers.Adam(0.01, global_clipnorm=0.05),
    "EMA": lambda: keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=2),
    "accumulation": lambda: keras.optimizers.Adam(0.01, gradient_accumulation_steps=3),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_training_is_that_of_one_process_with_all_samples(make: Callable[[], Any]) -> None:
    compare(make)


REDUCTIONS: dict[str, dict[str, Any]] = {
    "predivide": {"gradient_predivide_factor": 4.0},
    "groups": {"groups": 2},
    "one group": {"num_groups": 1},
    "name and devices": {"name": "mine", "device_dense": "/gpu:0", "device_sparse": ""},
}


@pytest.mark.filterwarnings("ignore:num_groups")
@pytest.mark.parametrize("options", REDUCTIONS.values(), ids=REDUCTIONS)
def test_options_change_how_gradients_travel_not_what_comes_of_them(options: dict[str, Any]) -> None:
    compare(OPTIMIZERS["clipnorm"], **options)


@pytest.mark.parametrize("narrow", ["fp16", "bf16"])
def test_narrow_gradients_train_alike_on_all_ranks(narrow: str) -> None:
    compare(OPTIMIZERS["momentum"], 2e-2, compression=getattr(hvd.Compression, narrow))


def test_groups_of_variables_are_reduced_together() -> None:
    model, reference = model_of(), model_of()
    groups = [list(model.trainable_variables[:3]), list(model.trainable_variables[3:])]
    fit(model, hvd.DistributedOptimizer(OPTIMIZERS["Adam"](), groups=groups), data())
    fit(reference, OPTIMIZERS["Adam"](), data())
    assert_as_alone(model, reference)


def test_each_process_set_trains_by_itself(half: Any) -> None:
    model, reference = model_of(), model_of()
    optimizer = hvd.DistributedOptimizer(OPTIMIZERS["momentum"](), process_set=half)
    for one, by, ranks in (
        (model, optimizer, [hvd.rank()]),
        (reference, OPTIMIZERS["momentum"](), half.ranks),
    ):
        one.compile(loss="mse", optimizer=by)
        x, y = (of_ranks(array, ranks) for array in data())
        one.fit(x.reshape(-1, 8), y.reshape(-1, 2), batch_size=x.shape[1], shuffle=False, verbose=0)
    far = allgather_object(float(abs(weights(model) - weights(reference)).max()))
    assert max(far) <= ROUNDING


def test_losses_that_fit_and_evaluate_return_average_to_those_of_one_process() -> None:
    model, reference = model_of(), model_of()
    own = fit(model, hvd.DistributedOptimizer(OPTIMIZERS["Adam"]()), data(), epochs=3)
    alone = fit(reference, OPTIMIZERS["Adam"](), data(), epochs=3)
    own.append(model.evaluate(*map(share, data()), verbose=0))
    alone.append(reference.evaluate(*data(), verbose=0))
    far = abs(hvd.allreduce(own) - alone).max()
    assert max(allgather_object(float(far))) <= ROUNDING


# The object


def test_it_is_an_optimizer_of_the_wrapped_ones_class_and_name() -> None:
    plain = keras.optimizers.Adam(0.01, name="mine")
    optimizer = hvd.DistributedOptimizer(plain)
    assert isinstance(optimizer, type(plain))
    assert (type(optimizer).__name__, type(optimizer).__module__) == ("Adam", type(plain).__module__)
    assert optimizer.get_config() == plain.get_config()
    assert keras.optimizers.serialize(optimizer) == keras.optimizers.serialize(plain)
    again = type(optimizer).from_config(optimizer.get_config())
    assert again.distribution is optimizer.distribution


def test_settings_and_state_of_the_wrapped_optimizer_stay() -> None:
    model, plain = model_of(), keras.optimizers.AdamW(0.01)
    plain.exclude_from_weight_decay(var_names=["bias"])
    fit(model, plain, data())
    optimizer = hvd.DistributedOptimizer(plain)
    assert optimizer.built
    assert int(optimizer.iterations) == STEPS
    optimizer.learning_rate = 0.5
    assert float(plain.learning_rate) == 0.5
    assert not optimizer._use_weight_decay(model.layers[0].bias)


def test_a_schedule_counts_steps_and_sets_the_rate() -> None:
    def make() -> Any:
        return keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.3, 2, 0.5))

    compare(make)


def test_several_optimizers_behind_one_are_distributed() -> None:
    def make() -> Any:
        by_path = keras.optimizers.OptimizerMap(keras.optimizers.SGD(0.1))
        by_path[".*bias"] = keras.optimizers.Adam(0.01)
        return keras.optimizers.MultiOptimizer(by_path)

    compare(make)


def test_a_backward_after_the_optimizer_is_gone_is_each_ranks_own() -> None:
    model = model_of()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    optimizer.build(model.trainable_variables)
    gradients = weakref.ref(optimizer._variable_gradients)
    del optimizer
    gc.collect()
    assert gradients() is None
    if hvd.rank() == 0:  # alone: another rank would not come
        model(data()[0]).sum().backward()


REFUSALS: dict[str, tuple[Callable[[], Any], str]] = {
    "a name": (lambda: hvd.DistributedOptimizer("adam"), r"keras\.optimizers\.get"),
    "twice": (
        lambda: hvd.DistributedOptimizer(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))),
        "wrap an optimizer once",
    ),
    "twice, by a loss scaler": (
        lambda: hvd.DistributedOptimizer(
            keras.optimizers.LossScaleOptimizer(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)))
        ),
        "wrap an optimizer once",
    ),
    "Adasum": (lambda: hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), op=hvd.Adasum), "Average or Sum"),
    "predivided sum": (
        lambda: hvd.DistributedOptimizer(
            keras.optimizers.SGD(0.1), op=hvd.Sum, gradient_predivide_factor=2.0
        ),
        "op=Average only",
    ),
    "factor 0": (
        lambda: hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), gradient_predivide_factor=0),
        "above 0",
    ),
    "no passes": (
        lambda: hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), backward_passes_per_step=0),
        "at least 1",
    ),
    "passes, or groups, without their name": (
        lambda: hvd.DistributedOptimizer(
            keras.optimizers.SGD(0.1), None, "", "", hvd.Compression.none, False, 1.0, hvd.Average, 4
        ),
        "8 positional arguments",
    ),
    "two counts of passes": (
        lambda: hvd.DistributedOptimizer(
            keras.optimizers.SGD(0.1, gradient_accumulation_steps=2), backward_passes_per_step=2
        ),
        "choose one of the two",
    ),
    "a name as local layer": (
        lambda: hvd.PartialDistributedOptimizer(keras.optimizers.SGD(0.1), local_layers=["dense"]),
        "found str",
    ),
    "a local layer that is not built": (
        lambda: hvd.PartialDistributedOptimizer(
            keras.optimizers.SGD(0.1), local_layers=keras.layers.Dense(2)
        ),
        "build the model first",
    ),
}


@pytest.mark.parametrize(("call", "words"), REFUSALS.values(), ids=REFUSALS)
def test_impossible_arguments_are_refused(call: Callable[[], Any], words: str) -> None:
    with pytest.raises((ValueError, TypeError), match=words):
        call()


# Local layers


def partial(model: keras.Model, **options: Any) -> Any:
    """Leave the last layer local."""
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    return hvd.PartialDistributedOptimizer(optimizer, local_layers=model.layers[-1], **options)


@pytest.mark.parametrize("options", [{}, {"scale_local_gradients": False}, {"backward_passes_per_step": 2}])
def test_gradients_of_local_layers_stay_on_their_rank(options: dict[str, Any]) -> None:
    """One step against gradients of every rank's samples, computed here."""
    model, passes = model_of(), options.get("backward_passes_per_step", 1)
    optimizer = partial(model, **options)
    x, y = (of_ranks(array, range(hvd.size()))[:passes] for array in data())
    expected = [[0.0] * 4 for _ in range(hvd.size())]
    for rank, of_rank in enumerate(expected):
        for own_x, own_y in zip(*(of_ranks(array, [rank])[:passes] for array in data()), strict=True):
            reference = model_of()
            keras.ops.mean(keras.ops.square(reference(own_x) - torch.as_tensor(own_y))).backward()
            for place, variable in enumerate(reference.trainable_variables):
                of_rank[place] = of_rank[place] + variable.value.grad.numpy()
    size = 1 if options.get("scale_local_gradients") is False else hvd.size()
    change = [sum(of_rank[place] for of_rank in expected) / hvd.size() for place in (0, 1)]
    change += [expected[hvd.rank()][place] / size for place in (2, 3)]
    before = model.get_weights()
    model.compile(loss="mse", optimizer=optimizer)
    x, y = (of_ranks(array, [hvd.rank()])[:passes] for array in data())
    model.fit(x.reshape(-1, 8), y.reshape(-1, 2), batch_size=x.shape[1], shuffle=False, verbose=0)
    found = [new - old for new, old in zip(model.get_weights(), before, strict=True)]
    far = max(float(abs(f + 0.1 * c).max()) for f, c in zip(found, change, strict=True))
    assert max(allgather_object(far)) <= ROUNDING


def test_a_loss_scaler_decides_alike_where_one_ranks_local_layer_overflows() -> None:
    model = model_of()
    optimizer = keras.optimizers.LossScaleOptimizer(partial(model), initial_scale=8.0)
    optimizer.build(model.trainable_variables)
    x = of_ranks(data()[0], [hvd.rank()])[0]
    # The factor reaches the last layer's gradients alone.
    outputs = model.layers[1](model.layers[0](x).detach())
    (outputs.sum() * (float("inf") if hvd.rank() == hvd.size() - 1 else 1.0)).backward()
    optimizer.apply(
        [v.value.grad for v in model.layers[1].trainable_variables], model.layers[1].trainable_variables
    )
    assert allgather_object(float(optimizer.dynamic_scale)) == [4.0] * hvd.size()
