"""`hpcpar draw activations`."""

from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib.patches import Rectangle

from hpcpar.bench.layer_activations import MeasuredActivations
from hpcpar.cli.draw_activations import figure_of
from hpcpar.planner.activations import TECHNIQUES, LayerShape
from hpcpar.units import MiB
from tests.command import Output

COMMAND = ("draw", "activations")

SMALL = ("--sequence", "32", "--batch", "1", "--hidden", "32", "--heads", "4", "--tp", "2")


def test_every_way_is_a_line_with_its_formula_and_its_bytes(output: Output) -> None:
    title, _, head, *lines = output(*SMALL).splitlines()
    assert title.endswith("s=32 b=1 h=32 a=4 (5as/h = 20), t=2")
    assert "measured" in head
    for line, (name, way) in zip(lines, TECHNIQUES.items(), strict=True):
        assert line.startswith(f"{name} ")
        assert way.formula in line
        assert f" {way.nbytes(LayerShape(32, 1, 32, 4), 2):,.0f} " in line


def test_a_bar_is_as_long_as_the_bytes_that_it_stands_for() -> None:
    kept = [
        MeasuredActivations("none", "f", 5 * MiB, {"between the blocks": 1 * MiB, "attention core": 3 * MiB}),
        MeasuredActivations("full", "2sbh", 2 * MiB, {"layer's input": 2 * MiB}),
    ]
    (axes,) = figure_of(kept, "").axes
    bars = [(bar.get_x(), bar.get_width()) for bar in axes.patches if isinstance(bar, Rectangle)]
    assert bars == [(0, 5), (0, 1), (1, 3), (0, 2), (0, 2)]


def test_the_bars_are_drawn_where_asked(output: Output, tmp_path: Path) -> None:
    path = tmp_path / "activations.png"
    assert f"written: {path}" in output(*SMALL, "--output", str(path))
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--heads", "6"), "heads=6 does not divide among tp=4 ranks; tp=2 or tp=3 or tp=6 would fit"),
        (("--sequence", "30"), "sequence=30 does not divide among tp=4 ranks"),
        (("--hidden", "68"), "hidden=68 does not divide among heads=8"),
        ((*SMALL, "--output", "no/such/directory/x.png"), "no/such/directory/x.png"),
        ((*SMALL, "--output", "x.xyz"), "Format 'xyz' is not supported"),
    ],
)
def test_what_cannot_be_drawn_is_named(arguments: tuple[str, ...], words: str, output: Output) -> None:
    assert words in output(*arguments, status=1)


@pytest.mark.parametrize("option", ["--tp", "--sequence", "--batch", "--hidden", "--heads"])
def test_a_number_below_one_is_a_usage_error(option: str, output: Output) -> None:
    assert option in output(option, "0", status=2)
