"""What would measure nothing, never end, or lose its results is refused before anything is measured."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--factor", "1", "argument --factor: 1: it takes at least 2"),  # the next size would be the same
        ("--min-bytes", "0", "argument --min-bytes: 0: it takes at least 1"),
        ("--rounds", "0", "argument --rounds: 0: it takes at least 1"),
        ("--rounds", "many", "argument --rounds: invalid number value: 'many'"),
        ("--json", "/nonexist/a", "argument --json: /nonexist/a cannot be written: there is no directory"),
    ],
)
def test_what_would_measure_nothing_never_end_or_be_lost_is_refused(
    option: str, value: str, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.setattr(sys, "argv", ["reductions.py", option, value])
    with pytest.raises(SystemExit):
        importlib.import_module("reductions").parse()
    assert words in capsys.readouterr().err


def test_a_picture_of_a_format_that_cannot_be_drawn_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    picture_file = importlib.import_module("option_types").picture_file
    assert picture_file(str(tmp_path / "bars.svg")) == tmp_path / "bars.svg"
    with pytest.raises(argparse.ArgumentTypeError, match=r"bars\.foo cannot be drawn: \.foo is no format"):
        picture_file(str(tmp_path / "bars.foo"))
