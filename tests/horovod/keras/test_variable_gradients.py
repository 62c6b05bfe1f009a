"""When gradients are reduced: as backward ends, or by apply; what looks at them in between; what is refused.

What ranks find is gathered first and asserted after, so that no rank fails alone while others wait.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import pytest
import torch

import hpcpar.horovod.keras as hvd
from hpcpar.horovod.torch import allgather_object
from tests.horovod.keras.training import (
    BATCH,
    ROUNDING,
    STEPS,
    assert_as_alone,
    assert_same,
    data,
    model_of,
    of_ranks,
    weights,
)

pytestmark = [pytest.mark.mpi, pytest.mark.usefixtures("hvd")]

Gradients = list[Any]
Step = Callable[[Any, torch.Tensor], Gradients]


def sgd() -> Any:
    return keras.optimizers.SGD(0.1, momentum=0.9)


def mse(model: Any, x: Any, y: Any) -> torch.Tensor:
    return keras.ops.mean(keras.ops.square(model(x) - torch.as_tensor(y)))


def by_backward(model: Any, loss: torch.Tensor) -> Gradients:
    model.zero_grad()
    loss.backward()
    return [variable.value.grad for variable in model.trainable_variables]


def by_autograd(model: Any, loss: torch.Tensor) -> Gradients:
    return list(torch.autograd.grad(loss, [variable.value for variable in model.trainable_variables]))


def clipped(model: Any, loss: torch.Tensor) -> Gradients:
    """A user's own rule, that is not linear, between backward and apply."""
    return [torch.sign(g) * g.abs().sqrt() for g in by_backward(model, loss)]


def in_two_backwards(model: Any, loss: torch.Tensor) -> Gradients:
    model.zero_grad()
    (0.25 * loss).backward(retain_graph=True)
    (0.75 * loss).backward()
    return [variable.value.grad for variable in model.trainable_variables]


def loop(model: Any, optimizer: Any, step: Step, ranks: Sequence[int], loss_of: Any = mse) -> None:
    """Train on the samples of these ranks by a loop of one's own."""
    arrays = [of_ranks(array, ranks) for array in data()]
    for x, y in zip(*arrays, strict=True):
        gradients = step(model, loss_of(model, x, y))
        with torch.no_grad():
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))


def compare_loops(
    step: Step, make: Callable[[], Any] = sgd, *, is_built: bool = True, **options: Any
) -> tuple[Any, Any]:
    """Hold a loop with the distributed optimizer to one process; returns both models."""
    model, reference = model_of(), model_of()
    optimizer = hvd.DistributedOptimizer(make(), **options)
    if is_built:
        optimizer.build(model.trainable_variables)
    loop(model, optimizer, step, [hvd.rank()])
    loop(reference, make(), step, range(hvd.size()))
    assert_as_alone(model, reference)
    return model, reference


STEPS_OF_USERS = [by_backward, by_autograd, clipped, in_two_backwards]


@pytest.mark.smoke
@pytest.mark.parametrize("step", STEPS_OF_USERS)
def test_a_loop_of_ones_own_is_that_of_one_process(step: Step) -> None:
    compare_loops(step)


@pytest.mark.parametrize("step", [by_backward, by_autograd])
def test_an_optimizer_that_apply_builds_reduces_the_first_gradients_too(step: Step) -> None:
    compare_loops(step, is_built=False)


@pytest.mark.usefixtures("needs_two")
def test_gradients_that_were_clipped_before_the_optimizer_was_built_are_refused() -> None:
    model, optimizer = model_of(), hvd.DistributedOptimizer(sgd())
    told = errors(lambda: loop(model, optimizer, clipped, [hvd.rank()]))
    assert all("GradientOrderError" in one and "optimizer.build(" in one for one in told), told


def test_gradients_are_averages_when_backward_returns() -> None:
    model, reference = model_of(), model_of()
    optimizer = hvd.DistributedOptimizer(sgd())
    optimizer.build(model.trainable_variables)
    x, y = (array[0] for array in [of_ranks(array, [hvd.rank()]) for array in data()])
    own = by_backward(model, mse(model, x, y))
    x, y = (array[0] for array in [of_ranks(array, range(hvd.size())) for array in data()])
    alone = by_backward(reference, mse(reference, x, y))
    far = max(float((a - b).abs().max()) for a, b in zip(own, alone, strict=True))
    assert max(allgather_object(far)) <= ROUNDING


def errors(call: Callable[[], Any]) -> list[str]:
    """Return each rank's error, or an empty text."""
    told = ""
    try:
        call()
    except Exception as error:
        told = f"{type(error).__name__}: {error}"
    return allgather_object(told)


