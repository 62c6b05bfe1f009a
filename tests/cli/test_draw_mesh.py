"""`hpcpar draw mesh`."""

from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib.patches import Polygon

from hpcpar.cli.draw_mesh import figure_of
from hpcpar.cli.picture import rank_colour
from hpcpar.planner.layout import Layout
from tests.command import Output

COMMAND = ("draw", "mesh")

CUBE = """\
pp=2 x dp=2 x tp=2: 8 ranks on 2 nodes

      pp0         pp1
       tp0  tp1    tp0  tp1
dp0   0 n0 1 n0   4 n1 5 n1
dp1   2 n0 3 n0   6 n1 7 n1

pp        4 x 2 ranks:  0,4  1,5  2,6  3,7
dp        4 x 2 ranks:  0,2  1,3  4,6  5,7
tp        4 x 2 ranks:  0,1  2,3  4,5  6,7
"""


def test_the_cube_of_three_axes(output: Output) -> None:
    assert output("--pp", "2", "--dp", "2", "--tp", "2", "--nodes", "2") == CUBE


def test_sets_of_shards_and_experts(output: Output) -> None:
    told = output("--dp", "4", "--cp", "2", "--dp-shard", "2", "--ep", "4")
    assert "dp3 set1" in told
    assert "dp_shard  2 x 4 ranks:  0,1,2,3  4,5,6,7" in told
    assert "edp       4 x 2 ranks:  0,4  1,5  2,6  3,7" in told
    assert "\n\n           cp1\n" in told


def test_a_picture_has_a_cube_for_each_rank_in_its_nodes_colour(output: Output, tmp_path: Path) -> None:
    (axes,) = figure_of(Layout(pp=2, dp=2, tp=2), [0, 0, 0, 1, 1, 1, 1, 1]).axes
    assert {text.get_text() for text in axes.texts} == {*map(str, range(8)), "pp", "dp", "tp"}
    cubes = [each.get_facecolor()[:3] for each in axes.patches if isinstance(each, Polygon)]
    assert [cubes.count(rank_colour(node)) for node in (0, 1)] == [3, 5]  # the full face of each
    output("--tp", "2", "--output", tmp_path / "mesh.svg")
    assert ">tp=2: 2 ranks<" in (tmp_path / "mesh.svg").read_text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--dp", "4", "--dp-shard", "3"), "try dp_shard=2 or dp_shard=4"),
        (("--dp", "3", "--nodes", "2"), "do not divide the 3 ranks"),
        (("--pp", "2", "--dp", "2", "--cp", "2", "--tp", "2", "--output", "x.png"), "three axes"),
        (("--tp", "16", "--output", "x.png"), "8 ranks along an axis"),
    ],
)
def test_what_cannot_be_drawn_is_refused(arguments: tuple[str, ...], words: str, output: Output) -> None:
    assert words in output(*arguments, status=1)


def test_an_axis_that_crosses_nodes_is_named(output: Output) -> None:
    assert "tp=4 crosses nodes" in output("--tp", "4", "--nodes", "2")
