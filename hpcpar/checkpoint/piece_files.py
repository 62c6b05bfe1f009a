"""The files that one rank writes of its own pieces, and what they amount to with those of the other ranks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from hpcpar.checkpoint.manifest import Entry
from hpcpar.checkpoint.stored import Extract, Stored
from hpcpar.data_parallel.parameters import Layout
from hpcpar.durable import push_to_disk
from hpcpar.errors import CheckpointError

FILE_NBYTES = 1 << 30
"""A file is closed when it has so much, which is also what a rank needs in memory to write it."""


@dataclass(frozen=True)
class Written:
    """A piece that a rank wrote."""

    name: str
    dtype: torch.dtype
    layout: Layout
    extract: Extract


class PieceFiles:
    """Writes pieces into <stem>.rank<rank>.<number>.safetensors, one file after another.

    entries   of the files that are complete, by name
    written   the pieces in them
    """

    def __init__(self, directory: Path, stem: str, rank: int) -> None:
        self.entries: dict[str, Entry] = {}
        self.written: list[Written] = []
        self._directory = directory
        self._stem = f"{stem}.rank{rank:05d}"
        self._waiting: dict[str, Tensor] = {}
        self._waiting_nbytes = 0

    def add(self, name: str, values: Tensor, layout: Layout, start: int) -> None:
        """Elements of the tensor of a name, from `start` on."""
        self._waiting[name] = on_cpu(values)
        self._waiting_nbytes += values.nbytes
        extract = Extract(start, start + values.numel(), self._file)
        self.written.append(Written(name, values.dtype, layout, extract))
        if self._waiting_nbytes >= FILE_NBYTES:
            self.finish()

    def finish(self) -> None:
        """Write what waits."""
        if self._waiting:
            file = self._file
            self.entries[file] = write_tensors(self._waiting, self._directory / file)
            self._waiting, self._waiting_nbytes = {}, 0

    @property
    def _file(self) -> str:
        return f"{self._stem}.{len(self.entries):03d}.safetensors"


def on_cpu(tensor: Tensor) -> Tensor:
    """A contiguous CPU tensor with a storage of its own, as safetensors wants it."""
    value = tensor.detach().cpu().contiguous()
    shares = value.untyped_storage().nbytes() != value.nbytes
    return value.clone() if shares else value


def write_tensors(tensors: dict[str, Tensor], path: Path) -> Entry:
    """Write one file, push it to the disk, and tell what it must be."""
    path.touch()
    mode = path.stat().st_mode  # safetensors makes files that nobody else may read
    try:
        save_file(tensors, path)
    except SafetensorError as error:
        raise CheckpointError(f"cannot write {path}: {error}") from error
    path.chmod(mode)
    push_to_disk(path)
    return Entry.of(path)


def joined(pieces: Iterable[Written]) -> dict[str, Stored]:
    """The tensors whose pieces all ranks wrote; CheckpointError unless each is there, and once."""
    of_name: dict[str, list[Written]] = {}
    for piece in pieces:
        of_name.setdefault(piece.name, []).append(piece)
    for name, found in of_name.items():
        forms = {(piece.dtype, piece.layout) for piece in found}
        if len(forms) > 1:
            raise CheckpointError(f"ranks have {name} in several forms: {sorted(map(str, forms))}")
    return {
        name: Stored(name, found[0].dtype, found[0].layout, tuple(sorted(piece.extract for piece in found)))
        for name, found in of_name.items()
    }
