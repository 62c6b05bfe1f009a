"""`ContextParallel`: ranks that share each sequence, and attention over all of it.

    cp = ContextParallel(mesh.cp)
    with cp.using(Mask(length=8192)):                   # causal; forward and backward
        tokens = cp.shard(tokens)                       # [B, S] -> this rank's [B, N]
        positions = cp.positions()                      # [N], for rotary embeddings
        out = cp.attention(queries, keys, values)       # [B, A, N, D]

Values sent by each rank for a layer's forward and backward, u = B·(S/c)·K·D, causal and c ranks:

    method      keys and values                              sent
    exchange    only those that the mask needs, direct       4.5(c - 1)u on average; 3(c - 1)u if kept
    ring        all, from neighbour to neighbour             6(c - 1)u; 4(c - 1)u if kept
    allgather   all, gathered; gradients reduce-scattered    6(c - 1)u; 4(c - 1)u if kept
    ulysses     heads exchanged for tokens                   4(1 + A/K)(c - 1)u/c
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor
from torch.autograd import Function

from hpcpar.autograd.checksum import checksum
from hpcpar.autograd.own_functions import differentiated_once, under_autocast
from hpcpar.comm.agree import is_same_everywhere
from hpcpar.context_parallel.block import wide
from hpcpar.context_parallel.blockwise_attention import Attention, AttentionCall, WeightDropout, places_in
from hpcpar.context_parallel.context_plan import ContextPlan, Spans, balanced, moves_of, part_of
from hpcpar.context_parallel.head_exchange import HeadExchange
from hpcpar.context_parallel.mask import Mask, Span
from hpcpar.context_parallel.travel import GatherTravel, MessageTravel, Travel
from hpcpar.errors import LayoutError, MismatchError
from hpcpar.partition import bounds, counts
from hpcpar.uncompiled import uncompiled

if TYPE_CHECKING:
    from hpcpar.comm import Communicator
    from hpcpar.tensor_parallel import Dropout

Method = Literal["exchange", "ring", "allgather", "ulysses", "ulysses+exchange", "ulysses+ring"]

METHODS: tuple[Method, ...] = get_args(Method)

CHECKED = 2
"""First batches whose tokens are compared over the ranks: who reads other samples does so from the start."""

PLANS = 64
"""Masks whose plans are kept: packed documents give another one with each batch."""


@dataclass
class _MaskInUse:
    """A mask within `using`: the plans' masks, and the tokens, on which the other ranks agree."""

    mask: Mask
    agreed: set[Mask] = field(default_factory=set)
    tokens: str = ""


