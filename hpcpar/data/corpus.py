"""A corpus: files of text and of records (JSONL, Parquet), and their documents in one fixed order."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import sysconfig
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any, TypeAlias

from hpcpar.data import file_formats
from hpcpar.data.file_formats import JSON, JSONL_ENDINGS, PARQUET, TEXT_ENDINGS
from hpcpar.errors import DataError
from hpcpar.units import KiB, MiB, format_nbytes

logger = logging.getLogger(__name__)

DESCRIPTION = re.compile(r"(readme([._-].*)?|(licen[sc]e|copying|notice|citation)(\..*)?)$", re.IGNORECASE)
"""Names of files that describe the files beside them."""

RECORDS_WITHOUT_TEXT = 100
"""Number of leading records without text after which a file is an error."""

SMALLEST_PIECE_NBYTES = 1 * KiB
LARGEST_PIECE_NBYTES = 1 * MiB
PIECES_OF_A_CORPUS = 64

# Generated character tables and copies of other projects are not what a person would call text.
LEFT_OUT_OF_STANDARD_LIBRARY = frozenset(
    {"site-packages", "dist-packages", "__pycache__", "encodings", "pydoc_data", "_bundled"}
    | {"test", "tests", "idle_test"}
)


Paths: TypeAlias = str | Path | Sequence[str | Path]
"""One file or directory, or several."""


@dataclass(frozen=True)
class Document:
    """Text that is trained on, or held out, as a whole."""

    name: str
    text: str


@dataclass(frozen=True)
class Skipped:
    """A file, or a piece or line of one, that could not be read as text, and the reason."""

    name: str
    reason: str


@dataclass
class Corpus:
    """Files in a fixed order, under names that do not depend on the location of the corpus.

    files      (name, path), sorted by name
    text_key   field of a record (a line of JSONL, a row of Parquet) that is its text
    left_out   files of its directories that are not in it, a phrase for each kind
    skipped    filled by `documents`: files and records that could not be read
    """

    files: tuple[tuple[str, Path], ...]
    text_key: str = "text"
    left_out: tuple[str, ...] = ()
    skipped: list[Skipped] = field(default_factory=list)

    @classmethod
    def of(cls, paths: Paths, *, text_key: str = "text") -> Corpus:
        """Collect the files of a directory, a file, or a list of both, each file once.

        A directory gives its .txt, .text, .md, .rst, .py, .jsonl, .ndjson and .parquet files at any depth,
        all but the last also compressed (.gz, .bz2, .xz, .zst). Other visible files go to `left_out`, as do
        those that describe the files beside or below them, such as a README. A file named by itself is taken
        whatever it is called; .json is read as JSONL. Directories that are links, or cannot be listed, are
        left out with a warning.

        errors   DataError if a path is missing, nothing is found, or a .parquet or .zst file needs pyarrow
                 and that is not installed
        """
        listed = _as_list(paths)
        found: dict[str, Path] = {}
        taken: set[Path] = set()
        left_out: list[str] = []
        for path in listed:
            for name, file in _files_of(path, left_out):
                # A file that is there twice, or linked to, could be both trained on and held out.
                if (place := file.resolve()) in taken:
                    continue
                taken.add(place)
                # Two roots may hold the same relative name; the later file goes by its full path.
                found[str(file) if name in found else name] = file
        if not found:
            raise DataError(
                f"no text in {', '.join(map(str, listed)) or 'an empty list of paths'}: "
                f"looked for files ending in {' '.join((*TEXT_ENDINGS, *JSONL_ENDINGS, PARQUET))}"
                + "".join(f"; left out: {each}" for each in left_out)
            )
        file_formats.require_pyarrow(found.values())
        return cls(tuple(sorted(found.items())), text_key, tuple(left_out))

    def nbytes(self) -> int:
        """Return the size of all files together."""
        return sum(_size(path) for _, path in self.files)

    def fingerprint(self) -> str:
        """Return a SHA-256 over names, sizes and modification times."""
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
        """Yield every document: a text file, or a record of a JSONL or Parquet file.

        Text longer than 1/64 of the corpus (between 1 KiB and 1 MiB) is cut at line ends into several
        documents, and a longer line behind blanks: none is too large for either side of a train / held-out
        split, and files of any size stream through. Text that is not UTF-8, not JSON or without `text_key`
        goes to `skipped`: of a text file that begins as UTF-8 only the piece, else the whole file.

        errors   DataError for a file none of whose first records has its text in `text_key`
        """
        self.skipped.clear()
        wanted = self.nbytes() // PIECES_OF_A_CORPUS
        piece_nbytes = min(max(wanted, SMALLEST_PIECE_NBYTES), LARGEST_PIECE_NBYTES)
        for name, path in self.files:
            kind = file_formats.uncompressed(path.name)
            try:
                if kind.endswith(PARQUET):
                    yield from self._texts(name, file_formats.rows(path, self.text_key), piece_nbytes)
                elif kind.endswith((*JSONL_ENDINGS, JSON)):
                    yield from self._texts(name, file_formats.lines(path), piece_nbytes)
                else:
                    yield from self._pieces_of_text(name, path, piece_nbytes)
            except file_formats.DAMAGED as error:
                self._skip(name, error)

    def _pieces_of_text(self, name: str, path: Path, piece_nbytes: int) -> Iterator[Document]:
        with file_formats.opened(path) as file:
            for number, piece in enumerate(_pieces(file, piece_nbytes)):
                where = f"{name}#{number}"
                try:
                    # Windows puts a mark before a file's text, which is none of it.
                    text = piece.decode("utf-8" if number else "utf-8-sig")
                except UnicodeDecodeError as error:
                    if number == 0:
                        raise
                    self._skip(where, error)
                else:
                    yield Document(where, text)

    def _texts(self, name: str, records: Iterable[tuple[int, Any]], piece_nbytes: int) -> Iterator[Document]:
        """Yield the texts of (number, record); a record is a dictionary, or the error in its place."""
        has_text, without = False, 0
        fields: dict[str, str] = {}
        for number, record in records:
            where = f"{name}:{number}"
            try:
                text = file_formats.text_of(record, self.text_key)
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                self._skip(where, error)
                if not has_text:
                    without += 1
                    if isinstance(record, dict):
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
            advice = f"there are {there}; name the field that is the text"
            if not fields:
                advice = (
                    f"of the first there is {self.skipped[-without].reason}; give an object on each line, or "
                    "what is to be read as it is as .txt"
                )
            raise DataError(
                f"no record of {name} has a text in the field {self.text_key!r} (text_key, in a run's "
                f"configuration data.text_key): {advice}"
            )

    def _skip(self, name: str, error: Exception) -> None:
        reason = f"{type(error).__name__}: {error}"
        self.skipped.append(Skipped(name, reason))
        logger.debug("skipped %s: %s", name, reason)


def standard_library(*, limit_nbytes: int = 8 * MiB) -> Corpus:
    """Return the .py files of Python's own library, a corpus that every machine has.

    Tests, character tables and bundled packages are left out. A hash of the names chooses files of up to
    `limit_nbytes`, so that the part is mixed and always the same.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    candidates = _walk(root, endings=(".py",), without=LEFT_OUT_OF_STANDARD_LIBRARY)
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
    """DataError for the first path that is missing, or neither file nor directory."""
    for path in _as_list(paths):
        if not path.exists():
            advice = "is it on a file system that this node sees?"
            if re.search(r"^~|[*?[]", str(path)):
                advice = "~ and patterns are not expanded here: name a directory, or a list of files"
            raise DataError(f"no such file or directory: {path}; {advice}")
        if not (path.is_file() or path.is_dir()):
            raise DataError(f"{path} is neither a file nor a directory; give one of these")


