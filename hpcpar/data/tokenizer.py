"""Tokenizers: text to token numbers and back, and the files that Hugging Face tools read them from."""

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
    end_of_document   token put after every document, or None
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
    """One token for each byte of UTF-8: no file, no training, any text.

    NUL ends a document, because text has none (and a text that has some reads the same after).
    """

    vocabulary: int = 256
    end_of_document: int | None = 0
    identity: str = "bytes"

    def encode(self, text: str) -> npt.NDArray[np.uint8]:
        """Return the bytes of the text; lone surrogates become "?"."""
        return np.frombuffer(text.encode("utf-8", errors="replace"), dtype=np.uint8)

    def decode(self, tokens: Sequence[int] | npt.NDArray[Any]) -> str:
        """Return the text of these bytes; a character cut in half becomes U+FFFD."""
        return np.asarray(tokens, dtype=np.uint8).tobytes().decode("utf-8", errors="replace")


class FileTokenizer:
    """Tokenizer of a Hugging Face `tokenizers` file (`tokenizer.json`).

    end_of_document   the token's text, or its number; False: there is none, and documents run together;
                      None: the one that files beside it name (`TOLD_BY`), else the first of `USUAL_ENDS`
                      in the vocabulary
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
            self._compiled = Compiled.from_buffer(content)
        except OSError as error:
            raise DataError(
                f"cannot read the tokenizer {path}: {error.strerror}; give the path of a tokenizer.json"
            ) from error
        except Exception as error:  # the library raises bare Exception for whatever it cannot parse
            raise DataError(
                f"{path} is not a Hugging Face tokenizers file: {error}; give the path of a tokenizer.json"
            ) from error
        # A file may ask for truncation or padding; here texts are documents of any length.
        self._compiled.no_truncation()
        self._compiled.no_padding()
        self._path = path
        # Added tokens may leave holes, so the vocabulary is not the number of tokens.
        tokens = self._compiled.get_vocab(with_added_tokens=True).values()
        if not tokens:
            raise DataError(f"the tokenizer {path} has no tokens; train it, or give another one")
        self.vocabulary = max(tokens) + 1
        self._joins = end_of_document is False
        self.end_of_document = None if end_of_document is False else self._find_end(end_of_document)
        # A run that asks for joined documents must not share a cache with one that would refuse them.
        end = "joined" if self._joins else self.end_of_document
        self.identity = f"tokenizers-{hashlib.sha256(content).hexdigest()}-{end}"

    def _find_end(self, asked: str | int | None) -> int | None:
        if asked is None:
            candidates = (*self._told_beside(), *self.USUAL_ENDS)
            return next((token for each in candidates if (token := self._token(each)) is not None), None)
        found = self._token(asked)
        if found is None:
            raise DataError(
                f"the tokenizer {self._path} has no token {asked!r} to end documents with{self._specials()}"
            )
        return found

    def _token(self, named: str | int) -> int | None:
        """Find a token by its text or its number."""
        if isinstance(named, int):
            return named if self._compiled.id_to_token(named) is not None else None
        token: int | None = self._compiled.token_to_id(named)
        return token

    def _told_beside(self) -> Iterator[str | int]:
        """Yield the ends of text that files beside the tokenizer name, the most reliable first."""
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
            yield from (
                each for each in (end if isinstance(end, list) else [end]) if isinstance(each, (str, int))
            )

    def _specials(self) -> str:
        special = [str(token.content) for token in self._compiled.get_added_tokens_decoder().values()]
        return f"; its special tokens are {' '.join(special[:8])}" if special else ""

    def require_end(self) -> None:
        """DataError if several documents would run together, and nobody asked for that."""
        if self.end_of_document is None and not self._joins:
            raise DataError(
                f"nothing tells which token of {self._path} ends a document, and without one documents run "
                f"together{self._specials()}; name it (end_of_document=, in a run's configuration "
                "data.eos_token), or false to have them run together"
            )

    def encode(self, text: str) -> npt.NDArray[np.uint32]:
        """Return the text's tokens, without the special tokens that a template would add.

        errors   DataError for text with neither a token nor an unknown-token in the vocabulary
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
        """Return a token as the vocabulary spells it; None for a number that it lacks."""
        text: str | None = self._compiled.id_to_token(token)
        return text

    def decode(self, tokens: Sequence[int] | npt.NDArray[Any]) -> str:
        """Return the text of these tokens, without special ones."""
        text: str = self._compiled.decode([int(token) for token in tokens])
        return text


def tokenizer_of(
    given: Tokenizer | str | Path | None, *, end_of_document: str | int | Literal[False] | None = None
) -> Tokenizer:
    """Return a tokenizer as it is, the one of a `tokenizers` file by its path, or bytes for None.

    end_of_document   as for `FileTokenizer`; DataError for any other tokenizer
    """
    if isinstance(given, (str, Path)):
        return FileTokenizer(given, end_of_document=end_of_document)
    if end_of_document is not None:
        raise DataError(
            f"the end of a document was named, {end_of_document!r}, but the tokenizer is of bytes, or brings "
            "its own; leave it out (data.eos_token), or give a tokenizers file (data.tokenizer)"
        )
    if given is not None and not hasattr(given, "identity"):
        raise DataError(
            f"the tokenizer is a {type(given).__name__}; give the path of its tokenizer.json, as "
            "save_pretrained of transformers or save of tokenizers writes it"
        )
    return ByteTokenizer() if given is None else given


# --- for tools without our code -------------------------------------------------------------------


def write_tokenizer(
    given: str | Path | None, directory: Path, *, end_of_document: str | int | Literal[False] | None = None
) -> Tokenizer:
    """Write tokenizer.json, and tokenizer_config.json for transformers and vLLM; return the tokenizer.

    given    a `tokenizers` file, which is copied; None: bytes
    errors   DataError if it cannot be read
    """
    tokenizer = tokenizer_of(given, end_of_document=None if given is None else end_of_document)
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    text = _byte_level_file() if given is None else Path(given).read_text(encoding="utf-8")
    end = tokenizer.end_of_document
    if end is not None:
        config["eos_token"] = (
            tokenizer.text_of(end) if isinstance(tokenizer, FileTokenizer) else _byte_letters()[end]
        )
    (directory / "tokenizer.json").write_text(text, encoding="utf-8")
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    return tokenizer


def _byte_level_file() -> str:
    """Return a byte-level tokenizers file without merges: each byte is the token of its number."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Compiled

    letters = _byte_letters()
    compiled = Compiled(models.BPE(vocab={letter: byte for byte, letter in enumerate(letters)}, merges=[]))
    compiled.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    compiled.decoder = decoders.ByteLevel()
    compiled.add_special_tokens([AddedToken(letters[0], special=True, normalized=False)])
    text: str = compiled.to_str(pretty=False)
    return text


def _byte_letters() -> list[str]:
    """Return GPT-2's letter for each byte.

    Printable bytes of Latin-1 stand for themselves, the others, in order, for the letters from U+0100 on.
    """
    printable = {
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    }
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(256 + others.index(byte)) for byte in range(256)]
