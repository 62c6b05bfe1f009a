"""Regions of a whole tensor, and the part that one rank holds: the integer arithmetic of resharding.

    whole tensor of 6 x 4              [0:6, 0:4]
    rank 1's two fused sections        [2:4 5:6, 0:4]       rows 2 3 5
    rank 1 of 2, 5 elements in all     d e ·                · is padding: never saved, zero when loaded

Two regions of one tensor overlap in boxes; a box is a slice of either.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, product

import torch
from torch import Tensor

from hpcpar.data_parallel.parameters import Layout, in_memory_order, layout_of
from hpcpar.errors import CheckpointError
from hpcpar.tensor_parallel.split import Range, comm_of, split_of

Ranges = tuple[Range, ...]
Box = tuple[slice, ...]


@dataclass(frozen=True)
class Region:
    """Ranges of each dim of a whole tensor; the ranges of a dim follow one another in the region.

    ranges   one tuple for each dim; `of` normalises them, so that equal regions compare equal
    """

    ranges: tuple[Ranges, ...]

    @classmethod
    def of(cls, ranges: Iterable[Iterable[Range]]) -> Region:
        """Drop empty ranges and merge adjacent ones."""
        return cls(tuple(_merged(along) for along in ranges))

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Region:
        return cls.of([(0, length)] for length in shape)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(sum(stop - start for start, stop in along) for along in self.ranges)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def fits(self, shape: Sequence[int]) -> bool:
        """Tell whether the region lies within a tensor of this shape."""
        return len(self.ranges) == len(shape) and all(
            0 <= start <= stop <= length
            for along, length in zip(self.ranges, shape, strict=True)
            for start, stop in along
        )

    def overlaps(self, other: Region) -> Iterator[tuple[Box, Box]]:
        """Yield each common box twice: as a slice of this region, and as a slice of the other."""
        pairs = zip(self.ranges, other.ranges, strict=True)
        for box in product(*(list(_common(mine, theirs)) for mine, theirs in pairs)):
            yield (
                tuple(slice(start, start + length) for start, _, length in box),
                tuple(slice(start, start + length) for _, start, length in box),
            )

    def __str__(self) -> str:
        dims = (" ".join(f"{start}:{stop}" for start, stop in along) for along in self.ranges)
        return f"[{', '.join(dims)}]"


def first_gap(regions: Sequence[Region], shape: Sequence[int]) -> tuple[int, int] | None:
    """Return (dim, index) of the first element that no region covers; None if they cover the whole.

    Regions may overlap. They must differ in the ranges of one dim only, as tensor-parallel shards do.
    """
    whole = Region.whole(shape)
    if whole in regions or not whole.numel:
        return None
    dims = (
        dim for region in regions for dim, along in enumerate(region.ranges) if along != whole.ranges[dim]
    )
    dim = next(dims, 0)
    slabs = [
        region.ranges[dim]
        for region in regions
        if all(along == whole.ranges[n] for n, along in enumerate(region.ranges) if n != dim)
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
    """Yield (offset in the one, offset in the other, length) of each common range."""
    for (start, stop), offset in _with_offsets(one):
        for (other_start, other_stop), other_offset in _with_offsets(other):
            low, high = max(start, other_start), min(stop, other_stop)
            if low < high:
                yield offset + low - start, other_offset + low - other_start, high - low


def _with_offsets(ranges: Ranges) -> Iterator[tuple[Range, int]]:
    """Yield each range with its offset within the region."""
    offset = 0
    for start, stop in ranges:
        yield (start, stop), offset
        offset += stop - start


@dataclass(frozen=True)
class LocalTensor:
    """Description of the part of a tensor that a rank has in memory.

    shape    of the whole tensor
    region   of the whole that this rank has
    layout   of the rank's memory; padding follows the region along a dim
    """

    shape: tuple[int, ...]
    region: Region
    layout: Layout

    @classmethod
    def of(cls, tensor: Tensor, layout: Layout | None = None) -> LocalTensor:
        """Describe a parameter or buffer of a model by its tensor-parallel split.

        layout   of its memory; None: its present one
        errors   CheckpointError if the tensor's shape contradicts its split
        """
        layout = layout or layout_of(tensor)
        split, comm = split_of(tensor), comm_of(tensor)
        if split is None or comm is None:
            return cls.whole(layout)
        shape = split.whole_shape(layout[0])
        if layout[0] != split.shard_shape(shape, comm.rank):
            raise CheckpointError(
                f"a parameter of shape {layout[0]} should have {split.shard_shape(shape, comm.rank)}, as "
                f"rank {comm.rank} of {comm.size}'s shard of {shape}; give it the split that it was made by"
            )
        ranges = list(Region.whole(shape).ranges)
        ranges[split.dim] = split.parts[comm.rank]
        return cls(shape, Region.of(ranges), layout)

    @classmethod
    def whole(cls, layout: Layout) -> LocalTensor:
        """Describe a tensor that is not split."""
        return cls(layout[0], Region.whole(layout[0]), layout)

    @property
    def is_padded(self) -> bool:
        return self.layout[0] != self.region.shape

    @cached_property
    def is_kept(self) -> Tensor:
        """Boolean mask over the rank's memory, flat: False for padding."""
        mask = torch.zeros(self.layout[0], dtype=torch.bool)
        mask[tuple(slice(0, length) for length in self.region.shape)] = True
        return in_memory_order(mask, self.layout)

    @property
    def packed(self) -> Layout:
        """Layout of the region without padding, its elements in the same order."""
        shape, (_, strides) = self.region.shape, self.layout
        if not self.is_padded:
            return self.layout
        packed, step = [0] * len(shape), 1
        for dim in sorted(range(len(shape)), key=lambda dim: strides[dim]):
            packed[dim] = step
            step *= shape[dim]
        return shape, tuple(packed)

    def without_padding(self, start: int, stop: int) -> tuple[int, int]:
        """Convert memory offsets start … stop to offsets that do not count padding."""
        if not self.is_padded:
            return start, stop
        first = int(self.is_kept[:start].sum())
        return first, first + int(self.is_kept[start:stop].sum())


def contiguous_layout(shape: Sequence[int]) -> Layout:
    """Return the row-major layout of a shape."""
    return tuple(shape), tuple(torch.empty(tuple(shape), device="meta").stride())


def is_replicated(tensor: Tensor) -> bool:
    """Tell whether every tensor-parallel rank has all of the tensor, and no padding."""
    split = split_of(tensor)
    return split is None or not (split.is_divided or split.padded)
