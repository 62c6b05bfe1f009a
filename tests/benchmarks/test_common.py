"""Options that would measure nothing, never end, or lose the results are refused."""

from __future__ import annotations

import argparse
import importlib
import runpy
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def test_options_that_measure_nothing_or_lose_results_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    common = importlib.import_module("common")
    assert common.at_least(2)("2") == 2
    with pytest.raises(argparse.ArgumentTypeError, match="1: it takes at least 2"):
        common.at_least(2)("1")
    with pytest.raises(argparse.ArgumentTypeError, match="cannot be written: there is no directory"):
        common.output_file("/nonexist/a")
    parser = argparse.ArgumentParser(exit_on_error=False)
    common.add_picture_options(parser)
    picture = str(tmp_path / "bars.svg")
    assert parser.parse_args(["--output", picture, "--dark"]) == argparse.Namespace(
        output=Path(picture), dark=True
    )
    with pytest.raises(argparse.ArgumentError, match=r"bars\.foo cannot be drawn: \.foo is no format"):
        parser.parse_args(["--output", str(tmp_path / "bars.foo")])


def test_every_player_has_one_turn_a_round_in_an_order_that_all_ranks_share(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    common = importlib.import_module("common")
    turns = list(common.in_turn("abcd", 20))
    assert turns == list(common.in_turn("abcd", 20))
    assert all(sorted(turns[at : at + 4]) == list("abcd") for at in range(0, 80, 4))
    assert len({tuple(turns[at : at + 4]) for at in range(0, 80, 4)}) > 5
    assert common.ratios([2.0, 4.0, 6.0], [1.0, 1.0, 2.0]) == [2.5, 3.0, 3.5]


def test_every_benchmark_can_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    # Most have only long tests of what they measure. keras_step.py would import Keras, for seconds.
    scripts = [path for path in BENCHMARKS.rglob("*.py") if path.name != "keras_step.py"]
    assert len(scripts) > 20
    for script in scripts:
        with monkeypatch.context() as patch:
            patch.syspath_prepend(BENCHMARKS)
            patch.syspath_prepend(script.parent)
            runpy.run_path(str(script), run_name="read")
