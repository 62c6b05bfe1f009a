"""Rows of tokens in the order of their experts, and back.

Shape letters: T tokens, H hidden, E experts, k experts of a token, R rows: a token has one for each expert
that takes it.

    tokens     a  b  c      a and c visit expert 0, b and c expert 1
    rows       a  c │ b  c  expert 0 │ expert 1, of each the tokens in order
    combined   wₐ·f₀(a)   w_b·f₁(b)   w_c0·f₀(c) + w_c1·f₁(c)   slot after slot, whatever the order of rows

Both ways each token adds its k rows in the order of its slots, without scatter-add, so that the sums have the
same bits wherever they are made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

Compute = Callable[[Tensor, list[int]], Tensor]
"""(rows [R, H] sorted by expert, rows of each expert) -> [R, H]."""


@dataclass(frozen=True, eq=False)
class RowOrder:
    """Rows of T tokens, sorted by expert and then by token.

    tokens   [R] int64, the token of each row
    rows     [T, k] int64, the row of each token's slot; R where the expert did not take the token
    counts   rows of each expert
    """

    tokens: Tensor
    rows: Tensor
    counts: Sequence[int]

    @classmethod
    def of(cls, experts: Tensor, count: int, kept: Tensor | None = None) -> RowOrder:
        """Sort the slots of experts [T, k], of `count` experts; `kept` as in Routing."""
        flat = experts.flatten()
        if kept is not None:
            flat = flat.masked_fill(~kept.flatten(), count)
        counts = torch.bincount(flat, minlength=count + 1).tolist()[:count]
        # Slots are numbered token · k + slot, and the sort is stable: an expert's tokens keep their order.
        slots = flat.argsort(stable=True)
        rows = torch.empty_like(slots)
        rows[slots] = torch.arange(len(slots), device=slots.device)
        total = sum(counts)
        return cls(slots[:total] // experts.shape[-1], rows.clamp(max=total).view_as(experts), counts)


def mix_here(
    hidden: Tensor,
    experts: Tensor,
    weights: Tensor,
    compute: Compute,
    count: int,
    kept: Tensor | None = None,
) -> Tensor:
    """Return each token's weighted sum of its experts' outputs, with all experts on this rank.

    hidden             [T, H]
    experts, weights   [T, k]
    compute            see `Compute`
    count              E
    kept               as in Routing
    """
    order = RowOrder.of(experts, count, kept)
    outputs = compute(to_rows(hidden, order), list(order.counts))
    return from_rows(outputs, weights, order)


def to_rows(hidden: Tensor, order: RowOrder) -> Tensor:
    """Return the rows [R, H] of tokens [T, H]."""
    rows: Tensor = _ToRows.apply(hidden, order)  # type: ignore[no-untyped-call]
    return rows


def from_rows(outputs: Tensor, weights: Tensor, order: RowOrder) -> Tensor:
    """Return the weighted sum [T, H] of each token's rows, of outputs [R, H] and weights [T, k]."""
    combined: Tensor = _FromRows.apply(outputs, weights, order)  # type: ignore[no-untyped-call]
    return combined


def _of_slot(rows: Tensor, order: RowOrder, slot: int) -> Tensor:
    """Return the rows [T, H] of the tokens' slot; zeros where the expert did not take the token."""
    if len(order.tokens) == order.rows.numel():
        return rows.index_select(0, order.rows[:, slot])
    padded = torch.cat((rows, rows.new_zeros(1, rows.shape[1])))
    return padded.index_select(0, order.rows[:, slot])


class _ToRows(Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, order: RowOrder) -> Tensor:
        ctx.order = order
        return hidden.index_select(0, order.tokens)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        order: RowOrder = ctx.order
        total = _of_slot(gradient, order, 0)
        for slot in range(1, order.rows.shape[1]):
            total += _of_slot(gradient, order, slot)
        return total, None


class _FromRows(Function):
    @staticmethod
    def forward(ctx: Any, outputs: Tensor, weights: Tensor, order: RowOrder) -> Tensor:
        ctx.order = order
        ctx.save_for_backward(outputs, weights)
        wide = weights.to(outputs.dtype)
        total = _of_slot(outputs, order, 0) * wide[:, :1]
        for slot in range(1, order.rows.shape[1]):
            total += _of_slot(outputs, order, slot) * wide[:, slot : slot + 1]
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        order: RowOrder = ctx.order
        outputs, weights = ctx.saved_tensors
        of_weights = torch.stack(
            [
                (_of_slot(outputs, order, slot) * gradient).sum(-1, dtype=weights.dtype)
                for slot in range(order.rows.shape[1])
            ],
            dim=-1,
        )
        # Row r is slot `at[r]` of its token.
        at = torch.empty_like(order.tokens)
        slots = torch.arange(order.rows.shape[1], device=at.device).expand_as(order.rows)
        taken = order.rows < len(at)
        at[order.rows[taken]] = slots[taken]
        of_rows = gradient.index_select(0, order.tokens)
        of_rows *= weights.to(gradient.dtype)[order.tokens, at].unsqueeze(-1)
        return of_rows, of_weights, None
