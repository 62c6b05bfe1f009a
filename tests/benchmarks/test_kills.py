"""The scoreboard of killed ranks, in short: each try kills a rank of a training at a random moment."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "scoreboard" / "kills.py"
TRIES = 9


@pytest.mark.timeout(1800)  # a try takes some 8 s on two quiet cores
def test_runs_whose_ranks_were_killed_go_on_with_every_bit(tmp_path: Path) -> None:
    lines = tmp_path / "lines.jsonl"
    words = ("--tries", str(TRIES), "--json", str(lines))
    done = subprocess.run([sys.executable, SCRIPT, *words], capture_output=True, text=True, timeout=1700)
    assert done.returncode == 0, done.stdout + done.stderr
    tries = [json.loads(line) for line in lines.read_text().splitlines()]
    assert [each["result"] for each in tries] == ["exact"] * TRIES
    assert len({each["layout"] for each in tries}) > 1
    assert f"{TRIES} of {TRIES} exact to the bit" in done.stdout
