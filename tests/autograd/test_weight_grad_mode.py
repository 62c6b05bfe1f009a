"""Deferred weights' gradients: what a whole backward gives, at the time asked for, from what was promised."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from hpcpar.autograd import DeferredGradients, recompute
from hpcpar.autograd.weight_grad_mode import stand_in
from hpcpar.comm import Communicator, run_loopback
from hpcpar.data_parallel.reducer import Reducer
from hpcpar.errors import OperationError
from tests.autograd.modules import (
    MODULES,
    TOLERANCE,
    Gradients,
    Sharing,
    Tied,
    X,
    cotangent,
    gradients,
    heard,
    leaves,
    made,
    mlp,
    require_same,
    tokens,
    values,
    whole,
)


def backward_of(module: nn.Module, inputs: Sequence[Tensor]) -> tuple[DeferredGradients, list[Tensor]]:
    """F and B, deferred."""
    given, deferred = leaves(inputs), DeferredGradients()
    with deferred.recording():
        output = module(*given)
    if output.requires_grad:
        torch.autograd.backward(output, cotangent(output))
    return deferred, given


def split(module: nn.Module, inputs: Sequence[Tensor]) -> Gradients:
    deferred, given = backward_of(module, inputs)
    deferred.compute()
    return gradients(module, given)


@pytest.mark.parametrize("name", MODULES)
def test_gradients_are_those_of_a_whole_backward_and_every_hook_runs_once_in_w(name: str) -> None:
    make, inputs = MODULES[name]
    expected = whole(made(make), inputs)
    module = made(make)
    names = heard(module)
    deferred, given = backward_of(module, inputs)
    assert names == []
    assert all(parameter.grad is None for parameter in module.parameters())
    deferred.compute()
    require_same(gradients(module, given), expected)
    assert sorted(names) == sorted(
        name for name, parameter in module.named_parameters() if parameter.grad is not None
    )


def test_hooks_run_in_the_order_of_a_whole_backward_each_before_the_next_gradient_is_made() -> None:
    module = nn.Sequential(*[nn.Linear(8, 8, bias=False) for _ in range(4)]).double()
    complete: list[int] = []
    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda _: complete.append(sum(each.grad is not None for each in module.parameters()))
        )
    names = heard(module)
    backward_of(module, [X])[0].compute()
    assert names == ["3.weight", "2.weight", "1.weight", "0.weight"]
    assert complete == [1, 2, 3, 4]


def test_hooks_of_a_parameter_as_a_tensor_see_and_change_the_whole_gradient() -> None:
    def doubling() -> nn.Module:
        module = made(Sharing)
        module.embed.weight.register_hook(lambda gradient: 2 * gradient)
        return module

    require_same(split(doubling(), [tokens(2, 5)]), whole(doubling(), [tokens(2, 5)]))


# --- the work -------------------------------------------------------------------------------------


def flops(work: Callable[[], Any]) -> int:
    with FlopCounterMode(display=False) as counter:
        work()
    return int(counter.get_total_flops())


@pytest.mark.parametrize(
    "name", ["Linear", "MLP, LayerNorm", "two modules with one weight", "Llama", "Llama, full"]
)
def test_b_multiplies_as_if_weights_were_frozen_and_w_what_is_missing(name: str) -> None:
    make, given = MODULES[name]
    inputs, module = leaves(given), made(make)
    output = module(*inputs)
    total = flops(lambda: torch.autograd.backward(output, cotangent(output)))

    # Tokens have no gradient: there, the tables stay as they are, and the last one's product is taken off.
    of_tokens = not inputs[0].requires_grad
    for parameter in module.parameters():
        parameter.requires_grad_(of_tokens and parameter.shape[0] == output.shape[-1])
    frozen = module(*inputs)
    without = flops(lambda: torch.autograd.backward(frozen, cotangent(frozen)))
    if of_tokens:
        without -= 2 * output.numel() * 8
    module.requires_grad_(True)

    deferred = DeferredGradients()
    with deferred.recording():
        recorded = module(*inputs)
    b = flops(lambda: torch.autograd.backward(recorded, cotangent(recorded)))
    w = flops(deferred.compute)
    assert b + w == total
    assert b == without
    assert w > 0


def test_the_first_layer_makes_no_gradient_of_an_input_that_wants_none() -> None:
    layer, deferred = nn.Linear(8, 6), DeferredGradients()
    with deferred.recording():
        output = layer(X.float())
    b = flops(lambda: output.sum().backward())
    w = flops(deferred.compute)
    assert (b, w) == (0, 2 * 10 * 8 * 6)


# --- memory ---------------------------------------------------------------------------------------


def storages() -> dict[int, int]:
    """Bytes of all memory of tensors that Python knows, by address; a compiler's fakes have none."""
    tensors = [each for each in gc.get_objects() if type(each) in (Tensor, nn.Parameter)]
    places = [each.untyped_storage() for each in tensors if each.layout is torch.strided]
    return {place.data_ptr(): place.nbytes() for place in places}


