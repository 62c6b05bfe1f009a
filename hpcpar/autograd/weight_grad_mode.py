"""Gradients of weights at another time than those of activations: the backward of a microbatch in two parts.

    whole    F   y = x·Wᵀ      B   dx = dy·W     dW = dyᵀ·x
    split    F   y = x·Wᵀ      B   dx = dy·W                   …   W   dW = dyᵀ·x

    deferred = DeferredGradients()
    with deferred.recording():
        output = module(inputs)                                    # F
    torch.autograd.backward(output, gradient)                      # B
    deferred.compute()                                             # W

What is recorded has a stand-in for every parameter: a leaf of its own in the parameter's memory, so that B
cannot reach the parameter itself. Of a product or an embedding B leaves x and dy; of whatever else uses a
parameter, a norm or a scale, B makes the gradient, for it is far smaller than x and dy, and it waits for W.
source   Qi et al. 2023, Zero Bubble Pipeline Parallelism, arXiv 2401.10241
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from hpcpar.autograd.deferred_functions import WeightGradMode
from hpcpar.autograd.grad_accumulation_fusion import WeightGrad, accumulate


class DeferredGradients:
    """Weight gradients of one microbatch that its backward has left to compute.

    Deferred are the products of torch's linear (so those of nn.Linear), those of hpcpar.tensor_parallel, and
    embeddings. The gradient of a parameter that is used otherwise, as in nn.MultiheadAttention or x @ W, is
    made in B. In any case it reaches the parameter in `compute`: its hooks run there, once, however often and
    wherever the parameter was used.

    An exception is a parameter that is handed to an autograd Function directly, not through `stand_in`, as
    torch shows such calls to nobody, or used within torch.func (vmap, grad, jvp), which refuses stand-ins.
    From there a gradient reaches the parameter in B, as always.

    Between B and W the inputs of the modules and the gradient that B was given are still in use: do not
    write to them. B is for all leaves, without torch's `inputs=`; gradients of gradients (create_graph) are
    not available.
    """

    def __init__(self) -> None:
        self._parts: list[tuple[Tensor, WeightGrad]] = []
        self._hook = _hook_of(self)

    @contextmanager
    def recording(self, *, again: bool = False) -> Iterator[None]:
        """Leave the weights' gradients of what this thread computes inside to `compute`.

        again   it is computed once more, in backward. `hpcpar.autograd.recompute` sees to that; torch's own
                checkpoint is to be told: context_fn=lambda: (nullcontext(), deferred.recording(again=True))
        """
        token = _UNDER_WAY.set(self)
        try:
            with WeightGradMode(self, again=again):
                yield
        finally:
            _UNDER_WAY.reset(token)

    def compute(self) -> None:
        """Add the gradients to the parameters' `.grad`, in the order in which backward came by, and forget.

        One parameter after the other is complete, and its hooks run, before the next one's gradient is made.
        What no backward has come by adds nothing; nor does a second call.
        collective   where a backward in hpcpar.tensor_parallel left communication to it: the ranks that share
                     the layers call it in the same place
        """
        parts = self._taken()
        # A view of a parameter hands its gradient to the parameter's stand-in, and that to this queue.
        _accumulate([part for part in parts if not part[0].is_leaf])
        _accumulate([part for part in parts if part[0].is_leaf] + self._taken())

    def add(self, weight: Tensor, part: WeightGrad) -> None:
        """Leave a part of a weight's gradient for `compute`: for the backward of an autograd Function.

        weight   a parameter, its stand-in, or a tensor that was made of stand-ins alone. The Function itself
                 is to have been given it `deferred_functions.cut_off`, and to return None for it
        """
        self._parts.append((getattr(weight, "stands_for", weight), part))

    def stand_in(self, parameter: Tensor) -> Tensor:
        """A leaf in the parameter's memory, whose gradients come here; what is no parameter, as it is."""
        if type(parameter) is Tensor or not isinstance(parameter, nn.Parameter):
            return parameter
        if not (parameter.requires_grad and torch.is_grad_enabled()):
            return parameter
        stand_in = parameter.detach().requires_grad_()
        stand_in.stands_for = parameter  # type: ignore[attr-defined]
        stand_in.register_post_accumulate_grad_hook(self._hook)  # type: ignore[no-untyped-call]
        return stand_in

    def _take(self, stand_in: Tensor) -> None:
        """Autograd has brought a stand-in its gradient, or the news that there is none."""
        gradient = stand_in.grad
        if gradient is None:
            return
        stand_in.grad = None
        # A copy: it may lie in the memory of a gradient that a product still needs, which hooks may change.
        kept = gradient.clone()
        self.add(stand_in, lambda: kept)

    def _taken(self) -> list[tuple[Tensor, WeightGrad]]:
        parts, self._parts = self._parts, []
        return parts


_UNDER_WAY: ContextVar[DeferredGradients | None] = ContextVar("weights' gradients deferred to", default=None)
"""By thread, as autograd's modes are: ranks may be threads of one process."""


def under_way() -> DeferredGradients | None:
    """To whom this thread leaves the weights' gradients of what it computes now."""
    return _UNDER_WAY.get()


def stand_in(parameter: Tensor) -> Tensor:
    """Return a parameter's stand-in for an autograd Function; the parameter itself outside a recording."""
    deferred = _UNDER_WAY.get()
    return parameter if deferred is None else deferred.stand_in(parameter)


def _hook_of(deferred: DeferredGradients) -> Callable[[Tensor], None]:
    """Return the hook of stand-ins, which holds the queue weakly: that may hold views of the stand-ins."""
    reference = weakref.ref(deferred)

    def hook(stand_in: Tensor) -> None:
        alive = reference()
        if alive is not None:
            alive._take(stand_in)

    return hook


class _Sum(Function):
    """Zero made of a tensor, to start a backward from that brings the sum of the tensor's gradient parts."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, parts: list[WeightGrad]) -> Tensor:
        ctx.tensor, ctx.parts = tensor, parts
        return tensor.new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:
        return accumulate(ctx.tensor, ctx.parts), None


@torch.enable_grad()
def _accumulate(parts: Sequence[tuple[Tensor, WeightGrad]]) -> None:
    """Through autograd, which knows the hooks, and how to add to the gradient that there is."""
    found: dict[int, tuple[Tensor, list[WeightGrad]]] = {}
    for tensor, part in parts:
        if tensor.requires_grad:
            found.setdefault(id(tensor), (tensor, []))[1].append(part)
    # Autograd begins with what was made last.
    sums = [_Sum.apply(tensor, parts) for tensor, parts in reversed(found.values())]  # type: ignore[no-untyped-call]
    if sums:
        torch.autograd.backward(sums)
