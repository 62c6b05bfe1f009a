"""Rotary position embeddings: queries and keys are rotated by angles that grow with position.

Shape letters: B batch, S sequence on this rank, A heads, D head size.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rotary_tables(
    positions: Tensor, head_size: int, theta: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return cosines and sines [S, D/2] of position · theta^(-2i/D), i = 0 … D/2 - 1.

    Angles are computed in float64: position · frequency loses digits in float32 from a few thousand positions
    on. The tables are float64 for a float64 model and float32 for any other.
    """
    exponents = torch.arange(0, head_size, 2, dtype=torch.float64, device=positions.device) / head_size
    angles = positions.to(torch.float64)[:, None] * theta**-exponents
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return angles.cos().to(wide), angles.sin().to(wide)


def rotate(heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotate each pair (i, i + D/2) of the last dim by its angle: [B, S, A, D] -> the same shape.

    cosines, sines   [S, 1, D/2]

    Pairs are halves, not neighbours, as in Hugging Face's Llama, so its weights fit.
    source   Su et al. 2021, arXiv 2104.09864
    """
    first, second = heads.chunk(2, dim=-1)
    turned = torch.cat((first * cosines - second * sines, second * cosines + first * sines), dim=-1)
    return turned.to(heads.dtype)
