"""Heads for tokens: a rank gives away its tokens of other heads, and gets all tokens of its own heads.

Shape letters: B batch, A heads of queries, K of keys and values, N tokens of this rank, S of all, D head
size.

    2 ranks    queries [B, A, N, D] of all heads    ->    [B, A/2, S, D]    ->    out [B, A, N, D]

One all-to-all takes queries, keys and values there, another brings the output back. With fewer key-value
heads than ranks several get the same one, each once, and its gradients are summed where it comes from.
source   Jacobs et al. 2023, DeepSpeed Ulysses, arXiv 2309.14509
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import Function

from hpcpar.context_parallel.mask import Span
from hpcpar.errors import LayoutError
from hpcpar.partition import bounds

if TYPE_CHECKING:
    from hpcpar.comm import Communicator


def heads_of_ranks(size: int, queries: int, keys: int) -> tuple[tuple[Span, ...], tuple[Span, ...]]:
    """Return the heads of queries that each of `size` ranks computes, and those of keys and values for them.

    errors   LayoutError for heads of queries that do not divide among the ranks
    """
    if queries % size:
        fitting = [degree for degree in range(1, queries + 1) if queries % degree == 0]
        raise LayoutError(
            f"heads={queries} do not divide among the {size} ranks that exchange heads (Ulysses); "
            f"degrees that fit: {', '.join(map(str, fitting))}"
        )
    served = queries // keys
    of_queries = tuple(Span(*edges) for edges in bounds(queries, size))
    return of_queries, tuple(Span(start // served, (stop - 1) // served + 1) for start, stop in of_queries)


def heads_used(queries: Span, keys: Span, served: int) -> list[int]:
    """Return the heads of keys, by their number among this rank's, that its attention is given.

    Each once, if as many heads of queries share each of them in order; else one for each head of queries.
    """
    owners = [head // served - keys.start for head in range(*queries)]
    if queries.length % keys.length == 0 and owners == [
        place * keys.length // queries.length for place in range(queries.length)
    ]:
        return list(range(keys.length))
    return owners


@dataclass(frozen=True)
class HeadExchange:
    """Ranks that share heads between them.

    counts   tokens that each of them holds
    """

    comm: Communicator
    counts: tuple[int, ...]

    def all_tokens(self, queries: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return all tokens of this rank's heads; collective, and so is its backward."""
        of_queries, of_keys = heads_of_ranks(self.comm.size, queries.shape[1], keys.shape[1])
        mine = of_queries[self.comm.rank], of_keys[self.comm.rank]
        all_queries, all_keys, all_values = _AllTokens.apply(  # type: ignore[no-untyped-call]
            self, (of_queries, of_keys, of_keys), queries, keys, values
        )
        owners = heads_used(*mine, queries.shape[1] // keys.shape[1])
        if owners != list(range(mine[1].length)):
            all_keys, all_values = all_keys[:, owners], all_values[:, owners]
        return all_queries, all_keys, all_values

    def own_tokens(self, out: Tensor, heads: int) -> Tensor:
        """Return this rank's tokens of all heads, from all tokens of its own; collective."""
        of_heads = tuple(Span(*edges) for edges in bounds(heads, self.comm.size))
        (own,) = _OwnTokens.apply(self, (of_heads,), out)  # type: ignore[no-untyped-call]
        return own  # type: ignore[no-any-return]


Heads = Sequence[tuple[Span, ...]]
"""For each tensor, the heads of each rank."""


class _AllTokens(Function):
    @staticmethod
    def forward(ctx: Any, exchange: HeadExchange, heads: Heads, *tensors: Tensor) -> Any:
        ctx.exchange, ctx.heads, ctx.counts = exchange, heads, [tensor.shape[1] for tensor in tensors]
        return _all_tokens(exchange, heads, tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, None, *_own_tokens(ctx.exchange, ctx.heads, gradients, ctx.counts)


class _OwnTokens(Function):
    @staticmethod
    def forward(ctx: Any, exchange: HeadExchange, heads: Heads, *tensors: Tensor) -> Any:
        ctx.exchange, ctx.heads = exchange, heads
        return _own_tokens(exchange, heads, tensors, [of_tensor[-1].stop for of_tensor in heads])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, None, *_all_tokens(ctx.exchange, ctx.heads, gradients)


def _all_tokens(exchange: HeadExchange, heads: Heads, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Send each rank its heads of the tensors [B, A, N, D]; join what comes as [B, A/p, S, D]."""
    comm, rank = exchange.comm, exchange.comm.rank
    sent = [
        [tensor[:, slice(*of[to])] for tensor, of in zip(tensors, heads, strict=True)]
        for to in range(comm.size)
    ]
    shapes = [
        [(t.shape[0], of[rank].length, count, t.shape[3]) for t, of in zip(tensors, heads, strict=True)]
        for count in exchange.counts
    ]
    received = _exchanged(comm, sent, shapes, is_even=_is_even(exchange, heads))
    by_token = (
        torch.cat([part.transpose(1, 2) for part in parts], 1) for parts in zip(*received, strict=True)
    )
    return tuple(tensor.transpose(1, 2) for tensor in by_token)


def _own_tokens(
    exchange: HeadExchange, heads: Heads, tensors: Sequence[Tensor], totals: Sequence[int]
) -> tuple[Tensor, ...]:
    """Send each rank its tokens of the tensors [B, A/p, S, D]; add up what comes as [B, A, N, D]."""
    comm, rank = exchange.comm, exchange.comm.rank
    sent = list(zip(*(torch.split(tensor, list(exchange.counts), dim=2) for tensor in tensors), strict=True))
    count = exchange.counts[rank]
    shapes = [
        [(t.shape[0], of[source].length, count, t.shape[3]) for t, of in zip(tensors, heads, strict=True)]
        for source in range(comm.size)
    ]
    received = _exchanged(comm, sent, shapes, is_even=_is_even(exchange, heads))
    whole = [
        t.new_zeros(t.shape[0], count, n, t.shape[3]).transpose(1, 2)
        for t, n in zip(tensors, totals, strict=True)
    ]
    for source, parts in enumerate(received):
        for tensor, part, of in zip(whole, parts, heads, strict=True):
            tensor[:, slice(*of[source])] += part
    return tuple(whole)


def _is_even(exchange: HeadExchange, heads: Heads) -> bool:
    """Return on all ranks whether every one sends every other as much: a call without counts costs less."""
    return len(set(exchange.counts)) == 1 and all(
        len({span.length for span in of_tensor}) == 1 for of_tensor in heads
    )


def _exchanged(
    comm: Communicator,
    sent: Sequence[Sequence[Tensor]],
    shapes: Sequence[Sequence[tuple[int, ...]]],
    *,
    is_even: bool,
) -> list[list[Tensor]]:
    """Send rank j the tensors of sent[j]; return those of these shapes that came from each rank.

    All lie in memory as [B, N, A, D], as models make them and take them.
    """
    flat = torch.cat([part.detach().transpose(1, 2).reshape(-1) for parts in sent for part in parts])
    sizes = [[torch.Size(shape).numel() for shape in of_rank] for of_rank in shapes]
    received = flat.new_empty(sum(map(sum, sizes)))
    if is_even:
        comm.alltoall(flat, out=received)
    else:
        comm.alltoall(
            flat,
            out=received,
            send_counts=[sum(part.numel() for part in parts) for parts in sent],
            receive_counts=[sum(of_rank) for of_rank in sizes],
        )
    pieces = iter(torch.split(received, [size for of_rank in sizes for size in of_rank]))
    return [
        [
            next(pieces).view(batch, count, heads, size).transpose(1, 2)
            for batch, heads, count, size in of_rank
        ]
        for of_rank in shapes
    ]
