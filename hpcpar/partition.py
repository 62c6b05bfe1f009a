"""Division of n things among p: the only place in the package that rounds."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise


def counts(n: int, p: int) -> tuple[int, ...]:
    """Sizes of p consecutive pieces of n elements, as equal as can be, larger ones first.

    counts(10, 4) == (3, 3, 2, 2); pieces may be empty: counts(2, 3) == (1, 1, 0).
    """
    if n < 0 or p < 1:
        raise ValueError(f"cannot divide {n} elements among {p}: need n >= 0 and p >= 1")
    quotient, rest = divmod(n, p)
    return tuple(quotient + 1 if i < rest else quotient for i in range(p))


def offsets(sizes: Sequence[int]) -> tuple[int, ...]:
    """Start of each of consecutive pieces, and at last their end.

    offsets((3, 3, 2, 2)) == (0, 3, 6, 8, 10)
    """
    return (0, *accumulate(sizes))


def bounds(n: int, p: int) -> tuple[tuple[int, int], ...]:
    """(start, stop) of p consecutive pieces of n elements; bounds(5, 2) == ((0, 3), (3, 5))."""
    edges = offsets(counts(n, p))
    return tuple(pairwise(edges))


def refined(edges: Sequence[int], parts: int) -> tuple[int, ...]:
    """The edges of pieces, each cut once more into `parts`: refined((0, 4, 10), 2) == (0, 2, 4, 7, 10)."""
    sizes = [size for start, stop in pairwise(edges) for size in counts(stop - start, parts)]
    return tuple(edges[0] + edge for edge in offsets(sizes))
