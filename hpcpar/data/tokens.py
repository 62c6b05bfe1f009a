"""Tokenizers: text to token numbers and back."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from hpcpar.errors import DataError


class Tokenizer(Protocol):
    """What the data rooms ask of a tokenizer.

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

    end_of_document   the token's text; None = the first of `USUAL_ENDS` that the vocabulary has
    errors            DataError for a file that cannot be read, of another kind or without tokens
    """

    USUAL_ENDS = ("<|end_of_text|>", "<|endoftext|>", "</s>", "<eos>", "[SEP]")

    def __init__(self, path: str | Path, *, end_of_document: str | None = None) -> None:
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
        self.end_of_document = self._find_end(end_of_document, path)
        self.identity = f"tokenizers-{hashlib.sha256(content).hexdigest()}-{self.end_of_document}"

    def _highest_token(self) -> int:
        # Added tokens may leave holes, so the number of tokens is not the largest one plus 1.
        tokens = self._compiled.get_vocab(with_added_tokens=True).values()
        if not tokens:
            raise DataError(f"the tokenizer {self._path} has no tokens; train it, or give another one")
        return max(tokens)

    def _find_end(self, asked: str | None, path: str | Path) -> int | None:
        for text in (asked,) if asked is not None else self.USUAL_ENDS:
            token: int | None = self._compiled.token_to_id(text)
            if token is not None:
                return token
        if asked is not None:
            raise DataError(f"the tokenizer {path} has no token {asked!r} to end documents with")
        return None

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


def tokenizer_of(given: Tokenizer | str | Path | None) -> Tokenizer:
    """A tokenizer as it is, that of a `tokenizers` file by its path, or that of bytes for None."""
    if given is None:
        return ByteTokenizer()
    return FileTokenizer(given) if isinstance(given, (str, Path)) else given
