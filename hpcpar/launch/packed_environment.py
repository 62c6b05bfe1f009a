"""An environment as one file: packed once, kept in the environment itself, packed anew when it has changed.

It is a plain tar, not compressed: of 1.6 GB gzip -1 makes a third in 20 s of a core and unpacks it in 9 s,
in which a network of 120 MB/s has sent the other two thirds. (zstd -1, with 6 s and 2 s, would pay below
700 MB/s; Python has it from 3.14 on.)
"""

from __future__ import annotations

import io
import os
import stat
import tarfile
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hpcpar.launch.environment_trees import PACKED_DIRECTORY, Entry, Tree, entries, key_of

BLOCK_NBYTES = 4096

WRITING = ".writing-"
WRITING_LEFT_S = 3600.0
"""A file that nobody has written to for so long was left by a job that was killed while it packed."""


@dataclass(frozen=True, slots=True)
class Packed:
    """A packed environment.

    path      of the file
    files     in it, directories included
    nbytes    that they take when unpacked, on a disk of blocks of 4 KiB
    reused    it was there already
    """

    path: Path
    files: int
    nbytes: int
    reused: bool


def pack(trees: tuple[Tree, ...], fallback: Path) -> Packed:
    """The environment's packed file: the one that was kept if nothing has changed since, else a new one.

    fallback   directory for it where the environment cannot be written to
    errors     OSError
    """
    found = list(entries(trees))
    nbytes = sum(-(-entry.nbytes // BLOCK_NBYTES) * BLOCK_NBYTES or BLOCK_NBYTES for entry in found)
    kept = Path(trees[0].source, PACKED_DIRECTORY)
    path = kept / f"{key_of(found)}.tar"
    _remove_unfinished(kept)
    if os.path.exists(path):  # no, and not an error, where the directory is another user's
        return Packed(path, len(found), nbytes, reused=True)
    try:
        kept.mkdir(mode=0o700, exist_ok=True)
        _write(found, path)
        for older in kept.glob("*.tar"):
            if older != path:
                older.unlink(missing_ok=True)
    except OSError:  # not ours to write to, or full: this job packs for itself
        path = fallback / path.name
        _write(found, path)
    return Packed(path, len(found), nbytes, reused=False)


def _remove_unfinished(kept: Path) -> None:
    with suppress(OSError):  # not ours, or gone meanwhile
        for file in kept.glob(f"{WRITING}*"):
            if time.time() - file.stat().st_mtime > WRITING_LEFT_S:
                file.unlink()


def _write(found: Sequence[Entry], path: Path) -> None:
    """Under another name first, so that a packed file is whole whenever it is there."""
    descriptor, writing = tempfile.mkstemp(prefix=WRITING, dir=path.parent)
    try:
        with (
            os.fdopen(descriptor, "wb") as file,
            tarfile.open(fileobj=file, mode="w|", bufsize=1 << 20) as tar,
        ):
            for entry in found:
                _add(tar, entry)
        os.rename(writing, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(writing)
        raise


def _add(tar: tarfile.TarFile, entry: Entry) -> None:
    info = tarfile.TarInfo(entry.name)
    info.mode = stat.S_IMODE(entry.mode) | stat.S_IRUSR | stat.S_IWUSR
    # A .pyc is valid as long as its source's time of change is what it says, in whole seconds.
    info.mtime = entry.mtime_ns // 1_000_000_000
    if stat.S_ISDIR(entry.mode):
        info.type = tarfile.DIRTYPE
        tar.addfile(info)
    elif entry.target:
        info.type, info.linkname = tarfile.SYMTYPE, entry.target
        tar.addfile(info)
    elif entry.content is not None:
        info.size = entry.nbytes
        tar.addfile(info, io.BytesIO(entry.content))
    else:
        with open(entry.source, "rb") as file:
            info.size = os.fstat(file.fileno()).st_size
            tar.addfile(info, file)
