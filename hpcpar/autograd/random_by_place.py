"""Random bits that depend on a seed and on an element's place in the whole, not on who computes it.

Each row and each column has 32 random bits of its own; an element's are a mix of both. So a rank that holds
some rows of a sequence, or a block of an attention matrix, draws what a rank with all of it would draw there.
source   Salmon et al. 2011, Parallel random numbers: as easy as 1, 2, 3 (numbers as functions of a counter);
         the mix is the finalizer of MurmurHash3
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_FIRST, _SECOND = -2048144789, -1028477387
_GOLDEN = 0x9E3779B9


def kept_by_place(seed: int, rows: Sequence[Tensor], columns: Tensor, probability: float) -> Tensor:
    """Return a mask that is True with a probability: [R₁, R₂, …, C].

    rows      numbers of the rows, one tensor for each dim but the last: [R₁], [R₂], …
    columns   numbers of the columns, [C]
    """
    mixed = torch.zeros((), dtype=torch.int64, device=columns.device)
    for dim, numbers in enumerate(rows):
        shape = [1] * len(rows)
        shape[dim] = len(numbers)
        mixed = _mix((mixed + (numbers.to(torch.int64).view(shape) + 1) * _GOLDEN + seed).to(torch.int32))
        mixed = mixed.to(torch.int64)
    of_columns = _mix(((columns.to(torch.int64) + 1) * _GOLDEN + (seed >> 32)).to(torch.int32))
    bits = _mix(mixed.to(torch.int32).unsqueeze(-1) ^ of_columns)
    return bits < int(probability * 2**32) - 2**31


def _mix(bits: Tensor) -> Tensor:
    """Return int32 whose every bit depends on every bit given."""
    bits = bits ^ _shifted(bits, 16)
    bits = _shifted_xor(bits * _FIRST, 13)
    return _shifted_xor(bits * _SECOND, 16)


def _shifted_xor(bits: Tensor, by: int) -> Tensor:
    return bits.bitwise_xor_(_shifted(bits, by))


def _shifted(bits: Tensor, by: int) -> Tensor:
    """Shift right, filling with zeros: torch's shift of int32 fills with the sign."""
    return (bits >> by).bitwise_and_((1 << (32 - by)) - 1)
