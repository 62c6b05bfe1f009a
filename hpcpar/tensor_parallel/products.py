"""Matrix products that overlap with their communication. Shape letters: S sequence, H hidden, O outputs.

    column     x ──(gather)── Wᵀ ── y           backward   dy · W ── sum (or reduce-scatter) ────── dx
                                                           dyᵀ · x ══════ meanwhile ══════ dW
    row        x ── Wᵀ ── sum (or reduce-scatter) ── y

Several weights with the same input (queries, keys and values; gate and up) form one product: the input is
gathered once, and its gradient is summed over the weights and sent once.

With chunks every rank cuts its sequence into pieces: while one is multiplied, the next is gathered, or the
previous one is reduced.

With deferred weight gradients, dyᵀ · x waits for `DeferredGradients.compute`. So does the second gather of x
under gather_again; until then a rank keeps its shard. A row product keeps the gathered dy, which dx needs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional

from hpcpar.autograd import copy_to, gather_from, reduce_from, reduce_scatter_to
from hpcpar.autograd.deferred_functions import cut_off
from hpcpar.autograd.dim_collectives import PendingResult, Summand, start_gather, start_sum_scatter
from hpcpar.autograd.grad_accumulation_fusion import LinearWeightGrad, accumulate, bias_gradient
from hpcpar.autograd.own_functions import differentiated_once, no_view, under_autocast
from hpcpar.autograd.weight_grad_mode import under_way
from hpcpar.partition import bounds
from hpcpar.tensor_parallel.axis import TensorParallel
from hpcpar.uncompiled import uncompiled

SEQUENCE = -2
"""Dim that sequence parallelism divides."""

LAYERS = "tensor-parallel layers; build them with TensorParallel(comm, twice=True)"


@uncompiled
def column_products(
    tp: TensorParallel, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]
) -> tuple[Tensor, ...]:
    """Compute x · Wᵀ + b for each of this rank's weights [O, H], which may differ in O.

    x         [..., S, H], the same on all ranks; with sequence parallelism S is this rank's shard
    returns   [..., S, O] each, with the whole S; autocast's dtype, which is sent too
    sends     in backward an all-reduce of x; with sequence parallelism an all-gather, and in backward a
              reduce-scatter (and with gather_again one more all-gather)
    """
    if tp.twice or tp.size == 1:
        whole = gather_from(x, tp.comm, SEQUENCE, "partial") if tp.sequence_parallel else copy_to(x, tp.comm)
        return tuple(functional.linear(whole, w, b) for w, b in zip(weights, biases, strict=True))
    x, *tensors = under_autocast(x, *weights, *biases)
    given = tensors if under_way() is None else [None if each is None else cut_off(each) for each in tensors]
    return _ColumnProducts.apply(tp, tensors, x, *given)  # type: ignore[no-any-return, no-untyped-call]


@uncompiled
def row_product(tp: TensorParallel, x: Tensor, weight: Tensor) -> Tensor:
    """Sum x · Wᵀ over ranks, with this rank's columns W [O, H] of the whole weight.

    x         [..., S, H], this rank's shard of the features
    returns   [..., S, O], the same on all ranks; with sequence parallelism S is this rank's shard
    sends     an all-reduce; with sequence parallelism a reduce-scatter, and in backward an all-gather
    """
    if tp.twice or tp.size == 1:
        partial = functional.linear(x, weight)
        if tp.sequence_parallel:
            return reduce_scatter_to(partial, tp.comm, SEQUENCE)
        return reduce_from(partial, tp.comm)
    x, weight = under_autocast(x, weight)
    given = weight if under_way() is None else cut_off(weight)
    return _RowProduct.apply(tp, (weight,), x, given)  # type: ignore[no-any-return, no-untyped-call]


class _ColumnProducts(Function):
    @staticmethod
    def forward(
        ctx: Any, tp: TensorParallel, targets: Sequence[Tensor | None], x: Tensor, *tensors: Any
    ) -> tuple[Tensor, ...]:
        count = len(tensors) // 2
        weights, biases = tensors[:count], tensors[count:]
        ctx.tp, ctx.has_bias = tp, [bias is not None for bias in biases]
        ctx.deferred, ctx.targets = under_way(), targets
        if not tp.sequence_parallel:
            whole, outputs = x, [functional.linear(x, w, b) for w, b in zip(weights, biases, strict=True)]
        else:
            whole, outputs = _gathered_products(tp, x, weights, biases)
        ctx.save_for_backward(x if tp.gather_again else whole, *weights)
        return tuple(map(no_view, outputs))

    @staticmethod
    @differentiated_once(LAYERS)
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        tp: TensorParallel = ctx.tp
        kept, *weights = ctx.saved_tensors
        _, _, need_x, *needs = ctx.needs_input_grad
        if ctx.deferred is not None:
            parts = _input_gradient(tp, gradients, weights) if need_x else []
            _defer_weights(ctx, gradients, kept, needs)
            of_x = _in_sequence([part.wait() for part in parts]) if need_x else None
            return None, None, of_x, *([None] * len(needs))
        gathering = start_gather(kept, tp.comm, SEQUENCE) if tp.gather_again else None
        count = len(weights)
        parts = _input_gradient(tp, gradients, weights) if need_x else []
        if not tp.overlap:
            parts = [_done(part.wait()) for part in parts]
        whole = kept if gathering is None else gathering.wait()
        of_weights = []
        for gradient, target, need in zip(gradients, ctx.targets[:count], needs[:count], strict=True):
            of_weights.append(
                accumulate(target, [LinearWeightGrad(gradient, lambda: whole)]) if need else None
            )
            tp.comm.poke()
        of_biases = [
            bias_gradient(gradient) if need and has else None
            for gradient, need, has in zip(gradients, needs[count:], ctx.has_bias, strict=True)
        ]
        of_x = _in_sequence([part.wait() for part in parts]) if need_x else None
        return None, None, of_x, *of_weights, *of_biases


class _RowProduct(Function):
    @staticmethod
    def forward(ctx: Any, tp: TensorParallel, targets: tuple[Tensor], x: Tensor, weight: Tensor) -> Tensor:
        ctx.tp, ctx.deferred, ctx.targets = tp, under_way(), targets
        ctx.save_for_backward(x, weight)
        if not tp.sequence_parallel:
            summand = Summand((*x.shape[:-1], weight.shape[0]), x, tp.comm)
            torch.mm(_rows(x), weight.t(), out=_rows(summand.tensor))
            return no_view(summand.start().wait())
        parts = _scattered(tp, lambda cut: functional.linear(cut(x), weight), x)
        return no_view(_in_sequence([part.wait() for part in parts]))

    @staticmethod
    @differentiated_once(LAYERS)
    def backward(ctx: Any, gradient: Tensor) -> Any:
        tp: TensorParallel = ctx.tp
        x, weight = ctx.saved_tensors
        _, _, need_x, need_weight = ctx.needs_input_grad
        whole, of_x = gradient, None
        if tp.sequence_parallel and need_x:
            whole, (of_x,) = _gathered_products(tp, gradient, [weight.conj().t()], [None])
        elif tp.sequence_parallel:
            whole = start_gather(gradient, tp.comm, SEQUENCE).wait()
        elif need_x:
            of_x = gradient.matmul(weight.conj())
        of_weight = None
        if need_weight and ctx.deferred is not None:
            inputs = x.detach()
            ctx.deferred.add(ctx.targets[0], LinearWeightGrad(whole, lambda: inputs))
        elif need_weight:
            of_weight = accumulate(ctx.targets[0], [LinearWeightGrad(whole, lambda: x)])
        return None, None, of_x, of_weight


def _defer_weights(ctx: Any, gradients: Sequence[Tensor], kept: Tensor, needs: Sequence[bool]) -> None:
    """Defer the gradients of a column product's weights and biases."""
    count = len(gradients)
    weights, biases = ctx.targets[:count], ctx.targets[count:]
    inputs = _Input(kept.detach(), ctx.tp, sum(needs[:count]))
    for weight, gradient, need in zip(weights, gradients, needs[:count], strict=True):
        if need:
            ctx.deferred.add(weight, LinearWeightGrad(gradient, inputs.take))
    for bias, gradient, need in zip(biases, gradients, needs[count:], strict=True):
        if need:
            ctx.deferred.add(bias, partial(bias_gradient, gradient))