def assert_works() -> None:
    """Assert that collectives go on working."""
    assert float(hvd.allreduce(1.0, op=hvd.Sum)) == hvd.size()


@pytest.mark.usefixtures("needs_two")
def test_gradients_of_ones_own_beside_reduced_ones_are_compared_and_refused() -> None:
    model, optimizer = model_of(), hvd.DistributedOptimizer(sgd())
    optimizer.build(model.trainable_variables)

    def two(model: Any, loss: torch.Tensor) -> Gradients:
        (0.5 * loss).backward(retain_graph=True)
        return by_autograd(model, loss)

    told = errors(lambda: loop(model, optimizer, two, [hvd.rank()]))
    assert all("GradientOrderError" in one and "differ between ranks" in one for one in told), told
    assert_works()


@pytest.mark.usefixtures("needs_two")
def test_a_second_backward_onto_sums_is_refused() -> None:
    model, optimizer = model_of(), hvd.DistributedOptimizer(sgd(), op=hvd.Sum)
    optimizer.build(model.trainable_variables)
    told = errors(lambda: loop(model, optimizer, in_two_backwards, [hvd.rank()]))
    assert all("GradientOrderError" in one and "zero_grad()" in one for one in told), told
    assert_works()


def test_sums_are_those_of_the_ranks() -> None:
    model, reference = model_of(), model_of()
    optimizer = hvd.DistributedOptimizer(sgd(), op=hvd.Sum)
    optimizer.build(model.trainable_variables)

    def share(model: Any, x: Any, y: Any) -> torch.Tensor:
        return keras.ops.sum(keras.ops.square(model(x) - torch.as_tensor(y))) / BATCH

    loop(model, optimizer, by_backward, [hvd.rank()], share)
    loop(reference, sgd(), by_backward, range(hvd.size()), share)
    assert_as_alone(model, reference)


# Passes


@pytest.mark.parametrize("average", [False, True])
def test_passes_are_added_up_and_reduced_in_the_last(average: bool) -> None:
    model, reference = model_of(), model_of()
    optimizer = hvd.DistributedOptimizer(
        sgd(), backward_passes_per_step=3, average_aggregated_gradients=average
    )
    plain = sgd()
    loop(model, optimizer, by_backward, [hvd.rank()])
    plain.build(reference.trainable_variables)
    sums: Gradients = []
    for number, (x, y) in enumerate(
        zip(*[of_ranks(array, range(hvd.size())) for array in data()], strict=True)
    ):
        found = by_backward(reference, mse(reference, x, y))
        sums = [a + b for a, b in zip(sums, found, strict=True)] if sums else [g.clone() for g in found]
        if number % 3 == 2:
            plain.apply([g / 3 if average else g for g in sums], reference.trainable_variables)
            sums = []
    assert_as_alone(model, reference)
    assert int(optimizer.iterations) == STEPS


def test_variables_do_not_move_between_the_passes() -> None:
    model, optimizer = model_of(), hvd.DistributedOptimizer(sgd(), backward_passes_per_step=STEPS + 1)
    before = weights(model)
    loop(model, optimizer, by_backward, [hvd.rank()])
    assert_same([(weights(model), before)])


# Optimizers that test whether gradients are finite


def scaled(optimizer: Any) -> Any:
    return keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=1024.0, dynamic_growth_steps=3)


def overflowing(model: Any, x: Any, y: Any) -> torch.Tensor:
    """A loss that is infinite for the samples of the last rank in the third batch."""
    loss = mse(model, x, y)
    third = data()[0].reshape(STEPS, BATCH, -1)[2, -1]
    return loss * torch.inf if np.array_equal(np.asarray(x)[-1], third) else loss


NESTINGS: dict[str, Callable[..., Any]] = {
    "inside": lambda **options: scaled(hvd.DistributedOptimizer(sgd(), **options)),
    "outside": lambda **options: hvd.DistributedOptimizer(scaled(sgd()), **options),
}


def scaled_loop(model: Any, optimizer: Any, ranks: Sequence[int]) -> float:
    optimizer.build(model.trainable_variables)
    loop(
        model,
        optimizer,
        lambda model, loss: by_backward(model, optimizer.scale_loss(loss)),
        ranks,
        overflowing,
    )
    return float(optimizer.dynamic_scale)


@pytest.mark.parametrize("nesting", NESTINGS)
def test_all_ranks_skip_a_step_in_which_one_overflows(nesting: str) -> None:
    model, reference = model_of(), model_of()
    own = scaled_loop(model, NESTINGS[nesting](), [hvd.rank()])
    alone = scaled_loop(reference, scaled(sgd()), range(hvd.size()))
    assert_as_alone(model, reference)
    assert allgather_object(own) == [alone] * hvd.size()
    assert alone == 1024.0


