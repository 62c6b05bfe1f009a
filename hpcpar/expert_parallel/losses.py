"""Auxiliary losses of a router, and the way in which they join the model's gradient.

Shape letters: T tokens on this rank, E experts, k experts of a token, N sequences.

    balance   E Σ_e load_e · mean_t p_te        load_e: share of all choices that fell on e; 1 at balance
    z         mean_t (log Σ_e exp logit_te)²

The counts behind `load` may be of more ranks' tokens than these T: the sums over p are this rank's, so each
rank's loss is its share of the whole, and so is its gradient.

Hugging Face's balance loss is k times this one: there the loads add up to k.
source   Fedus et al. 2021, arXiv 2101.03961, section 2.2; Zoph et al. 2022, arXiv 2202.08906, equation 5;
         DeepSeek-V3, arXiv 2412.19437, equation 17 (of a sequence)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from hpcpar.expert_parallel.routing import Routing
from hpcpar.planner.experts import Experts


def counts_of(experts: Tensor, count: int, sequence_of: Tensor | None = None, sequences: int = 1) -> Tensor:
    """Count the tokens that chose each of `count` experts: int64 [N, E].

    experts       [T, k]
    sequence_of   [T] int64, number of each token's sequence, of N = `sequences`; None: one for all
    """
    slots = experts if sequence_of is None else experts + sequence_of.unsqueeze(-1) * count
    return torch.bincount(slots.flatten(), minlength=sequences * count).view(sequences, count)


def balance_loss(
    routing: Routing, sizes: Experts, counts: Tensor, tokens: int | Tensor, sequence_of: Tensor | None = None
) -> Tensor:
    """Return this rank's share of the balance loss, without its coefficient.

    counts        [N, E], tokens that chose each expert, of each sequence or of all together (N = 1)
    tokens        over which the loss is a mean: more than these T where ranks and microbatches share it
    sequence_of   [T], as in `counts_of`
    """
    shares = routing.scores
    if sizes.score == "sigmoid":
        shares = shares / (shares.sum(-1, keepdim=True) + 1e-20)
    # In the shares' type: integers would divide in float32.
    loads = counts.to(shares.dtype) / counts.sum(-1, keepdim=True).clamp(min=1)
    products = shares.sum(0) * loads[0] if sequence_of is None else shares * loads[sequence_of]
    return products.sum() * sizes.count / tokens


def z_loss(logits: Tensor, tokens: int | Tensor) -> Tensor:
    """Return this rank's share of the z-loss of logits [T, E]; `tokens` as in `balance_loss`."""
    return logits.logsumexp(-1).square().sum() / tokens


def attach(tensor: Tensor, loss: Tensor, scale: float | Tensor = 1.0) -> Tensor:
    """Return the tensor unchanged; where a gradient comes back to it, the loss gets the gradient `scale`.

    So a layer's loss joins the backward pass without being handed on to the model's output.
    """
    attached: Tensor = _Attach.apply(tensor, loss, scale)  # type: ignore[no-untyped-call]
    return attached


class _Attach(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, loss: Tensor, scale: float | Tensor) -> Tensor:
        ctx.scale, ctx.like = scale, (loss.dtype, loss.device)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        dtype, device = ctx.like
        return gradient, torch.as_tensor(ctx.scale, dtype=dtype, device=device), None
