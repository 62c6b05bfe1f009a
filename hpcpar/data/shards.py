"""A corpus as token files that are mapped into memory: built once, read by every rank.

tokens-<key>/
    index.json          what is here: sizes, digests, tokenizer, what was skipped
    train-00000.bin     little-endian numbers of 1, 2 or 4 bytes, one document after another
    train-00001.bin
    held_out-00000.bin
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from hpcpar.data.corpus import Corpus, Skipped
from hpcpar.data.tokens import FileTokenizer, Tokenizer
from hpcpar.durable import whole_directory
from hpcpar.errors import DataError
from hpcpar.partition import offsets

FORMAT = 2
"""In 1 texts ended where a tokenizer's file cuts them, and a file's where it first was not UTF-8."""

INDEX = "index.json"
SPLITS = ("train", "held_out")
SHARD_TOKENS = 1 << 28

Tokens = npt.NDArray[np.unsignedinteger[Any]]


def token_dtype(vocabulary: int) -> np.dtype[Any]:
    """The smallest little-endian type that holds every token: 1, 2 or 4 bytes."""
    for name in ("<u1", "<u2", "<u4"):
        dtype = np.dtype(name)
        if vocabulary - 1 <= np.iinfo(dtype).max:
            return dtype
    raise DataError(f"a vocabulary of {vocabulary} tokens does not fit 32 bits")


def cache_key(corpus: Corpus, tokenizer: Tokenizer, held_out_fraction: float) -> str:
    """Names the shards that these inputs give: 16 hexadecimal digits."""
    told = f"{FORMAT}/{corpus.fingerprint()}/{tokenizer.identity}/{held_out_fraction!r}"
    if tokenizer.end_of_document is None:
        told += "/kept apart"  # or refused: earlier versions let documents run together without a word
    return hashlib.sha256(told.encode()).hexdigest()[:16]


class TokenStream:
    """The tokens of one split, read as one long sequence however many files hold them."""

    def __init__(self, files: list[Path], sizes: list[int], dtype: np.dtype[Any], digest: str) -> None:
        self._edges = offsets(sizes)
        self._maps = [
            np.memmap(file, dtype=dtype, mode="r", shape=(size,))
            for file, size in zip(files, sizes, strict=True)
        ]
        self.dtype = dtype
        self.digest = digest

    def __len__(self) -> int:
        return self._edges[-1]

    def read(self, start: int, stop: int) -> Tokens:
        """Tokens start … stop - 1, [stop - start]; a copy, so the file stays what it is."""
        if not 0 <= start <= stop <= len(self):
            raise IndexError(f"tokens {start}:{stop} asked for, but the stream has {len(self)}")
        pieces = [
            self._maps[i][max(start, first) - first : min(stop, last) - first]
            for i, (first, last) in enumerate(zip(self._edges[:-1], self._edges[1:], strict=True))
            if first < stop and start < last
        ]
        return np.concatenate(pieces) if pieces else np.empty(0, self.dtype)


@dataclass(frozen=True)
class Shards:
    """The token files of a directory, opened."""

    directory: Path
    train: TokenStream
    held_out: TokenStream
    vocabulary: int
    tokenizer_identity: str
    documents: dict[str, int]
    skipped: tuple[Skipped, ...]

    @property
    def digest(self) -> str:
        """The same on two nodes if and only if their tokens are (SHA-256)."""
        return hashlib.sha256(f"{self.train.digest}/{self.held_out.digest}".encode()).hexdigest()

    @classmethod
    def open(cls, directory: Path) -> Shards:
        """Map the files of a directory; DataError when one is missing or not as long as its index says."""
        path = directory / INDEX
        try:
            index = json.loads(path.read_text())
        except OSError as error:
            raise DataError(f"cannot read {path}: {error.strerror}; build the shards again") from error
        except ValueError as error:
            raise DataError(f"{path} is damaged: {error}; delete {directory} and build it again") from error
        if index.get("format") != FORMAT:
            raise DataError(f"{path} has format {index.get('format')}, this version reads {FORMAT}")
        dtype = np.dtype(index["dtype"])
        streams = {name: _open_split(directory, index["splits"][name], dtype) for name in SPLITS}
        return cls(
            directory=directory,
            train=streams["train"],
            held_out=streams["held_out"],
            vocabulary=index["vocabulary"],
            tokenizer_identity=index["tokenizer"],
            documents={name: index["splits"][name]["documents"] for name in SPLITS},
            skipped=tuple(Skipped(**entry) for entry in index["skipped"]),
        )


def _open_split(directory: Path, split: dict[str, Any], dtype: np.dtype[Any]) -> TokenStream:
    files = [directory / shard["file"] for shard in split["shards"]]
    sizes = [shard["tokens"] for shard in split["shards"]]
    for file, size in zip(files, sizes, strict=True):
        expected = size * dtype.itemsize
        found = file.stat().st_size if file.exists() else None
        if found != expected:
            raise DataError(
                f"{file} should have {expected} bytes, but "
                f"{'is missing' if found is None else f'has {found}'}; "
                f"delete {directory} and build it again"
            )
    return TokenStream(files, sizes, dtype, split["sha256"])


class _SplitWriter:
    """Writes one split's files: a new one whenever the last has `shard_tokens`, between documents."""

    def __init__(self, directory: Path, split: str, dtype: np.dtype[Any], shard_tokens: int) -> None:
        self._directory, self._split, self._dtype = directory, split, dtype
        self._shard_tokens = shard_tokens
        self._file: BinaryIO | None = None
        self._digest = hashlib.sha256()
        self._shards: list[dict[str, Any]] = []
        self.tokens = 0
        self.documents = 0

    def __enter__(self) -> _SplitWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()

    def write(self, tokens: npt.NDArray[Any]) -> None:
        if self._file is None or self._shards[-1]["tokens"] >= self._shard_tokens:
            self._next_file()
        assert self._file is not None
        content = tokens.astype(self._dtype, copy=False).tobytes()
        self._file.write(content)
        self._digest.update(content)
        self._shards[-1]["tokens"] += len(tokens)
        self.tokens += len(tokens)
        self.documents += 1

    def _next_file(self) -> None:
        if self._file is not None:
            self._file.close()
        name = f"{self._split}-{len(self._shards):05d}.bin"
        self._file = (self._directory / name).open("wb")
        self._shards.append({"file": name, "tokens": 0})

    def entry(self) -> dict[str, Any]:
        return {
            "tokens": self.tokens,
            "documents": self.documents,
            "sha256": self._digest.hexdigest(),
            "shards": self._shards,
        }


