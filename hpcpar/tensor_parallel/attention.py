"""Self-attention with its heads divided among ranks.

Shape letters: B batch, S sequence, H hidden, A heads and K key-value heads on this rank, D head size.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from hpcpar.autograd.recompute import recompute
from hpcpar.errors import LayoutError
from hpcpar.tensor_parallel.axis import TensorParallel
from hpcpar.tensor_parallel.dropout import Dropout
from hpcpar.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear, project
from hpcpar.tensor_parallel.split import Heads, require_fitting

if TYPE_CHECKING:
    from hpcpar.comm import Communicator


def causal_attention(queries: Tensor, keys: Tensor, values: Tensor, dropout: Dropout | None = None) -> Tensor:
    """softmax(QKᵀ/√D + causal mask)·V; each key-value head serves A/K query heads.

    queries [B, A, S, D], keys and values [B, K, S, D] -> [B, A, S, D]
    dropout   of the attention weights; None: torch's fused kernel computes everything
    """
    served = queries.shape[1] // keys.shape[1]
    if dropout is None or not dropout.is_active:
        return functional.scaled_dot_product_attention(
            queries, keys, values, is_causal=True, enable_gqa=served > 1
        )
    keys, values = (heads.repeat_interleave(served, dim=1) for heads in (keys, values))
    scores = (queries / math.sqrt(queries.shape[-1])) @ keys.transpose(-1, -2)
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    weights = scores.masked_fill(later, -math.inf).softmax(-1)
    mixed: Tensor = dropout(weights) @ values
    return mixed


class ParallelSelfAttention(nn.Module):
    """Causal self-attention: heads divided among ranks, keys and values from one fused weight.

    hidden_size, heads   of the whole layer
    kv_heads      heads of keys and values, None: heads; if fewer than ranks, several ranks hold the same one
    head_size     None: hidden_size / heads
    dropout       of the attention weights, with a stream that differs among ranks; None: none
    selective     recompute the core (scores, softmax, mix) in backward instead of saving S² values
                  (Korthikanti et al. 2022, arXiv 2205.05198, section 5)

    [B, S, H] -> [B, S, H]; with sequence parallelism S is this rank's shard
    errors   LayoutError for heads that do not divide among the ranks
    """

    def __init__(
        self,
        hidden_size: int,
        heads: int,
        tp: TensorParallel | Communicator,
        *,
        kv_heads: int | None = None,
        head_size: int | None = None,
        bias: bool = True,
        dropout: Dropout | None = None,
        selective: bool = False,
    ) -> None:
        super().__init__()
        tp = TensorParallel.of(tp)
        kv_heads = heads if kv_heads is None else kv_heads
        require_heads(heads, kv_heads, tp.size)
        if head_size is None and hidden_size % heads:
            raise LayoutError(
                f"hidden_size={hidden_size} does not divide among heads={heads}; give a head_size"
            )
        self.head_size = hidden_size // heads if head_size is None else head_size
        self.q_proj = ColumnParallelLinear(hidden_size, Heads(heads, self.head_size), tp, bias=bias)
        both = (Heads(kv_heads, self.head_size), Heads(kv_heads, self.head_size))
        self.kv_proj = ColumnParallelLinear(hidden_size, both, tp, bias=bias)
        self.o_proj = RowParallelLinear(heads * self.head_size, hidden_size, tp, bias=bias)
        self.dropout = dropout
        self.selective = selective

    def forward(self, hidden: Tensor) -> Tensor:
        of_queries, of_both = project([self.q_proj, self.kv_proj], hidden)
        queries, keys, values = (
            torch.unflatten(part, -1, (part.shape[-1] // self.head_size, self.head_size)).transpose(1, 2)
            for part in (of_queries, *self.kv_proj.sections_of(of_both))
        )
        if self.selective:
            streams = None if self.dropout is None else self.dropout.random_streams
            mixed = recompute(self._core, queries, keys, values, streams=streams)
        else:
            mixed = self._core(queries, keys, values)
        output: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return output

    def _core(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return causal_attention(queries, keys, values, self.dropout)


def require_heads(heads: int, kv_heads: int, size: int) -> None:
    """Raise LayoutError unless `size` ranks can share these heads."""
    require_fitting({"heads": heads}, {"kv_heads": kv_heads}, size)
