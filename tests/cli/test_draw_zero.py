"""`hpcpar draw zero`."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcpar.cli.draw_zero import figure_of, stages
from hpcpar.units import GiB
from tests.command import Output

COMMAND = ("draw", "zero")


def test_the_figure_of_the_paper(output: Output) -> None:
    """7.5 billion parameters on 64 ranks: 120, 31.4, 16.6 and 1.9 GB (arXiv 1910.02054, figure 1)."""
    told = output("--parameters", "7.5B", "--ranks", "64").splitlines()
    assert told[0] == "7,500,000,000 parameters in bfloat16, adamw, 64 ranks"
    sums = [float(line.split()[-2]) * GiB / 1e9 for line in told[3:7]]
    assert sums == pytest.approx([120, 31.4, 16.6, 1.9], abs=0.06)


def test_traffic_counts_microbatches(output: Output) -> None:
    told = output("--parameters", str(GiB // 2), "--ranks", "2", "--microbatches", "4").splitlines()
    assert [float(line.split()[-1]) for line in told[3:7]] == [1.0, 1.0, 2.5, 6.0]  # times Φ: 2, 2, 5, 12


def test_bars_are_parameters_gradients_and_state_by_stage(output: Output, tmp_path: Path) -> None:
    found = stages(GiB, 4, precision="bfloat16", optimizer="adamw", microbatches=1)
    (axes,) = figure_of(found, "").axes
    widths = [[bar.get_width() for bar in of_part] for of_part in axes.containers]
    assert widths == [[2, 2, 2, 0.5], [2, 2, 0.5, 0.5], [12, 3, 3, 3]]
    output("--output", tmp_path / "zero.svg")
    assert "> 1.75 GiB<" in (tmp_path / "zero.svg").read_text()


def test_a_number_that_is_none_is_refused(output: Output) -> None:
    assert "'7.5X'" in output("--parameters", "7.5X", status=2)
    assert "'inf': give a number" in output("--parameters", "inf", status=2)
    assert "at least 1" in output("--parameters", "0", status=2)
