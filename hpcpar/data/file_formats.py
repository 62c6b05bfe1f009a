"""Readers of text and records: compressed or not, line by line or row by row."""

from __future__ import annotations

import bz2
import gzip
import importlib.util
import io
import json
import lzma
import os
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

from hpcpar.errors import DataError

JSONL_ENDINGS = (".jsonl", ".ndjson")
TEXT_ENDINGS = (".txt", ".text", ".md", ".rst", ".py")
COMPRESSED_ENDINGS = (".gz", ".bz2", ".xz", ".zst")
"""Endings that may follow those of text and JSONL."""

JSON = ".json"
"""Ending of what is read as JSONL where it is named itself: in directories such files describe others."""

PARQUET = ".parquet"
ENDINGS = (
    *(*TEXT_ENDINGS, *JSONL_ENDINGS, PARQUET),
    *(ending + compressed for ending in TEXT_ENDINGS + JSONL_ENDINGS for compressed in COMPRESSED_ENDINGS),
)
NEED_PYARROW = (PARQUET, ".zst")

DAMAGED = (OSError, UnicodeDecodeError, EOFError, zlib.error, lzma.LZMAError)
"""Exceptions of reading a file that is truncated, or not what its name says."""


def uncompressed(name: str) -> str:
    """Return a file's name in lower case, without the ending of its compression."""
    stem, ending = os.path.splitext(name.lower())
    return stem if ending in COMPRESSED_ENDINGS else name.lower()


def require_pyarrow(files: Iterable[Path]) -> None:
    """DataError that names the extra, if one of the files needs pyarrow and that is not installed."""
    needing = next((file for file in files if file.name.lower().endswith(NEED_PYARROW)), None)
    if needing is not None and importlib.util.find_spec("pyarrow") is None:
        raise DataError(
            f"{needing} is read by pyarrow, which is not installed: pip install 'hpcpar[parquet]', or give "
            "the text as JSONL"
        )


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """Open a file to read its bytes, decompressed as its ending says."""
    ending = path.suffix.lower()
    if ending == ".zst":
        with _arrow_errors():
            import pyarrow

            with pyarrow.input_stream(str(path), compression="zstd") as stream:
                yield cast(BinaryIO, io.BufferedReader(stream))
        return
    openers: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
    with openers.get(ending, open)(path, "rb") as file:
        yield file


@contextmanager
def _arrow_errors() -> Iterator[None]:
    """Turn pyarrow's errors about a damaged file into OSError."""
    import pyarrow

    try:
        yield
    except pyarrow.ArrowException as error:
        raise OSError(f"{type(error).__name__}: {error}") from error


def lines(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield (number from 1 on, parsed JSON or the error) of each line that is not blank."""
    with opened(path) as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                yield number, json.loads(line)
            except (ValueError, RecursionError) as error:
                yield number, error


def rows(path: Path, text_key: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (number from 1 on, row); if the file has the text's field, only that is read."""
    with _arrow_errors():
        import pyarrow.parquet

        with pyarrow.parquet.ParquetFile(path) as file:
            columns = [text_key] if text_key in file.schema_arrow.names else None
            batches = file.iter_batches(batch_size=256, columns=columns)
            yield from enumerate((row for batch in batches for row in batch.to_pylist()), start=1)


def text_of(record: Any, text_key: str) -> str:
    """Return a record's text; ValueError, KeyError or TypeError if it has none."""
    if isinstance(record, Exception):
        raise record
    if not isinstance(record, dict):
        raise TypeError(f"a {type(record).__name__}, which has no fields")
    text = record[text_key]
    if isinstance(text, bytes):  # as some Parquet files have it
        text = text.decode("utf-8")
    if not isinstance(text, str):
        raise TypeError(f"{text_key!r} is not a string")
    return text
