from __future__ import annotations

import bz2
import errno
import gzip
import importlib.util
import json
import lzma
import os
from pathlib import Path

import pytest

from hpcpar.data import Corpus, standard_library
from hpcpar.data.corpus import SMALLEST_PIECE_NBYTES
from hpcpar.errors import DataError
from hpcpar.units import KiB


def texts(corpus: Corpus) -> list[str]:
    return [document.text for document in corpus.documents()]


def test_files_of_a_directory_come_sorted_by_name_at_any_depth(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / ".git").mkdir()
    for name in ("z.txt", "a.md", "b/c.py", "b/picture.png", ".hidden.txt", ".git/x.txt"):
        (tmp_path / name).write_text(name)
    assert texts(Corpus.of(tmp_path)) == ["a.md", "b/c.py", "z.txt"]


def test_directories_that_are_left_out_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("text/open", "text/locked", "elsewhere"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "a.txt").write_text(name)
    (tmp_path / "text" / "link").symlink_to(tmp_path / "elsewhere")
    scandir = os.scandir

    def locked(path: str) -> object:
        if Path(path).name == "locked":  # also for root, who may list all
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", locked)
    assert texts(Corpus.of(tmp_path / "text")) == ["text/open"]
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path}/text/link is left out: links to directories are not followed; name it itself",
        f"{tmp_path}/text/locked is left out: it cannot be listed (Permission denied)",
    ]


def test_a_list_mixes_files_and_directories(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "x.txt").write_text("in d")
    (tmp_path / "x.txt").write_text("by itself")
    (tmp_path / "LICENSE").write_text("named")
    corpus = Corpus.of([tmp_path / "d", tmp_path / "x.txt", tmp_path / "LICENSE", tmp_path / "LICENSE"])
    assert sorted(texts(corpus)) == ["by itself", "in d", "named"]


def test_a_file_of_overlapping_directories_is_there_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "d" / "inner").mkdir(parents=True)
    (tmp_path / "d" / "x.txt").write_text("outer")
    (tmp_path / "d" / "inner" / "y.txt").write_text("inner")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "d" / "link.txt").symlink_to("x.txt")
    for paths in (["d", "d/inner"], ["d/inner", "d"], ["d", "d/../d/x.txt"]):
        assert sorted(texts(Corpus.of(paths))) == ["inner", "outer"]


def test_each_line_of_jsonl_is_a_document(tmp_path: Path) -> None:
    lines = [{"text": "one"}, {"text": "two\nlines"}, {"other": 3}, {"text": 4}, ["text"]]
    content = "\n".join(map(json.dumps, lines)) + "\n\nnot json\n"
    (tmp_path / "a.jsonl").write_text(content)
    corpus = Corpus.of(tmp_path)
    assert texts(corpus) == ["one", "two\nlines"]
    assert [item.name for item in corpus.skipped] == ["a.jsonl:3", "a.jsonl:4", "a.jsonl:5", "a.jsonl:7"]
    assert "KeyError: 'text'" in corpus.skipped[0].reason


