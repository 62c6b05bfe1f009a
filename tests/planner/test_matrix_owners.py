"""Owners of matrices: the work of ranks is even, and each owns whole ones."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from hpcpar.planner.matrix_owners import (
    balanced_owners,
    matrix_cost,
    rounds_of,
)


def imbalance(costs: Sequence[int], owners: Sequence[int], size: int) -> float:
    """Return the cost of the longest rank over the mean; 1.0 is even."""
    loads = [0] * size
    for cost, owner in zip(costs, owners, strict=True):
        loads[owner] += cost
    return max(loads) * size / sum(loads) if sum(loads) else 1.0


def test_the_drawn_case() -> None:
    costs = [9, 7, 6, 5, 4, 4]
    owners = balanced_owners(costs, 2)
    assert owners == [0, 1, 1, 0, 1, 0]
    assert rounds_of(costs, owners, 2) == [[0, 1], [3, 2], [5, 4]]
    assert imbalance(costs, owners, 2) == pytest.approx(18 / 17.5)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 8, 16, 32, 64])
def test_the_longest_rank_has_at_most_a_matrix_more_than_the_mean(size: int) -> None:
    """A Llama of 32 layers: queries, keys, values, output, gate, up, down."""
    layer = [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096)]
    layer += [(14336, 4096), (14336, 4096), (4096, 14336)]
    costs = [matrix_cost(shape) for _ in range(32) for shape in layer]
    owners = balanced_owners(costs, size)
    mean = sum(costs) / size
    assert imbalance(costs, owners, size) * mean <= mean + max(costs) * (size - 1) / size
    assert imbalance(costs, owners, size) < (1.005 if size <= 32 else 1.06)


@pytest.mark.parametrize("size", [1, 3, 8])
def test_every_matrix_is_in_one_round_and_no_rank_twice_in_one(size: int) -> None:
    costs = [(7 * number) % 11 + 1 for number in range(20)]
    owners = balanced_owners(costs, size)
    rounds = rounds_of(costs, owners, size)
    assert sorted(number for each in rounds for number in each) == list(range(20))
    assert all(len({owners[number] for number in each}) == len(each) for each in rounds)


def test_no_matrices_are_no_rounds() -> None:
    assert balanced_owners([], 3) == []
    assert rounds_of([], [], 3) == []
    assert imbalance([], [], 3) == 1.0
