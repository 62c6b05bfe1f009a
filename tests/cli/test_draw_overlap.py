"""`hpcpar draw overlap`."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from hpcpar.cli.draw_overlap import figure_of, read
from hpcpar.cli.picture import BACKWARD, COMMUNICATION, FORWARD, IDLE, WEIGHTS
from tests.command import Output

COMMAND = ("draw", "overlap")


def event(rank: int, category: str, name: str, start_ms: float, stop_ms: float, **arguments: Any) -> Any:
    times = {"ts": start_ms * 1e3, "dur": (stop_ms - start_ms) * 1e3}
    return {"ph": "X", "name": name, "cat": category, "pid": rank, "tid": 0, "args": arguments, **times}


@pytest.fixture
def timeline(tmp_path: Path) -> Path:
    """Of two ranks, the second of which begins 10 ms later and comes last to the all-reduce.

    Its passes are named as those of a pipeline. Before the step is an evaluation; the next one awaits the
    all-gather.
    """
    events = []
    for rank, late_ms, forward, backward in ((0, 0.0, "forward", "backward"), (1, 10.0, "1F0", "1B0")):
        for name, start_ms, stop_ms in (
            ("0F0", -9, -6),
            ("data", 0, 0),
            (forward, 0, 20),
            (backward, 20, 60),
        ):
            events.append(event(rank, "compute", name, start_ms + late_ms, stop_ms + late_ms))
        events += [
            event(rank, "communication", "allreduce losses", late_ms - 6, late_ms - 1, blocking=True),
            event(rank, "communication", "allreduce dp", 40 + late_ms, 80, nbytes_sent=2**20),
            event(rank, "compute", "wait for gradients", 60 + late_ms, 80),
            event(rank, "communication", "allreduce norm", 80, 82, blocking=True),
            event(rank, "compute", "optimizer", 82, 90),
            event(rank, "communication", "allgather dp", 88, 96),
            event(rank, "waiting", "allgather dp", 90, 96),
        ]
    path = tmp_path / "timeline.json"
    path.write_text(json.dumps({"traceEvents": events}))
    return path


def test_a_step_by_hand(timeline: Path, output: Output) -> None:
    told = output(str(timeline.parent), "--step", "1").splitlines()
    assert told[1:3] == [
        "rank 0       90.0 ms     50.0 ms       44%      22.0 ms    108.0 ms",
        "rank 1       80.0 ms     40.0 ms       55%      12.0 ms    108.0 ms",
    ]
    assert told[5].split() == ["allgather", "dp", "1", "0.00", "MiB", "8.0", "ms", "25%"]
    assert told[6].split() == ["allreduce", "dp", "1", "1.00", "MiB", "40.0", "ms", "50%"]
    assert told[7].split() == ["allreduce", "norm", "1", "0.00", "MiB", "2.0", "ms", "0%"]


def test_bars_are_as_long_as_what_they_stand_for(timeline: Path) -> None:
    lasted: dict[Any, float] = defaultdict(float)
    as_it_was, one_by_one = figure_of(read(timeline, 1), 1).axes
    for bar in as_it_was.collections:
        lasted[tuple(bar.get_facecolor()[0][:3])] += bar.get_paths()[0].get_extents().width
    assert lasted == pytest.approx(
        {FORWARD: 40, BACKWARD: 80, WEIGHTS: 16, COMMUNICATION: 50 + 40, IDLE: 22 + 12}
    )
    ends = [bar.get_paths()[0].get_extents().x1 for bar in one_by_one.collections]
    assert max(ends) == pytest.approx(108)
    assert one_by_one.get_title(loc="left") == "one by one: 18.0 ms longer"


def test_a_step_too_many_and_another_file_are_refused(timeline: Path, output: Output, tmp_path: Path) -> None:
    assert "the timeline has 1 steps" in output(str(timeline), "--step", "2", status=1)
    (tmp_path / "other.json").write_text("[]")
    assert "is no timeline of a run" in output(str(tmp_path / "other.json"), status=1)
