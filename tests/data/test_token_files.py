from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from hpcpar.data import ByteTokenizer, Corpus, Dataset, Shards, build
from hpcpar.data.token_files import _SplitWriter, building, cache_key, token_dtype
from hpcpar.errors import DataError


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    (tmp_path / "text").mkdir()
    for number in range(40):
        (tmp_path / "text" / f"{number:02d}.txt").write_text(f"{number:02d}" * 10)
    return Corpus.of(tmp_path / "text")


class WideTokenizer(ByteTokenizer):
    vocabulary = 70_000
    identity = "wide"


class NarrowTokenizer(ByteTokenizer):
    vocabulary = 50
    identity = "narrow"


class EndlessTokenizer(ByteTokenizer):
    end_of_document = 256
    identity = "endless"


@pytest.mark.parametrize(
    ("tokenizer", "found"),
    [
        (NarrowTokenizer(), "token 50 of 02.txt#0, but its vocabulary = 50 has 0 … 49"),
        (EndlessTokenizer(), "token 256 of the end of a document, but its vocabulary = 256 has 0 … 255"),
    ],
)
def test_a_token_that_is_not_in_the_vocabulary_is_named_and_not_taken_for_another(
    corpus: Corpus, tmp_path: Path, tokenizer: ByteTokenizer, found: str
) -> None:
    with pytest.raises(DataError, match=found):
        build(corpus, tokenizer, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("vocabulary", "nbytes"), [(2, 1), (256, 1), (257, 2), (65_536, 2), (65_537, 4), (2**32, 4)]
)
def test_tokens_take_as_few_bytes_as_hold_them(vocabulary: int, nbytes: int) -> None:
    assert token_dtype(vocabulary).itemsize == nbytes


def test_a_vocabulary_past_32_bits_is_refused() -> None:
    with pytest.raises(DataError, match="4294967297 tokens does not fit 32 bits"):
        token_dtype(2**32 + 1)


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), WideTokenizer()])
@pytest.mark.parametrize("shard_tokens", [1, 50, 10**6])
def test_both_splits_together_are_the_corpus(
    corpus: Corpus, tmp_path: Path, tokenizer: ByteTokenizer, shard_tokens: int
) -> None:
    shards = build(corpus, tokenizer, tmp_path / "out", held_out_fraction=0.25, shard_tokens=shard_tokens)
    whole = {
        name: stream.read(0, len(stream)) for name, stream in (("t", shards.train), ("h", shards.held_out))
    }
    documents = [
        tokenizer.decode(part)
        for tokens in whole.values()
        for part in np.split(tokens, np.flatnonzero(tokens == 0) + 1)
    ]
    assert sorted(filter(None, documents)) == [f"{number:02d}" * 10 + "\0" for number in range(40)]
    assert len(shards.held_out) / (len(shards.train) + len(shards.held_out)) == pytest.approx(0.25, abs=0.03)
    assert whole["t"].dtype == token_dtype(tokenizer.vocabulary)


def test_reads_across_files_equal_reads_of_one_file(corpus: Corpus, tmp_path: Path) -> None:
    one = build(corpus, ByteTokenizer(), tmp_path / "one").train
    many = build(corpus, ByteTokenizer(), tmp_path / "many", shard_tokens=30).train
    assert len(list((tmp_path / "many").glob("train-*.bin"))) > 5
    for start in range(0, len(one), 7):
        for stop in (start, start + 1, min(start + 100, len(one))):
            assert many.read(start, stop).tolist() == one.read(start, stop).tolist()
    assert many.digest == one.digest
    with pytest.raises(IndexError, match="but the stream has"):
        one.read(0, len(one) + 1)


def test_two_documents_are_enough_for_both_splits(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "first"}\n{"text": "second"}\n{"text": ""}')
    shards = build(Corpus.of(tmp_path), ByteTokenizer(), tmp_path / "out", held_out_fraction=0.01)
    assert (len(shards.train), len(shards.held_out)) == (6, 7)


