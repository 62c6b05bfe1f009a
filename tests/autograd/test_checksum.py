"""Checksums tell tensors of other values, or of another order, apart."""

from __future__ import annotations

import pytest
import torch

from hpcpar.autograd.checksum import checksum


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int8, torch.bool, torch.complex64])
def test_a_checksum_sees_one_bit_and_the_order_of_rows_and_columns(dtype: torch.dtype) -> None:
    values = (torch.arange(12).view(3, 4) % 5 == 0).to(dtype)
    changed = values.clone()
    changed[1, 2] = 1
    others = (changed, values.flip(0), values.flip(1), values[:2])
    assert len({checksum(values), *map(checksum, others)}) == 5
    assert checksum(values) == checksum(values.t().contiguous().t())
    assert checksum(values[1:], checksum(values[:1])) == checksum(values)
    assert checksum(values.conj()) == checksum(values.conj().resolve_conj())
    assert checksum(torch.ones(2, 0)) == 0
    checksum(torch.tensor(1.0))
