"""Values between experts' ranks by formula, compared with an enumeration."""

from __future__ import annotations

import itertools

import pytest

from hpcpar.expert_parallel.dispatch import Dispatch, between_nodes
from hpcpar.planner.expert_traffic import (
    balanced_values,
    nodes_of_token,
    sent_values,
    values_between_nodes,
)


def test_balanced_counts_send_as_much_as_the_formula() -> None:
    counts = [[4] * 8] * 4  # 16 tokens of 2 experts on each rank
    assert sent_values(counts, 10) == (balanced_values(16, 2, 10, 4),) * 4
    assert sent_values(counts, 10, recomputed=True) == (1.5 * balanced_values(16, 2, 10, 4),) * 4


def test_uneven_counts_drawn_by_hand() -> None:
    """Rank 0 has experts 0 and 1, rank 1 has 2: rank 0 sends 5 rows there, and 7 outputs home."""
    assert sent_values([[9, 9, 5], [3, 4, 9]], 1) == (24, 24)
    assert sent_values([[9, 9, 5]], 1) == (0,)


def every_choice(stages: int, slots: int) -> Dispatch:
    """A token for each choice of experts of 8, on each of four ranks of two nodes."""
    tokens = tuple(itertools.combinations(range(8), slots))
    return Dispatch((tokens,) * 4, 8, (0, 0, 1, 1), stages)


@pytest.mark.parametrize("slots", [1, 2, 3, 8])
def test_averages_are_those_of_all_choices(slots: int) -> None:
    one, two = every_choice(1, slots), every_choice(2, slots)
    tokens = len(one.routing[0])
    reached = [{expert // 4 for expert in experts} for experts in one.routing[0]]
    assert nodes_of_token(8, slots, 2) == pytest.approx(sum(map(len, reached)) / tokens)
    for dispatch, sums in ((one, False), (two, False), (two, True)):
        rows = between_nodes(dispatch.messages, dispatch.nodes)
        rows += between_nodes(dispatch.returns(sum_on_node=sums), dispatch.nodes)
        found = values_between_nodes(tokens, slots, 1, 8, 2, stages=dispatch.stages, sum_on_node=sums)
        assert 4 * found == pytest.approx(2 * rows)
