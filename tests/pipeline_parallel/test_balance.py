"""Costs are cut into stages as evenly as can be: drawn by hand, and against every split there is."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise

import pytest

from hpcpar.errors import LayoutError
from hpcpar.pipeline_parallel.balance import (
    StageSplit,
    balanced,
    by_hand,
    require_split,
    stage_costs,
)
from hpcpar.pipeline_schedules.stage_placement import loop, v_shape


def all_splits(items: int, stages: int) -> Iterator[StageSplit]:
    for cuts in combinations(range(1, items), stages - 1):
        yield tuple(pairwise((0, *cuts, items)))


def sizes(split: StageSplit) -> list[int]:
    return [stop - start for start, stop in split]


def drawn_costs() -> list[list[int]]:
    draw = random.Random(3)
    return [[draw.randint(0, 9) for _ in range(draw.randint(1, 9))] for _ in range(40)]


@pytest.mark.parametrize(
    ("costs", "stages", "expected"),
    [
        ([1, 1, 1, 1], 2, [2, 2]),
        ([1] * 10, 4, [2, 2, 3, 3]),  # the earlier are the smaller
        ([0, 1, 1, 1, 1, 2], 3, [3, 2, 1]),  # embedding for nothing, a head worth two layers
        ([5, 1, 1, 1], 2, [1, 3]),
        ([5, 1, 1, 1], 3, [1, 1, 2]),
        ([1, 1, 1, 5], 3, [1, 2, 1]),
        ([7], 1, [1]),
        ([0, 0, 0], 2, [1, 2]),
        ([0.1] * 6, 3, [2, 2, 2]),  # 0.1 + 0.1 + 0.1 is not 0.3 in floating point
        ([0.1] * 7, 3, [2, 2, 3]),
    ],
)
def test_stages_are_as_even_as_can_be(costs: list[float], stages: int, expected: list[int]) -> None:
    assert sizes(balanced(costs, stages)) == expected


def test_of_all_splits_it_has_the_smallest_largest_stage_then_squares_then_first_stages() -> None:
    compared = 0
    for costs in drawn_costs():
        for stages in range(1, len(costs) + 1):
            best = min(
                all_splits(len(costs), stages),
                key=lambda split: (
                    max(stage_costs(costs, split)),
                    sum(cost * cost for cost in stage_costs(costs, split)),
                    sizes(split),
                ),
            )
            assert balanced(costs, stages) == best
            compared += 1
    assert compared > 150


def test_the_unit_of_costs_does_not_matter() -> None:
    for costs in drawn_costs():
        for stages in range(1, len(costs) + 1):
            halves = [cost / 1024 for cost in costs]
            assert balanced(halves, stages) == balanced(costs, stages)


def test_every_split_is_contiguous_without_empty_stages() -> None:
    for costs in drawn_costs():
        for stages in range(1, len(costs) + 1):
            require_split(balanced(costs, stages), len(costs))
            require_split(balanced(costs, stages, loop(1, stages).rank_of_stage), len(costs))


def test_more_stages_than_items_are_refused() -> None:
    with pytest.raises(LayoutError, match=r"4 stages for 3 items.*choose 1 to 3"):
        balanced([1, 1, 1], 4)
    with pytest.raises(LayoutError, match="0 stages"):
        balanced([1, 1, 1], 0)


@pytest.mark.parametrize("cost", [-1, math.nan, math.inf])
def test_a_cost_that_is_none_is_refused(cost: float) -> None:
    with pytest.raises(LayoutError, match="item 1 costs"):
        balanced([1, cost], 1)


def rank_costs(
    costs: Sequence[float], split: Sequence[tuple[int, int]], rank_of_stage: Sequence[int]
) -> list[float]:
    """Sum the costs of each rank's stages."""
    sums = [0.0] * (1 + max(rank_of_stage[stage] for stage in range(len(split))))
    for stage, cost in enumerate(stage_costs(costs, split)):
        sums[rank_of_stage[stage]] += cost
    return sums


