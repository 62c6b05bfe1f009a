"""Attention of a rank's queries to the keys of all ranks, block by block, and its backward.

Shape letters: B batch, A heads, K key-value heads, N tokens of this rank, D head size.

    forward    own keys, then each other rank's as they come:  out, lse = merge(out, lse, block's)
    backward   the same blocks, given the merged out and lse:  dQ stays, each owner's dK and dV go home

Blocks are merged in the same order each time: on CPUs results are the same to the bit each time, and on GPUs
where torch's kernels are deterministic.
source   Liu et al. 2023, Ring Attention, arXiv 2310.01889
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from hpcpar.autograd.own_functions import differentiated_once
from hpcpar.autograd.random_by_place import kept_by_place
from hpcpar.context_parallel.block import AttentionBlock, AttentionGradients, KeysValues, wide
from hpcpar.context_parallel.context_plan import BlockTask, ContextPlan, Spans, part_of
from hpcpar.context_parallel.kernel import attend, attend_backward, merge
from hpcpar.context_parallel.mask import Span
from hpcpar.context_parallel.travel import Travel, number_in


def places_in(spans: Spans, device: torch.device | None = None) -> Tensor:
    """Return the numbers in some spans, int64, made on the device: nothing waits for a copy there."""
    none = torch.empty(0, dtype=torch.int64, device=device)
    return torch.cat([none, *(torch.arange(*span, device=device) for span in spans)])


@dataclass(frozen=True)
class WeightDropout:
    """Dropout of attention weights by the places of query and key, for the same result on any ranks.

    seed         drawn for this call, the same on all ranks of a sequence
    first_head   number of the first head that this rank computes
    """

    probability: float
    seed: int
    first_head: int = 0

    def multipliers(self, queries: Tensor, query_places: Tensor, key_places: Tensor) -> Tensor:
        """Return 0 for a weight that is dropped, else 1/(1 - probability): [B, A, N, M]."""
        batch, heads = (torch.arange(size, device=queries.device) for size in queries.shape[:2])
        kept = 1 - self.probability
        rows = batch, heads + self.first_head, query_places
        return kept_by_place(self.seed, rows, key_places, kept).to(wide(queries.dtype)).div_(kept)


@dataclass(frozen=True)
class AttentionCall:
    """One call of attention on one rank.

    travel   makes what moves keys and their gradients: once for forward, once for backward
    scale    of the scores
    keep     keep the keys of other ranks for backward, and do not fetch them again
    dropout  of the attention weights
    """

    plan: ContextPlan
    rank: int
    travel: Callable[[], Travel]
    scale: float
    keep: bool = False
    dropout: WeightDropout | None = None

    @property
    def begins_whole(self) -> bool:
        """True if the first task has all of this rank's queries and all of its own keys."""
        tasks, tokens = self.plan.tasks[self.rank][self.rank], Span(0, self.plan.counts[self.rank])
        return len(tasks) == 1 and tasks[0][:2] == (tokens, tokens)

    def blocks(self, owner: int, queries: Tensor) -> Iterator[tuple[BlockTask, AttentionBlock]]:
        """Yield the tasks of this rank's queries [B, A, N, D] with an owner's keys."""
        shares, mask = self.plan.shares, self.plan.mask
        for task in self.plan.tasks[self.rank][owner]:
            allowed = weights = None
            if task.kind == "band" or self.dropout is not None:
                places = places_in(part_of(shares[self.rank], task.queries), queries.device)
                keys = places_in(part_of(shares[owner], task.keys), queries.device)
            if task.kind == "band":  # within one document
                before = places.unsqueeze(-1) - keys
                reach = mask.length if mask.window is None else mask.window
                allowed = (before < reach) & (before > (-1 if mask.causal else -reach))
            if self.dropout is not None:
                weights = self.dropout.multipliers(queries, places, keys)
            yield task, AttentionBlock(self.scale, task.kind == "causal", allowed, weights)


