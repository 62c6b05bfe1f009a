"""The scoreboard of killed ranks, in short."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "scoreboard" / "kills.py"


@pytest.mark.timeout(600)
def test_a_run_whose_rank_was_killed_goes_on_with_every_bit(tmp_path: Path) -> None:
    lines = tmp_path / "lines.jsonl"
    words = ("--tries", "1", "--layouts", "ZeRO-3, saved", "--json", str(lines))
    done = subprocess.run([sys.executable, SCRIPT, *words], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    tries = [json.loads(line) for line in lines.read_text().splitlines()]
    assert {(each["layout"], each["result"]) for each in tries} == {
        ("ZeRO-3, saved behind training", "exact")
    }
    assert f"{len(tries)} of {len(tries)} exact to the bit" in done.stdout
