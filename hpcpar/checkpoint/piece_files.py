"""The files that one rank writes of its own pieces, and what they amount to with those of the other ranks."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from hpcpar.checkpoint.holding import Holding, all_of, contiguous
from hpcpar.checkpoint.manifest import Entry
from hpcpar.checkpoint.parts import Part
from hpcpar.checkpoint.stored import Extract, Stored, StoredPart
from hpcpar.durable import push_to_disk
from hpcpar.errors import CheckpointError

FILE_NBYTES = 1 << 30
"""A file is closed when it has so much, which is also what a rank needs in memory to write it."""


@dataclass(frozen=True)
class Written:
    """A piece that a rank wrote of the tensor of a name.

    shape     of the whole
    part      of the whole that the rank has
    strides   in which its elements are counted
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    part: Part
    strides: tuple[int, ...]
    extract: Extract


class PieceFiles:
    """Writes pieces into <stem>.rank<rank>.<number>.safetensors, one file after another.

    may_be_infinite   names of tensors in which an infinite number is none the worse, such as masks

    entries      of the files that are complete, by name
    written      the pieces in them
    not_finite   the first tensor in them with values that are no finite numbers
    """

    def __init__(
        self, directory: Path, stem: str, rank: int, *, may_be_infinite: Container[str] = ()
    ) -> None:
        self.entries: dict[str, Entry] = {}
        self.written: list[Written] = []
        self.not_finite: str | None = None
        self._may_be_infinite = may_be_infinite
        self._directory = directory
        self._stem = f"{stem}.rank{rank:05d}"
        self._waiting: dict[str, Tensor] = {}
        self._waiting_nbytes = 0

    def add(self, name: str, values: Tensor, holding: Holding, start: int) -> None:
        """Elements of the tensor of a name, flat, from `start` on as they lie in memory; not the padding."""
        first, end = holding.among_kept(start, start + values.numel())
        if holding.is_padded:
            values = values[holding.kept[start : start + values.numel()].to(values.device)]
        self._waiting[name] = on_cpu(values)
        self._waiting_nbytes += values.nbytes
        _, strides = holding.packed
        extract = Extract(first, end, self._file)
        self.written.append(Written(name, values.dtype, holding.shape, holding.part, strides, extract))
        if self._waiting_nbytes >= FILE_NBYTES:
            self.finish()

    def add_whole(self, name: str, value: Tensor) -> None:
        """A whole tensor, which stays in its shape in the file."""
        self.add(name, value, all_of(contiguous(value.shape)), 0)

    def finish(self) -> None:
        """Write what waits."""
        if self._waiting:
            file = self._file
            self.entries[file] = write_tensors(self._waiting, self._directory / file)
            self.not_finite = self.not_finite or first_not_finite(self._waiting, self._may_be_infinite)
            self._waiting, self._waiting_nbytes = {}, 0

    @property
    def _file(self) -> str:
        return f"{self._stem}.{len(self.entries):03d}.safetensors"


def on_cpu(tensor: Tensor) -> Tensor:
    """A contiguous CPU tensor with a storage of its own, as safetensors wants it."""
    value = tensor.detach().cpu().contiguous()
    shares = value.untyped_storage().nbytes() != value.nbytes
    return value.clone() if shares else value


def first_not_finite(tensors: Mapping[str, Tensor], may_be_infinite: Container[str] = ()) -> str | None:
    """The name of the first tensor with a value that is no number, or an infinite one where none may be."""
    for name, value in tensors.items():
        if not (value.is_floating_point() or value.is_complex()) or not value.numel():
            continue
        real = torch.view_as_real(value) if value.is_complex() else value
        if real.element_size() == 1:
            real = real.float()
        # A tensor's extremes need no memory of its size, and are no numbers where one of its values is none.
        lowest, highest = torch.stack(torch.aminmax(real)).double().tolist()
        if math.isnan(lowest) or (name not in may_be_infinite and math.isinf(highest - lowest)):
            return name
    return None


def write_tensors(tensors: dict[str, Tensor], path: Path) -> Entry:
    """Write one file, push it to the disk, and tell what it must be."""
    save_tensors(tensors, path)
    push_to_disk(path)
    return Entry.of(path)


def save_tensors(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """Write one file, which may be read by whoever may read others of this process."""
    path.touch()
    mode = path.stat().st_mode  # safetensors makes files that nobody else may read
    try:
        save_file(_apart(tensors), path, metadata=metadata)
    except SafetensorError as error:
        raise CheckpointError(f"cannot write {path}: {error}") from error
    except KeyError as error:
        raise CheckpointError(f"cannot write {path}: safetensors has no type {error.args[0]}") from error
    path.chmod(mode)


def _apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same, but for a copy of what has the memory of another one, which safetensors refuses."""
    taken: set[int] = set()
    apart = {}
    for name, value in tensors.items():
        place = value.untyped_storage().data_ptr()
        apart[name] = value.clone() if value.numel() and place in taken else value
        taken.add(place)
    return apart


def joined(pieces: Iterable[Written]) -> dict[str, Stored]:
    """The tensors whose pieces all ranks wrote; CheckpointError unless each is there, and once."""
    of_name: dict[str, list[Written]] = defaultdict(list)
    for piece in pieces:
        of_name[piece.name].append(piece)
    return {name: _joined(name, found) for name, found in of_name.items()}


def _joined(name: str, pieces: Sequence[Written]) -> Stored:
    of_part: dict[Part, list[Written]] = defaultdict(list)
    for piece in pieces:
        of_part[piece.part].append(piece)
    forms = {(piece.dtype, piece.shape) for piece in pieces}
    orders = {(part, piece.strides) for part, found in of_part.items() for piece in found}
    if len(forms) > 1 or len(orders) > len(of_part):
        found = sorted({f"{piece.dtype} {piece.shape} {piece.part} {piece.strides}" for piece in pieces})
        raise CheckpointError(f"ranks have {name} in several forms: {found}")
    parts = [
        StoredPart(part, found[0].strides, tuple(sorted(piece.extract for piece in found)))
        for part, found in of_part.items()
    ]
    return Stored(name, pieces[0].dtype, pieces[0].shape, tuple(parts))