class Block(nn.Module):
    """Queries, keys and values of one input, a norm, and products elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(8, 24), nn.Linear(24, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        mixed = functional.scaled_dot_product_attention(self.q(h), self.k(h), self.v(h))
        x = x + self.o(mixed)
        output: Tensor = x + self.down(functional.gelu(self.up(x)))
        return output


@pytest.mark.parametrize("mode", ["none", "full"])
def test_between_b_and_w_there_are_inputs_and_outputs_gradients_and_after_w_nothing(mode: str) -> None:
    module, x = Block(), values(4, 16, 8, dtype=torch.float32).requires_grad_()
    gradient = values(4, 16, 8, seed=2, dtype=torch.float32)
    gc.collect()  # before, but not between: nothing is to wait for the collector
    before = storages()
    deferred = DeferredGradients()
    with deferred.recording():
        output = recompute(module, x) if mode == "full" else module(x)
    torch.autograd.backward(output, gradient)
    del output
    assert x.grad is not None
    before[x.grad.untyped_storage().data_ptr()] = 0
    token = 4 * 16 * 4
    # q, k and v have one input; the gradient of `down`'s output is the one given, and of `o`'s, the sum with
    # what comes by way of `up`. Of the norm's weight and bias the gradients are made.
    inputs = {"q, k, v": 8, "o": 8, "up": 8, "down": 24}
    outputs = {"q": 8, "k": 8, "v": 8, "o": 8, "up": 24}
    new = sum(nbytes for place, nbytes in storages().items() if place not in before)
    assert new == token * (sum(inputs.values()) + sum(outputs.values())) + 2 * 8 * 4
    deferred.compute()
    kept = {each.grad.untyped_storage().data_ptr() for each in module.parameters() if each.grad is not None}
    assert {place for place in storages() if place not in before} == kept


def test_what_is_never_computed_is_forgotten_with_its_queue() -> None:
    make, inputs = MODULES["attention to others"]
    module = made(make)
    deferred, _ = backward_of(module, inputs)
    reference = weakref.ref(deferred)
    gc.disable()  # not by the collector
    try:
        del deferred
        assert reference() is None
    finally:
        gc.enable()


# --- several microbatches, and what is not there --------------------------------------------------


def test_microbatches_may_be_interleaved() -> None:
    microbatches = [values(2, 5, 8, seed=seed) for seed in range(3)]
    expected, found = made(mlp), made(mlp)
    for x in microbatches:
        whole(expected, [x])
    names = heard(found)
    deferred = [DeferredGradients() for _ in microbatches]
    outputs = []
    for each, x in zip(deferred, microbatches, strict=True):
        with each.recording():
            outputs.append(found(x))
    for output in outputs:
        torch.autograd.backward(output, cotangent(output))
    for each in deferred:
        each.compute()
    require_same(gradients(found, []), gradients(expected, []))
    assert all(names.count(name) == 3 for name, _ in found.named_parameters())


def test_what_is_there_is_added_to_in_place() -> None:
    module = made(mlp)
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    places = [parameter.grad for parameter in module.parameters()]
    split(module, [X])
    assert all(p.grad is place for p, place in zip(module.parameters(), places, strict=True))
    expected = whole(made(mlp), [X])
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(parameter.grad - 1, expected[name], rtol=1e-10, atol=1e-10)


def test_a_second_compute_and_one_without_a_backward_add_nothing() -> None:
    module = made(mlp)
    deferred = DeferredGradients()
    with deferred.recording():
        output = module(X)
    deferred.compute()
    assert all(parameter.grad is None for parameter in module.parameters())
    torch.autograd.backward(output, cotangent(output))
    deferred.compute()
    names = heard(module)
    deferred.compute()
    assert names == []
    expected = whole(made(mlp), [X])
    del expected["input 0"]
    require_same(gradients(module, []), expected)


def test_two_backwards_through_a_retained_graph_count_twice() -> None:
    def twice(*, deferred: DeferredGradients | None) -> Gradients:
        module, given = made(mlp), leaves([X])
        with nullcontext() if deferred is None else deferred.recording():
            output = module(*given)
        torch.autograd.backward(output, cotangent(output), retain_graph=True)
        torch.autograd.backward(output, cotangent(output))
        if deferred is not None:
            deferred.compute()
        return gradients(module, given)

    require_same(twice(deferred=DeferredGradients()), twice(deferred=None))


@pytest.mark.parametrize("frozen", ["1.weight", "1.bias", "0.weight"])
def test_frozen_parameters_get_nothing_and_others_theirs(frozen: str) -> None:
    def partly() -> nn.Module:
        module = made(mlp)
        module.get_parameter(frozen).requires_grad_(False)
        return module

    module = partly()
    found = split(module, [X])
    require_same(found, whole(partly(), [X]))
    assert found[frozen] is None


def test_where_no_gradient_is_wanted_nothing_is_recorded() -> None:
    deferred = DeferredGradients()
    with deferred.recording(), torch.no_grad():
        assert not made(mlp)(X).requires_grad
    deferred.compute()
    assert stand_in(nn.Parameter(X)).grad_fn is None


class Mapped(nn.Module):
    """A layer in torch.vmap, which refuses functions of others, and then by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(torch.vmap(lambda row: self.layer(row) * self.layer.bias)(x))
        return output


