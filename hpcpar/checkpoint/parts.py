"""Parts of a whole tensor, as the ranges of each of its dims. Pure integers.

    whole of 6 x 4                     [0:6, 0:4]
    rank 1's of two fused sections     [2:4 5:6, 0:4]        rows 2 3 5

Two parts of one tensor overlap in boxes; a box is a slice of either.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, product

Range = tuple[int, int]
"""start, stop"""

Ranges = tuple[Range, ...]
Box = tuple[slice, ...]


@dataclass(frozen=True)
class Part:
    """What lies in these ranges of a whole tensor, those of a dim one after another.

    ranges   of each dim; made by `of`, so that equal parts have equal ranges
    """

    ranges: tuple[Ranges, ...]

    @classmethod
    def of(cls, ranges: Iterable[Iterable[Range]]) -> Part:
        """Without empty ranges; what begins where the range before it ends becomes one with it."""
        return cls(tuple(_merged(along) for along in ranges))

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Part:
        """All of a tensor."""
        return cls.of([(0, length)] for length in shape)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(sum(stop - start for start, stop in along) for along in self.ranges)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def overlaps(self, other: Part) -> Iterator[tuple[Box, Box]]:
        """The boxes that both have: where in this one, and where in the other."""
        pairs = zip(self.ranges, other.ranges, strict=True)
        for box in product(*(list(_common(mine, theirs)) for mine, theirs in pairs)):
            yield (
                tuple(slice(start, start + length) for start, _, length in box),
                tuple(slice(start, start + length) for _, start, length in box),
            )

    def __str__(self) -> str:
        dims = (" ".join(f"{start}:{stop}" for start, stop in along) for along in self.ranges)
        return f"[{', '.join(dims)}]"


def first_gap(parts: Sequence[Part], shape: Sequence[int]) -> tuple[int, int] | None:
    """(dim, place) of the first element that none of the parts has; None: together they are the whole.

    They may overlap, and are to differ in the ranges of one dim only, as the parts of ranks do.
    """
    whole = Part.whole(shape)
    if whole in parts or not whole.numel:
        return None
    dims = (dim for part in parts for dim, along in enumerate(part.ranges) if along != whole.ranges[dim])
    dim = next(dims, 0)
    slabs = [
        part.ranges[dim]
        for part in parts
        if all(along == whole.ranges[n] for n, along in enumerate(part.ranges) if n != dim)
    ]
    end = 0
    for start, stop in sorted(chain.from_iterable(slabs)):
        if start > end:
            break
        end = max(end, stop)
    return None if shape and end == shape[dim] else (dim, end)


def _merged(ranges: Iterable[Range]) -> Ranges:
    merged: list[Range] = []
    for start, stop in ranges:
        if start == stop:
            continue
        if merged and merged[-1][1] == start:
            start = merged.pop()[0]
        merged.append((start, stop))
    return tuple(merged)


def _common(one: Ranges, other: Ranges) -> Iterator[tuple[int, int, int]]:
    """(place in the one, place in the other, length) of what both have."""
    for (start, stop), place in _placed(one):
        for (other_start, other_stop), other_place in _placed(other):
            low, high = max(start, other_start), min(stop, other_stop)
            if low < high:
                yield place + low - start, other_place + low - other_start, high - low


def _placed(ranges: Ranges) -> Iterator[tuple[Range, int]]:
    """Each range, and where it begins among the elements of all."""
    place = 0
    for start, stop in ranges:
        yield (start, stop), place
        place += stop - start