@pytest.mark.parametrize("nesting", NESTINGS)
def test_with_passes_they_skip_together_too(nesting: str) -> None:
    model = model_of()
    scale = scaled_loop(model, NESTINGS[nesting](backward_passes_per_step=2), [hvd.rank()])
    told = allgather_object((scale, weights(model).tobytes()))
    assert len(set(told)) == 1
    assert np.isfinite(weights(model)).all()
    # Halved in the third pass, doubled after three finite ones; outside every second pass counts.
    assert scale == {"inside": 1024.0, "outside": 512.0}[nesting]


def test_mixed_float16_trains_alike_on_all_ranks() -> None:
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model, reference = model_of(), model_of()
    finally:
        keras.config.set_dtype_policy(before)
    for one, make, ranks in (
        (model, lambda: hvd.DistributedOptimizer(sgd()), [hvd.rank()]),
        (reference, sgd, range(hvd.size())),
    ):
        one.compile(loss="mse", optimizer=make())
        assert type(one.optimizer).__name__ == "LossScaleOptimizer"
        x, y = (of_ranks(array, ranks) for array in data())
        one.fit(x.reshape(-1, 8), y.reshape(-1, 2), batch_size=x.shape[1], shuffle=False, epochs=2, verbose=0)
    assert_as_alone(model, reference, 1e-3)
    assert allgather_object(float(model.optimizer.dynamic_scale)) == [2.0**15] * hvd.size()


# Gradients that are missing, sparse or of other variables


class Branches(keras.Model):
    """Layers of which each rank uses some; nobody uses the last."""

    def __init__(self) -> None:
        super().__init__()
        keras.utils.set_random_seed(1)
        self.branches = [keras.layers.Dense(2, name=f"branch_{i}") for i in range(3)]
        for layer in self.branches:
            layer.build((None, 8))
        self.built = True

    def call(self, x: Any, used: Sequence[int] = (0, 1)) -> Any:
        return sum(self.branches[i](x) for i in used)


def test_a_layer_that_one_rank_does_not_use_counts_as_zero_there_and_is_named() -> None:
    model, reference = Branches(), Branches()
    optimizer, plain = hvd.DistributedOptimizer(sgd()), sgd()
    optimizer.build(model.trainable_variables)
    plain.build(reference.trainable_variables)

    def loss_of(model: Any, x: Any, y: Any, rank: int) -> torch.Tensor:
        used = [0, 1] if rank == 0 else [0]
        return keras.ops.mean(keras.ops.square(model(x, used=used) - torch.as_tensor(y)))

    x, y = (array.reshape(STEPS, BATCH, -1) for array in data())
    shares = [slice(rank, None, hvd.size()) for rank in range(hvd.size())]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for i in range(STEPS):
            rank = hvd.rank()
            gradients = by_backward(model, loss_of(model, x[i, shares[rank]], y[i, shares[rank]], rank))
            optimizer.apply(gradients, model.trainable_variables)
    for i in range(STEPS):
        losses = [loss_of(reference, x[i, own], y[i, own], rank) for rank, own in enumerate(shares)]
        plain.apply(by_backward(reference, sum(losses) / len(losses)), reference.trainable_variables)
    assert_as_alone(model, reference)
    told = allgather_object([str(w.message) for w in caught if "no gradient for" in str(w.message)])
    assert told[0] == []
    assert all(len(of_rank) == 1 and "branch_1/kernel" in of_rank[0] for of_rank in told[1:]), told


def test_a_sparse_gradient_stays_sparse_and_is_the_sum_of_all_rows() -> None:
    class Lookup(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            table = torch.nn.Embedding(30, 4, sparse=True)
            self.table = keras.layers.TorchModuleWrapper(table)
            self.built = True

        def call(self, rows: Any) -> Any:
            return self.table(rows)

    rows = np.random.default_rng(0).integers(0, 30, STEPS * BATCH)
    models = []
    for optimizer, ranks in (
        (hvd.DistributedOptimizer(keras.optimizers.SGD(0.5)), [hvd.rank()]),
        (hvd.DistributedOptimizer(keras.optimizers.SGD(0.5), sparse_as_dense=True), [hvd.rank()]),
        (keras.optimizers.SGD(0.5), range(hvd.size())),
    ):
        model = Lookup()
        optimizer.build(model.trainable_variables)
        for batch in of_ranks(rows, ranks):
            loss = keras.ops.mean(keras.ops.square(model(torch.as_tensor(batch)) - 1.0))
            gradients = by_backward(model, loss)
            assert gradients[0].is_sparse
            with torch.no_grad():
                optimizer.apply(gradients, model.trainable_variables)
        models.append(model)
    assert_as_alone(models[0], models[2])
    assert_as_alone(models[1], models[2])


def test_an_embedding_layer_of_keras_is_that_of_one_process() -> None:
    rows = np.random.default_rng(0).integers(0, 30, STEPS * BATCH)
    models = []
    for optimizer, ranks in (
        (hvd.DistributedOptimizer(keras.optimizers.Adam(0.05)), [hvd.rank()]),
        (keras.optimizers.Adam(0.05), range(hvd.size())),
    ):
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input(()), keras.layers.Embedding(30, 4), keras.layers.Dense(1)])
        model.compile(loss="mse", optimizer=optimizer)
        own = of_ranks(rows, ranks)
        model.fit(own.ravel(), np.ones(own.size), batch_size=own.shape[1], shuffle=False, verbose=0)
        models.append(model)
    assert_as_alone(*models)


