"""Bars of memory: what is drawn of a benchmark's lines."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hpcpar.comm import Communicator, run_loopback
from hpcpar.data_parallel import DistributedOptimizer, memory_report

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "memory_picture.py"


def load() -> Any:
    """Import the script as a module."""
    spec = importlib.util.spec_from_file_location("benchmark_memory_picture", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


memory_picture = load()
bar, draw = memory_picture.bar, memory_picture.draw


def line_of(stage: int, **options: Any) -> dict[str, Any]:
    """As the benchmark writes it: 32 parameters on two ranks."""

    def work(comm: Communicator) -> dict[str, Any]:
        model = nn.Linear(8, 4, bias=False)
        optimizer = DistributedOptimizer(
            torch.optim.AdamW(model.parameters()),
            model.named_parameters(),
            comm,
            zero_stage=stage,
            precision="bfloat16",
            **options,
        )
        model(torch.ones(1, 8, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        return memory_report(model, optimizer, comm).as_record(every_rank=True)

    report = run_loopback(2, work, shared_memory=True)[0]
    return json.loads(json.dumps({"precision": "bfloat16", "optimizer": "AdamW", **report}))


def test_a_bar_is_what_was_measured_beside_the_formula() -> None:
    shown = bar(line_of(2))
    assert shown.label == "ZeRO-2"
    assert shown.state == {"parameters": 64, "gradients": 32, "optimizer state": 192}
    assert shown.theory == shown.state
    assert shown.beyond == {"gradients on their way": 64 + 64}
    assert shown.text == "2Φ + 14Φ/p: 288 B"


def test_a_bar_has_no_part_that_is_on_disk(tmp_path: Path) -> None:
    shown = bar({**line_of(2, offload=tmp_path), "variant": "state on disk"})
    assert shown.label == "ZeRO-2, state on disk"
    assert (shown.state["optimizer state"], shown.theory["optimizer state"]) == (0, 0)
    assert shown.beyond["blocks from disk"] == 192
    assert shown.text == "2Φ + 14Φ/p: 96 B, and 192 B on disk"


def test_a_bar_has_the_ranks_share_of_what_is_common() -> None:
    shown = bar(line_of(1, shared_parameters=True))
    assert shown.state == shown.theory == {"parameters": 32, "gradients": 64, "optimizer state": 192}


@pytest.mark.parametrize("stages", [(), (0, 1, 2)])
def test_a_picture_has_a_row_for_each_line(stages: tuple[int, ...]) -> None:
    (axes,) = draw([line_of(stage) for stage in stages]).axes
    assert [label.get_text() for label in axes.get_yticklabels()] == [f"ZeRO-{stage}" for stage in stages]
