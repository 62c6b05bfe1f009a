"""A block of attention, besides its tensors: what every kernel is given, and what its backward returns.

Shape letters: B batch, A heads, K key-value heads, N queries, M keys, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

KeysValues = Tensor | tuple[Tensor, Tensor]
"""Keys and values [B, K, M, D], as one tensor [2, B, K, M, D] or as two."""


class AttentionGradients(NamedTuple):
    queries: Tensor
    keys: Tensor
    values: Tensor


@dataclass(frozen=True)
class AttentionBlock:
    """A block of attention besides its tensors.

    scale     of the scores
    causal    query i sees the first i + 1 keys; both have the same number
    allowed   [N, M], True where query and key attend; None: everywhere
    weights   [B, A, N, M], what each attention weight is multiplied by after the softmax (dropout); None: 1
    """

    scale: float
    causal: bool = False
    allowed: Tensor | None = None
    weights: Tensor | None = None


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which blocks are summed: float64 for such, float32 for any other."""
    return torch.float64 if dtype == torch.float64 else torch.float32