def test_a_line_of_jsonl_that_is_nested_too_deeply_is_skipped(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("[" * 100_000 + '\n{"text": "good"}\n')
    corpus = Corpus.of(tmp_path)
    assert texts(corpus) == ["good"]
    assert corpus.skipped[0].name == "a.jsonl:1"


def test_the_key_of_a_jsonl_text_can_be_chosen(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.json"):
        (tmp_path / name).write_text('{"content": "yes", "text": "no"}')
    assert texts(Corpus.of(tmp_path, text_key="content")) == ["yes"]
    # Others than in a directory, where it may describe the text, a file of .json is one of records.
    assert texts(Corpus.of(tmp_path / "b.json", text_key="content")) == ["yes"]


def test_a_mark_of_byte_order_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one"}', encoding="utf-8-sig")
    (tmp_path / "b.txt").write_text("two", encoding="utf-8-sig")
    assert texts(Corpus.of(tmp_path)) == ["one", "two"]


def test_a_file_whose_records_lack_the_field_is_an_error_that_lists_those_that_it_has(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "good"}\n')
    (tmp_path / "b.jsonl").write_text('{"id": 3, "content": "no"}\n{"body": ["no"]}\n')
    there = r"'id' \(int\), 'content' \(str\), 'body' \(list\)"
    with pytest.raises(DataError, match=rf"no record of b\.jsonl has a text in the field 'text' .* {there}"):
        texts(Corpus.of(tmp_path))
    with pytest.raises(DataError, match=r"no record of a\.jsonl .* 'content' .*: there are 'text' \(str\)"):
        texts(Corpus.of(tmp_path, text_key="content"))
    for content, found in (
        ('["no"]\n', "TypeError: a list, which"),
        ('{\n "text": "no"\n}\n', "JSONDecodeError"),
    ):
        (tmp_path / "b.json").write_text(content)  # an array, or an object over several lines
        with pytest.raises(
            DataError, match=rf"no record of b\.json .* of the first there is {found}.* as \.txt"
        ):
            texts(Corpus.of(tmp_path / "b.json"))
    # Nor is a long file read to its end for it.
    (tmp_path / "b.jsonl").write_text('{"text": 1}\n' * 100 + '{"text": "too late"}\n')
    with pytest.raises(DataError, match=r"no record of b\.jsonl .* there are 'text' \(int\)"):
        texts(Corpus.of(tmp_path))


def test_packed_files_are_unpacked_and_damaged_ones_reported(tmp_path: Path) -> None:
    line = b'{"text": "in a record"}\n'
    for name, content in (
        ("a.jsonl.gz", gzip.compress(line) + gzip.compress(line)),
        ("b.txt.bz2", bz2.compress(b"bzip2")),
        ("c.MD.XZ", lzma.compress(b"xz")),
        ("d.ndjson.gz", gzip.compress(line * 1000)[:-9]),
        ("e.txt.xz", b"not xz"),
        ("f.txt.gz", b"not gzip"),
    ):
        (tmp_path / name).write_bytes(content)
    corpus = Corpus.of(tmp_path)
    assert texts(corpus)[:4] == ["in a record", "in a record", "bzip2", "xz"]
    assert [item.name for item in corpus.skipped] == ["d.ndjson.gz", "e.txt.xz", "f.txt.gz"]


def test_rows_of_parquet_are_documents(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [f"row {number}" for number in range(300)]
    parquet.write_table(pyarrow.table({"id": list(range(300)), "text": rows}), tmp_path / "a.parquet")
    missing = pyarrow.array(["one", None, "two"]).dictionary_encode()
    parquet.write_table(pyarrow.table({"text": missing}), tmp_path / "b.parquet")
    (tmp_path / "c.parquet").write_bytes(b"PAR1 and no more")
    with pyarrow.output_stream(str(tmp_path / "d.jsonl.zst"), compression="zstd") as stream:
        stream.write(b'{"text": "of zstd"}\n')
    corpus = Corpus.of(tmp_path)
    assert texts(corpus) == [*rows, "one", "two", "of zstd"]
    assert [item.name for item in corpus.skipped] == ["b.parquet:2", "c.parquet"]
    with pytest.raises(DataError, match=r"no record of a\.parquet .* 'id' \(int\), 'text' \(str\); name"):
        texts(Corpus.of(tmp_path, text_key="content"))


@pytest.mark.parametrize("name", ["a.parquet", "b.jsonl.zst", "B.PARQUET"])
def test_without_pyarrow_a_file_that_needs_it_is_an_error_that_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / name).touch()
    (tmp_path / "text.txt").write_text("text")
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(DataError, match=rf"{name} is read by pyarrow, .* pip install 'hpcpar\[parquet\]'"):
        Corpus.of(tmp_path)
    assert texts(Corpus.of(tmp_path / "text.txt")) == ["text"]


def test_what_describes_the_files_beside_or_below_it_is_no_text_and_what_is_left_out_is_told(
    tmp_path: Path,
) -> None:
    names = (
        *("README.md", "data/a.jsonl", "data/readme_de.txt", "LICENSE.txt", "data/b.csv", "data/c.csv"),
        *("Makefile", "alone/README.md", "readme/notes.txt", "data/readme.jsonl", ".gitattributes"),
    )
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('{"text": "x"}')
    corpus = Corpus.of(tmp_path)
    assert [name for name, _ in corpus.files] == [
        *("alone/README.md", "data/a.jsonl", "data/readme.jsonl", "readme/notes.txt")
    ]
    assert corpus.left_out == (
        f"{tmp_path}/LICENSE.txt and 2 more, which describes the files beside it",
        f"2 ending in .csv in {tmp_path}, the first is data/b.csv",
        f"1 without an ending in {tmp_path}, the first is Makefile",
    )
    assert texts(Corpus.of(tmp_path / "README.md")) == ['{"text": "x"}']


def test_a_readme_beside_files_that_cannot_be_read_is_not_trained_on(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("of the data")
    (tmp_path / "train.arrow").touch()
    words = r"no text in .*; left out: \S+README\.md, which describes .*; left out: 1 ending in \.arrow"
    with pytest.raises(DataError, match=words):
        Corpus.of(tmp_path)


def test_files_that_are_not_text_are_skipped_and_reported(tmp_path: Path) -> None:
    (tmp_path / "bad.txt").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "gone.txt").write_text("removed after it was listed")
    (tmp_path / "good.txt").write_text("good")
    corpus = Corpus.of(tmp_path)
    (tmp_path / "gone.txt").unlink()
    assert texts(corpus) == ["good"]
    assert [(item.name, item.reason.split(":")[0]) for item in corpus.skipped] == [
        ("bad.txt", "UnicodeDecodeError"),
        ("gone.txt", "FileNotFoundError"),
    ]


def test_a_byte_that_is_no_text_costs_the_piece_that_it_is_in_and_nothing_behind_it(tmp_path: Path) -> None:
    lines = [b"%04d this is a line of plain text\n" % number for number in range(1000)]
    lines[500] = "0500 caf\u00e9\n".encode("latin-1")
    (tmp_path / "a.txt").write_bytes(b"".join(lines))
    corpus = Corpus.of(tmp_path)
    found = "".join(texts(corpus)).splitlines(keepends=True)
    assert found[0].startswith("0000")
    assert found[-1].startswith("0999")
    assert len(lines) - SMALLEST_PIECE_NBYTES // 34 <= len(found) < len(lines)
    assert [(item.name.partition("#")[0], item.reason[:18]) for item in corpus.skipped] == [
        ("a.txt", "UnicodeDecodeError")
    ]


def test_a_long_file_is_cut_at_line_ends_and_nothing_is_lost(tmp_path: Path) -> None:
    content = "".join(f"line {number} é\n" for number in range(1000)) + "y" * 3000
    (tmp_path / "a.txt").write_text(content)
    documents = list(Corpus.of(tmp_path).documents())
    assert "".join(document.text for document in documents) == content
    assert len({document.name for document in documents}) == len(documents) > 10
    for document in documents:
        assert document.text.endswith(("\n", "y"))
        assert len(document.text.encode()) <= SMALLEST_PIECE_NBYTES


@pytest.mark.parametrize(("word", "end"), [("words ", " "), ("ü", "ü")], ids=["blanks", "characters"])
def test_a_line_longer_than_a_document_is_cut_behind_blanks_or_between_characters(
    tmp_path: Path, word: str, end: str
) -> None:
    (tmp_path / "a.txt").write_text("." + word * 5000)
    documents = [*Corpus.of(tmp_path).documents()]
    assert "".join(document.text for document in documents) == "." + word * 5000
    assert len(documents) >= 10
    for document in documents:
        assert document.text.endswith(end)


def test_a_missing_or_empty_place_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no such file or directory: .*nowhere"):
        Corpus.of(tmp_path / "nowhere")
    for given in ("~/text", "text/*.txt"):
        with pytest.raises(DataError, match="~ and patterns are not expanded here: name a directory"):
            Corpus.of([given])
    with pytest.raises(DataError, match="the name of a file or directory of text is empty"):
        Corpus.of("")
    with pytest.raises(DataError, match=r"no text in .*looked for files ending in .txt"):
        Corpus.of(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="pipe is neither a file nor a directory"):
        Corpus.of(tmp_path / "pipe")


def test_the_fingerprint_follows_changes_but_not_the_place(tmp_path: Path) -> None:
    for root in ("one", "two"):
        (tmp_path / root).mkdir()
        (tmp_path / root / "a.txt").write_text("same")
        os.utime(tmp_path / root / "a.txt", ns=(1, 1))
    first, second = (Corpus.of(tmp_path / root) for root in ("one", "two"))
    assert first.fingerprint() == second.fingerprint()
    (tmp_path / "two" / "a.txt").write_text("more")
    assert first.fingerprint() != second.fingerprint()
    assert first.fingerprint() != Corpus.of(tmp_path / "one", text_key="body").fingerprint()


def test_the_standard_library_is_a_corpus_within_its_limit() -> None:
    corpus = standard_library(limit_nbytes=300 * KiB)
    assert 250 * KiB < corpus.nbytes() <= 300 * KiB
    assert corpus.files == standard_library(limit_nbytes=300 * KiB).files
    for name, path in corpus.files:
        assert name.endswith(".py")
        assert "site-packages" not in path.parts
    assert sum(len(text.encode()) for text in texts(corpus)) == corpus.nbytes()
    assert not corpus.skipped


def test_a_limit_that_lets_nothing_through_is_an_error() -> None:
    with pytest.raises(DataError, match="no Python source of at most 0 B"):
        standard_library(limit_nbytes=0)