def test_two_optimizers_of_one_backward_each_reduce_their_own() -> None:
    """As in a GAN: the generator's backward brings gradients to the discriminator, too."""

    def train(wrap: Callable[[Any], Any], ranks: Sequence[int]) -> list[Any]:
        pair = [model_of(0), model_of(1)]
        optimizers = [wrap(keras.optimizers.Adam(0.01)) for _ in pair]
        for x, y in zip(*[of_ranks(array, ranks) for array in data()], strict=True):
            for model, optimizer in zip(pair, optimizers, strict=True):
                for each in pair:
                    each.zero_grad()
                mse(lambda x: pair[0](x) * pair[1](x), x, y).backward()
                optimizer.apply([v.value.grad for v in model.trainable_variables], model.trainable_variables)
        return pair

    own = train(hvd.DistributedOptimizer, [hvd.rank()])
    alone = train(lambda optimizer: optimizer, range(hvd.size()))
    for model, reference in zip(own, alone, strict=True):
        assert_as_alone(model, reference)


@pytest.mark.usefixtures("needs_two")
def test_variables_that_differ_in_the_first_step_become_the_first_ranks_with_a_warning() -> None:
    model = model_of(seed=hvd.rank())
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.0))
    first = allgather_object(weights(model))[0]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loop(model, optimizer, by_backward, [hvd.rank()])
    told = allgather_object(
        (weights(model).tobytes(), sum("broadcast_global_variables" in str(w.message) for w in caught))
    )
    assert told == [(first.tobytes(), 1)] * hvd.size()


def test_after_a_new_start_the_optimizer_goes_on() -> None:
    model, reference = model_of(), model_of()
    optimizer, plain = hvd.DistributedOptimizer(sgd()), sgd()
    for _ in range(2):
        loop(model, optimizer, by_backward, [hvd.rank()])
        loop(reference, plain, by_backward, range(hvd.size()))
        hvd.shutdown()
        hvd.init(process_sets="dynamic")
    assert_as_alone(model, reference)


def test_a_stateless_loop_is_that_of_one_process() -> None:
    def train(model: Any, optimizer: Any, ranks: Sequence[int]) -> None:
        optimizer.build(model.trainable_variables)
        own = [variable.value.detach().clone() for variable in model.trainable_variables]
        slots = [variable.value.detach().clone() for variable in optimizer.variables]
        for x, y in zip(*[of_ranks(array, ranks) for array in data()], strict=True):
            inputs = [value.detach().requires_grad_() for value in own]
            outputs, _ = model.stateless_call(inputs, [], torch.as_tensor(x))
            loss = keras.ops.mean(keras.ops.square(outputs - torch.as_tensor(y)))
            gradients = torch.autograd.grad(loss, inputs)
            with torch.no_grad():
                own, slots = optimizer.stateless_apply(slots, gradients, [v.detach() for v in inputs])
        for variable, value in zip(model.trainable_variables, own, strict=True):
            variable.assign(value)

    model, reference = model_of(), model_of()
    train(model, hvd.DistributedOptimizer(sgd()), [hvd.rank()])
    train(reference, sgd(), range(hvd.size()))
    assert_as_alone(model, reference)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_compiled_train_step_is_that_of_one_process() -> None:
    model, reference = model_of(), model_of()
    for one, optimizer, ranks, is_compiled in (
        (model, hvd.DistributedOptimizer(sgd()), [hvd.rank()], True),
        (reference, sgd(), range(hvd.size()), False),
    ):
        one.compile(loss="mse", optimizer=optimizer, jit_compile=is_compiled)
        x, y = (of_ranks(array, ranks) for array in data())
        one.fit(x.reshape(-1, 8), y.reshape(-1, 2), batch_size=x.shape[1], shuffle=False, verbose=0)
    assert_as_alone(model, reference)
