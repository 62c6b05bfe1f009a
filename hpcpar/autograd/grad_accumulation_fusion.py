"""Gradient accumulation fusion (Megatron-LM's word): add a weight's gradient where it lies, in one product.

    autograd         dW = dyᵀ·x, in new memory; then W.grad += dW     over the weight's memory: 4 passes
    fused            W.grad += dyᵀ·x, in one product                                         2 passes
    offered buffer   W.grad = dyᵀ·x, in memory that was offered for it                       1 pass

For an embedding, autograd fills a new table with zeros and adds all of it; fused, only the rows of the tokens
in the batch are added to.

It pays where there are few tokens beside the weight's size, as in a pipeline's microbatches. A reducer offers
memory in its buckets (`GradBufferOffer`). Otherwise a parameter's first gradient is made in new memory, as
always, and so is one that hooks, or torch.autograd.grad, want to see by itself.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import get_gradient_edge
from torch.utils.weak import WeakTensorKeyDictionary

from hpcpar.autograd.held_parameter import own_gradient, set_own_gradient

WeightGrad = Callable[[], Tensor]
"""Works out a part of a parameter's gradient; parts are added up."""


@dataclass(frozen=True)
class LinearWeightGrad:
    """dyᵀ·x, [..., O] and [..., H] -> [O, H]

    x    asked for when it is needed; of complex numbers its conjugate counts
    """

    gradient: Tensor
    x: Callable[[], Tensor]

    def __call__(self) -> Tensor:
        left, right = self._factors()
        return left.mm(right)

    def put_in(self, buffer: Tensor) -> None:
        """buffer = this"""
        left, right = self._factors()
        if left.dtype == right.dtype == buffer.dtype:
            torch.mm(left, right, out=buffer)
        else:  # under autocast
            buffer.copy_(left.mm(right))

    def add_to(self, total: Tensor) -> None:
        """total += this"""
        left, right = self._factors()
        if left.dtype == right.dtype == total.dtype:
            torch.addmm(total, left, right, out=total)  # torch's FLOP counter does not know addmm_
        else:
            total.add_(left.mm(right))

    def _factors(self) -> tuple[Tensor, Tensor]:
        return matrix(self.gradient).t(), matrix(self.x()).conj()


@dataclass(frozen=True)
class EmbeddingWeightGrad:
    """Rows of dy [..., H] at the places of the tokens [...], in zeros [V, H].

    rows    V; the others as of torch.nn.Embedding
    """

    gradient: Tensor
    tokens: Tensor
    rows: int
    padding_idx: int | None = None
    scale_grad_by_freq: bool = False
    sparse: bool = False

    def __call__(self) -> Tensor:
        padding = -1 if self.padding_idx is None else self.padding_idx % self.rows
        made: Tensor = torch.ops.aten.embedding_backward(
            self.gradient, self.tokens, self.rows, padding, self.scale_grad_by_freq, self.sparse
        )
        return made

    @property
    def is_plain(self) -> bool:
        """Return whether all rows of dy count, and as they are."""
        return self.padding_idx is None and not self.scale_grad_by_freq and not self.sparse

    def put_in(self, buffer: Tensor) -> None:
        """buffer = this"""
        if self.is_plain:
            self.add_to(buffer.zero_())
        else:
            buffer.copy_(self())

    def add_to(self, total: Tensor) -> None:
        """total += this"""
        if self.is_plain:
            total.index_add_(0, self.tokens.flatten(), matrix(self.gradient))
        else:
            total.add_(self())


