"""Numbers that would leave nothing to measure, or never end, are refused before anything is."""

from __future__ import annotations

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
    ],
)
def test_what_would_measure_nothing_or_never_end_is_refused(
    option: str, value: str, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.setattr(sys, "argv", ["reductions.py", option, value])
    with pytest.raises(SystemExit):
        importlib.import_module("reductions").parse()
    assert words in capsys.readouterr().err