@pytest.mark.parametrize(
    ("make", "given", "early"),
    [
        (lambda: Tied(openly=False), tokens(2, 5), ["table"]),
        (Mapped, X, ["layer.bias", "layer.weight"]),
    ],
)
def test_a_parameter_in_a_function_of_its_own_or_a_transform_has_its_hook_in_b_too(
    make: Callable[[], nn.Module], given: Tensor, early: list[str]
) -> None:
    module = made(make)
    names = heard(module)
    deferred, inputs = backward_of(module, [given])
    assert sorted(names) == early
    deferred.compute()
    assert sorted(names) == sorted(2 * early)
    require_same(gradients(module, inputs), whole(made(make), [given]))


@pytest.mark.parametrize(("module", "given"), [(mlp(), X), (nn.Embedding(9, 8), tokens(2, 5))])
def test_deferred_gradients_are_not_differentiated_again(module: nn.Module, given: Tensor) -> None:
    deferred = DeferredGradients()
    with deferred.recording():
        output = module.double()(given)
    with pytest.raises(OperationError, match=r"cannot be differentiated again .*a schedule without it"):
        output.sum().backward(create_graph=True)


def test_a_weight_made_of_the_input_gets_its_gradient_in_b() -> None:
    class Hyper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.make = nn.Linear(8, 24)

        def forward(self, x: Tensor) -> Tensor:
            weight = self.make(x.mean((0, 1))).view(3, 8)
            return functional.linear(x, weight, x[0, 0, :3])

    require_same(split(made(Hyper), [X]), whole(made(Hyper), [X]))


