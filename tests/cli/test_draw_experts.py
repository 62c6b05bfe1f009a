"""`hpcpar draw experts`."""

from __future__ import annotations

from pathlib import Path

import pytest

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


@pytest.mark.parametrize("suffix", ["png", "svg"])
@pytest.mark.parametrize("ranks", [3, 12])
def test_a_picture_is_written_where_asked(ranks: int, suffix: str, output: Output, tmp_path: Path) -> None:
    path = tmp_path / f"experts.{suffix}"
    assert f"written: {path}" in output("--ranks", ranks, "--output", path)
    assert path.read_bytes().startswith(b"\x89PNG" if suffix == "png" else b"<?xml")


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
