"""`ContextParallel`: ranks that share each sequence, and attention over all of it.

    cp = ContextParallel(mesh.cp)
    mask = Mask(length=8192)                        # causal
    tokens = cp.shard(tokens, mask)                 # [B, S] -> this rank's [B, N]
    positions = cp.positions(mask)                  # [N], for rotary embeddings
    out = cp.attention(queries, keys, values, mask) # [B, A, N, D]

Values sent by each rank for a layer's forward and backward, u = B·(S/c)·K·D, causal and c ranks:

    method      keys and values                              sent
    exchange    only those that the mask needs, direct       4.5(c - 1)u on average; 3(c - 1)u if kept
    ring        all, from neighbour to neighbour             6(c - 1)u; 4(c - 1)u if kept
    allgather   all, gathered; gradients reduce-scattered    6(c - 1)u; 4(c - 1)u if kept
    ulysses     heads exchanged for tokens                   4(1 + A/K)(c - 1)u/c
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import TYPE_CHECKING, Literal, get_args

import torch
from torch import Tensor

from hpcpar.context_parallel.attention import Attention, Call
from hpcpar.context_parallel.head_exchange import HeadExchange
from hpcpar.context_parallel.kernel import wide
from hpcpar.context_parallel.mask import Mask, Span
from hpcpar.context_parallel.plan import (
    Plan,
    Spans,
    balanced,
    exchange_moves,
    exchange_returns,
    part_of,
    positions_of,
    ring_moves,
    ring_returns,
)
from hpcpar.context_parallel.travel import GatherTravel, MessageTravel, Travel
from hpcpar.errors import LayoutError, MismatchError
from hpcpar.partition import bounds, counts
from hpcpar.uncompiled import uncompiled

if TYPE_CHECKING:
    from hpcpar.comm import Communicator

Method = Literal["exchange", "ring", "allgather", "ulysses", "ulysses+exchange", "ulysses+ring"]

METHODS: tuple[Method, ...] = get_args(Method)

PLANS = 64
"""Masks whose plans are kept: packed documents give another one with each batch."""


class ContextParallel:
    """Ranks that share each sequence.

    comm      they; rank r of it holds the tokens `spans(mask)[r]`
    method    how keys travel: see the head of this file. The two-level ones exchange heads within a node,
              and keys between nodes
    inner     for these: neighbouring ranks that exchange heads; None: as many as there are on each node
    keep      keep other ranks' keys for backward: fewer bytes, more memory
    narrow    let gradients of keys travel in the keys' own type, not in float32 (float64 stays float64)
    errors    LayoutError for a method that there is not, or an `inner` that does not divide the ranks

    source   Liu et al. 2023, arXiv 2310.01889; Llama Team 2024, arXiv 2407.21783, section 3.3.2; Jacobs et al.
             2023, arXiv 2309.14509; Fang and Zhao 2024, USP, arXiv 2405.07719
    """

    def __init__(
        self,
        comm: Communicator,
        method: Method = "exchange",
        *,
        inner: int | None = None,
        keep: bool = False,
        narrow: bool = False,
    ) -> None:
        if method not in METHODS:
            raise LayoutError(f"there is no method {method!r} of context parallelism; give one of {METHODS}")
        self.comm, self.method, self.keep, self.narrow = comm, method, keep, narrow
        self._travels = method.rpartition("+")[2]
        self.inner, self.outer = _levels(comm, method, inner)
        self.plan = lru_cache(PLANS)(self._plan)

    def spans(self, mask: Mask) -> tuple[Spans, ...]:
        """Return the positions that each rank holds, in ascending order; collective for a new mask."""
        plan, ranks = self.plan(mask), self.inner.size
        return tuple(
            part_of(share, Span(*edges))
            for share, count in zip(plan.shares, plan.counts, strict=True)
            for edges in bounds(count, ranks)
        )

    def positions(self, mask: Mask) -> Tensor:
        """Return the positions of this rank's tokens in the whole sequence, int64 [N]."""
        return torch.tensor(positions_of(self.spans(mask)[self.comm.rank]), dtype=torch.int64)

    def shard(self, tensor: Tensor, mask: Mask, dim: int = 1) -> Tensor:
        """Return this rank's tokens of a tensor that all ranks have, along a dim of `mask.length`."""
        if tensor.shape[dim] != mask.length:
            raise MismatchError(
                f"a tensor of shape {list(tensor.shape)} has {tensor.shape[dim]} tokens along dim {dim}, but "
                f"its mask {mask.length}; give the whole sequence"
            )
        return tensor.index_select(dim, self.positions(mask).to(tensor.device))

    @uncompiled
    def attention(
        self, queries: Tensor, keys: Tensor, values: Tensor, mask: Mask, *, scale: float | None = None
    ) -> Tensor:
        """Return softmax(Q Kᵀ scale)·V over the whole sequence, for this rank's queries; collective.

        queries   [B, A, N, D] of this rank's tokens, whose positions they have been rotated by
        keys, values   [B, K, N, D], A a multiple of K
        scale     None: 1/√D
        errors    MismatchError for shapes that do not fit the mask; LayoutError for heads that do not divide
                  among ranks that exchange heads
        """
        plan = self.plan(mask)
        self._require_shapes(queries, keys, values, plan)
        scale = queries.shape[-1] ** -0.5 if scale is None else scale
        travel = self._travel(plan, keys.dtype if self.narrow else wide(keys.dtype))
        call = Call(plan, self.outer.rank, travel, scale, self.keep)
        if self.inner.size == 1:
            return Attention.apply(queries, keys, values, call)  # type: ignore[no-any-return, no-untyped-call]
        exchange = HeadExchange(self.inner, counts(plan.counts[self.outer.rank], self.inner.size))
        parts = exchange.all_tokens(queries, keys, values)
        out = Attention.apply(*parts, call)  # type: ignore[no-untyped-call]
        return exchange.own_tokens(out, queries.shape[1])

    def _travel(self, plan: Plan, dtype: torch.dtype) -> partial[Travel]:
        if self._travels == "allgather":
            return partial(GatherTravel, self.outer, plan, dtype)
        moves, returns = (
            (ring_moves, ring_returns) if self._travels == "ring" else (exchange_moves, exchange_returns)
        )
        return partial(MessageTravel, self.outer, plan, moves(plan), returns(plan), dtype)

    def _plan(self, mask: Mask) -> Plan:
        everyone = self.comm.allgather_object(mask)
        others = [rank for rank, theirs in enumerate(everyone) if theirs != everyone[0]]
        if others:
            raise MismatchError(
                f"ranks of one sequence have different masks: rank 0 has {everyone[0]}, rank {others[0]} has "
                f"{everyone[others[0]]}; all ranks of {self.comm.name!r} must read the same sample"
            )
        return balanced(mask, self.outer.size)

    def _require_shapes(self, queries: Tensor, keys: Tensor, values: Tensor, plan: Plan) -> None:
        count = counts(plan.counts[self.outer.rank], self.inner.size)[self.inner.rank]
        shapes = [list(tensor.shape) for tensor in (queries, keys, values)]
        fits = all(len(shape) == 4 and shape[2] == count for shape in shapes)
        if not fits or shapes[0][1] % shapes[1][1] or shapes[1][:3] != shapes[2][:3]:
            raise MismatchError(
                f"rank {self.comm.rank}: queries, keys and values of shapes {shapes}; they must be "
                f"[B, A, {count}, D] and [B, K, {count}, D] with A a multiple of K, as this rank holds {count} "
                f"of the {plan.mask.length} tokens"
            )


def _levels(comm: Communicator, method: str, inner: int | None) -> tuple[Communicator, Communicator]:
    """Return the ranks that exchange heads with this one, and those that exchange keys."""
    two_level = "+" in method
    if inner is not None and not two_level:
        raise LayoutError(f"inner={inner} is for methods with two levels; {method!r} has one")
    if method == "ulysses":
        ranks = comm.size
    elif two_level:
        ranks = inner or max(1, sum(node == comm.nodes[0] for node in comm.nodes))
    else:
        ranks = 1
    if comm.size % ranks:
        raise LayoutError(
            f"inner={ranks} ranks that exchange heads do not divide the {comm.size} ranks of a sequence"
        )
    within = comm.split(comm.rank // ranks, name=f"{comm.name}-heads")
    between = comm.split(comm.rank % ranks, name=f"{comm.name}-keys")
    assert within is not None
    assert between is not None
    return within, between
