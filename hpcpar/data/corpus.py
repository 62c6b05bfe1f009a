"""A corpus: files of text and of records (JSONL, Parquet), and the documents in them, in one fixed order."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import sysconfig
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any, TypeAlias

from hpcpar.data.reading import (
    DAMAGED,
    ENDINGS,
    JSONL_ENDINGS,
    PARQUET,
    TEXT_ENDINGS,
    lines,
    opened,
    require_pyarrow,
    rows,
    text_of,
    unpacked,
)
from hpcpar.errors import DataError
from hpcpar.units import KiB, MiB, format_nbytes

logger = logging.getLogger(__name__)

DESCRIPTION = re.compile(r"(readme([._-].*)?|(licen[sc]e|copying|notice|citation)(\..*)?)$", re.IGNORECASE)
"""Names of files that tell of those beside them."""

RECORDS_WITHOUT_TEXT = 100
"""After so many of a file it is given up."""

SMALLEST_PIECE_NBYTES = 1 * KiB
LARGEST_PIECE_NBYTES = 1 * MiB
PIECES_OF_A_CORPUS = 64

# Generated character tables and copies of other projects: not what a person would call text.
LEFT_OUT_OF_STANDARD_LIBRARY = frozenset(
    {"site-packages", "dist-packages", "__pycache__", "encodings", "pydoc_data", "_bundled"}
    | {"test", "tests", "idle_test"}
)


Paths: TypeAlias = str | Path | Sequence[str | Path]
"""One file or directory, or several."""


@dataclass(frozen=True)
class Document:
    """A piece of text that is trained on, or held out, as a whole."""

    name: str
    text: str


@dataclass(frozen=True)
class Skipped:
    """A file, or a piece or line of one, that could not be read as text, and why."""

    name: str
    reason: str


@dataclass
class Corpus:
    """Files in a fixed order, each under a name that does not depend on where the corpus lies.

    files      (name, path), sorted by name
    text_key   the field of a record (a line of JSONL, a row of Parquet) that is its text
    left_out   files of its directories that are not in it, by kind, as people are told
    skipped    filled by `documents`: what could not be read
    """

    files: tuple[tuple[str, Path], ...]
    text_key: str = "text"
    left_out: tuple[str, ...] = ()
    skipped: list[Skipped] = field(default_factory=list)

    @classmethod
    def of(cls, paths: Paths, *, text_key: str = "text") -> Corpus:
        """The corpus of a directory, of a file, or of a list of both, which has each file once.

        A directory gives its .txt, .text, .md, .rst, .py, .jsonl, .ndjson and .parquet files at any depth,
        all but the last also packed (.gz, .bz2, .xz, .zst). Others, hidden ones apart, are in `left_out`, and
        so are those that describe what lies beside or below them, such as a README. A file named by itself is
        taken whatever it is called. A directory in it that cannot be listed, or is a link, is left out with a
        warning.

        errors   DataError when a path is missing or nothing is found, and where a .parquet or .zst file needs
                 pyarrow, which is not there
        """
        listed = _as_list(paths)
        found: dict[str, Path] = {}
        taken: set[Path] = set()
        left_out: list[str] = []
        for path in listed:
            for name, file in _files_of(path, left_out):
                # Twice in the corpus, it could be learnt from and held out as well.
                if file.absolute() in taken:
                    continue
                taken.add(file.absolute())
                # Two roots may hold the same relative name: the later one takes its full path.
                found[str(file) if name in found else name] = file
        if not found:
            raise DataError(
                f"no text in {', '.join(map(str, listed)) or 'an empty list of paths'}: "
                f"looked for files ending in {' '.join((*TEXT_ENDINGS, *JSONL_ENDINGS, PARQUET))}"
                + "".join(f"; left out: {each}" for each in left_out)
            )
        require_pyarrow(found.values())
        return cls(tuple(sorted(found.items())), text_key, tuple(left_out))

    def nbytes(self) -> int:
        """Bytes of all files together, as the file system tells."""
        return sum(_size(path) for _, path in self.files)

    def fingerprint(self) -> str:
        """SHA-256 over names, sizes and times of change: another one when a file was changed."""
        digest = hashlib.sha256(self.text_key.encode())
        for name, path in self.files:
            try:
                status = path.stat()
            except OSError:
                digest.update(f"{name}\0missing\n".encode(errors="replace"))
            else:
                digest.update(f"{name}\0{status.st_size}\0{status.st_mtime_ns}\n".encode(errors="replace"))
        return digest.hexdigest()

    def documents(self) -> Iterator[Document]:
        """Every document: a text file, or a record of a JSONL or Parquet file.

        Text longer than 1/64 of the corpus (between 1 KiB and 1 MiB) is cut at line ends into
        several documents, so that no document is too large for either side of a train / held-out
        split and files of any size stream through. What is not UTF-8, not JSON or without
        `text_key` goes to `skipped`: of a text file that begins as UTF-8 the piece, else the whole file.

        errors   DataError for a file none of whose first records has its text in `text_key`
        """
        self.skipped.clear()
        wanted = self.nbytes() // PIECES_OF_A_CORPUS
        piece_nbytes = min(max(wanted, SMALLEST_PIECE_NBYTES), LARGEST_PIECE_NBYTES)
        for name, path in self.files:
            kind = unpacked(path.name)
            try:
                if kind.endswith(PARQUET):
                    yield from self._texts(name, rows(path, self.text_key), piece_nbytes)
                elif kind.endswith(JSONL_ENDINGS):
                    yield from self._texts(name, lines(path), piece_nbytes)
                else:
                    yield from self._pieces_of_text(name, path, piece_nbytes)
            except DAMAGED as error:
                self._skip(name, error)

    def _pieces_of_text(self, name: str, path: Path, piece_nbytes: int) -> Iterator[Document]:
        with opened(path) as file:
            for number, piece in enumerate(_pieces(file, piece_nbytes)):
                where = f"{name}#{number}"
                try:
                    text = piece.decode("utf-8")
                except UnicodeDecodeError as error:
                    if number == 0:
                        raise
                    self._skip(where, error)
                else:
                    yield Document(where, text)

    def _texts(self, name: str, records: Iterable[tuple[int, Any]], piece_nbytes: int) -> Iterator[Document]:
        """`records`: (its number, a record as a dictionary, or why it cannot be read)."""
        has_text, without = False, 0
        fields: dict[str, str] = {}
        for number, record in records:
            where = f"{name}:{number}"
            try:
                text = text_of(record, self.text_key)
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                self._skip(where, error)
                if not has_text and isinstance(record, dict):
                    without += 1
                    fields.update((key, type(value).__name__) for key, value in record.items())
                    if without == RECORDS_WITHOUT_TEXT:
                        break
                continue
            has_text = True
            encoded = text.encode("utf-8", errors="replace")
            for part, piece in enumerate(_pieces(encoded.splitlines(keepends=True), piece_nbytes)):
                yield Document(f"{where}#{part}", piece.decode("utf-8", errors="replace"))
        if without and not has_text:
            there = ", ".join(f"{key!r} ({kind})" for key, kind in fields.items())
            raise DataError(
                f"no record of {name} has a text in the field {self.text_key!r} (text_key, in a run's "
                f"configuration data.text_key): there are {there}; name the field that is the text"
            )

    def _skip(self, name: str, error: Exception) -> None:
        reason = f"{type(error).__name__}: {error}"
        self.skipped.append(Skipped(name, reason))
        logger.debug("skipped %s: %s", name, reason)


def standard_library(*, limit_nbytes: int = 8 * MiB) -> Corpus:
    """Python's own library, a corpus that every machine has: its .py files without site-packages.

    Left out: tests, character tables, bundled packages. Of a library larger than `limit_nbytes` a
    part is taken that is chosen by a hash of the names, so that it is mixed and always the same.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    candidates = [
        (name, path)
        for name, path in _walk(root, endings=(".py",))
        if not LEFT_OUT_OF_STANDARD_LIBRARY.intersection(Path(name).parts)
    ]
    chosen, total = [], 0
    for name, path in sorted(candidates, key=lambda item: hashlib.sha256(item[0].encode()).digest()):
        size = _size(path)
        if 0 < size <= limit_nbytes - total:
            chosen.append((name, path))
            total += size
    if not chosen:
        raise DataError(
            f"no Python source of at most {format_nbytes(limit_nbytes)} in {root}, where this Python's "
            f"standard library should be; give a directory of text files instead"
        )
    return Corpus(tuple(sorted(chosen)))


