"""Checksums of tensors, by which ranks see whether they have the same values."""

from __future__ import annotations

import zlib

import torch
from torch import Tensor


def checksum(values: Tensor, of_those_before: int = 0) -> int:
    """Compute the CRC-32 of the values in index order, after those of others; some seconds for 10 GB."""
    octets = values.detach().cpu().resolve_conj().contiguous().view(-1).view(torch.uint8).numpy()
    return zlib.crc32(octets.data, of_those_before)