def test_in_a_v_the_rank_with_the_head_gets_fewer_layers() -> None:
    """A head worth four layers of six: by stages alone its rank gets two of them beside it."""
    costs = [0, 1, 1, 1, 1, 1, 1, 4]
    alone, together = balanced(costs, 4), balanced(costs, 4, v_shape(2).rank_of_stage)
    assert stage_costs(costs, alone) == [2, 2, 2, 4]
    assert rank_costs(costs, alone, v_shape(2).rank_of_stage) == [6, 4]
    assert stage_costs(costs, together) == [1, 2, 3, 4]
    assert rank_costs(costs, together, v_shape(2).rank_of_stage) == [5, 5]


def placements(ranks: int) -> list[Sequence[int]]:
    return [
        loop(ranks).rank_of_stage,
        loop(ranks, 2).rank_of_stage,
        loop(ranks, 3).rank_of_stage,
        v_shape(ranks).rank_of_stage,
    ]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_with_equal_layers_no_split_has_a_smaller_largest_rank(ranks: int) -> None:
    compared = 0
    for placement in placements(ranks):
        for layers in (4, 7, 9):
            for embedding, head in ((0, 0), (0, 5), (1, 2), (3, 1)):
                costs = [embedding, *[2] * layers, head]
                if len(placement) > len(costs):
                    continue
                best = min(
                    max(rank_costs(costs, split, placement))
                    for split in all_splits(len(costs), len(placement))
                )
                assert max(rank_costs(costs, balanced(costs, len(placement), placement), placement)) == best
                compared += 1
    assert compared >= 40


@pytest.mark.parametrize("ranks", [2, 3])
def test_with_any_costs_ranks_are_no_worse_than_without_the_placement(ranks: int) -> None:
    better = 0
    for costs in drawn_costs():
        for placement in placements(ranks):
            if len(placement) > len(costs):
                continue
            without = balanced(costs, len(placement))
            found = balanced(costs, len(placement), placement)
            if len(placement) == ranks:
                assert found == without
            largest, before = (max(rank_costs(costs, split, placement)) for split in (found, without))
            assert largest <= before
            better += largest < before
    assert better > 0


def test_a_placement_may_be_a_mapping_or_a_sequence() -> None:
    costs = [0, *[1] * 14, 2]
    in_order = (0, 1, 1, 0)
    assert balanced(costs, 4, in_order) == balanced(costs, 4, v_shape(2).rank_of_stage)


def test_a_placement_without_a_stage_is_refused() -> None:
    with pytest.raises(LayoutError, match="stage 2 is on no rank: the placement has 2 stages"):
        balanced([1, 1, 1], 3, (0, 1))


@pytest.mark.parametrize(
    ("counts", "layers", "expected"),
    [
        ([2, 3, 3], 8, ((0, 3), (3, 6), (6, 10))),
        ([8], 8, ((0, 10),)),
        ([0, 8, 0], 8, ((0, 1), (1, 9), (9, 10))),
        ([0, 1], 1, ((0, 1), (1, 3))),
    ],
)
def test_stages_by_hand_have_the_layers_given(counts: list[int], layers: int, expected: StageSplit) -> None:
    assert by_hand(counts, layers) == expected
    require_split(expected, layers + 2)


@pytest.mark.parametrize(
    ("counts", "told"),
    [
        ([2, 3, 4], "2, 3, 4 are 9 together, but the model has 8; change one of them by -1"),
        ([2, 3], "are 5 together, but the model has 8; change one of them by [+]3"),
        ([4, 0, 4], "stage 1 would have nothing to do"),
        ([9, -1], "stage 1 cannot have -1 layers"),
        ([4.0, 4], "stage 0 cannot have 4.0 layers"),
        ([], "none are given"),
    ],
)
def test_stages_by_hand_that_do_not_fit_are_refused(counts: list[int], told: str) -> None:
    with pytest.raises(LayoutError, match=told):
        by_hand(counts, 8)


@pytest.mark.parametrize(
    ("split", "told"),
    [
        (((0, 2), (3, 5)), "stage 1 has items 3 to 5; it should begin at 2"),
        (((0, 2), (2, 2), (2, 5)), "stage 1 has items 2 to 2"),
        (((1, 5),), "stage 0 has items 1 to 5; it should begin at 0"),
        (((0, 2), (2, 4)), "the stages have 4 items, but the model 5"),
    ],
)
def test_a_split_with_holes_is_refused(split: StageSplit, told: str) -> None:
    with pytest.raises(LayoutError, match=told):
        require_split(split, 5)
