"""The overlap benchmark: its bound, and right results beside a computation."""

from __future__ import annotations

import importlib
import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "overlap.py"


def test_only_waiting_can_be_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(SCRIPT.parent)
    most_hidden = importlib.import_module("overlap").most_hidden
    assert most_hidden(4.0, 2.0, 0.5, 2, 1, 2) == 1 - 0.5 / 2  # a >= b: 1 - u/b
    assert most_hidden(1.0, 2.0, 0.0, 2, 1, 2) == 0.5  # no longer than the computation
    assert most_hidden(4.0, 2.0, 2.0, 2, 1, 2) == 0  # processors move all bytes
    assert most_hidden(4.0, 2.0, 0.5, 4, 1, 2) == 0.5  # 4 ranks on 2 cores: their work is on the same cores


@pytest.mark.long
def test_both_libraries_are_right_beside_a_computation(
    run_ranks: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    path = tmp_path / "lines.jsonl"
    quick = ("--bytes", "64K", "--compute", "1", "--tests", "0", "2", "--rounds", "1")
    done = run_ranks(2, str(SCRIPT), *quick, "--json", str(path))
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(row["algorithm"], row["tests"], row["wrong"]) for row in rows] == [
        (name, tests, 0) for name in ("hpcpar", "mpi") for tests in (0, 2)
    ]
    assert all(row["bound"] <= 1 for row in rows)
