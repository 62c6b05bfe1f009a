"""`hpcpar draw experts`."""

from __future__ import annotations

import pytest

from hpcpar.cli.draw_experts import figure_of, planned
from tests.command import Output

COMMAND = ("draw", "experts")

EVERY_EXPERT = """\
4 tokens of 4 of 4 experts on 4 ranks of 2 nodes

expert  rank  rows
     0     0     4  ████████████████████████████████████████
     1     1     4  ████████████████████████████████████████
     2     2     4  ████████████████████████████████████████
     3     3     4  ████████████████████████████████████████

the busiest expert has 1.00 of the mean; coefficient of variation 0.00; 0 idle

          one stage                                two stages
          to 0  to 1  to 2  to 3  between nodes    to 0  to 1  to 2  to 3  between nodes
rank 0             4     4     4              8             8     6     0              6
rank 1       4           4     4              8       8           0     6              6
rank 2       4     4           4              8       6     0           8              6
rank 3       4     4     4                    8       0     6     8                    6

one stage: 48 rows, 32 of them between nodes; 112.0 µs
two stages: 56 rows, 24 of them between nodes; 64.0 µs
"""

PRICED = ("--alpha-intra", "4e-6", "--alpha-inter", "1.2e-5", "--beta-intra", "0", "--beta-inter", "0")


def test_one_token_of_each_rank_for_every_expert_drawn_by_hand(output: Output) -> None:
    """To the other node a token goes once, and its gradient twice home; within nodes all rows are sent."""
    told = output("--experts", "4", "--per-token", "4", "--tokens", "1", *PRICED)
    # Four ways, each 4 + 12 + 12 µs for one stage and 12 + 4 µs for two.
    assert told == EVERY_EXPERT


def test_sums_halve_the_way_home(output: Output) -> None:
    told = output("--experts", "4", "--per-token", "4", "--tokens", "1", "--sum-on-node")
    assert "2 nodes, outputs summed on nodes\n" in told
    assert "two stages: 48 rows, 16 of them between nodes" in told


def test_a_seed_draws_the_same_again_and_a_skew_prefers_the_first(output: Output) -> None:
    assert output("--seed", "1") == output("--seed", "1") != output("--seed", "2")
    told = output("--skew", "3", "--per-token", "1", "--tokens", "500")
    loads = [int(line.split()[2].replace(",", "")) for line in told.splitlines()[3:11]]
    assert loads[0] > loads[1] > loads[2] > loads[7]


def test_no_tokens_send_nothing(output: Output) -> None:
    told = output("--tokens", "0", "--ranks", "1", "--nodes", "1")
    assert "\n     7     0     0\n\nno rows\n" in told
    assert "two stages: 0 rows, 0 of them between nodes; 0.0 µs" in told


@pytest.mark.parametrize("ranks", [3, 12])
def test_the_picture_has_the_loads_and_the_rows(ranks: int) -> None:
    links = {f"{sign}_{where}": 1e-6 for sign in ("alpha", "beta") for where in ("intra", "inter")}
    found = planned(ranks, 2, 8, 2, 64, 0.5, 0, sum_on_node=False, row_bytes=8, **links)
    loads, *ways = figure_of(found).axes
    assert [bar.get_height() for bar in loads.containers[0]] == list(found.dispatch.loads)
    for axes, way in zip(ways, found.ways, strict=True):
        (image,) = axes.images
        assert image.get_array().tolist() == [list(row) for row in way.sent]
        written = [text.get_text() for text in axes.texts]
        assert written == ([f"{rows:,}" for row in way.sent for rows in row if rows] if ranks == 3 else [])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--per-token", "9"), "--per-token=9, but there are --experts=8; give 8 or fewer"),
        (("--nodes", "5"), "--nodes=5 for --ranks=4: each node has one at least"),
        (("--output", "no/such/directory/x.png"), "no/such/directory/x.png"),
        (("--output", "x.xyz"), "Format 'xyz' is not supported"),
    ],
)
def test_what_cannot_be_drawn_is_named(arguments: tuple[str, ...], words: str, output: Output) -> None:
    assert words in output(*arguments, status=1)


def test_a_price_is_a_finite_number(output: Output) -> None:
    assert "nan is no finite number" in output("--alpha-intra", "nan", status=2)
