"""Tokenizers: text to token numbers and back."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from hpcpar.errors import DataError

logger = logging.getLogger(__name__)


class Tokenizer(Protocol):
    """Text to token numbers, and back.

    vocabulary        token numbers are 0 … vocabulary - 1
    end_of_document   the token put after every document, or None
    identity          differs whenever encode() may give other tokens for the same text
    """

    @property
    def vocabulary(self) -> int: ...
    @property
    def end_of_document(self) -> int | None: ...
    @property
    def identity(self) -> str: ...
    def encode(self, text: str) -> npt.NDArray[np.unsignedinteger[Any]]: ...
    def decode(self, tokens: Sequence[int] | npt.NDArray[Any]) -> str: ...


class ByteTokenizer:
    """A token for each byte of UTF-8: no file, no training, any text.

    NUL ends a document, because text has none (and a text that has some reads the same after).
    """

    vocabulary: int = 256
    end_of_document: int | None = 0
    identity: str = "bytes"

    def encode(self, text: str) -> npt.NDArray[np.uint8]:
        """The bytes of the text; lone surrogates become "?"."""
        return np.frombuffer(text.encode("utf-8", errors="replace"), dtype=np.uint8)

    def decode(self, tokens: Sequence[int] | npt.NDArray[Any]) -> str:
        """The text of these bytes; a character cut in half becomes U+FFFD."""
        return np.asarray(tokens, dtype=np.uint8).tobytes().decode("utf-8", errors="replace")


class FileTokenizer:
    """A tokenizer from a Hugging Face `tokenizers` file (`tokenizer.json`).

    end_of_document   the token's text, or its number; False: there is none, and documents run together.
                      None: what the files beside it name (`TOLD_BY`), else the first of `USUAL_ENDS` that
                      the vocabulary has
    errors            DataError for a file that cannot be read, of another kind or without tokens
    """

    TOLD_BY = (
        ("tokenizer_config.json", "eos_token"),
        ("special_tokens_map.json", "eos_token"),
        ("generation_config.json", "eos_token_id"),
        ("config.json", "eos_token_id"),
    )
    USUAL_ENDS = (
        *("<|end_of_text|>", "<|endoftext|>", "</s>", "<eos>", "[SEP]"),
        *("<EOS>", "[EOS]", "<|eos|>", "<｜end▁of▁sentence｜>"),
    )

    def __init__(
        self, path: str | Path, *, end_of_document: str | int | Literal[False] | None = None
    ) -> None:
        from tokenizers import Tokenizer as Compiled

        try:
            content = Path(path).read_bytes()
        except OSError as error:
            raise DataError(
                f"cannot read the tokenizer {path}: {error.strerror}; give the path of a tokenizer.json"
            ) from error
        try:
            self._compiled = Compiled.from_buffer(content)
        except Exception as error:  # the library raises bare Exception for whatever it cannot parse
            raise DataError(
                f"{path} is not a Hugging Face tokenizers file: {error}; give the path of a tokenizer.json"
            ) from error
        # A file may say that texts are cut, or filled up, to a length: here they are documents of any length.
        self._compiled.no_truncation()
        self._compiled.no_padding()
        self._path = path
        self.vocabulary = self._highest_token() + 1
        self._joins = end_of_document is False
        self.end_of_document = None if end_of_document is False else self._find_end(end_of_document)
        # Tokens of documents that run together on purpose are not those of a run that would refuse it.
        end = "joined" if self._joins else self.end_of_document
        self.identity = f"tokenizers-{hashlib.sha256(content).hexdigest()}-{end}"

    def _highest_token(self) -> int:
        # Added tokens may leave holes, so the number of tokens is not the largest one plus 1.
        tokens = self._compiled.get_vocab(with_added_tokens=True).values()
        if not tokens:
            raise DataError(f"the tokenizer {self._path} has no tokens; train it, or give another one")
        return max(tokens)

    def _find_end(self, asked: str | int | None) -> int | None:
        if asked is not None:
            found = self._token(asked)
            if found is None:
                raise DataError(
                    f"the tokenizer {self._path} has no token {asked!r} to end documents with"
                    f"{self._specials()}"
                )
            return found
        candidates = (*self._told_beside(), *self.USUAL_ENDS)
        return next((token for each in candidates if (token := self._token(each)) is not None), None)

    def _token(self, named: str | int) -> int | None:
        """A token by its text or its number."""
        if isinstance(named, int):
            return named if self._compiled.id_to_token(named) is not None else None
        token: int | None = self._compiled.token_to_id(named)
        return token

    def _told_beside(self) -> Iterator[str | int]:
        """Ends of a text as the files beside it name them, the most telling first."""
        for file, key in self.TOLD_BY:
            path = Path(self._path).with_name(file)
            if not path.is_file():
                continue
            try:
                told = json.loads(path.read_bytes())
            except (OSError, ValueError) as error:
                logger.warning("%s, which may name the end of a text, cannot be read: %s", path, error)
                continue
            end = told.get(key) if isinstance(told, dict) else None
            if isinstance(end, dict):
                end = end.get("content")
            for each in end if isinstance(end, list) else [end]:
                if isinstance(each, (str, int)):
                    yield each

    def _specials(self) -> str:
        special = [str(token.content) for token in self._compiled.get_added_tokens_decoder().values()]
        return f"; its special tokens are {' '.join(special[:8])}" if special else ""

    def require_end(self) -> None:
        """DataError where several documents would run together, and nobody asked for that."""
        if self.end_of_document is None and not self._joins:
            raise DataError(
                f"nothing tells which token of {self._path} ends a document, and without one documents run "
                f"together{self._specials()}; name it (end_of_document=, in a run's configuration "
                "data.eos_token), or false to have them run together"
            )

    def encode(self, text: str) -> npt.NDArray[np.uint32]:
        """The text's tokens, without the special tokens that a template would add.

        errors   DataError where it has none for a part of the text, nor one for what is unknown
        """
        try:
            tokens = self._compiled.encode(text, add_special_tokens=False).ids
        except Exception as error:  # a bare one, as above
            raise DataError(
                f"the tokenizer {self._path} cannot encode a text that begins with {text[:20]!r}: {error}; "
                "give one that knows every character, or has a token for what it does not know"
            ) from error
        return np.asarray(tokens, dtype=np.uint32)

    def text_of(self, token: int) -> str | None:
        """What the vocabulary calls a token; None where it has none of this number."""
        text: str | None = self._compiled.id_to_token(token)
        return text

    def decode(self, tokens: Sequence[int] | npt.NDArray[Any]) -> str:
        """The text of these tokens, special ones left out."""
        text: str = self._compiled.decode([int(token) for token in tokens])
        return text


def tokenizer_of(
    given: Tokenizer | str | Path | None, *, end_of_document: str | int | Literal[False] | None = None
) -> Tokenizer:
    """A tokenizer as it is, that of a `tokenizers` file by its path, or that of bytes for None.

    end_of_document   as of `FileTokenizer`; DataError where it is not of a file
    """
    if isinstance(given, (str, Path)):
        return FileTokenizer(given, end_of_document=end_of_document)
    if end_of_document is not None:
        raise DataError(
            f"the end of a document was named, {end_of_document!r}, but the tokenizer is of bytes, or brings "
            "its own; leave it out (data.eos_token), or give a tokenizers file (data.tokenizer)"
        )
    return ByteTokenizer() if given is None else given