class _Input:
    """Saved input of several weights: the first gathers it under gather_again, the last frees it."""

    def __init__(self, kept: Tensor, tp: TensorParallel, uses: int) -> None:
        self._kept: Tensor | None = kept
        self._tp = tp
        self._unused = self._uses = uses

    def take(self) -> Tensor:
        kept = self._kept
        assert kept is not None, "as many take it as need it"
        if self._tp.gather_again and self._unused == self._uses:
            kept = start_gather(kept, self._tp.comm, SEQUENCE).wait()
        self._unused -= 1
        self._kept = kept if self._unused else None
        return kept


# --- pieces of the sequence -----------------------------------------------------------------------
#
#   shards of 2 ranks     r0: a b | c d        r1: e f | g h          2 chunks
#   gathered chunk 0      a b e f
#   gathered chunk 1              c d g h
#   whole                 a b c d e f g h

Cut = Callable[[Tensor], Tensor]
"""Whole sequence -> one chunk: a piece of every rank's shard."""


def _gathered_products(
    tp: TensorParallel, shard: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]
) -> tuple[Tensor, list[Tensor]]:
    """Gather the sequence from shards [..., S/p, H], and multiply it by the weights."""
    pieces = bounds(shard.shape[SEQUENCE], min(tp.chunks, shard.shape[SEQUENCE]) or 1)
    under_way = [
        start_gather(shard.narrow(SEQUENCE, start, stop - start), tp.comm, SEQUENCE) for start, stop in pieces
    ]
    if len(pieces) == 1:
        whole = under_way[0].wait()
        return whole, [functional.linear(whole, w, b) for w, b in zip(weights, biases, strict=True)]
    rows = (*shard.shape[:-2], tp.size * shard.shape[-2])
    whole = shard.new_empty((*rows, shard.shape[-1]))
    outputs = [shard.new_empty((*rows, weight.shape[0])) for weight in weights]
    for gathering, (start, stop) in zip(under_way, pieces, strict=True):
        chunk = gathering.wait()
        _place(tp, whole, start, stop, chunk)
        for output, weight, bias in zip(outputs, weights, biases, strict=True):
            _place(tp, output, start, stop, functional.linear(chunk, weight, bias))
            tp.comm.poke()
    return whole, outputs


