"""A tensor as a rank has it in memory: a part of the whole, in some order, perhaps with padding.

    whole         a b c d e
    rank 1 of 2   d e ·            · is padding: never saved, and zeros when loaded

A tensor that is not split is held whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from hpcpar.checkpoint.parts import Part
from hpcpar.data_parallel.parameters import Layout, in_memory_order, layout_of
from hpcpar.errors import CheckpointError
from hpcpar.tensor_parallel.split import comm_of, split_of


@dataclass(frozen=True)
class Holding:
    """What a rank has of a tensor.

    shape    of the whole
    part     of it that the rank has
    layout   of the rank's memory, where padding follows the part along a dim
    """

    shape: tuple[int, ...]
    part: Part
    layout: Layout

    @property
    def is_padded(self) -> bool:
        return self.layout[0] != self.part.shape

    @cached_property
    def kept(self) -> Tensor:
        """Of each element in memory, in its order there, whether it is one of the part: no padding."""
        kept = torch.zeros(self.layout[0], dtype=torch.bool)
        kept[tuple(slice(0, length) for length in self.part.shape)] = True
        return in_memory_order(kept, self.layout)

    @property
    def packed(self) -> Layout:
        """The layout of the part by itself, its elements in the same order."""
        shape, (_, strides) = self.part.shape, self.layout
        if not self.is_padded:
            return self.layout
        packed, step = [0] * len(shape), 1
        for dim in sorted(range(len(shape)), key=lambda dim: strides[dim]):
            packed[dim] = step
            step *= shape[dim]
        return shape, tuple(packed)

    def among_kept(self, start: int, stop: int) -> tuple[int, int]:
        """Elements start … stop - 1 in memory, counted without padding."""
        if not self.is_padded:
            return start, stop
        first = int(self.kept[:start].sum())
        return first, first + int(self.kept[start:stop].sum())


def holding_of(tensor: Tensor, layout: Layout | None = None) -> Holding:
    """What this rank has of a parameter or buffer of a model; of what is not split, all.

    layout   of its memory; None: as it lies now
    errors   CheckpointError where the tensor's shape is not what its split says
    """
    layout = layout or layout_of(tensor)
    split, comm = split_of(tensor), comm_of(tensor)
    if split is None or comm is None:
        return all_of(layout)
    shape = split.whole_shape(layout[0])
    if layout[0] != split.shard_shape(shape, comm.rank):
        raise CheckpointError(
            f"a parameter of shape {layout[0]} should have {split.shard_shape(shape, comm.rank)}, as rank "
            f"{comm.rank} of {comm.size}'s shard of {shape}; give it the split that it was made by"
        )
    ranges = list(Part.whole(shape).ranges)
    ranges[split.dim] = split.parts[comm.rank]
    return Holding(shape, Part.of(ranges), layout)


def all_of(layout: Layout) -> Holding:
    """A tensor that is held whole."""
    return Holding(layout[0], Part.whole(layout[0]), layout)


def contiguous(shape: Sequence[int]) -> Layout:
    """The row-major layout of a shape."""
    return tuple(shape), tuple(torch.empty(tuple(shape), device="meta").stride())


def is_the_same_everywhere(tensor: Tensor) -> bool:
    """Whether every rank that it could be split over has all of it, and no padding."""
    split = split_of(tensor)
    return split is None or not (split.is_divided or split.padded)
