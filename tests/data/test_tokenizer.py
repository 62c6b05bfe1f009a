from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from hpcpar.data import ByteTokenizer, FileTokenizer, tokenizer_of
from hpcpar.errors import DataError


@pytest.fixture
def words_file(tmp_path: Path) -> Path:
    vocabulary = {"the": 0, "ring": 1, "sums": 2, "?": 3, "</s>": 9}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    return path


@settings(deadline=None)
@given(st.text())
def test_bytes_give_any_text_back(text: str) -> None:
    tokenizer = ByteTokenizer()
    tokens = tokenizer.encode(text)
    assert tokenizer.decode(tokens) == text
    assert len(tokens) == len(text.encode())


def test_a_character_cut_in_half_is_replaced() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.decode(tokenizer.encode("aé")[:2]) == "a\ufffd"
    assert tokenizer.decode([104, 105]) == "hi"


def test_a_tokenizers_file_gives_its_tokens(words_file: Path) -> None:
    tokenizer = FileTokenizer(words_file)
    assert tokenizer.encode("the ring sums nothing").tolist() == [0, 1, 2, 3]
    assert tokenizer.decode([1, 2]) == "ring sums"


def test_the_vocabulary_reaches_over_holes_to_the_highest_token(words_file: Path) -> None:
    assert FileTokenizer(words_file).vocabulary == 10


def test_a_file_that_cuts_texts_or_fills_them_up_gives_all_tokens_and_no_others(words_file: Path) -> None:
    cutting = Tokenizer.from_file(str(words_file))
    cutting.enable_truncation(3)
    cutting.enable_padding(length=8, pad_id=9)
    cutting.save(str(words_file))
    assert FileTokenizer(words_file).encode("the ring").tolist() == [0, 1]
    assert FileTokenizer(words_file).encode("the ring sums the ring").tolist() == [0, 1, 2, 0, 1]


def test_the_end_of_a_document_is_found_or_named(words_file: Path) -> None:
    assert FileTokenizer(words_file).end_of_document == 9
    named = FileTokenizer(words_file, end_of_document="sums")
    assert named.end_of_document == 2
    assert named.identity != FileTokenizer(words_file).identity
    with pytest.raises(DataError, match="has no token '<stop>'"):
        FileTokenizer(words_file, end_of_document="<stop>")


@pytest.mark.parametrize(
    ("files", "end"),
    [
        ({"tokenizer_config.json": {"eos_token": "the"}, "generation_config.json": {"eos_token_id": 1}}, 0),
        ({"tokenizer_config.json": {"eos_token": {"content": "sums", "special": True}}}, 2),
        ({"special_tokens_map.json": {"eos_token": {"content": "ring"}}}, 1),
        ({"special_tokens_map.json": {"eos_token": "ring"}, "config.json": {"eos_token_id": 2}}, 1),
        ({"generation_config.json": {"eos_token_id": [77, 2]}}, 2),
        ({"config.json": {"eos_token_id": 0}}, 0),
        ({"tokenizer_config.json": {"eos_token": None}}, 9),
        ({"tokenizer_config.json": {"eos_token": "<gone>"}, "config.json": [1]}, 9),
    ],
)
def test_the_files_beside_a_tokenizer_name_the_end_before_the_usual_names_do(
    words_file: Path, files: dict[str, Any], end: int
) -> None:
    for name, content in files.items():
        words_file.with_name(name).write_text(json.dumps(content))
    assert FileTokenizer(words_file).end_of_document == end
    assert FileTokenizer(words_file, end_of_document="?").end_of_document == 3


def test_a_file_beside_it_that_is_damaged_is_told(words_file: Path, caplog: pytest.LogCaptureFixture) -> None:
    words_file.with_name("tokenizer_config.json").write_text("{")
    assert FileTokenizer(words_file).end_of_document == 9
    assert "tokenizer_config.json, which may name the end of a text, cannot be read" in caplog.text


def test_an_end_is_of_a_tokenizers_file_alone() -> None:
    for tokenizer in (None, ByteTokenizer()):
        with pytest.raises(DataError, match=r"was named, .</s>., but the tokenizer is of bytes, or brings"):
            tokenizer_of(tokenizer, end_of_document="</s>")


def test_a_missing_or_foreign_tokenizer_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot read the tokenizer .*none.json: No such file"):
        FileTokenizer(tmp_path / "none.json")
    (tmp_path / "other.json").write_text('{"a": 1}')
    with pytest.raises(DataError, match=r"other.json is not a Hugging Face tokenizers file"):
        FileTokenizer(tmp_path / "other.json")


def test_a_tokenizer_that_is_empty_or_does_not_know_a_word_is_named(tmp_path: Path) -> None:
    Tokenizer(models.BPE()).save(str(tmp_path / "empty.json"))
    with pytest.raises(DataError, match=r"the tokenizer .*empty\.json has no tokens; train it"):
        FileTokenizer(tmp_path / "empty.json")
    Tokenizer(models.WordLevel({"a": 0})).save(str(tmp_path / "a.json"))
    assert FileTokenizer(tmp_path / "a.json").encode("a").tolist() == [0]
    with pytest.raises(DataError, match=r"a\.json cannot encode a text that begins with 'b': WordLevel"):
        FileTokenizer(tmp_path / "a.json").encode("b")


def test_a_tokenizer_may_be_given_as_itself_as_a_path_or_not_at_all(words_file: Path) -> None:
    given = ByteTokenizer()
    assert tokenizer_of(given) is given
    assert isinstance(tokenizer_of(None), ByteTokenizer)
    assert isinstance(tokenizer_of(str(words_file)), FileTokenizer)
    with pytest.raises(DataError, match="is a Tokenizer; give the path of"):
        tokenizer_of(Tokenizer.from_file(str(words_file)))  # type: ignore[arg-type]
