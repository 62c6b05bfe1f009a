"""Tensors as a checkpoint's files have them: whole in one, or in pieces that ranks wrote, each its own.

    parameter     0 ─────────────── 12 ──────── 19      its elements as they lie in memory
    files         rank 0's            rank 1's
    wanted                   8 ──────────── 17          by rank 1 of 3: the end of one piece, part of the next

Only what is wanted is read.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hpcpar.data_parallel.parameters import Layout, in_memory_order, view_as
from hpcpar.errors import CheckpointError

MOST_OPEN = 16


@dataclass(frozen=True, order=True)
class Extract:
    """Elements start … stop - 1 of a tensor: all that `file` has under its name."""

    start: int
    stop: int
    file: str


@dataclass(frozen=True)
class Stored:
    """A tensor in a checkpoint.

    name       under which the files have it, or its pieces
    layout     shape and strides: the order in which its elements are counted
    extracts   in order, without gaps
    """

    name: str
    dtype: torch.dtype
    layout: Layout
    extracts: tuple[Extract, ...]

    def __post_init__(self) -> None:
        end = 0
        for extract in self.extracts:
            if extract.start != end or extract.stop < extract.start:
                raise CheckpointError(
                    f"of {self.name} there are elements {extract.start} … {extract.stop - 1} in "
                    f"{extract.file}, where those from {end} on should be"
                )
            end = extract.stop
        if end != self.numel:
            raise CheckpointError(f"of the {self.numel} elements of {self.name} there are only {end}")

    @property
    def shape(self) -> tuple[int, ...]:
        return self.layout[0]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def whole(self, files: Files) -> Tensor:
        """All of it, in its shape."""
        return view_as(self._flat(files, 0, self.numel), 0, self.numel, self.layout)

    def elements(self, files: Files, start: int, stop: int, layout: Layout) -> Tensor:
        """Elements start … stop - 1, flat, counted as they lie in memory in another layout of this shape."""
        if _same_order(self.layout, layout):
            return self._flat(files, start, stop)
        return in_memory_order(self.whole(files), layout)[start:stop]

    def _flat(self, files: Files, start: int, stop: int) -> Tensor:
        found = torch.empty(stop - start, dtype=self.dtype)
        for extract in self.extracts:
            low, high = max(start, extract.start), min(stop, extract.stop)
            if low < high:
                part = files.flat(extract.file, self.name, low - extract.start, high - extract.start)
                found[low - start : high - start] = part
        return found


class Files:
    """A checkpoint's safetensors files, of which a few are open."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._open: OrderedDict[str, Any] = OrderedDict()

    def flat(self, file: str, name: str, start: int, stop: int) -> Tensor:
        """Elements start … stop - 1 of a tensor in row-major order; may be a view of the file."""
        try:
            handle = self._handle(file)
            part = handle.get_slice(name)
            shape = part.get_shape()
            if not shape:
                whole: Tensor = handle.get_tensor(name)
                return whole.reshape(1)[start:stop]
            row = math.prod(shape[1:])
            first, last = start // row, -(-stop // row)
            rows: Tensor = part[first:last]
            return rows.reshape(-1)[start - first * row : stop - first * row]
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"cannot read {name} in {self.directory / file}: {error}") from error

    def all_in(self, file: str) -> dict[str, Stored]:
        """What one file has whole, by name."""
        try:
            handle = self._handle(file)
            # They are views of the file: nothing is read.
            tensors = {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"cannot read {self.directory / file}: {error}") from error
        return {
            name: Stored(name, value.dtype, contiguous(value.shape), (Extract(0, value.numel(), file),))
            for name, value in tensors.items()
        }

    def _handle(self, file: str) -> Any:
        handle = self._open.pop(file, None) or safe_open(self.directory / file, framework="pt")
        self._open[file] = handle
        if len(self._open) > MOST_OPEN:
            self._open.popitem(last=False)
        return handle


def contiguous(shape: Sequence[int]) -> Layout:
    """The row-major layout of a shape."""
    return tuple(shape), tuple(torch.empty(tuple(shape), device="meta").stride())


def _same_order(one: Layout, other: Layout) -> bool:
    """Whether elements lie in the same order: strides of dimensions of one element say nothing."""
    (shape, strides), (other_shape, other_strides) = one, other
    return shape == other_shape and all(
        length == 1 or stride == other_stride
        for length, stride, other_stride in zip(shape, strides, other_strides, strict=True)
    )


# --- on paper -------------------------------------------------------------------------------------

Record = dict[str, Any]


def as_record(stored: Stored) -> Record:
    """What JSON can hold of it; `from_record` makes it again."""
    return {
        "dtype": str(stored.dtype).removeprefix("torch."),
        "shape": stored.layout[0],
        "strides": stored.layout[1],
        "pieces": [[extract.file, extract.start, extract.stop] for extract in stored.extracts],
    }


def from_record(name: str, record: Record) -> Stored:
    """The tensor that `as_record` described."""
    return Stored(
        name,
        getattr(torch, record["dtype"]),
        (tuple(record["shape"]), tuple(record["strides"])),
        tuple(Extract(start, stop, file) for file, start, stop in record["pieces"]),
    )
