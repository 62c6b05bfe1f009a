"""`hpcpar bench simulate`."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from hpcpar.algorithms.registry import ALGORITHMS
from hpcpar.algorithms.simulate import estimates
from hpcpar.algorithms.topology import MessageCost, Topology
from hpcpar.cli.bench import require_writable
from hpcpar.errors import ConfigError
from tests.command import Output

COMMAND = ("bench", "simulate")


def test_a_table_has_a_row_for_each_size_and_marks_the_fastest(output: Output) -> None:
    shown = output("--ranks", "16384", "--min-bytes", "8", "--max-bytes", "1M", "--factor", "64")
    assert shown.startswith("allreduce, 16,384 ranks on 2,048 nodes of 8; within a node 1.0 µs + 100 GB/s")
    rows = [line for line in shown.splitlines() if line.count("µs") + line.count(" ms") > 5]
    assert [row.split()[:2] for row in rows] == [["8", "B"], ["512", "B"], ["32.0", "KiB"], ["1.0", "MiB"]]
    assert all(row.count("*") == 1 for row in rows)
    assert "~" not in "".join(rows)


def test_the_crossovers_follow_the_table(output: Output) -> None:
    shown = output("--ranks", "4096", "--max-bytes", "64M")
    _, _, told = shown.partition("fastest from 8 B: ")
    assert [line.split()[-1] for line in told.splitlines()] == [
        "recursive_doubling",
        "rabenseifner",
        "hierarchical_halving",
    ]


def test_few_ranks_are_simulated_and_marked(output: Output) -> None:
    shown = output("--ranks", "4", "--collective", "broadcast", "--min-bytes", "64", "--max-bytes", "64")
    assert "broadcast, 4 ranks on 1 node;" in shown
    assert shown.count("~") == 1 + len(ALGORITHMS["broadcast"])


def test_the_lines_hold_what_was_found_with_the_parameters_given(output: Output, tmp_path: Path) -> None:
    flags = (
        "--alpha-intra",
        "2e-6",
        "--beta-intra",
        "1e-10",
        "--alpha-inter",
        "3e-6",
        "--beta-inter",
        "1e-9",
    )
    written = tmp_path / "found.jsonl"
    output(
        *("--ranks", "24", "--ranks-per-node", "4", "--gamma", "0", "--min-bytes", "1K", "--max-bytes", "4K"),
        *flags,
        *("--json", str(written)),
    )
    header, *rows = map(json.loads, written.read_text().splitlines())
    assert header["benchmark"] == "simulate"
    assert header["inter"] == {"alpha_s": 3e-6, "beta_s_per_byte": 1e-9}
    topology = Topology(4, MessageCost(2e-6, 1e-10), MessageCost(3e-6, 1e-9))
    expected = [one for nbytes in (1024, 4096) for one in estimates("allreduce", 24, nbytes, topology)]
    assert [(row["algorithm"], row["nbytes"], row["seconds"]) for row in rows] == [
        (one.algorithm, one.nbytes, one.seconds) for one in expected
    ]


@pytest.mark.long
def test_a_picture_is_drawn(output: Output, tmp_path: Path) -> None:
    picture = tmp_path / "found.png"
    shown = output("--ranks", "64", "--output", str(picture), "--picture-bytes", "1M")
    assert shown.endswith(f"written: {picture}\n")
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--min-bytes", "2M", "--max-bytes", "1M"), "above --max-bytes"),
        (("--min-bytes", "many"), "'many' is no size"),
        (("--min-bytes", "0"), "need at least one byte"),
        (("--collective", "barrier"), "'barrier' is not one of"),
        (("--ranks", "1"), "1 is not in the range"),
    ],
)
def test_a_mistake_is_answered_with_what_is_possible(
    arguments: tuple[str, ...], words: str, output: Output
) -> None:
    assert words in output(*arguments, status=2)


@pytest.mark.parametrize("option", ["--json", "--output"])
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_priced(
    option: str, output: Output
) -> None:
    told = output("--ranks", "4", option, "/nonexist/file.png", status=2)
    assert "/nonexist/file.png cannot be written: there is no directory /nonexist" in told


def test_a_directory_that_is_closed_to_us_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stat(path: object, **others: object) -> os.stat_result:
        raise PermissionError(errno.EACCES, "Permission denied", path)

    # Root may enter any.
    monkeypatch.setattr(os, "stat", stat)
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(ConfigError, match=r"closed/a\.json cannot be written"):
        require_writable(Path("closed/a.json"))


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--output", "a.foo", "a.foo cannot be drawn: .foo is no format"),
        ("--output", "a", "a cannot be drawn: no suffix is no format"),
        ("--alpha-intra", "nan", "nan is no finite number"),
        ("--gamma", "inf", "inf is no finite number"),
    ],
)
def test_what_cannot_be_drawn_or_priced_is_refused(
    option: str, value: str, words: str, output: Output
) -> None:
    assert words in output(option, value, status=2)