def require_existing(paths: Paths) -> None:
    """DataError that names the first path that is not here, or is neither file nor directory."""
    for path in _as_list(paths):
        if not path.exists():
            raise DataError(f"no such file or directory: {path}; is it on a file system that this node sees?")
        if not (path.is_file() or path.is_dir()):
            raise DataError(f"{path} is neither a file nor a directory; give one of these")


def _as_list(paths: Paths) -> list[Path]:
    return [Path(paths)] if isinstance(paths, (str, Path)) else [Path(path) for path in paths]


def _files_of(path: Path, left_out: list[str]) -> Iterator[tuple[str, Path]]:
    """(name, path) of a file, or of the files of a directory; names are relative to the latter."""
    require_existing(path)
    if path.is_file():
        yield path.name, path
        return
    others: list[str] = []
    files = dict(_walk(path, endings=ENDINGS, others=others))
    described = {
        directory
        for name in (*files, *others)
        if not DESCRIPTION.match(PurePath(name).name)
        for directory in PurePath(name).parents
    }
    descriptions = [
        name
        for name in files
        if DESCRIPTION.match(PurePath(name).name)
        and not name.lower().endswith((*JSONL_ENDINGS, PARQUET))
        and PurePath(name).parent in described
    ]
    left_out += _told(path, descriptions, others)
    yield from ((name, file) for name, file in files.items() if name not in descriptions)


