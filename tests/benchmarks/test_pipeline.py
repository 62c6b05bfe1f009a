"""The pipeline benchmark's peers agree with one process, and what it runs it also prices."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.long

SCRIPT = str(Path(__file__).resolve().parents[2] / "benchmarks" / "pipeline.py")
TINY = ["--hidden", "64", "--layers", "4", "--vocabulary", "64", "--sequence", "16", "--microbatches", "4"]
PEERS = [
    "hpcpar zb-v",
    "hpcpar even gpipe",
    "hpcpar even 1f1b",
    "torch 1f1b",
    "torch zb-v",
    "one process",
]

RunRanks = Callable[..., "subprocess.CompletedProcess[str]"]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_peers_agree_with_one_process_and_keep_as_much_as_their_schedules_say(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    path = tmp_path / "figures.jsonl"
    counts = ["--rounds", "1", "--steps", "1", "--peers", *PEERS, "--json", str(path)]
    done = run_ranks(2, SCRIPT, "peers", *TINY, *counts, timeout_s=110)
    assert done.returncode == 0, done.stderr
    found = {line["peer"]: line for line in lines(path)}
    assert list(found) == PEERS
    for peer, line in found.items():
        assert line["difference"] <= 1e-4, peer
        assert line["loss"] == pytest.approx(found["one process"]["loss"], rel=1e-3)
        assert line["tokens_per_step"] == 4 * 16
        assert sum(line["split"]) == 4 + 2
        assert line["tokens_per_s_ratio_to"].keys() == found.keys()
    gpipe, ours, theirs = (found[name] for name in ("hpcpar even gpipe", "hpcpar even 1f1b", "torch 1f1b"))
    for one_f_one_b in (ours, theirs):
        assert one_f_one_b["split"] == [3, 3]
        # 4 microbatches are alive beside 2 on the first rank, beside 1 on the last; and what comes and goes.
        assert gpipe["live_nbytes"][0] > 1.7 * one_f_one_b["live_nbytes"][0]
        assert gpipe["live_nbytes"][1] > 2.5 * one_f_one_b["live_nbytes"][1]


def test_stages_that_sleep_take_no_less_than_their_price(run_ranks: RunRanks, tmp_path: Path) -> None:
    path, picture = tmp_path / "figures.jsonl", tmp_path / "chart.svg"
    given = ["--forward-ms", "3", "--backward-ms", "2", "--weight-ms", "4"]
    schedules = ["1f1b", "zb-v", "automatic"]
    counts = ["--microbatches", "4", "--steps", "1", "--schedules", *schedules]
    done = run_ranks(2, SCRIPT, "sleep", *given, *counts, "--json", str(path), "--output", str(picture))
    assert done.returncode == 0, done.stderr
    found = {line["schedule"]: line for line in lines(path)}
    assert list(found) == schedules
    assert found["1f1b"]["predicted_s"] == pytest.approx(5 * 0.009)
    assert found["zb-v"]["forward_s"] == [0.003] * 4
    assert all(line["median_s"] >= line["predicted_s"] for line in found.values())
    assert all(f"{schedule}, measured" in picture.read_text() for schedule in schedules)


def test_layers_are_measured_alone_and_priced(run_ranks: RunRanks, tmp_path: Path) -> None:
    path = tmp_path / "figures.jsonl"
    schedules = ["--schedules", "gpipe", "zb-v", "automatic"]
    counts = ["--steps", "1", "--repeats", "1", "--json", str(path)]
    done = run_ranks(2, SCRIPT, "layers", *TINY, *schedules, *counts)
    assert done.returncode == 0, done.stderr
    gpipe, zb_v, automatic = lines(path)
    assert [len(line["backward_s"]) for line in (gpipe, zb_v, automatic)] == [2, 4, 2]
    assert gpipe["weight_s"] == [0, 0]
    assert min(zb_v["weight_s"]) > 0
    for line in (gpipe, automatic):
        stages = zip(line["forward_s"], line["backward_s"], line["weight_s"], strict=True)
        assert line["predicted_s"] >= 4 * max(map(sum, stages))
        assert 0 <= line["bubble_rate"] < 1


def test_what_does_not_fit_is_named_once(run_ranks: RunRanks) -> None:
    done = run_ranks(1, SCRIPT, "peers", "--microbatches", "1")
    assert done.returncode != 0
    assert done.stderr.count("--microbatches 1 on 1 ranks") == 1, done.stderr
    assert "Traceback" not in done.stderr
