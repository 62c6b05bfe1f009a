"""Offload: memory or files that hold master weights and optimizer states between steps.

    Offload       none: where they were made
    CpuOffload    in host memory, where the step is done, too, while the parameters are on a GPU
    DiskOffload   in a file for each block, so that they may be larger than memory

               disk     read 1      read 2      read 3
               step            step 1      step 2      step 3
               disk                   write 1     write 2     write 3

source   Ren et al. 2021, ZeRO-Offload, arXiv 2101.06840;
         Rajbhandari et al. 2021, ZeRO-Infinity, arXiv 2104.07857
"""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import tempfile
import weakref
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hpcpar.errors import OffloadError
from hpcpar.units import format_nbytes

Content = Sequence[tuple[Tensor, dict[str, Any]]]
"""A block's pieces, each with its state."""


class Offload:
    """Masters and states stay where they were made; a block is worked on between `fetch` and `offload`.

    device        where the step is done; None: where the parameters are
    is_resident   whether masters may be the parameters themselves
    is_safe       whether it always has room
    """

    device: torch.device | None = None
    is_resident = True
    is_safe = True

    def adopt(self, number: int, content: Content, master: Tensor) -> None:
        """Take over a block that has just been made: its master weights, of which the pieces are views."""

    def fetch(self, number: int, following: Sequence[int] = ()) -> None:
        """Bring a block to where it can be worked on; `following` will be asked for next."""

    def offload(self, number: int, *, changed: bool = True) -> None:
        """Put a block away until the next `fetch`."""

    def wait(self) -> None:
        """Return when all that was offloaded is where it belongs."""

    def nbytes(self) -> int:
        """Bytes that are kept elsewhere than in the memory of parameters."""
        return 0

    peak_nbytes = 0
    """The most bytes of blocks that were in memory at once for a while."""


class CpuOffload(Offload):
    """Masters and states are made in host memory, and stay there."""

    device = torch.device("cpu")
    is_resident = False


@dataclass
class _Field:
    """One tensor in a block's file: a piece's own (key None) or a value of its state."""

    tensor: Tensor
    state: dict[str, Any]
    key: str | None
    dtype: torch.dtype
    shape: torch.Size

    @property
    def numel(self) -> int:
        return self.shape.numel()


@dataclass
class _File:
    """A block on disk.

    content   whose tensors are empty while they are offloaded
    fields    what lies in the file, one after another
    buffer    the memory that they are views of, while the block is here
    """

    path: Path
    content: Content
    master: Tensor
    fields: list[_Field] = field(default_factory=list)
    buffer: Tensor | None = None
    reading: Future[Tensor] | None = None
    nbytes: int = 0


class DiskOffload(Offload):
    """A file for each block under `directory`, in a directory of its own that goes with this object.

    While a block is stepped on the next one is read and the one before written: three are in memory.
    errors   OffloadError where the directory cannot be written to, or is full
    """

    is_resident = False
    is_safe = False

    def __init__(self, directory: str | Path) -> None:
        try:
            Path(directory).mkdir(parents=True, exist_ok=True)
            self.directory = Path(tempfile.mkdtemp(prefix="offload-", dir=directory))
        except OSError as error:
            raise OffloadError(
                f"offload={str(directory)!r} cannot be written to: {error.strerror}"
            ) from error
        self.peak_nbytes = 0
        self._written: _File | None = None
        self._files: dict[int, _File] = {}
        self._writing: Future[None] | None = None
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="hpcpar-offload")
        self._remover = weakref.finalize(self, shutil.rmtree, self.directory, ignore_errors=True)

    def adopt(self, number: int, content: Content, master: Tensor) -> None:
        self._files[number] = _File(self.directory / f"block-{number:05d}.bin", content, master)
        self.offload(number)
        self.wait()  # one block in memory is enough while they are made

    def fetch(self, number: int, following: Sequence[int] = ()) -> None:
        file = self._files[number]
        if file.buffer is None:
            reading = file.reading or self._begin_reading(file)
            file.buffer, file.reading = reading.result(), None
            self._show(file)
        if following and self._files[following[0]].buffer is None:
            self._begin_reading(self._files[following[0]])
        self._note_peak()

    def offload(self, number: int, *, changed: bool = True) -> None:
        file = self._files[number]
        self.wait()
        if changed:
            buffer = self._packed(file)
            try:
                _reserve(file.path, buffer.nbytes)
            except OSError as error:
                raise _explained(file.path, buffer.nbytes, error) from error
            self._writing = self._threads.submit(_write, file.path, buffer)
            self._written, file.nbytes = file, buffer.nbytes
            self._note_peak()
        for each in file.fields:
            _put(each, torch.empty(0, dtype=each.dtype))
        file.master.data = torch.empty(0, dtype=file.master.dtype)
        file.buffer = None

    def wait(self) -> None:
        if self._writing is not None:
            writing, self._writing = self._writing, None
            self._written = None
            writing.result()

    def nbytes(self) -> int:
        return sum(file.nbytes for file in self._files.values())

    def _note_peak(self) -> None:
        here = (
            file.nbytes
            for file in self._files.values()
            if file.buffer is not None or file.reading is not None or file is self._written
        )
        self.peak_nbytes = max(self.peak_nbytes, sum(here))

    def _begin_reading(self, file: _File) -> Future[Tensor]:
        if file is self._written:
            self.wait()
        file.reading = self._threads.submit(_read, file.path, file.nbytes)
        return file.reading

    def _packed(self, file: _File) -> Tensor:
        """The block's tensors one after another: the buffer itself where all are still views of it."""
        fields = _fields(file.content)
        is_as_read = (
            file.buffer is not None
            and [(f.key, f.dtype, f.shape) for f in fields]
            == [(f.key, f.dtype, f.shape) for f in file.fields]
            and [f.tensor.data_ptr() for f in fields] == [view.data_ptr() for view in _views(file)]
        )
        file.fields = fields
        if is_as_read:
            assert file.buffer is not None, "just seen"
            return file.buffer
        tensors = [each.tensor.detach().reshape(-1).view(torch.uint8) for each in fields]
        buffer = _memory(sum(tensor.numel() for tensor in tensors))
        # A rank whose shard of a small block is padding has no tensors.
        return torch.cat(tensors, out=buffer) if tensors else buffer

    @staticmethod
    def _show(file: _File) -> None:
        """Let the pieces and their states be views of what was read."""
        views = _views(file)
        for each, view in zip(file.fields, views, strict=True):
            _put(each, view)
        # The master is all pieces in a row, and they come first.
        assert file.buffer is not None, "just read"
        nbytes = sum(each.numel for each in file.fields if each.key is None) * file.master.dtype.itemsize
        file.master.data = file.buffer[:nbytes].view(file.master.dtype)


