"""Memory that the processes of one node share: a file of the memory file system, mapped by each of them.

The file loses its name as soon as all have mapped it, so nothing is left behind by a job that is killed
(and what is, in that moment, is removed by a later one). Each process reserves the pages that it writes to:
they lie in the memory of its own processor, and a file system that is too small says so at once. A shared
window of MPI offers neither: it is a file with a name while the job runs, and what does not fit is a bus
error at the first touch.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import platform
import tempfile
import time
import weakref
from pathlib import Path
from typing import Any

import numpy as np

from hpcpar.errors import SharedMemoryError
from hpcpar.transport.interface import Octets
from hpcpar.units import format_nbytes

DIRECTORY = Path("/dev/shm")
PREFIX = "hpcpar-"

STALE_S = 3600.0
"""A file that has kept its name for so long will lose it no more: all have mapped it within seconds."""

MADV_POPULATE_WRITE = 23
"""Of Linux 5.14 and later: map pages now, to be written to."""

ORDERED = ("x86_64", "AMD64", "i686")
"""Processors on which other cores see stores in the order in which they were made.

Elsewhere (aarch64: Grace, A64FX) a word that says "the data is there" could be seen before the data, unless a
fence stands between the two stores, and between the two loads of the reader.
"""


class Segment:
    """One mapping.

    octets   its bytes
    words    the same as whole 64-bit numbers, each of which is stored and seen at once
    address  where it begins in this process
    """

    def __init__(self, mapping: mmap.mmap) -> None:
        self._bytes = memoryview(mapping)
        self.octets: Octets = self.part(0, len(self._bytes))
        self.words = memoryview(mapping).cast("Q")
        self.address: int = self.octets.__array_interface__["data"][0]

    @property
    def nbytes(self) -> int:
        return self.octets.size

    def part(self, start: int, stop: int) -> Octets:
        """Bytes of it as an array of their own, which lives as long as anything that is made of it."""
        return np.frombuffer(self._bytes[start:stop], dtype=np.uint8)


def keeps_order(machine: str = "") -> bool:
    """True on processors that need no fences between accesses to shared memory."""
    return (machine or platform.machine()) in ORDERED


def hindrance(directory: Path | None = None) -> str | None:
    """Why the processes of this node cannot share memory this way; None: they can."""
    directory = directory or DIRECTORY
    if not os.access(directory, os.W_OK):
        return f"{directory} cannot be written to"
    return None


def create(
    nbytes: int, directory: Path | None = None, own: tuple[int, int] | None = None
) -> tuple[str, Segment]:
    """A new file of zeros, and its mapping.

    own      (start, stop) of the bytes that this process writes to: they are reserved, and mapped for it. All
             others are mapped as they are used; and a process forked from this one, which is no rank, writes
             to memory of its own. None: it writes to all
    errors   SharedMemoryError where there is no room for it
    """
    directory = directory or DIRECTORY
    sweep(directory)
    rounded = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    path = ""
    try:
        descriptor, path = tempfile.mkstemp(prefix=PREFIX, dir=directory)
        try:
            os.ftruncate(descriptor, rounded)
            return path, _mapped(descriptor, rounded, own)
        finally:
            os.close(descriptor)
    except OSError as error:
        if path:
            remove(path)
        raise _no_room(nbytes, directory, error) from error


def sweep(directory: Path) -> None:
    """Remove what jobs of this user left that were killed between making memory and mapping it."""
    for path in directory.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # another process was quicker
            found = path.stat()
            if found.st_uid == os.getuid() and time.time() - found.st_mtime > STALE_S:
                path.unlink()


def attach(path: str, own: tuple[int, int] | None = None) -> Segment:
    """Map a file that another process of this node has made.

    own      as of `create`
    errors   SharedMemoryError where there is no such file, or no room for the own bytes
    """
    try:
        descriptor = os.open(path, os.O_RDWR)
    except OSError as error:
        raise SharedMemoryError(
            f"{path}, which another rank of this node has made, cannot be opened: {error.strerror}; "
            f"do the ranks run in containers that have each a {DIRECTORY} of their own?"
        ) from error
    nbytes = os.fstat(descriptor).st_size
    try:
        return _mapped(descriptor, nbytes, own)
    except OSError as error:
        raise _no_room(nbytes, Path(path).parent, error) from error
    finally:
        os.close(descriptor)


def remove(path: str) -> None:
    """Take the name away; the memory lives until the last mapping is gone."""
    Path(path).unlink(missing_ok=True)


def _no_room(nbytes: int, directory: Path, error: OSError) -> SharedMemoryError:
    return SharedMemoryError(
        f"{format_nbytes(nbytes)} of shared memory in {directory} are not to be had: {error.strerror}"
    )


def _mapped(descriptor: int, nbytes: int, own: tuple[int, int] | None) -> Segment:
    start, stop = own or (0, nbytes)
    mapping = mmap.mmap(descriptor, nbytes, flags=mmap.MAP_SHARED)
    if start < stop:
        os.posix_fallocate(descriptor, start, stop - start)
        begin = start // mmap.PAGESIZE * mmap.PAGESIZE
        with contextlib.suppress(OSError):  # an older Linux, which maps all pages as they are used
            mapping.madvise(MADV_POPULATE_WRITE, begin, stop - begin)
    segment = Segment(mapping)
    if own is not None:
        kept = os.dup(descriptor)
        weakref.finalize(mapping, os.close, kept).atexit = False
        _private_in_children[mapping] = segment.address, kept
    return segment


_private_in_children: weakref.WeakKeyDictionary[mmap.mmap, tuple[int, int]] = weakref.WeakKeyDictionary()
"""Address and file of mappings to which processes forked from this one must not write."""

_MREMAP_MAYMOVE_FIXED = 3
_libc = ctypes.CDLL(None)
_mmap: Any = _libc.mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_mremap: Any = getattr(_libc, "mremap", None)
"""None where there is no Linux."""
if _mremap is not None:
    _mremap.restype = ctypes.c_void_p
    _mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]


def _make_private() -> None:
    """In a forked child: map these files so that what is written stays in this process.

    Where there is no memory to be promised for it, a mapping stays as it is.
    """
    found = [(mapping, *where) for mapping, where in _private_in_children.items()]
    _private_in_children.clear()  # a child of this process inherits what this one has written
    for mapping, address, descriptor in found if _mremap is not None else ():
        nbytes = len(mapping)
        fresh = _mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE, descriptor, 0)
        if fresh != ctypes.c_void_p(-1).value:
            _mremap(fresh, nbytes, nbytes, _MREMAP_MAYMOVE_FIXED, address)


os.register_at_fork(after_in_child=_make_private)