class ContextParallel:
    """Ranks that share each sequence.

    comm      they; rank r of it holds the tokens `spans(mask)[r]`
    method    how keys travel: see the head of this file. The two-level ones exchange heads within a node,
              and keys between nodes
    inner     for these: neighbouring ranks that exchange heads; None: as many as there are on each node
    keep      keep other ranks' keys for backward: fewer bytes, more memory
    narrow    let gradients of keys travel in the keys' own type, not in float32 (float64 stays float64)
    multiple  of which each rank's tokens are a multiple: tp ranks that share them by sequence parallelism
    even      give a rank as many tokens for all masks of one length, at some cost in balance: a pipeline's
              messages are then of one shape
    errors    LayoutError for a method that there is not, or an `inner` that does not divide the ranks

    source   Liu et al. 2023, arXiv 2310.01889; Llama Team 2024, arXiv 2407.21783, section 3.3.2; Jacobs et
             al. 2023, arXiv 2309.14509; Fang and Zhao 2024, USP, arXiv 2405.07719
    """

    def __init__(
        self,
        comm: Communicator,
        method: Method = "exchange",
        *,
        inner: int | None = None,
        keep: bool = False,
        narrow: bool = False,
        multiple: int = 1,
        even: bool = False,
    ) -> None:
        if method not in METHODS:
            raise LayoutError(f"there is no method {method!r} of context parallelism; give one of {METHODS}")
        self.comm, self.method, self.keep, self.narrow = comm, method, keep, narrow
        self.inner, self.outer = _levels(comm, method, inner)
        self.multiple, self.even = multiple, even
        self._plans = lru_cache(PLANS)(self._plan)
        self._in_use: list[_MaskInUse] = []
        self._unchecked = CHECKED

    def __deepcopy__(self, memo: Any) -> ContextParallel:
        return self  # a copy of a model is on the same ranks

    @contextmanager
    def using(self, mask: Mask) -> Iterator[None]:
        """Let the methods mean this mask, in forward and in backward (recomputation asks for it again)."""
        self._in_use.append(_MaskInUse(mask))
        try:
            yield
        finally:
            self._in_use.pop()

    @property
    def mask(self) -> Mask:
        """The mask in use; LayoutError outside of `using`."""
        if not self._in_use:
            raise LayoutError("no mask is in use; write `with cp.using(Mask(length)):` around this")
        return self._in_use[-1].mask

    def plan(self, mask: Mask, window: int | None = None) -> ContextPlan:
        """Return the plan of a mask, or of a layer with a window of its own."""
        return self._plans(mask, window)

    def spans(self) -> tuple[Spans, ...]:
        """Return the places in the sequence that each rank holds, ascending."""
        plan, ranks, multiple = self.plan(self.mask), self.inner.size, self.multiple
        return tuple(
            part_of(share, Span(start * multiple, stop * multiple))
            for share, count in zip(plan.shares, plan.counts, strict=True)
            for start, stop in bounds(count // multiple, ranks)
        )

    def places(self) -> Tensor:
        """Return the places of this rank's tokens in the sequence, int64 [N]."""
        return places_in(self.spans()[self.comm.rank])

    def positions(self) -> Tensor:
        """Return the positions of this rank's tokens in their documents, int64 [N], for rotary embeddings."""
        parts = self.mask.parts(self.spans()[self.comm.rank])
        return places_in(tuple(Span(part.start - of.start, part.stop - of.start) for of, part in parts))

    @property
    def longest(self) -> int:
        """Tokens of the longest document."""
        return max(self.mask.documents or (self.mask.length,))

    def own_tokens(self, tokens: Tensor) -> Tensor:
        """Return this rank's of tokens [B, S] that all ranks have: [B, N].

        Where the mask is as long as all rows together, these are taken one after the other: [1, N].
        """
        rows = tokens.shape[0]
        return self.shard(tokens.reshape(1, -1) if rows * tokens.shape[1] == self.mask.length else tokens)

    def shard(self, tensor: Tensor, dim: int = 1) -> Tensor:
        """Return this rank's tokens of a tensor that all ranks have, along a dim of the whole length."""
        if tensor.shape[dim] != self.mask.length:
            raise MismatchError(
                f"a tensor of shape {list(tensor.shape)} has {tensor.shape[dim]} tokens along dim {dim}, but "
                f"the mask in use {self.mask.length}; give the whole sequence"
            )
        if self._unchecked and not self._in_use[-1].tokens and not tensor.is_floating_point():
            self._unchecked -= 1
            self._in_use[-1].tokens = f" with tokens of checksum {checksum(tensor):08x}"
        return tensor.index_select(dim, self.places().to(tensor.device))

    @uncompiled
    def unshard(self, tensor: Tensor, dim: int = 1) -> Tensor:
        """Return all ranks' tokens in the order of the sequence, on every rank. Collective, as is backward.

        Gradients are summed over the ranks, so that the average over them is that of the ranks' losses.
        """
        self._require_agreed(self.mask)
        return _Unshard.apply(tensor, self.comm, self.spans(), dim)  # type: ignore[no-any-return, no-untyped-call]

    @uncompiled
    def attention(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        *,
        scale: float | None = None,
        dropout: WeightDropout | None = None,
        window: int | None = None,
    ) -> Tensor:
        """Return softmax(Q Kᵀ scale)·V over the whole sequence, for this rank's queries; collective.

        queries   [B, A, N, D] of this rank's tokens, whose positions they have been rotated by; all three of
                  one type, or under torch.autocast cast to its type
        keys, values   [B, K, N, D], A a multiple of K
        scale     None: 1/√D
        dropout   of the attention weights; None: none. What is dropped depends on the places of query and
                  key, and not on the number of ranks
        window    of this layer: a query sees keys at a distance below it, and of them those that the mask in
                  use has; which rank holds which tokens depends on that mask alone. None: no other window
        errors    MismatchError for shapes that do not fit the mask, for several types, and on every rank for
                  masks that differ between ranks; LayoutError for heads that do not divide among ranks that
                  exchange heads
        """
        plan = self.plan(self.mask, window)
        self._require_agreed(plan.mask)
        queries, keys, values = under_autocast(queries, keys, values)
        self._require_shapes(queries, keys, values, plan)
        scale = queries.shape[-1] ** -0.5 if scale is None else scale
        travel = self._travel(plan, keys.dtype if self.narrow else wide(keys.dtype))
        call = AttentionCall(plan, self.outer.rank, travel, scale, self.keep, dropout)
        if self.inner.size == 1:
            return Attention.apply(queries, keys, values, call)  # type: ignore[no-any-return, no-untyped-call]
        exchange = HeadExchange(self.inner, self._counts(plan))
        parts = exchange.all_tokens(queries, keys, values)
        if dropout is not None:
            call = replace(call, dropout=replace(dropout, first_head=self.inner.rank * parts[0].shape[1]))
        out = Attention.apply(*parts, call)  # type: ignore[no-untyped-call]
        return exchange.own_tokens(out, queries.shape[1])

    def model_attention(
        self, queries: Tensor, keys: Tensor, values: Tensor, dropout: Dropout | None = None
    ) -> Tensor:
        """`attention`, in the form in which a model's layers are given it."""
        if dropout is None or not dropout.is_active:
            return self.attention(queries, keys, values)
        seed = dropout.random_streams.seed("different")
        return self.attention(queries, keys, values, dropout=WeightDropout(dropout.probability, seed))

    def _travel(self, plan: ContextPlan, dtype: torch.dtype) -> Callable[[], Travel]:
        if self.method == "allgather":
            return partial(GatherTravel, self.outer, plan, dtype)
        moves = moves_of(plan, self.method)
        return partial(MessageTravel, self.outer, plan, *moves, dtype, keep=self.keep)

    def _counts(self, plan: ContextPlan) -> tuple[int, ...]:
        """Return the tokens of each rank that exchanges heads with this one."""
        whole, multiple = plan.counts[self.outer.rank], self.multiple
        return tuple(count * multiple for count in counts(whole // multiple, self.inner.size))

    def _plan(self, mask: Mask, window: int | None) -> ContextPlan:
        if window is not None:  # of one layer, between others: the tokens stay where they are
            narrowed = replace(mask, window=min(window, mask.window or window))
            return ContextPlan(narrowed, self.plan(mask).shares)
        return balanced(mask, self.outer.size, multiple=self.multiple, even=self.even)

    def _require_agreed(self, mask: Mask) -> None:
        """Agree with the other ranks on mask and tokens, when this mask is first needed within `using`.

        Not only for a mask that is new to this rank: another may have it new, or go on with an older one.
        cost     one all-reduce of 32 bytes
        """
        use = self._in_use[-1]
        if mask in use.agreed:
            return
        own = f"{mask}{use.tokens}"
        if not is_same_everywhere(self.comm, own):
            everyone = self.comm.allgather_object(own)
            other = next(rank for rank, theirs in enumerate(everyone) if theirs != everyone[0])
            raise MismatchError(
                f"ranks of one sequence have different masks or tokens: rank 0 has {everyone[0]}, rank "
                f"{other} has {everyone[other]}; all ranks of {self.comm.name!r} must read the same sample: "
                "choose it by mesh.dp.rank of mesh.dp.size"
            )
        use.agreed.add(mask)

    def _require_shapes(self, queries: Tensor, keys: Tensor, values: Tensor, plan: ContextPlan) -> None:
        count = self._counts(plan)[self.inner.rank]
        shapes = [list(tensor.shape) for tensor in (queries, keys, values)]
        dtypes = [str(tensor.dtype) for tensor in (queries, keys, values)]
        fits = all(len(shape) == 4 and shape[2:] == [count, shapes[0][-1]] for shape in shapes)
        if not fits or shapes[0][1] % shapes[1][1] or shapes[1] != shapes[2] or len(set(dtypes)) > 1:
            raise MismatchError(
                f"rank {self.comm.rank}: queries, keys and values of shapes {shapes} and types "
                f"{', '.join(dtypes)}; they must be [B, A, {count}, D] and [B, K, {count}, D] with A a "
                f"multiple of K, as this rank holds {count} of the {plan.mask.length} tokens, and of one type"
            )


class _Unshard(Function):
    """Tokens of all ranks in the order of the sequence."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, comm: Communicator, spans: tuple[Spans, ...], dim: int) -> Tensor:
        flat = tensor.movedim(dim, 0).contiguous()
        rest = math.prod(flat.shape[1:])
        sizes = [sum(span.length for span in own) * rest for own in spans]
        gathered = comm.allgather(flat.reshape(-1), counts=sizes, out=flat.new_empty(sum(sizes)))
        places = torch.cat([places_in(own, flat.device) for own in spans])
        whole = flat.new_empty(len(places), *flat.shape[1:])
        whole[places] = gathered.view(whole.shape)
        ctx.comm, ctx.sizes, ctx.dim, ctx.places, ctx.shape = comm, sizes, dim, places, flat.shape
        return whole.movedim(0, dim)

    @staticmethod
    @differentiated_once("ContextParallel.unshard; do without it")
    def backward(ctx: Any, gradient: Tensor) -> Any:
        by_rank = gradient.movedim(ctx.dim, 0)[ctx.places].reshape(-1)
        own = ctx.comm.reduce_scatter(by_rank, counts=ctx.sizes)
        return own.view(ctx.shape).movedim(0, ctx.dim), None, None, None


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
