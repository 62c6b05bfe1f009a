"""Tensor fusion: small tensors side by side in memory that the ranks share, so that one message carries all.

    gradient a  ──┐                    ┌──> a
    gradient b  ──┼─> [ a | b | c ] ───┼──> b       one all-reduce for three tensors
    gradient c  ──┘    the buffer      └──> c

The buffer is the same memory in every step, which spares a call on fresh memory its preparation, and the
ranks of a node read each other's where it lies. source: Sergeev, Del Balso 2018, arXiv 1802.05799, section 4
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

ALIGNED = 64
MOST_LAYOUTS = 512

Shapes = tuple[tuple[int, ...], ...]


class FusedLayout:
    """Tensors of one element type side by side in the buffer: the whole, and a view for each.

    start   where in the buffer, in bytes
    """

    def __init__(self, memory: Tensor, start: int, dtype: torch.dtype, shapes: Shapes) -> None:
        counts = [math.prod(shape) for shape in shapes]
        self.start = start
        with torch.inference_mode(False):  # it is kept, and written to outside of that mode
            self.flat = memory[start : start + sum(counts) * dtype.itemsize].view(dtype)
            parts = torch.split(self.flat, counts)
            self.views = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


class FusionBuffer:
    """Memory for fused tensors, given out in whole layouts.

    memory   bytes, a one-dimensional uint8 tensor
    """

    def __init__(self, memory: Tensor) -> None:
        self.nbytes = memory.numel()
        self._memory = memory
        self._layouts: dict[tuple[int, torch.dtype, Shapes], FusedLayout] = {}
        self._taken: dict[int, int] = {}

    def take(self, dtype: torch.dtype, shapes: Shapes) -> FusedLayout | None:
        """Allocate space for tensors of these shapes; None until enough has been given back.

        While nothing else is under way the same shapes get the same place, and the layout made for it.
        """
        nbytes = sum(math.prod(shape) for shape in shapes) * dtype.itemsize
        start = max(self._taken.values(), default=0)
        stop = start + max(ALIGNED, -(-nbytes // ALIGNED) * ALIGNED)
        if stop > self.nbytes:
            return None
        self._taken[start] = stop
        key = (start, dtype, shapes)
        layout = self._layouts.get(key)
        if layout is None:
            if len(self._layouts) >= MOST_LAYOUTS:
                self._layouts.clear()
            layout = self._layouts[key] = FusedLayout(self._memory, start, dtype, shapes)
        return layout

    def give_back(self, layout: FusedLayout) -> None:
        """Free the space of a layout."""
        del self._taken[layout.start]


@cache
def dtype_called(name: str) -> torch.dtype:
    """Return torch's element type of a name such as "float32"."""
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def scale(tensor: Tensor, factor: float) -> None:
    """Multiply in place; 16-bit floating point in float32, integers in float64 and then truncated."""
    if factor == 1.0:
        return
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.mul_(factor)
    else:
        tensor.copy_(tensor.double().mul_(factor).trunc_())


def divide(tensor: Tensor, divisor: int) -> None:
    """Divide in place; integers are truncated."""
    if divisor == 1:
        return
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.div_(divisor)
    else:
        torch.div(tensor, divisor, rounding_mode="trunc", out=tensor)


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy sources[i] into targets[i], of the same shapes."""
    if len(targets) == 1:
        targets[0].copy_(sources[0])
    else:
        torch._foreach_copy_(list(targets), list(sources))
