"""Routing: the experts of each token, and the weights of their outputs.

Shape letters: T tokens, E experts, k experts of a token.

    logits [T, E] ── softmax or sigmoid ── scores ──┬─ + bias ── best groups ── k best ── experts [T, k]
                                                    └───────────── of these ── /Σ · scale ── weights [T, k]

A bias selects, and does not weigh. Of equal scores the expert with the lower number is chosen, so routing is
the same wherever a token is computed.
With a capacity an expert takes a limited number of each sequence's tokens; the others go without it. What is
dropped of a sequence depends on this sequence alone, not on ranks or microbatches.
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
    """

    experts: Tensor
    weights: Tensor
    scores: Tensor


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
    order = values.sort(dim=-1, descending=True, stable=True).indices
    return order[..., :count].contiguous()  # a view would keep the whole order for backward


def within_capacity(
    experts: Tensor, weights: Tensor, sequence_of: Tensor, capacities: Tensor, sizes: Experts
) -> Tensor:
    """Return [T, k] bool: True where an expert has room for the token.

    experts, weights   [T, k], of whole sequences, each one's tokens in order
    sequence_of        [T] int64, number of each token's sequence
    capacities         [N] int64, tokens that an expert takes of each sequence: see `Experts.capacity`

    An expert prefers the highest weights, or the first positions; of equal weights, too, the first positions.
    source   Lepikhin et al. 2020, GShard, arXiv 2006.16668 (by position)
    """
    per_token = experts.shape[-1]
    queue = (sequence_of.unsqueeze(-1) * sizes.count + experts).flatten()  # of one expert and sequence
    order = torch.arange(len(queue), device=queue.device)
    if sizes.drop == "score":
        order = weights.flatten().sort(descending=True, stable=True).indices
    order = order[queue[order].sort(stable=True).indices]
    lengths = torch.bincount(queue, minlength=len(capacities) * sizes.count)
    starts = lengths.cumsum(0) - lengths
    place_in_queue = torch.empty_like(queue)
    place_in_queue[order] = torch.arange(len(queue), device=queue.device) - starts[queue[order]]
    return (place_in_queue < capacities[sequence_of].repeat_interleave(per_token)).view_as(experts)
