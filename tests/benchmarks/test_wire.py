"""The benchmark over a wire counts what theory says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"),
]

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "wire.py"


def test_a_ring_between_two_hosts_sends_what_theory_says(tmp_path: Path) -> None:
    path = tmp_path / "figures.jsonl"
    counts = ["--hosts", "2", "--ranks-per-host", "1", "--sizes", "1M", "--rounds", "1"]
    what = ["--collectives", "allreduce", "--candidates", "ring", "mpi", "--json", str(path)]
    done = subprocess.run(
        [sys.executable, SCRIPT, *counts, *what], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    facts, *lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert facts["benchmark"] == "wire"
    assert [line["algorithm"] for line in lines] == ["ring", "mpi"]
    assert lines[0]["wire_nbytes"] == pytest.approx(2**20, rel=0.05)
