"""Token files of a corpus, mapped into memory: built once, read by every rank.

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
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from hpcpar.data.corpus import Corpus, Skipped
from hpcpar.data.tokenizer import FileTokenizer, Tokenizer
from hpcpar.durable import whole_directory
from hpcpar.errors import DataError
from hpcpar.partition import offsets

FORMAT = 3
"""1 cut texts where the tokenizer's file says so, and files where they first were not UTF-8; 2 cut no lines,
took .json for text, and read marks of byte order and files behind links as well.
"""

INDEX = "index.json"
SHARD_TOKENS = 1 << 28

Tokens = npt.NDArray[np.unsignedinteger[Any]]


def token_dtype(vocabulary: int) -> np.dtype[Any]:
    """Return the smallest little-endian type that holds every token: 1, 2 or 4 bytes."""
    for name in ("<u1", "<u2", "<u4"):
        dtype = np.dtype(name)
        if vocabulary - 1 <= np.iinfo(dtype).max:
            return dtype
    raise DataError(f"a vocabulary of {vocabulary} tokens does not fit 32 bits")


def cache_key(corpus: Corpus, tokenizer: Tokenizer, held_out_fraction: float) -> str:
    """Return 16 hexadecimal digits that name the shards of these inputs."""
    told = f"{FORMAT}/{corpus.fingerprint()}/{tokenizer.identity}/{held_out_fraction!r}"
    if tokenizer.end_of_document is None:
        told += "/kept apart"  # or refused: earlier versions let documents run together without a word
    return hashlib.sha256(told.encode()).hexdigest()[:16]


class TokenStream:
    """Tokens of one split, read as one sequence however many files hold them."""

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
        """Return tokens start … stop - 1, [stop - start], as a copy."""
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
    """Open token files of a directory."""

    directory: Path
    train: TokenStream
    held_out: TokenStream
    vocabulary: int
    tokenizer_identity: str
    skipped: tuple[Skipped, ...]

    @property
    def digest(self) -> str:
        """SHA-256 of all tokens, to compare nodes by."""
        return hashlib.sha256(f"{self.train.digest}/{self.held_out.digest}".encode()).hexdigest()

    @classmethod
    def open(cls, directory: Path) -> Shards:
        """Map the files of a directory; DataError if one is missing or of another size than expected."""
        path = directory / INDEX
        try:
            index = json.loads(path.read_text())
            if index["format"] != FORMAT:
                raise DataError(f"{path} has format {index['format']}, this version reads {FORMAT}")
            dtype = np.dtype(index["dtype"])
            splits = index["splits"]
            return cls(
                directory=directory,
                train=_open_split(directory, splits["train"], dtype),
                held_out=_open_split(directory, splits["held_out"], dtype),
                vocabulary=index["vocabulary"],
                tokenizer_identity=index["tokenizer"],
                skipped=tuple(Skipped(**entry) for entry in index["skipped"]),
            )
        except DataError:
            raise
        except OSError as error:
            raise DataError(f"cannot read {path}: {error.strerror}; build the shards again") from error
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            reason = f"{type(error).__name__} {error}"
            raise DataError(f"{path} is damaged: {reason}; delete {directory} and build it again") from error


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
    """Write one split's files, beginning a new one between documents once the last has `shard_tokens`."""

    def __init__(self, directory: Path, split: str, dtype: np.dtype[Any], shard_tokens: int) -> None:
        self._directory, self._split, self._dtype = directory, split, dtype
        self._shard_tokens = shard_tokens
        self._file: BinaryIO | None = None
        self._digest = hashlib.sha256()
        self._shards: list[dict[str, Any]] = []
        self.tokens = 0
        self.documents = 0

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def write(self, tokens: npt.NDArray[Any]) -> None:
        if self._file is None or self._shards[-1]["tokens"] >= self._shard_tokens:
            self.close()
            name = f"{self._split}-{len(self._shards):05d}.bin"
            self._file = (self._directory / name).open("wb")
            self._shards.append({"file": name, "tokens": 0})
        content = tokens.astype(self._dtype, copy=False).tobytes()
        self._file.write(content)
        self._digest.update(content)
        self._shards[-1]["tokens"] += len(tokens)
        self.tokens += len(tokens)
        self.documents += 1

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

    A document is held out if fewer than `held_out_fraction` of the tokens before it are. The choice is the
    same on every machine, follows the corpus evenly, and gives any corpus of two documents both splits.

    errors   DataError if the corpus gives no token to train on, if the tokenizer makes one outside its
             vocabulary or has none to end documents with, or if `directory` cannot be written
    """
    if not 0 <= held_out_fraction < 1:
        raise DataError(f"held_out_fraction={held_out_fraction} must be at least 0 and less than 1")
    dtype = token_dtype(tokenizer.vocabulary)
    end = np.array([] if tokenizer.end_of_document is None else [tokenizer.end_of_document], dtype=np.int64)
    _require_known(end, tokenizer, "the end of a document")
    with _to_be_written(directory) as staging:
        with (
            closing(_SplitWriter(staging, "train", dtype, shard_tokens)) as train,
            closing(_SplitWriter(staging, "held_out", dtype, shard_tokens)) as held_out,
        ):
            source: str | None = None
            for document in corpus.documents():
                tokens = tokenizer.encode(document.text)
                if not len(tokens):
                    continue
                # Pieces of one text, a.txt#0 and a.txt#1, may join without an end between them.
                before, source = source, document.name.rpartition("#")[0]
                if before not in (None, source) and isinstance(tokenizer, FileTokenizer):
                    tokenizer.require_end()
                _require_known(tokens, tokenizer, document.name)
                total = train.tokens + held_out.tokens
                split = held_out if held_out.tokens < held_out_fraction * total else train
                split.write(np.append(tokens, end.astype(tokens.dtype)))
                yield train.tokens + held_out.tokens
        if not train.tokens:
            skipped = "".join(f"; skipped {item.name}: {item.reason}" for item in corpus.skipped[:3])
            raise DataError(
                f"no text in the {len(corpus.files)} files of the corpus{skipped}; give files of UTF-8 text"
            )
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
    # The corpus skips files that it cannot read, so an OSError here is of writing, and may not say where.
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
    options: dict[str, Any] = {"held_out_fraction": held_out_fraction, "shard_tokens": shard_tokens}
    for _ in building(corpus, tokenizer, directory, **options):
        pass
    return Shards.open(directory)


def _require_known(tokens: npt.NDArray[Any], tokenizer: Tokenizer, where: str) -> None:
    """DataError for a token outside the vocabulary, whose type could turn it into another one."""
    unknown = tokens[(tokens < 0) | (tokens >= tokenizer.vocabulary)]
    if unknown.size:
        raise DataError(
            f"the tokenizer makes the token {unknown[0]} of {where}, but its vocabulary = "
            f"{tokenizer.vocabulary} has 0 … {tokenizer.vocabulary - 1}; make that the highest token plus 1, "
            "added ones included"
        )
