"""The benchmark of collectives on GPUs: its ceilings, its lines tried on CPUs, what it says without a GPU."""

from __future__ import annotations

import importlib
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "device_collectives.py"

RunRanks = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(SCRIPT.parent)
    return importlib.import_module(SCRIPT.stem)


def test_ceilings_are_the_bytes_that_go_through_one_memory(module: ModuleType) -> None:
    """Counted piece by piece, of n pieces for each rank: what a sum or a copy reads, and what it writes."""
    for n in (1, 2, 3, 4, 8):
        piece = 1 / n
        ring_sum = n * (n - 1) * (2 + 1) * piece  # own and incoming, into own
        ring_copies = n * (n - 1) * (1 + 1) * piece
        assert module.ring_s(n, 1, 1.0) == pytest.approx(ring_sum + ring_copies)
        direct_sum = n * (n + 1) * piece if n > 1 else 2  # all ranks' piece, into own
        direct_copies = n * (n - 1) * (1 + 1) * piece
        assert module.direct_s(n, 1, 1.0) == pytest.approx(direct_sum + direct_copies)


def test_every_line_is_measured_and_right_where_it_is_tried_on_cpus(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    path = tmp_path / "figures.jsonl"
    words = ["--device", "cpu", "--min-bytes", "4K", "--max-bytes", "4K", "--rounds", "2", "--in-a-row", "2"]
    done = run_ranks(2, str(SCRIPT), *words, "--round-seconds", "0.001", "--json", str(path))
    assert done.returncode == 0, done.stderr
    about, *lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert (about["benchmark"], about["ranks"], about["rounds"]) == ("device collectives", 2, 2)
    assert about["in_a_row"] == 2
    assert "left out: torch has no NCCL" in about["peer nccl"]
    assert {line["wrong"] for line in lines} == {0}
    assert {line["collective"] for line in lines} == {
        "allreduce",
        "reduce_scatter",
        "allgather",
        "broadcast",
        "alltoall",
    }
    for collective in ("allreduce", "reduce_scatter", "allgather", "broadcast"):
        found = [(line["way"], line["algorithm"]) for line in lines if line["collective"] == collective]
        assert found == [
            ("host", "chosen"),
            ("host", "ring"),
            ("host", "direct"),
            ("MPI", "MPI"),
            ("copy", "memory_copy"),
            ("gloo", "gloo"),
        ]
    for line in lines:
        assert line["of_ring"] is None, "there is no ceiling of one GPU's memory on CPUs"
        assert line["lower_quartile_s"] <= line["median_s"] <= line["upper_quartile_s"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_what_to_do(run_ranks: RunRanks) -> None:
    done = run_ranks(2, str(SCRIPT))
    assert done.returncode == 1
    assert "ERROR: torch sees no GPU on ranks 0, 1 of 2" in done.stderr
    assert "benchmarks/gpu_check.sh installs both" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_unknown_way_is_refused_by_name(run_ranks: RunRanks) -> None:
    done = run_ranks(1, str(SCRIPT), "--ways", "pull,telepathy")
    assert done.returncode != 0
    assert "'telepathy' is none of pull, mpi, staged" in done.stderr
