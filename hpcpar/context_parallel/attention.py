"""Attention of a rank's queries to the keys of all ranks, block by block, and its backward.

Shape letters: B batch, A heads, K key-value heads, N tokens of this rank, D head size.

    forward    own keys, then each other rank's as they come:  out, lse = merge(out, lse, block's)
    backward   the same blocks, given the merged out and lse:  dQ stays, each owner's dK and dV go home

Blocks are merged in the same order each time, so results are the same to the bit each time.
source   Liu et al. 2023, Ring Attention, arXiv 2310.01889
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from hpcpar.context_parallel.kernel import Block, attend, attend_backward, merge, wide
from hpcpar.context_parallel.plan import Plan, Task, part_of, positions_of
from hpcpar.context_parallel.travel import Travel, number_in, packed


@dataclass(frozen=True)
class Call:
    """One call of attention on one rank.

    travel   makes what moves keys and their gradients: once for forward, once for backward
    scale    of the scores
    keep     keep the keys of other ranks for backward, and do not fetch them again
    """

    plan: Plan
    rank: int
    travel: Callable[[], Travel]
    scale: float
    keep: bool = False

    def blocks(self, owner: int, device: torch.device) -> Iterator[tuple[Task, Block]]:
        """Yield the tasks with an owner's keys."""
        for task in self.plan.tasks[self.rank][owner]:
            allowed = self._allowed(task, owner).to(device) if task.kind == "band" else None
            yield task, Block(self.scale, task.kind == "causal", allowed)

    def _allowed(self, task: Task, owner: int) -> Tensor:
        shares, mask = self.plan.shares, self.plan.mask
        keys = torch.tensor(positions_of(part_of(shares[owner], task.keys)))
        seen = [mask.keys(query) for query in positions_of(part_of(shares[self.rank], task.queries))]
        first, stop = torch.tensor(seen).unbind(-1)
        return (keys >= first[:, None]) & (keys < stop[:, None])


class Attention(Function):
    """Attention as one operation of autograd, whose gradients cannot be differentiated again."""

    @staticmethod
    def forward(ctx: Any, queries: Tensor, keys: Tensor, values: Tensor, call: Call) -> Tensor:
        sums = wide(queries.dtype)
        out = torch.zeros(queries.shape, dtype=sums, device=queries.device)
        lse = torch.full(queries.shape[:-1], -torch.inf, dtype=sums, device=queries.device)
        travel, kept = call.travel(), []
        for owner, theirs in travel.keys(packed(keys, values)):
            for task, block in call.blocks(owner, queries.device):
                rows, columns = slice(*task.queries), slice(*number_in(travel.tokens(owner), task.keys))
                part = attend(queries[:, :, rows], *theirs[..., columns, :], block)
                if owner == call.rank:  # first, and once for each query
                    out[:, :, rows], lse[:, :, rows] = part
                else:
                    merge(out[:, :, rows], lse[:, :, rows], *part)
            if call.keep:
                kept.append((owner, theirs))
        result = out.to(queries.dtype)
        ctx.call, ctx.owners = call, [owner for owner, _ in kept]
        ctx.save_for_backward(queries, keys, values, result, lse, *(theirs for _, theirs in kept))
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        queries, keys, values, out, lse, *kept = ctx.saved_tensors
        call: Call = ctx.call
        travel = call.travel()
        sums = wide(queries.dtype)
        of_queries = torch.zeros(queries.shape, dtype=sums, device=queries.device)
        of_own = torch.zeros((2, *keys.shape), dtype=sums, device=queries.device)
        fetched: Iterable[tuple[int, Tensor]] = zip(ctx.owners, kept, strict=True)
        for owner, theirs in fetched if call.keep else travel.keys(packed(keys, values)):
            of_theirs = of_own if owner == call.rank else torch.zeros_like(theirs, dtype=sums)
            for task, block in call.blocks(owner, queries.device):
                rows, columns = slice(*task.queries), slice(*number_in(travel.tokens(owner), task.keys))
                ours = (part[:, :, rows] for part in (gradient, queries))
                parts = attend_backward(
                    *ours, *theirs[..., columns, :], out[:, :, rows], lse[:, :, rows], block
                )
                of_queries[:, :, rows] += parts.queries
                of_theirs[0][:, :, columns] += parts.keys
                of_theirs[1][:, :, columns] += parts.values
            if owner != call.rank:
                travel.send_home(owner, of_theirs)
        travel.add_at_home(of_own)
        return of_queries.to(queries.dtype), *of_own.to(keys.dtype), None