def _fields(content: Content) -> list[_Field]:
    masters = [_Field(tensor, state, None, tensor.dtype, tensor.shape) for tensor, state in content]
    moments = [
        _Field(value, state, key, value.dtype, value.shape)
        for tensor, state in content
        for key, value in state.items()
        if isinstance(value, Tensor) and value.dim() > 0
    ]
    return masters + sorted(moments, key=lambda each: -each.dtype.itemsize)  # stable: all stay aligned


def _views(file: _File) -> list[Tensor]:
    assert file.buffer is not None, "the block is here"
    views, offset = [], 0
    for each in file.fields:
        nbytes = each.numel * each.dtype.itemsize
        views.append(file.buffer[offset : offset + nbytes].view(each.dtype).view(each.shape))
        offset += nbytes
    return views


def _put(each: _Field, value: Tensor) -> None:
    if each.key is None:
        each.tensor.data = value
    else:
        # The field, too, lets go of what it held: a view of a block would keep all of it in memory.
        each.state[each.key] = each.tensor = value


def _memory(nbytes: int) -> Tensor:
    """Allocate memory that the system gets back once freed; malloc keeps some for each thread."""
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE), dtype=torch.uint8)


def _reserve(path: Path, nbytes: int) -> None:
    """Reserve room before writing, so that a full disk is known while all is in memory."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        if nbytes > os.fstat(descriptor).st_size:
            os.posix_fallocate(descriptor, 0, nbytes)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):  # file systems that cannot reserve
            raise
    finally:
        os.close(descriptor)


def _write(path: Path, buffer: Tensor) -> None:
    octets = memoryview(buffer.numpy().data)
    try:
        with path.open("r+b", buffering=0) as file:
            while octets:
                octets = octets[file.write(octets) :]
    except OSError as error:
        raise _explained(path, buffer.nbytes, error) from error


def _read(path: Path, nbytes: int) -> Tensor:
    buffer = _memory(nbytes)
    octets = memoryview(buffer.numpy().data)
    try:
        with path.open("rb", buffering=0) as file:
            while octets:
                count = file.readinto(octets)
                if not count:
                    raise OffloadError(
                        f"{path} is shorter than the {format_nbytes(nbytes)} that were written"
                    )
                octets = octets[count:]
    except OSError as error:
        raise OffloadError(
            f"{path}, which holds optimizer states, cannot be read: {error.strerror}"
        ) from error
    return buffer


def _explained(path: Path, nbytes: int, error: OSError) -> OffloadError:
    free = shutil.disk_usage(path.parent).free
    return OffloadError(
        f"{path} cannot hold {format_nbytes(nbytes)} of optimizer states: {error.strerror} "
        f"({format_nbytes(free)} are free); give offload= a directory with more room, or use more ranks"
    )


def make_offload(offload: str | Path | None, device: torch.device) -> Offload:
    """Return the offload for None, "cpu" or a directory, and parameters on this device."""
    if offload is None or (offload == "cpu" and device.type == "cpu"):
        return Offload()
    if offload == "cpu":
        return CpuOffload()
    return DiskOffload(offload)