def test_one_long_file_is_split_near_the_fraction_asked_for(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some words in a line\n" * 20_000)
    shards = build(Corpus.of(tmp_path / "a.txt"), ByteTokenizer(), tmp_path / "out", held_out_fraction=0.05)
    assert len(shards.held_out) / len(shards.train) == pytest.approx(0.05, abs=0.02)


def test_no_held_out_tokens_are_written_when_none_are_asked_for(corpus: Corpus, tmp_path: Path) -> None:
    shards = build(corpus, ByteTokenizer(), tmp_path / "out", held_out_fraction=0)
    assert len(shards.held_out) == 0
    assert shards.held_out.read(0, 0).tolist() == []
    assert Dataset(shards.held_out, 4).spread(3) == []


def test_nothing_appears_when_a_build_stops_half_way(corpus: Corpus, tmp_path: Path) -> None:
    steps = building(corpus, ByteTokenizer(), tmp_path / "cache" / "out")
    next(steps)
    steps.close()
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_corpus_without_text_is_an_error_that_says_what_was_skipped(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xff")
    with pytest.raises(DataError, match=r"no text in the 1 files.*skipped a.txt: UnicodeDecodeError"):
        build(Corpus.of(tmp_path), ByteTokenizer(), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_was_skipped_is_kept_in_the_index(corpus: Corpus, tmp_path: Path) -> None:
    (tmp_path / "text" / "bad.txt").write_bytes(b"\xff")
    shards = build(Corpus.of(tmp_path / "text"), ByteTokenizer(), tmp_path / "out")
    assert [item.name for item in Shards.open(shards.directory).skipped] == ["bad.txt"]


def test_truncated_missing_and_foreign_files_are_named(corpus: Corpus, tmp_path: Path) -> None:
    directory = build(corpus, ByteTokenizer(), tmp_path / "out").directory
    file = directory / "train-00000.bin"
    size = file.stat().st_size
    file.write_bytes(file.read_bytes()[:-3])
    with pytest.raises(DataError, match=rf"^\S+train-00000.bin should have {size} bytes, but has {size - 3}"):
        Shards.open(directory)
    file.unlink()
    with pytest.raises(DataError, match=rf"should have {size} bytes, but is missing"):
        Shards.open(directory)
    (directory / "index.json").write_text('{"format": 99}')
    with pytest.raises(DataError, match=r"index.json has format 99, this version reads 3$"):
        Shards.open(directory)
    for damaged in ("{", "[]", '{"format": 3}'):
        (directory / "index.json").write_text(damaged)
        with pytest.raises(DataError, match=r"index.json is damaged"):
            Shards.open(directory)
    with pytest.raises(DataError, match=r"cannot read .*index.json: No such file"):
        Shards.open(tmp_path / "nowhere")


def test_a_directory_that_is_full_is_named(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(_SplitWriter, "write", full)
    with pytest.raises(
        DataError, match=rf"cannot be written to {tmp_path / 'out'}: No space left on device;"
    ):
        build(corpus, ByteTokenizer(), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_wrong_fraction_is_refused(corpus: Corpus, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="held_out_fraction=1 must be"):
        build(corpus, ByteTokenizer(), tmp_path / "out", held_out_fraction=1)


def test_the_cache_key_follows_text_tokenizer_and_split(corpus: Corpus, tmp_path: Path) -> None:
    key = cache_key(corpus, ByteTokenizer(), 0.05)
    assert key == cache_key(Corpus.of(tmp_path / "text"), ByteTokenizer(), 0.05)
    assert key != cache_key(corpus, WideTokenizer(), 0.05)
    assert key != cache_key(corpus, ByteTokenizer(), 0.06)
    (tmp_path / "text" / "00.txt").write_text("changed")
    assert key != cache_key(corpus, ByteTokenizer(), 0.05)


def test_targets_are_the_tokens_that_come_next(corpus: Corpus, tmp_path: Path) -> None:
    stream = build(corpus, ByteTokenizer(), tmp_path / "out", shard_tokens=30).train
    dataset = Dataset(stream, sequence=8)
    tokens, targets = dataset.batch(np.array([3, 0, dataset.windows - 1]))
    assert tokens.shape == targets.shape == (3, 8)
    assert tokens.dtype == targets.dtype == torch.int64
    assert tokens[0].tolist() == stream.read(24, 32).tolist()
    assert targets[0].tolist() == stream.read(25, 33).tolist()
    assert dataset.windows * 8 + 1 <= len(stream)
    assert dataset.batch([])[0].shape == (0, 8)
    with pytest.raises(IndexError, match="asked for, but"):
        dataset.batch([dataset.windows])


def test_held_out_windows_are_spread_over_the_whole_stream(corpus: Corpus, tmp_path: Path) -> None:
    dataset = Dataset(build(corpus, ByteTokenizer(), tmp_path / "out").train, sequence=8)
    assert dataset.spread(10**6) == list(range(dataset.windows))
    assert dataset.spread(3) == [0, dataset.windows // 3, 2 * dataset.windows // 3]
