"""Parts of weights' gradients, worked out when they are asked for, and added to where the others lie.

    autograd     dW = dyᵀ·x, in new memory; then W.grad += dW     over memory of the weight's size: 4 passes
    in place     W.grad += dyᵀ·x, in one product                                                    2 passes

    of an embedding, autograd fills a new table with zeros and adds all of it; in place, the rows of the
    tokens that were there are added to

In place is what Megatron-LM calls gradient accumulation fusion. It pays where there are few tokens beside the
weight's size, as in a pipeline's microbatches. A parameter's first gradient is made in new memory, as always,
and so is one that hooks want to see by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

Piece = Callable[[], Tensor]
"""Works out a part of a parameter's gradient; parts are added up."""


@dataclass(frozen=True)
class OfProduct:
    """dyᵀ·x, [..., O] and [..., H] -> [O, H]; transposed: xᵀ·dy, [H, O]

    x    asked for when it is needed
    """

    gradient: Tensor
    x: Callable[[], Tensor]
    transposed: bool = False

    def __call__(self) -> Tensor:
        left, right = self._factors()
        return left.mm(right)

    def add_to(self, total: Tensor) -> None:
        left, right = self._factors()
        if left.dtype == right.dtype == total.dtype:
            torch.addmm(total, left, right, out=total)  # torch's FLOP counter does not know addmm_
        else:  # under autocast
            total.add_(left.mm(right))

    def _factors(self) -> tuple[Tensor, Tensor]:
        rows, inputs = matrix(self.gradient), matrix(self.x())
        return (inputs.t(), rows) if self.transposed else (rows.t(), inputs)


@dataclass(frozen=True)
class OfEmbedding:
    """Rows of dy [..., H] at the places of the tokens [...], in zeros [V, H]."""

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

    def add_to(self, total: Tensor) -> None:
        if self.padding_idx is not None or self.scale_grad_by_freq or self.sparse:
            total.add_(self())
        else:
            total.index_add_(0, self.tokens.flatten(), matrix(self.gradient))


def contribute(parameter: Tensor, piece: Piece) -> Tensor | None:
    """Add a piece to a parameter's gradient; where that is to be left to autograd, return it instead.

    For the backward of an autograd Function, which returns what this does: the parameter's hooks run in
    any case, once, when all that backward has for it is there.
    """
    total = gradient_to_add_to(parameter)
    if total is None:
        return piece()
    add(total, piece)
    return None


def gradient_to_add_to(parameter: Tensor) -> Tensor | None:
    """A parameter's gradient, if one may add to it without autograd: nobody wants to see the summand."""
    if not parameter.is_leaf or torch.is_grad_enabled() or parameter._backward_hooks:
        return None
    total = parameter.grad
    if total is None or total.layout is not torch.strided or type(total) is not Tensor:
        return None
    if getattr(parameter, "_post_accumulate_grad_hooks", None) and not _hooks_run_without_a_gradient():
        return None
    return total


def add(total: Tensor, piece: Piece) -> None:
    """total += piece, without the memory for it where the piece knows how."""
    if isinstance(piece, (OfProduct, OfEmbedding)):
        piece.add_to(total)
    else:
        total.add_(piece())


def matrix(tensor: Tensor) -> Tensor:
    """[..., H] -> [T, H]; [H] -> [1, H]"""
    return tensor.unsqueeze(0) if tensor.dim() < 2 else tensor.flatten(0, -2)


@cache
def _hooks_run_without_a_gradient() -> bool:
    """Whether a parameter's hooks run, too, when a backward brings it None: not in every version of torch."""
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
