"""The training benchmark runs with every kind of peer, finds that they agree, and names what does not fit."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.long

SCRIPT = str(Path(__file__).resolve().parents[2] / "benchmarks" / "training.py")
SMALL = ["--model", "tiny", "--sequence", "16", "--batch", "2", "--rounds", "2", "--steps", "1"]
TENSOR_PARALLEL = {
    "hpcpar tp",
    "hpcpar tp no overlap",
    "hpcpar tp+sp",
    "hpcpar tp+sp 2 chunks",
    "dtensor tp",
    "dtensor tp+sp",
    "one process",
    "no communication",
}

CONTEXT_PARALLEL = {
    "hpcpar exchange",
    "hpcpar exchange kept",
    "hpcpar ring",
    "hpcpar allgather",
    "hpcpar ulysses",
    "zigzag ring",
    "ulysses",
    "one process",
    "no communication",
}

EXPERT_PARALLEL = {"hpcpar ep", "hpcpar ep halves", "ddp", "one process", "no communication"}

RunRanks = Callable[..., "subprocess.CompletedProcess[str]"]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_tensor_parallel_peers_agree_with_one_process_and_are_timed_in_both_ways(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    path = tmp_path / "figures.jsonl"
    sizes = ["--tp", "2", "--hidden", "128", "--layers", "2"]
    done = run_ranks(2, SCRIPT, *SMALL, *sizes, "--forward-only", "--json", str(path), timeout_s=110)
    assert done.returncode == 0, done.stderr
    found = lines(path)
    for forward_only in (False, True):
        of_kind = [line for line in found if line["forward_only"] is forward_only]
        assert {line["peer"] for line in of_kind} == TENSOR_PARALLEL
        for line in of_kind:
            assert (line["tp"], line["hidden"], line["layers"], line["global_batch"]) == (2, 128, 2, 2)
            assert line["tokens_per_step"] == 32
            assert set(line["tokens_per_s_ratio_to"]) == TENSOR_PARALLEL
            assert line["tokens_per_s_ratio_to"][line["peer"]] == [1.0, 1.0, 1.0]
            assert len(line["step_s"]) == 2
    differences = {line["peer"]: line["difference"] for line in found if not line["forward_only"]}
    assert differences.pop("no communication") is None
    assert all(difference <= 1e-4 for difference in differences.values()), differences


def test_data_parallel_peers_agree_with_one_process(run_ranks: RunRanks, tmp_path: Path) -> None:
    path = tmp_path / "figures.jsonl"
    peers = ["--peers", "hpcpar", "ddp", "one rank alone", "no communication"]
    done = run_ranks(2, SCRIPT, *SMALL, *peers, "--forward-only", "--json", str(path), timeout_s=110)
    assert done.returncode == 0, done.stderr
    found = lines(path)
    assert [(line["peer"], line["forward_only"]) for line in found] == [
        (peer, kind)
        for peer in ("hpcpar 0", "ddp", "one rank alone", "no communication")
        for kind in (False, True)
    ]
    assert [line["tokens_per_step"] for line in found] == [64, 64, 64, 64, 32, 32, 64, 64]
    differences = [line["difference"] for line in found if line["difference"] is not None]
    assert len(differences) == 2
    assert max(differences) <= 1e-4


def test_context_parallel_peers_agree_with_one_process_and_hold_a_part_of_its_activations(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    path = tmp_path / "figures.jsonl"
    done = run_ranks(2, SCRIPT, *SMALL, "--cp", "2", "--sequence", "64", "--json", str(path), timeout_s=110)
    assert done.returncode == 0, done.stderr
    found = {line["peer"]: line for line in lines(path)}
    assert set(found) >= CONTEXT_PARALLEL
    assert all(line["tokens_per_step"] == 128 for line in found.values())
    assert found.pop("no communication")["difference"] is None
    differences = {peer: line["difference"] for peer, line in found.items()}
    assert all(difference <= 1e-4 for difference in differences.values()), differences
    whole = found["one process"]
    for peer in ("hpcpar exchange", "hpcpar ring", "hpcpar allgather"):
        for figure in ("saved_nbytes", "allocated_nbytes"):
            assert found[peer][figure] <= 1.06 / 2 * whole[figure]


def test_expert_parallel_peers_agree_with_one_process_and_hold_a_part_of_the_experts(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    path = tmp_path / "figures.jsonl"
    done = run_ranks(2, SCRIPT, *SMALL, "--ep", "2", "--json", str(path), timeout_s=110)
    assert done.returncode == 0, done.stderr
    found = {line["peer"]: line for line in lines(path)}
    assert set(found) >= EXPERT_PARALLEL
    assert all(
        (line["ep"], line["experts"], line["tokens_per_step"]) == (2, 8, 64) for line in found.values()
    )
    assert found.pop("no communication")["difference"] is None
    differences = {peer: line["difference"] for peer, line in found.items()}
    assert all(difference <= 1e-4 for difference in differences.values()), differences
    # Parameters, gradients, two states of the optimizer: of half the experts, in place of all.
    assert found["hpcpar ep"]["peak_nbytes"] < 0.75 * found["ddp"]["peak_nbytes"]


MISTAKES = [
    (["--tp", "3"], "--tp 3, but the job has 2 ranks"),
    (["--tp", "2", "--hidden", "100"], "--hidden 100; give a multiple of 64"),
    (["--tp", "2", "--hidden", "64", "--sequence", "15"], "--sequence=15 does not divide among tp=2"),
    (["--tp", "2", "--dtype", "bfloat16"], "--tp has no masters for --dtype bfloat16"),
    (["--tp", "2", "--hidden", "64", "--peers", "dtensor tp"], "would cut kv_heads=1 for tp=2 ranks"),
    (["--tp", "2", "--peers", "ddp"], "ddp: only without --tp"),
    (["--peers", "dtensor tp"], "dtensor tp: only with --tp"),
    (["--cp", "3"], "--cp 3, but the job has 2 ranks"),
    (["--cp", "2", "--tp", "2"], "--tp 2 and --cp 2; give one of them"),
    (["--cp", "2", "--dtype", "bfloat16"], "--cp has no masters for --dtype bfloat16"),
    (["--cp", "2", "--sequence", "18", "--peers", "zigzag ring"], "--sequence 18 is no multiple of 4"),
    (["--peers", "zigzag ring"], "zigzag ring: only with --cp"),
    (["--ep", "2", "--tp", "2"], "--tp 2 and --ep 2; give one of them"),
    (["--ep", "3"], "--ep 3, but the job has 2 ranks; all share each mixture here"),
    (
        ["--ep", "2", "--experts", "3", "--peers", "megatron ep"],
        "--experts 3 do not divide among --ep 2 ranks",
    ),
    (["--ep", "2", "--experts", "2", "--per-token", "3"], "experts.per_token=3, but there are"),
    (["--layers", "0"], "layers=0 must be greater than 0"),
]

# One job makes all the mistakes, for starting ranks takes longer than everything else.
MAKE_THEM = """
import json, os, runpy, sys
script, mistakes = sys.argv[1], json.loads(sys.argv[2])
sys.path.insert(0, os.path.dirname(script))
for words in mistakes:
    sys.argv = [script, *words]
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        assert end.code == 1
    else:
        raise AssertionError(f"{words} were taken")
"""


def test_what_does_not_fit_is_named_once(run_ranks: RunRanks) -> None:
    asked = json.dumps([[*SMALL, *given] for given, _ in MISTAKES])
    done = run_ranks(2, "-c", MAKE_THEM, SCRIPT, asked)
    assert done.returncode == 0, done.stderr
    for _, named in MISTAKES:
        assert done.stderr.count(named) == 1, done.stderr
    assert "Traceback" not in done.stderr
