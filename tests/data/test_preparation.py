from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

import hpcpar.data.corpus as corpus_module
from hpcpar.comm import Communicator, run_loopback
from hpcpar.data import prepare
from hpcpar.errors import DataError, PeerFailedError
from hpcpar.units import KiB


@pytest.fixture
def text(tmp_path: Path) -> Path:
    directory = tmp_path / "text"
    directory.mkdir()
    for number in range(20):
        (directory / f"{number}.txt").write_text(f"document {number}\n" * 9)
    return directory


def test_all_ranks_read_the_same_tokens_and_the_second_time_nothing_is_built(
    text: Path, tmp_path: Path
) -> None:
    def read(comm: Communicator) -> tuple[bool, str, int]:
        prepared = prepare(comm, text, cache_directory=tmp_path / "cache")
        return prepared.built, prepared.shards.digest, len(prepared.shards.train)

    first, second = run_loopback(3, read), run_loopback(3, read)
    assert len(set(first)) == len(set(second)) == 1
    assert (first[0][0], second[0][0]) == (True, False)
    assert first[0][1:] == second[0][1:]
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_the_first_rank_of_each_node_builds_in_its_own_cache(text: Path, tmp_path: Path) -> None:
    def read(comm: Communicator) -> str:
        cache = tmp_path / f"disk-of-node-{comm.nodes[comm.rank]}"
        return prepare(comm, text, cache_directory=cache).shards.digest

    assert len(set(run_loopback(4, read, nodes=(0, 0, 1, 1)))) == 1
    assert len(list(tmp_path.glob("disk-of-node-*/tokens-*"))) == 2


def test_a_path_missing_on_one_rank_fails_on_all_and_names_rank_and_path(text: Path, tmp_path: Path) -> None:
    def read(comm: Communicator) -> str:
        try:
            prepare(
                comm, text if comm.rank != 1 else tmp_path / "elsewhere", cache_directory=tmp_path / "cache"
            )
        except PeerFailedError as error:
            return f"{error} cause: {error.__cause__}"
        return "went on"

    messages = run_loopback(3, read)
    for message in messages:
        assert "looking for the training data" in message
        assert f"rank 1: DataError: no such file or directory: {tmp_path}/elsewhere" in message
    assert [message.endswith("cause: None") for message in messages] == [True, False, True]


