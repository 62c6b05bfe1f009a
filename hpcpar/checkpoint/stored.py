"""Tensors as a checkpoint's files have them: in the parts that ranks had, each in the pieces of its owners.

    tensor      rows 0 ───────────── 5 │ rows 6 ──────────── 11       two parts, of tp ranks 0 and 1
    part 0      0 ─────────────── 12 ──────── 19                      its elements as they lie in memory
    files       rank 0's            rank 2's                          dp ranks 0 and 1 own them
    wanted                 8 ──────────── 17                          the end of one piece, part of the next

Most tensors have one part, the whole, in one piece. Only what is wanted is read.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hpcpar.checkpoint.holding import Holding, contiguous
from hpcpar.checkpoint.parts import Box, Part, first_gap
from hpcpar.data_parallel.parameters import Layout, in_memory_order, view_as
from hpcpar.errors import CheckpointError

MOST_OPEN = 16


@dataclass(frozen=True, order=True)
class Extract:
    """Elements start … stop - 1 of a part: all that `file` has under the tensor's name."""

    start: int
    stop: int
    file: str


@dataclass(frozen=True)
class StoredPart:
    """A part of a tensor in a checkpoint.

    part       which it is of the whole
    strides    in which its elements are counted
    extracts   in order, without gaps
    """

    part: Part
    strides: tuple[int, ...]
    extracts: tuple[Extract, ...]

    @property
    def layout(self) -> Layout:
        return self.part.shape, self.strides

    def require_complete(self, name: str) -> None:
        """CheckpointError, which calls it by this name, unless each of its elements is there, and once."""
        end = 0
        for extract in self.extracts:
            if extract.start != end or extract.stop < extract.start:
                raise CheckpointError(
                    f"of {name} there are elements {extract.start} … {extract.stop - 1} in "
                    f"{extract.file}, where those from {end} on should be"
                )
            end = extract.stop
        if end != self.part.numel:
            raise CheckpointError(f"of the {self.part.numel} elements of {name} there are only {end}")


@dataclass(frozen=True)
class Stored:
    """A tensor in a checkpoint.

    name    under which the files have it, or its pieces
    shape   of the whole
    parts   together the whole; they may overlap
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: tuple[StoredPart, ...]

    def __post_init__(self) -> None:
        whole = Part.whole(self.shape)
        for each in self.parts:
            each.require_complete(self.name if each.part == whole else f"{self.name}{each.part}")
        gap = first_gap([each.part for each in self.parts], self.shape)
        if gap is not None:
            dim, place = gap
            raise CheckpointError(
                f"of {self.name} of shape {self.shape} no rank had what begins at {place} along dim {dim}"
            )

    def whole(self, files: Files) -> Tensor:
        """All of it, in its shape."""
        return self._values(files, Part.whole(self.shape))

    def held(self, files: Files, holding: Holding) -> Tensor:
        """What a rank has of it, in the shape and memory order that it has there."""
        numel = math.prod(holding.layout[0])
        return view_as(self.elements(files, holding, 0, numel), 0, numel, holding.layout)

    def elements(self, files: Files, holding: Holding, start: int, stop: int) -> Tensor:
        """Elements start … stop - 1, flat, counted as they lie in a rank's memory; zeros for padding."""
        found = self._of_part(files, holding, *holding.among_kept(start, stop))
        if not holding.is_padded:
            return found
        return found.new_zeros(stop - start).masked_scatter_(holding.kept[start:stop], found)

    def _of_part(self, files: Files, holding: Holding, start: int, stop: int) -> Tensor:
        """Elements start … stop - 1, flat, counted without padding."""
        for saved in self.parts:
            if saved.part == holding.part and _same_order(saved.layout, holding.packed):
                return self._flat(files, saved, start, stop)
        return in_memory_order(self._values(files, holding.part), holding.packed)[start:stop]

    def _values(self, files: Files, wanted: Part) -> Tensor:
        """A part in its shape: from the very part, or from all that overlap it."""
        found = torch.empty(wanted.shape, dtype=self.dtype)
        for saved in [each for each in self.parts if each.part == wanted] or self.parts:
            for here, there in wanted.overlaps(saved.part):
                found[here] = self._box(files, saved, there)
        return found

    def _box(self, files: Files, saved: StoredPart, box: Box) -> Tensor:
        """A slice of a part, of which no more is read than what lies between its first and last element."""
        low = sum(along.start * stride for along, stride in zip(box, saved.strides, strict=True))
        high = 1 + sum((along.stop - 1) * stride for along, stride in zip(box, saved.strides, strict=True))
        lengths = [along.stop - along.start for along in box]
        return self._flat(files, saved, low, high).as_strided(lengths, saved.strides)

    def _flat(self, files: Files, saved: StoredPart, start: int, stop: int) -> Tensor:
        found = torch.empty(stop - start, dtype=self.dtype)
        for extract in saved.extracts:
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
            name: Stored(name, value.dtype, tuple(value.shape), (_in_one(value, file),))
            for name, value in tensors.items()
        }

    def _handle(self, file: str) -> Any:
        handle = self._open.pop(file, None) or safe_open(self.directory / file, framework="pt")
        self._open[file] = handle
        if len(self._open) > MOST_OPEN:
            self._open.popitem(last=False)
        return handle


def _in_one(value: Tensor, file: str) -> StoredPart:
    """A whole tensor that a file has in its shape."""
    _, strides = contiguous(value.shape)
    return StoredPart(Part.whole(value.shape), strides, (Extract(0, value.numel(), file),))


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
        "shape": stored.shape,
        "parts": [
            {
                "ranges": each.part.ranges,
                "strides": each.strides,
                "pieces": [[extract.file, extract.start, extract.stop] for extract in each.extracts],
            }
            for each in stored.parts
        ],
    }


def from_record(name: str, record: Record) -> Stored:
    """The tensor that `as_record` described; in format 2 it was one part, the whole."""
    shape = tuple(record["shape"])
    parts = record.get("parts", [{**record, "ranges": Part.whole(shape).ranges}])
    return Stored(name, getattr(torch, record["dtype"]), shape, tuple(map(_part_from_record, parts)))


def _part_from_record(record: Record) -> StoredPart:
    return StoredPart(
        Part.of([(start, stop) for start, stop in along] for along in record["ranges"]),
        tuple(record["strides"]),
        tuple(Extract(start, stop, file) for file, start, stop in record["pieces"]),
    )