def _scattered(tp: TensorParallel, product: Callable[[Cut], Tensor], whole: Tensor) -> list[PendingResult]:
    """Start the reduce-scatter of a product of the whole sequence, a chunk at a time."""
    length = whole.shape[SEQUENCE] // tp.size
    under_way = []
    for start, stop in bounds(length, min(tp.chunks, length) or 1):
        partial = product(lambda tensor, start=start, stop=stop: _chunk(tp, tensor, start, stop))  # type: ignore[misc]
        under_way.append(start_sum_scatter(partial, tp.comm, SEQUENCE))
    return under_way


def _input_gradient(
    tp: TensorParallel, gradients: Sequence[Tensor], weights: Sequence[Tensor]
) -> list[PendingResult]:
    """Start the input's gradient: a sum over weights and ranks."""

    def product(cut: Cut, total: Tensor | None = None) -> Tensor:
        first = cut(gradients[0])
        if total is None:
            total = first.new_empty((*first.shape[:-1], weights[0].shape[1]))
        rows = _rows(total)
        torch.mm(_rows(first), weights[0].conj(), out=rows)
        for gradient, weight in zip(gradients[1:], weights[1:], strict=True):
            rows.addmm_(_rows(cut(gradient)), weight.conj())
        return total

    if tp.sequence_parallel:
        return _scattered(tp, product, gradients[0])
    summand = Summand((*gradients[0].shape[:-1], weights[0].shape[1]), gradients[0], tp.comm)
    product(lambda tensor: tensor, summand.tensor)
    return [summand.start()]


def _by_rank(tp: TensorParallel, whole: Tensor) -> Tensor:
    """[..., S, H] -> [..., p, S/p, H]"""
    return torch.unflatten(whole, SEQUENCE, (tp.size, whole.shape[SEQUENCE] // tp.size))


def _chunk(tp: TensorParallel, whole: Tensor, start: int, stop: int) -> Tensor:
    """Select elements start … stop - 1 of every rank's shard of the sequence."""
    if (stop - start) * tp.size == whole.shape[SEQUENCE]:
        return whole
    return _by_rank(tp, whole).narrow(SEQUENCE, start, stop - start).flatten(-3, -2)


def _place(tp: TensorParallel, whole: Tensor, start: int, stop: int, chunk: Tensor) -> None:
    _by_rank(tp, whole).narrow(SEQUENCE, start, stop - start).copy_(_by_rank(tp, chunk))


def _in_sequence(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=SEQUENCE)


def _rows(tensor: Tensor) -> Tensor:
    """[..., H] -> [T, H]"""
    return tensor.reshape(-1, tensor.shape[-1])


def _done(tensor: Tensor) -> PendingResult:
    return PendingResult(None, lambda: tensor)