def building(
    corpus: Corpus,
    tokenizer: Tokenizer,
    directory: Path,
    *,
    held_out_fraction: float = 0.05,
    shard_tokens: int = SHARD_TOKENS,
) -> Iterator[int]:
    """Build shards document by document, yielding the tokens so far; the directory appears at the end.

    A document is held out when, without it, fewer than `held_out_fraction` of the tokens before it
    are: so the choice is the same on every machine, follows the corpus evenly, and any corpus of
    two documents has both splits.

    errors   DataError when the corpus gives no token to train on, when the tokenizer makes one that is not in
             its vocabulary or has none to keep documents apart, or when `directory` cannot be written
    """
    if not 0 <= held_out_fraction < 1:
        raise DataError(f"held_out_fraction={held_out_fraction} must be at least 0 and less than 1")
    dtype = token_dtype(tokenizer.vocabulary)
    end = np.array([] if tokenizer.end_of_document is None else [tokenizer.end_of_document], dtype=np.int64)
    _require_known(end, tokenizer, "the end of a document")
    with _to_be_written(directory) as staging:
        with (
            _SplitWriter(staging, "train", dtype, shard_tokens) as train,
            _SplitWriter(staging, "held_out", dtype, shard_tokens) as held_out,
        ):
            source: str | None = None
            for document in corpus.documents():
                tokens = tokenizer.encode(document.text)
                if not len(tokens):
                    continue
                # Pieces of one text, a.txt#0 and a.txt#1, may follow each other without an end between them.
                before, source = source, document.name.rpartition("#")[0]
                if before not in (None, source) and isinstance(tokenizer, FileTokenizer):
                    tokenizer.require_end()
                _require_known(tokens, tokenizer, document.name)
                total = train.tokens + held_out.tokens
                split = held_out if held_out.tokens < held_out_fraction * total else train
                split.write(np.append(tokens, end.astype(tokens.dtype)))
                yield train.tokens + held_out.tokens
        if not train.tokens:
            raise DataError(_nothing_to_train_on(corpus))
        index = {
            "format": FORMAT,
            "tokenizer": tokenizer.identity,
            "vocabulary": tokenizer.vocabulary,
            "end_of_document": tokenizer.end_of_document,
            "dtype": dtype.str,
            "splits": {"train": train.entry(), "held_out": held_out.entry()},
            "skipped": [{"name": item.name, "reason": item.reason} for item in corpus.skipped],
        }
        (staging / INDEX).write_text(json.dumps(index, indent=1) + "\n")


@contextmanager
def _to_be_written(directory: Path) -> Iterator[Path]:
    # Inside, what cannot be read is left out: an OSError is of writing, and may not say where.
    try:
        with whole_directory(directory) as staging:
            yield staging
    except OSError as error:
        raise DataError(
            f"the tokens of the text cannot be written to {directory}: {error.strerror}; make room there, "
            "or name another place"
        ) from error


def build(
    corpus: Corpus,
    tokenizer: Tokenizer,
    directory: Path,
    *,
    held_out_fraction: float = 0.05,
    shard_tokens: int = SHARD_TOKENS,
) -> Shards:
    """Build shards in one go and open them; see `building`."""
    for _ in building(
        corpus, tokenizer, directory, held_out_fraction=held_out_fraction, shard_tokens=shard_tokens
    ):
        pass
    return Shards.open(directory)


def _require_known(tokens: npt.NDArray[Any], tokenizer: Tokenizer, where: str) -> None:
    """DataError for a token that, in the type that holds the vocabulary, would become another one."""
    unknown = tokens[(tokens < 0) | (tokens >= tokenizer.vocabulary)]
    if unknown.size:
        raise DataError(
            f"the tokenizer makes the token {unknown[0]} of {where}, but its vocabulary = "
            f"{tokenizer.vocabulary} has 0 … {tokenizer.vocabulary - 1}; make that the highest token plus 1, "
            "added ones included"
        )


def _nothing_to_train_on(corpus: Corpus) -> str:
    skipped = "".join(f"; skipped {item.name}: {item.reason}" for item in corpus.skipped[:3])
    return f"no text in the {len(corpus.files)} files of the corpus{skipped}; give files of UTF-8 text"