def _as_list(paths: Paths) -> list[Path]:
    listed = [paths] if isinstance(paths, (str, Path)) else list(paths)
    if "" in listed:  # which pathlib takes for the working directory
        raise DataError("the name of a file or directory of text is empty; give one, or leave it out")
    return [Path(path) for path in listed]


def _files_of(path: Path, left_out: list[str]) -> Iterator[tuple[str, Path]]:
    """Yield (name, path) of a file, or of the files of a directory, whose names are relative to it."""
    require_existing(path)
    if path.is_file():
        yield path.name, path
        return
    others: list[str] = []
    files = dict(_walk(path, endings=file_formats.ENDINGS, others=others))
    # A README describes other files if its directory has any, at whatever depth.
    is_description = {name: bool(DESCRIPTION.match(PurePath(name).name)) for name in (*files, *others)}
    described = {
        parent for name, is_one in is_description.items() if not is_one for parent in PurePath(name).parents
    }
    descriptions = [
        name
        for name in files
        if is_description[name]
        and not name.lower().endswith((*JSONL_ENDINGS, PARQUET))
        and PurePath(name).parent in described
    ]
    left_out += _left_out(path, descriptions, others)
    yield from ((name, file) for name, file in files.items() if name not in descriptions)


def _left_out(root: Path, descriptions: Sequence[str], others: Sequence[str]) -> Iterator[str]:
    """Yield a phrase for each kind of file that is left out of a directory."""
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
    root: Path,
    *,
    endings: tuple[str, ...],
    others: list[str] | None = None,
    without: Collection[str] = (),
) -> Iterator[tuple[str, Path]]:
    """Yield (name, path) of files with these endings, in any case; the other names go to `others`.

    without   names of files and directories that are passed over
    """

    def warn(error: OSError) -> None:
        logger.warning("%s is left out: it cannot be listed (%s)", error.filename, error.strerror)

    for directory, subdirectories, files in os.walk(root, onerror=warn):
        subdirectories[:] = sorted(
            name for name in subdirectories if not name.startswith(".") and name not in without
        )
        for name in subdirectories:
            if (link := Path(directory, name)).is_symlink():
                logger.warning("%s is left out: links to directories are not followed; name it itself", link)
        inside = Path(directory).relative_to(root)
        for file in sorted(files):
            path = Path(directory, file)
            if file.startswith(".") or file in without or not path.is_file():
                continue
            name = (inside / file).as_posix()
            if file.lower().endswith(endings):
                yield name, path
            elif others is not None:
                others.append(name)


def _pieces(lines: Iterable[bytes], piece_nbytes: int) -> Iterator[bytes]:
    """Join whole lines to pieces of up to `piece_nbytes`; a longer line is cut."""
    kept: list[bytes] = []
    nbytes = 0
    for line in lines:
        for part in _parts(line, piece_nbytes):
            if kept and nbytes + len(part) > piece_nbytes:
                yield b"".join(kept)
                kept, nbytes = [], 0
            kept.append(part)
            nbytes += len(part)
    if kept:
        yield b"".join(kept)


def _parts(line: bytes, limit_nbytes: int) -> Iterator[bytes]:
    """Cut a line longer than the limit behind blanks, or between characters of UTF-8 where it has none."""
    start = 0
    while len(line) - start > limit_nbytes:
        end = start + limit_nbytes
        stop = line.rfind(b" ", start, end) + 1
        if not stop:
            stop = next((at for at in range(end, end - 4, -1) if line[at] & 0xC0 != 0x80), end)
        yield line[start:stop]
        start = stop
    yield line[start:]


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0  # read later, and then reported as skipped
