"""Tokenizers as the files of a Hugging Face model directory, for those who have not our code.

tokenizer.json           what `tokenizers` reads
tokenizer_config.json    what transformers and vLLM want to know besides
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from hpcpar.data.tokens import FileTokenizer, Tokenizer, tokenizer_of


def write_tokenizer(
    given: str | Path | None, directory: Path, *, end_of_document: str | int | Literal[False] | None = None
) -> Tokenizer:
    """Leave both files in a directory; the tokenizer that they describe.

    given             a `tokenizers` file, which is copied; None = bytes
    end_of_document   of a file, as of `FileTokenizer`
    errors            DataError where it cannot be read
    """
    tokenizer = tokenizer_of(given, end_of_document=None if given is None else end_of_document)
    told: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    text = _bytes_file() if given is None else Path(given).read_text(encoding="utf-8")
    end = tokenizer.end_of_document
    if end is not None:
        told["eos_token"] = (
            tokenizer.text_of(end) if isinstance(tokenizer, FileTokenizer) else _letters()[end]
        )
    (directory / "tokenizer.json").write_text(text, encoding="utf-8")
    (directory / "tokenizer_config.json").write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    return tokenizer


def _bytes_file() -> str:
    """A byte-level tokenizer without merges: each byte is the token of its number."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Compiled

    letters = _letters()
    compiled = Compiled(models.BPE(vocab={letter: byte for byte, letter in enumerate(letters)}, merges=[]))
    compiled.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    compiled.decoder = decoders.ByteLevel()
    compiled.add_special_tokens([AddedToken(letters[0], special=True, normalized=False)])
    text: str = compiled.to_str(pretty=False)
    return text


def _letters() -> list[str]:
    """The letter that stands for each byte in a byte-level vocabulary, as GPT-2's tokenizer has them.

    Printable bytes of Latin-1 stand for themselves, the others, in order, for the letters from U+0100 on.
    """
    printable = {
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    }
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(256 + others.index(byte)) for byte in range(256)]
