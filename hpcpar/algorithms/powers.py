"""Powers of two below a number of ranks, which every logarithmic algorithm walks through."""

from __future__ import annotations


def doublings(size: int) -> tuple[int, ...]:
    """1, 2, 4 … below `size`: as many as the ceiling of log₂ size; doublings(6) == (1, 2, 4)."""
    return tuple(1 << bit for bit in range((size - 1).bit_length()))


def largest_power(size: int) -> int:
    """The largest power of two that is at most `size`; largest_power(6) == 4."""
    return 1 << (size.bit_length() - 1)