def test_only_the_first_rank_of_a_node_lists_the_files(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed: list[Path] = []
    walk = corpus_module._walk
    monkeypatch.setattr(
        corpus_module, "_walk", lambda root, **keys: listed.append(root) or walk(root, **keys)
    )
    run_loopback(
        4, lambda comm: prepare(comm, text, cache_directory=tmp_path / "cache").built, nodes=(0, 0, 1, 1)
    )
    assert listed == [text, text]


def test_a_build_that_fails_on_one_rank_fails_on_all(tmp_path: Path) -> None:
    (tmp_path / "bad.txt").write_bytes(b"\xff")

    def read(comm: Communicator) -> str:
        with pytest.raises(PeerFailedError) as caught:
            prepare(comm, tmp_path / "bad.txt", cache_directory=tmp_path / "cache")
        return str(caught.value)

    for message in run_loopback(2, read):
        assert "rank 0: DataError: no text in the 1 files" in message


def test_other_text_on_another_node_is_an_error_on_all(text: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "a.txt").write_text("something else\n" * 50)

    def read(comm: Communicator) -> str:
        with pytest.raises(DataError) as caught:
            prepare(comm, text if comm.rank == 0 else other, cache_directory=tmp_path / f"cache-{comm.rank}")
        return str(caught.value)

    for message in run_loopback(2, read, nodes=(0, 1)):
        assert "ranks 1 of" in message
        assert "hold other training data than rank 0" in message


def test_a_damaged_cache_is_built_again(text: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    alone = Communicator.alone()
    before = prepare(alone, text, cache_directory=tmp_path / "cache")
    file = before.shards.directory / "train-00000.bin"
    os.truncate(file, 5)
    with caplog.at_level(logging.WARNING):
        after = prepare(alone, text, cache_directory=tmp_path / "cache")
    assert after.built
    assert after.shards.digest == before.shards.digest
    assert "train-00000.bin should have" in caplog.text


def test_long_builds_report_to_the_other_ranks_and_to_the_user(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpcpar.data.preparation.HEARTBEAT_S", -1.0)
    seen: list[int] = []

    def read(comm: Communicator) -> bool:
        return prepare(comm, text, cache_directory=tmp_path / "cache", on_progress=seen.append).built

    assert run_loopback(2, read) == [True, True]
    assert len(seen) == 20
    assert seen == sorted(seen)


def test_skipped_files_are_reported_once(
    text: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (text / "bad.txt").write_bytes(b"\xff")
    with caplog.at_level(logging.WARNING):
        run_loopback(2, lambda comm: prepare(comm, text, cache_directory=tmp_path / "cache").built)
    assert caplog.text.count("could not be read and were left out, the first is bad.txt") == 1


def test_files_that_are_left_out_are_told_once_also_when_nothing_is_built(
    text: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("README.md", "more.csv"):
        (text / name).write_text("no text")
    for _ in range(2):
        caplog.clear()
        run_loopback(2, lambda comm: prepare(comm, text, cache_directory=tmp_path / "cache").built)
        assert [record.getMessage() for record in caplog.records] == [
            f"left out of the text: {text}/README.md, which describes the files beside it; 1 ending in .csv "
            f"in {text}, the first is more.csv; a file that is named itself is taken whatever it is called"
        ]


def words_file(directory: Path) -> Path:
    """A tokenizer whose end of a text has none of the usual names."""
    directory.mkdir()
    tokenizer = Tokenizer(models.WordLevel({"document": 0, "?": 1, "<fin>": 2}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<fin>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory / "tokenizer.json"


def test_documents_that_would_run_together_are_refused_on_every_rank_unless_that_is_asked_for(
    text: Path, tmp_path: Path
) -> None:
    file = words_file(tmp_path / "model")

    def read(comm: Communicator, source: Path = text, **options: Any) -> tuple[int | None, int]:
        found = prepare(comm, source, cache_directory=tmp_path / "cache", tokenizer=file, **options).shards
        tokens = [*found.train.read(0, len(found.train)), *found.held_out.read(0, len(found.held_out))]
        return json.loads((found.directory / "index.json").read_text())["end_of_document"], tokens.count(2)

    def refused(comm: Communicator) -> str:
        with pytest.raises(PeerFailedError) as caught:
            read(comm)
        return str(caught.value)

    for message in run_loopback(2, refused):
        assert "nothing tells which token of" in message
        assert "its special tokens are <fin>; name it (end_of_document=, in a run's config" in message
    alone = Communicator.alone()
    assert read(alone, end_of_document="<fin>") == (2, 20)
    assert read(alone, end_of_document=False) == (None, 0)
    # What was built by leave is not there for who gives none; nor does one text run into another.
    assert "nothing tells" in run_loopback(2, refused)[0]
    assert read(alone, text / "1.txt") == (None, 0)
    (file.parent / "generation_config.json").write_text('{"eos_token_id": [2, 1]}')
    assert read(alone) == (2, 20)


def test_without_paths_the_standard_library_is_read(tmp_path: Path) -> None:
    prepared = prepare(Communicator.alone(), cache_directory=tmp_path, limit_nbytes=200 * KiB)
    shards = prepared.shards
    assert 150 * KiB < len(shards.train) + len(shards.held_out) < 210 * KiB
    text = prepared.tokenizer.decode(shards.train.read(0, len(shards.train)))
    assert "import" in text


@pytest.mark.mpi
def test_ranks_over_mpi_prepare_the_same_data(tmp_path: Path, world: Communicator) -> None:
    directory = Path(world.broadcast_object(str(tmp_path)))
    prepared = prepare(world, cache_directory=directory, limit_nbytes=100 * KiB)
    digests = world.allgather_object(prepared.shards.digest)
    assert len(set(digests)) == 1
