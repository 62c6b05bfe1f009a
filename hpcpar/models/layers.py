"""What a model is built from, as values: a parallel layer takes a plain one's place here.

Shape letters: B batch, S sequence on this rank, H hidden, A heads, K key-value heads, D head size.
A and K are those of this rank: a column-parallel projection hands over fewer heads, and attention
works on what it is handed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

LinearFactory = Callable[[int, int], nn.Module]
"""(in_features, out_features), both of the whole layer -> the module, without bias."""

EmbeddingFactory = Callable[[int, int], nn.Module]
"""(vocabulary, hidden) -> the module."""

NormFactory = Callable[[int, float], nn.Module]
"""(hidden, epsilon) -> the module."""

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
"""queries [B, A, S, D], keys and values [B, K, S, D] -> [B, A, S, D], causal."""


class Linear(nn.Linear):
    """A linear layer without bias whose values come from `initialise`, not from here."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False)

    def reset_parameters(self) -> None:
        """Draw nothing: building a model must not move the process's random numbers."""


class Embedding(nn.Embedding):
    """An embedding whose values come from `initialise`, not from here."""

    def reset_parameters(self) -> None:
        """Draw nothing, as `Linear`."""


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + ε) · weight over the last dim, worked out in float32 at least.

    source   Zhang and Sennrich 2019, arXiv 1910.07467
    """

    def __init__(self, hidden_size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.epsilon = epsilon

    def forward(self, hidden: Tensor) -> Tensor:
        wide = hidden if hidden.dtype == torch.float64 else hidden.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.epsilon)
        return (wide * scale).to(hidden.dtype) * self.weight

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, epsilon={self.epsilon}"


def causal_attention(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """softmax(QKᵀ/√D + causal mask)·V; each head of keys and values serves A/K heads of queries.

    queries [B, A, S, D], keys and values [B, K, S, D] -> [B, A, S, D]
    """
    served = queries.shape[1] // keys.shape[1]
    if served > 1:
        keys = keys.repeat_interleave(served, dim=1)
        values = values.repeat_interleave(served, dim=1)
    return functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)


@dataclass(frozen=True)
class Layers:
    """The makers of a model's layers; the defaults give the serial model.

    column_linear       projections whose outputs may be spread over ranks: q, k, v, gate, up
    row_linear          projections whose inputs are spread the same way: o, down
    vocabulary_linear   hidden to logits
    """

    column_linear: LinearFactory = Linear
    row_linear: LinearFactory = Linear
    vocabulary_linear: LinearFactory = Linear
    embedding: EmbeddingFactory = Embedding
    norm: NormFactory = RMSNorm
    attention: Attention = causal_attention
