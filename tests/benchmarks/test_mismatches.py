"""The scoreboard of mismatches: what it prints of calls that are the same, and of some that are not."""

from __future__ import annotations

import json
from pathlib import Path

SCRIPT = str(Path(__file__).parents[2] / "benchmarks" / "scoreboard" / "mismatches.py")


def test_two_kinds_of_mismatch_are_named_on_every_rank(tmp_path, run_ranks):
    lines = tmp_path / "lines.jsonl"
    done = run_ranks(2, SCRIPT, "--sizes", "8,4K", "--only", "float32 and int32", "--json", str(lines))
    found = [json.loads(line) for line in lines.read_text().splitlines()]
    assert {each["case"] for each in found} >= {"dtype: float32 and int32", "message: float32 and int32"}
    assert [each["result"] for each in found] == ["named"] * 6, done.stdout
    assert all("32[" in text for each in found for text in each["told"])
    assert f"of {len(found)}" in done.stdout