def test_attributes_of_parameters_are_theirs_within_a_recording() -> None:
    layer = nn.Linear(8, 6)
    with DeferredGradients().recording():
        assert layer.weight.grad is None
        assert layer.weight.requires_grad
        assert layer.weight.shape == (6, 8)
        assert layer.weight.detach().data_ptr() == layer.weight.data_ptr()
        layer.weight.grad = torch.ones(6, 8)
    assert torch.equal(layer.weight.grad, torch.ones(6, 8))


# --- element types --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_in_other_types_gradients_are_those_of_a_whole_backward(dtype: torch.dtype) -> None:
    x = X.to(dtype)
    found, expected = split(made(Block).to(dtype), [x]), whole(made(Block).to(dtype), [x])
    assert all(each is None or each.dtype == dtype for each in found.values())
    require_same(found, expected, 1e-6 if dtype == torch.float32 else 2**-7)


def test_under_autocast_products_are_in_half_precision_and_gradients_as_wide_as_parameters() -> None:
    def run(step: Callable[..., Gradients]) -> Gradients:
        module = made(Block).float()

        def cast(x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                output: Tensor = module(x)
            return output

        wrapped = nn.Module()
        wrapped.forward = cast
        wrapped.inner = module
        return step(wrapped, [X.float()])

    found, expected = run(split), run(whole)
    assert all(each is not None and each.dtype == torch.float32 for each in found.values())
    require_same(found, expected, 2**-6)


def test_sparse_gradients_stay_sparse_and_may_meet_dense_ones() -> None:
    def table() -> nn.Module:
        return nn.Embedding(9, 4, sparse=True)

    found, expected = split(made(table), [tokens(2, 5)]), whole(made(table), [tokens(2, 5)])
    assert found["weight"] is not None
    assert expected["weight"] is not None
    assert found["weight"].is_sparse
    torch.testing.assert_close(found["weight"].to_dense(), expected["weight"].to_dense())

    class Both(nn.Embedding):
        def forward(self, tokens: Tensor) -> Tensor:
            return functional.linear(super().forward(tokens), self.weight)

    require_same(
        split(made(lambda: Both(9, 4, sparse=True)), [tokens(2, 5)]),
        whole(made(lambda: Both(9, 4)), [tokens(2, 5)]),
    )


# --- with others ----------------------------------------------------------------------------------


def test_torch_s_own_checkpoint_records_when_it_is_told_to() -> None:
    module, given, deferred = made(Block), leaves([X]), DeferredGradients()
    with deferred.recording():
        output = checkpoint(
            module,
            *given,
            use_reentrant=False,
            context_fn=lambda: (nullcontext(), deferred.recording(again=True)),
        )
    torch.autograd.backward(output, cotangent(output))
    assert all(parameter.grad is None for parameter in module.parameters())
    deferred.compute()
    require_same(gradients(module, given), whole(made(Block), [X]))


def test_recorded_ranks_in_threads_average_their_microbatches_once_all_are_in() -> None:
    # Made by one thread: torch's generator is common to all.
    start, serial = made(mlp), made(mlp)

    def averages(comm: Communicator) -> list[Tensor | None]:
        module = copy.deepcopy(start)
        reducer = Reducer(module.named_parameters(), comm, passes=2)
        both = [backward_of(module, [values(2, 5, 8, seed=2 * comm.rank + turn)])[0] for turn in range(2)]
        for deferred in both:
            deferred.compute()
        reducer.synchronize()
        return [parameter.grad for parameter in module.parameters()]

    for seed in range(4):
        whole(serial, [values(2, 5, 8, seed=seed)])
    for found in run_loopback(2, averages):
        for mine, parameter in zip(found, serial.parameters(), strict=True):
            torch.testing.assert_close(mine, parameter.grad / 2, rtol=TOLERANCE, atol=TOLERANCE)
