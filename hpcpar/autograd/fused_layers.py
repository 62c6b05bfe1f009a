"""Torch's linear layers and embeddings, whose backward adds to large gradients in place, as `parts` says."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from inspect import getattr_static
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional

from hpcpar.autograd.grad_accumulation_fusion import (
    EmbeddingWeightGrad,
    LinearWeightGrad,
    accumulate,
    bias_gradient,
)
from hpcpar.autograd.held_parameter import is_ordinary
from hpcpar.autograd.own_functions import is_transformed, no_view
from hpcpar.autograd.weight_grad_mode import under_way
from hpcpar.units import MiB

LEAST_NBYTES = MiB
"""Of a weight for which it is done: a step in Python takes some 30 µs, as long as a pass over 1 MiB."""


@contextmanager
def adding_in_place(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Let linear layers and embeddings in `modules` add to large gradients in place.

    That is for forwards inside, and their backwards anywhere. Layers with a forward of their own are left
    alone, and so is what happens under autocast, in torch.compile, in torch.func, under forward-mode
    differentiation, and where gradients are deferred.
    """
    with ExitStack() as stack:
        for layer in {layer for module in modules for layer in module.modules()}:
            # As it is written in the class: to ask torch.jit's scripted layers for it is an error.
            forward = FORWARDS.get(getattr_static(type(layer), "forward", None))
            if forward is not None and "forward" not in vars(layer):
                layer.forward = partial(forward, layer)
                stack.callback(delattr, layer, "forward")
        yield


def _linear(layer: nn.Linear, input: Tensor) -> Tensor:
    weight = layer.weight  # once: of a parametrized layer it is worked out anew each time
    if not _is_worth_while(weight, input):
        return functional.linear(input, weight, layer.bias)
    return cast(Tensor, _Linear.apply(input, weight, layer.bias))  # type: ignore[no-untyped-call]


def _embedding(layer: nn.Embedding, input: Tensor) -> Tensor:
    weight = layer.weight
    if not _is_worth_while(weight, weight) or layer.max_norm is not None:
        return functional.embedding(
            input,
            weight,
            layer.padding_idx,
            layer.max_norm,
            layer.norm_type,
            layer.scale_grad_by_freq,
            layer.sparse,
        )
    return cast(Tensor, _Embedding.apply(layer, input, weight))  # type: ignore[no-untyped-call]


FORWARDS: dict[Callable[..., Any], Callable[..., Tensor]] = {
    nn.Linear.forward: _linear,
    nn.Embedding.forward: _embedding,
}


def _is_worth_while(weight: Tensor, input: Tensor) -> bool:
    return (
        weight.nbytes >= LEAST_NBYTES
        and weight.requires_grad
        and torch.is_grad_enabled()
        and is_ordinary(weight)
        and input.dtype == weight.dtype
        and input.dim() > 0
        and not torch.is_autocast_enabled(input.device.type)
        and not torch.compiler.is_compiling()
        and not is_transformed()
        and under_way() is None
    )


class _Linear(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.parameter = weight
        return no_view(functional.linear(x, weight, bias))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        need_x, need_weight, need_bias = ctx.needs_input_grad
        of_x = gradient.matmul(weight.conj()) if need_x else None
        of_weight = (
            accumulate(ctx.parameter, [LinearWeightGrad(gradient, lambda: x)]) if need_weight else None
        )
        of_bias = bias_gradient(gradient) if need_bias else None
        return of_x, of_weight, of_bias


class _Embedding(Function):
    @staticmethod
    def forward(ctx: Any, layer: nn.Embedding, tokens: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.parameter = weight
        ctx.options = (layer.padding_idx, layer.scale_grad_by_freq, layer.sparse)
        return functional.embedding(tokens, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (tokens,) = ctx.saved_tensors
        part = EmbeddingWeightGrad(gradient, tokens, ctx.parameter.shape[0], *ctx.options)
        return None, None, accumulate(ctx.parameter, [part])