class Attention(Function):
    """Attention as one operation of autograd, whose gradients cannot be differentiated again."""

    @staticmethod
    def forward(ctx: Any, queries: Tensor, keys: Tensor, values: Tensor, call: AttentionCall) -> Tensor:
        sums = wide(queries.dtype)
        begins_whole = call.begins_whole
        if not begins_whole:
            # With the memory layout of queries, for what follows to need no copy of it.
            out = torch.zeros_like(queries, dtype=sums)
            lse = torch.full(queries.shape[:-1], -torch.inf, dtype=sums, device=queries.device)
        travel, kept = call.travel(), []
        for owner, theirs in travel.keys((keys, values)):
            for task, block in call.blocks(owner, queries):
                rows, columns = slice(*task.queries), slice(*number_in(travel.tokens(owner), task.keys))
                part = attend(queries[:, :, rows], _tokens(theirs, columns), block)
                if owner == call.rank and begins_whole:
                    out, lse = part[0].to(sums), part[1]
                elif owner == call.rank:  # first, and once for each query
                    out[:, :, rows], lse[:, :, rows] = part
                else:
                    merge(out[:, :, rows], lse[:, :, rows], *part)
            if call.keep and owner == call.rank:
                keys, values = theirs  # which may be part of what all ranks' are gathered in
            elif call.keep:
                kept.append((owner, theirs))
        result = out.to(queries.dtype)
        ctx.call, ctx.owners = call, [owner for owner, _ in kept]
        ctx.save_for_backward(queries, result, lse, keys, values, *(theirs for _, theirs in kept))
        return result

    @staticmethod
    @differentiated_once("context-parallel attention; do without context parallelism")
    def backward(ctx: Any, gradient: Tensor) -> Any:
        queries, out, lse, keys, values, *kept = ctx.saved_tensors
        call: AttentionCall = ctx.call
        travel, own = call.travel(), (keys, values)
        of_queries: Tensor | None = None
        fetched: Iterable[tuple[int, KeysValues]]
        of_others = zip(ctx.owners, kept, strict=True)
        fetched = [(call.rank, own), *of_others] if call.keep else travel.keys(own)
        for owner, theirs in fetched:
            sums = _Sums(queries, theirs, of_queries)
            for task, block in call.blocks(owner, queries):
                rows, columns = slice(*task.queries), slice(*number_in(travel.tokens(owner), task.keys))
                inputs = gradient[:, :, rows], queries[:, :, rows], _tokens(theirs, columns)
                sums.add(attend_backward(*inputs, (out[:, :, rows], lse[:, :, rows]), block), rows, columns)
            of_queries, of_keys, of_values = sums.totals()
            if owner == call.rank:
                of_own = of_keys, of_values
            else:
                travel.send_home(owner, (of_keys, of_values))
        travel.add_at_home(of_own)
        assert of_queries is not None, "this rank's own keys always come"
        return of_queries.to(queries.dtype), of_own[0].to(keys.dtype), of_own[1].to(values.dtype), None


class _Sums:
    """Sums of blocks' gradients of the queries, and of the keys and values of one owner."""

    def __init__(self, queries: Tensor, keys_values: KeysValues, of_queries: Tensor | None) -> None:
        self._inputs = queries, *keys_values
        self._sums: list[Tensor | None] = [of_queries, None, None]

    def add(self, parts: AttentionGradients, rows: slice, columns: slice) -> None:
        for place, (part, tokens) in enumerate(zip(parts, (rows, columns, columns), strict=True)):
            total = self._sums[place]
            if total is None and part.shape == self._inputs[place].shape:
                self._sums[place] = part.to(wide(part.dtype))  # a kernel's own tensor, which nobody else has
                continue
            if total is None:
                total = self._sums[place] = self._zeros(place)
            total[:, :, tokens] += part

    def totals(self) -> tuple[Tensor, Tensor, Tensor]:
        of_queries, of_keys, of_values = (
            self._zeros(place) if total is None else total for place, total in enumerate(self._sums)
        )
        return of_queries, of_keys, of_values

    def _zeros(self, place: int) -> Tensor:
        like = self._inputs[place]
        return torch.zeros_like(like, dtype=wide(like.dtype))


def _tokens(keys_values: KeysValues, columns: slice) -> tuple[Tensor, Tensor]:
    keys, values = keys_values
    return keys[:, :, columns], values[:, :, columns]
