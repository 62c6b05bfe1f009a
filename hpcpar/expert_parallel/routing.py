"""Routing: the experts of each token, and the weights of their outputs.

Shape letters: T tokens, E experts, k experts of a token.

    logits [T, E] ── softmax or sigmoid ── scores ──┬─ + bias ── best groups ── k best ── experts [T, k]
                                                    └───────────── of these ── /Σ · scale ── weights [T, k]

A bias selects, and does not weigh. Of equal scores the expert with the lower number is chosen, so routing is
the same wherever a token is computed.
source   Shazeer et al. 2017, arXiv 1701.06538; DeepSeek-V3, arXiv 2412.19437, section 2.1.2 (groups, bias)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hpcpar.errors import MismatchError
from hpcpar.planner.experts import Experts


@dataclass(frozen=True, eq=False)
class Routing:
    """Experts of T tokens.

    experts   [T, k] int64, of each token the highest score (with its bias) first
    weights   [T, k], of the experts' outputs, in the logits' type
    scores    [T, E], softmax or sigmoid of the logits
    kept      [T, k] bool: False where the expert was full, and the token goes without it; None: all are kept
    """

    experts: Tensor
    weights: Tensor
    scores: Tensor
    kept: Tensor | None = None


def route(logits: Tensor, sizes: Experts, bias: Tensor | None = None) -> Routing:
    """Choose the experts of each token, all of which take it.

    logits   [T, E], float32 or float64
    bias     [E], added to scores where experts are chosen; None: nothing is
    """
    if logits.shape[-1] != sizes.count:
        raise MismatchError(
            f"logits {list(logits.shape)} of a router; the last dim must be the {sizes.count} experts"
        )
    scores = logits.softmax(-1) if sizes.score == "softmax" else logits.sigmoid()
    experts = _chosen(scores.detach(), sizes, bias)
    weights = scores.gather(-1, experts)
    if sizes.renormalise:
        # Sigmoids may all be 0; of softmax the sum is at least k/E.
        weights = weights / (weights.sum(-1, keepdim=True) + (1e-20 if sizes.score == "sigmoid" else 0.0))
    return Routing(experts, weights if sizes.scale == 1 else weights * sizes.scale, scores)


def _chosen(scores: Tensor, sizes: Experts, bias: Tensor | None) -> Tensor:
    """Return the numbers [T, k] of the best experts of each token."""
    ranked = scores if bias is None else scores + bias
    if sizes.groups_per_token < sizes.groups:
        grouped = ranked.view(*ranked.shape[:-1], sizes.groups, sizes.per_group)
        best_two = grouped.topk(2, dim=-1).values.sum(-1)
        groups = _best(best_two, sizes.groups_per_token)
        outside = torch.ones_like(best_two, dtype=torch.bool).scatter_(-1, groups, False)
        ranked = grouped.masked_fill(outside.unsqueeze(-1), float("-inf")).flatten(-2)
    return _best(ranked, sizes.per_token)


def _best(values: Tensor, count: int) -> Tensor:
    """Return the places of the highest values of each row, highest first; of equals the first one.

    torch.topk promises no order of equal values.
    """
    return values.sort(dim=-1, descending=True, stable=True).indices[..., :count]