def accumulate(parameter: Tensor, parts: list[WeightGrad]) -> Tensor | None:
    """Add parts to a parameter's gradient; where that is to be left to autograd, return their sum instead.

    For the backward of an autograd Function, which returns what this does: the parameter's hooks run in
    any case, once, when all that backward has for it is there. `parts`, one at least, is emptied.
    """
    if not _may_be_written(parameter):
        return _sum(parts)
    total = own_gradient(parameter)
    if total is None:
        total, first = _offered_buffer(parameter, parts[0]), parts[0]
        if total is None or not isinstance(first, (LinearWeightGrad, EmbeddingWeightGrad)):
            return _sum(parts)
        first.put_in(total)
        del parts[0], first
        set_own_gradient(parameter, total)
    while parts:
        part = parts.pop(0)
        if isinstance(part, (LinearWeightGrad, EmbeddingWeightGrad)):
            part.add_to(total)
        else:
            total.add_(part())
    return None


def _may_be_written(parameter: Tensor) -> bool:
    """Return whether its gradient is there for whoever makes one: nobody wants to see what is added."""
    if not parameter.is_leaf or torch.is_grad_enabled() or parameter._backward_hooks:
        return False
    there = own_gradient(parameter)
    if there is None and parameter not in _OFFERS:
        return False
    if there is not None and (there.layout is not torch.strided or type(there) is not Tensor):
        return False
    if getattr(parameter, "_post_accumulate_grad_hooks", None) and not _hooks_run_without_a_gradient():
        return False
    return _is_accumulated(parameter)


def _is_accumulated(parameter: Tensor) -> bool:
    """Return whether a backward() runs that adds to this gradient: its `inputs=` may leave it out."""
    try:
        return torch._C._will_engine_execute_node(get_gradient_edge(parameter).node)
    except RuntimeError:  # torch.autograd.grad, which wants to have it, and not to find it added
        return False


def _sum(parts: list[WeightGrad]) -> Tensor:
    total = parts.pop(0)()
    while parts:
        part = parts.pop(0)()
        # Dense and sparse may be added in this order alone.
        total = part + total if total.is_sparse else total + part
    return total


def bias_gradient(gradient: Tensor) -> Tensor:
    """[..., O] -> [O]"""
    return matrix(gradient).sum(0)


def matrix(tensor: Tensor) -> Tensor:
    """[..., H] -> [T, H]; [H] -> [1, H]"""
    return tensor.unsqueeze(0) if tensor.dim() < 2 else tensor.flatten(0, -2)


# --- buffer -----------------------------------------------------------------------------------------

Offer = Callable[[], Tensor | None]
"""Memory of a parameter's shape, type and strides for the gradient that it does not have yet; or None."""

_OFFERS: MutableMapping[Tensor, Offer] = WeakTensorKeyDictionary()
"""Not attributes of the parameters, which would be pickled with them."""


class GradBufferOffer:
    """An offer until it is taken back by `remove`, or another one is made for the same parameter."""

    def __init__(self, parameter: Tensor, offer: Offer) -> None:
        self._parameter = weakref.ref(parameter)
        self._offer = offer
        _OFFERS[parameter] = offer

    def remove(self) -> None:
        """Take it back."""
        parameter = self._parameter()
        if parameter is not None and _OFFERS.get(parameter) is self._offer:
            del _OFFERS[parameter]


def _offered_buffer(parameter: Tensor, part: WeightGrad) -> Tensor | None:
    """Return the memory that is offered for a gradient, if this part can be computed into it."""
    if not isinstance(part, (LinearWeightGrad, EmbeddingWeightGrad)) or getattr(part, "sparse", False):
        return None
    offer = _OFFERS.get(parameter)
    return None if offer is None else offer()


@cache
def _hooks_run_without_a_gradient() -> bool:
    """Return whether this version of torch runs a parameter's hooks when backward brings it None."""
    ran: list[bool] = []
    with torch.enable_grad():
        leaf = torch.zeros((), requires_grad=True)
        leaf.register_post_accumulate_grad_hook(lambda _: ran.append(True))  # type: ignore[no-untyped-call]
        _Nothing.apply(leaf).backward()  # type: ignore[no-untyped-call]
    return bool(ran)


class _Nothing(Function):
    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        return leaf.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> None:
        return None
