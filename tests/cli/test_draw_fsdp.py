"""`hpcpar draw fsdp`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hpcpar.cli.draw_fsdp import chart, parts_of, read
from hpcpar.units import KiB, MiB
from tests.command import Output

COMMAND = ("draw", "fsdp")


def span(category: str, name: str, start_ms: float, stop_ms: float, **arguments: Any) -> Any:
    times = {"ts": start_ms * 1e3, "dur": (stop_ms - start_ms) * 1e3}
    return {"ph": "X", "name": name, "cat": category, "pid": 0, "tid": 0, "args": arguments, **times}


def gather(unit: str, begin_ms: float, ready_ms: float, waited_ms: float) -> Any:
    times = {"starting_s": 1e-3, "waited_s": waited_ms / 1e3}
    return span("units", f"gather {unit}", begin_ms, ready_ms, nbytes=MiB, **times)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A step of 84 ms: two layers, of which the second is gathered during the first one's forward.

    ms          0    10   14   20   30        40        50   60      70   84
    layer 0     gather    |F        |                        gather |B   |
    layer 1               gather    |F        |B             |
    """
    events = [
        span("compute", "data", 0, 0),
        span("compute", "forward", 10, 40),
        span("compute", "backward", 40, 80),
        span("compute", "optimizer", 80, 84),
        gather("layer 0", 0, 10, waited_ms=6),
        span("communication", "allgather dp", 0.5, 8.5, nbytes_sent=1),
        span("units", "hold layer 0", 10, 20, nbytes=MiB),
        gather("layer 1", 10, 20, waited_ms=0),
        span("communication", "allgather dp", 10.5, 18.5, nbytes_sent=1),
        span("units", "hold layer 1", 20, 60, nbytes=MiB),
        gather("layer 0", 40, 60, waited_ms=0),
        span("communication", "allgather dp", 40.5, 44.5, nbytes_sent=1),
        span("communication", "allgather ep", 45, 47, nbytes_sent=1),  # somebody else's
        span("communication", "reduce_scatter dp", 40.5, 44.5, nbytes_sent=1),
        span("waiting", "allgather dp", 4, 10),
        span("waiting", "reduce_scatter dp", 43, 44.1),
        span("units", "hold layer 0", 60, 80, nbytes=MiB),
    ]
    (tmp_path / "timeline.json").write_text(json.dumps({"traceEvents": events}))
    return tmp_path


def test_a_step_by_hand(run: Path, output: Output) -> None:
    told = output(run, "--step", "1").splitlines()
    # 8 + 8 + 4 ms under way; the program stood still in 4.5 ms of the first one and 1.1 ms of the last one.
    assert told[1].split() == ["rank", "0", "3", "2.0", "MiB", "20.0", "ms", "72%", "6.0", "ms", "84.0", "ms"]
    assert told[3] == "layer 0  " + 10 * "g" + 10 * "F" + 20 * "·" + 20 * "g" + 20 * "B" + 4 * "·"
    assert told[4] == "layer 1  " + 10 * "·" + 10 * "g" + 20 * "F" + 20 * "B" + 24 * "·"


def test_a_unit_that_is_held_through_both_passes_has_both_parts(run: Path) -> None:
    (found,) = read(run, 1)
    assert found.peak_nbytes == 2 * MiB
    assert [each.unit for each in found.units] == ["layer 0", "layer 1", "layer 0"]
    parts = parts_of(found.units[1], found.passes)
    for kind, expected in (("F", [(0.02, 0.04)]), ("B", [(0.04, 0.06)]), ("", [(0.02, 0.06)])):
        assert [time for each in parts[kind] for time in each] == pytest.approx(
            [time for each in expected for time in each]
        )


def test_many_units_are_cut(run: Path) -> None:
    (found,) = read(run, 1)
    (first, *_) = found.units
    many = found._replace(units=[first._replace(unit=f"layer {number}") for number in range(30)])
    assert "and 6 more" in chart(many)


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_a_picture(run: Path, suffix: str, output: Output, tmp_path: Path) -> None:
    output(run, "--step", "1", "--output", f"{tmp_path}/fsdp.{suffix}")
    assert (tmp_path / f"fsdp.{suffix}").stat().st_size > 5 * KiB
    if suffix == "svg":
        drawn = (tmp_path / "fsdp.svg").read_text()
        assert "step 1 of rank 0: 3 gathers, 20.0 ms under way, 72% of it hidden" in drawn
        assert ">layer 1<" in drawn


def test_a_run_without_units_is_refused(run: Path, output: Output, tmp_path: Path) -> None:
    assert "the timeline has 1 steps" in output(run, "--step", "2", status=1)
    assert "the run had ranks 0 to 0" in output(run, "--step", "1", "--rank", "1", status=1)
    other = tmp_path / "other.json"
    other.write_text(
        json.dumps({"traceEvents": [span("compute", name, 0, 1) for name in ("data", "optimizer")]})
    )
    assert "step 1 has no units of ZeRO-3" in output(other, "--step", "1", status=1)