def _told(root: Path, descriptions: Sequence[str], others: Sequence[str]) -> Iterator[str]:
    """Say what is left out of a directory, in a phrase for each kind."""
    if descriptions:
        several = f" and {len(descriptions) - 1} more" if len(descriptions) > 1 else ""
        yield f"{root / descriptions[0]}{several}, which describes the files beside it"
    by_ending: dict[str, list[str]] = defaultdict(list)
    for name in others:
        by_ending["".join(PurePath(name).suffixes[-2:])].append(name)
    for ending, names in sorted(by_ending.items(), key=lambda item: -len(item[1])):
        ends = f"ending in {ending}" if ending else "without an ending"
        yield f"{len(names)} {ends} in {root}, the first is {names[0]}"


def _walk(
    root: Path, *, endings: tuple[str, ...], others: list[str] | None = None
) -> Iterator[tuple[str, Path]]:
    """(name, path) of files with these endings, in any case; `others` gets the names of those without."""
    for directory, subdirectories, files in os.walk(root, onerror=_warn_of_directory):
        subdirectories[:] = sorted(name for name in subdirectories if not name.startswith("."))
        for name in subdirectories:
            if (link := Path(directory, name)).is_symlink():
                logger.warning("%s is left out: links to directories are not followed; name it itself", link)
        for file in sorted(files):
            path = Path(directory, file)
            if file.startswith(".") or not path.is_file():
                continue
            name = path.relative_to(root).as_posix()
            if file.lower().endswith(endings):
                yield name, path
            elif others is not None:
                others.append(name)


def _warn_of_directory(error: OSError) -> None:
    logger.warning("%s is left out: it cannot be listed (%s)", error.filename, error.strerror)


def _pieces(lines: Iterable[bytes], piece_nbytes: int) -> Iterator[bytes]:
    """Whole lines joined until a piece has `piece_nbytes`; a longer line is a piece by itself."""
    kept: list[bytes] = []
    nbytes = 0
    for line in lines:
        if kept and nbytes + len(line) > piece_nbytes:
            yield b"".join(kept)
            kept, nbytes = [], 0
        kept.append(line)
        nbytes += len(line)
    if kept:
        yield b"".join(kept)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0  # read later, and then reported as skipped
