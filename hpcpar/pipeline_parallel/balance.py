"""Balanced division of a model into stages: contiguous ranges of items with even costs. Pure integers.

    items     embedding   layer 0   layer 1   …   layer L - 1   norm, head and loss        L + 2 of them
    split     ╰──────── stage 0 ───────╯╰─ stage 1 ─ …   ╰──────── last stage ──────╯

The schedule places stages on ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import accumulate, pairwise
from typing import TypeVar

from hpcpar.errors import LayoutError
from hpcpar.partition import offsets

StageSplit = tuple[tuple[int, int], ...]
"""(start, stop) of each stage's items."""

RankOfStage = Mapping[int, int] | Sequence[int]
"""Rank of each stage, as `Schedule.rank_of_stage`."""

Cost = TypeVar("Cost", int, float)


def balanced(costs: Sequence[float], stages: int, rank_of_stage: RankOfStage | None = None) -> StageSplit:
    """Split items so that the most expensive stage is as cheap as possible, exactly.

    Ties: the smallest sum of squared stage costs; then the smaller first stage, second stage and so on, as
    earlier stages keep more microbatches alive. balanced([1] * 10, 4) has 2, 2, 3 and 3 items.

    rank_of_stage   balance the sums of ranks with several stages: items move between stages, one at a time,
                    as long as this lowers, in this order, the largest rank's sum, the squares of ranks'
                    sums, the largest stage, the squares of stages. The largest sum is optimal if all layers
                    cost the same; else it may miss the optimum, but is never above the start.
    cost            stages · items² steps; with `rank_of_stage` stages² · stages for each move
    errors          LayoutError for more stages than items, and costs that are not finite and 0 or more
    """
    _require_costs(costs)
    if not 1 <= stages <= len(costs):
        raise LayoutError(
            f"{stages} stages for {len(costs)} items (embedding, layers, head); every stage needs at least "
            f"one, so choose 1 to {len(costs)} stages"
        )
    loads = _whole_numbers(costs)
    edges = _evenest(loads, stages, _smallest_limit(loads, stages))
    if rank_of_stage is not None:
        ranks = [_rank_of(rank_of_stage, stage) for stage in range(stages)]
        if len(set(ranks)) < stages:
            edges = _even_ranks(loads, edges, ranks)
    return tuple(pairwise(edges))


def by_hand(layers_per_stage: Sequence[int], layers: int) -> StageSplit:
    """by_hand([2, 3, 3], layers=8) == ((0, 3), (3, 6), (6, 10)): embedding and head belong to the ends.

    The first and the last stage may have no other layer.
    errors   LayoutError for numbers that do not add up to the model's layers, and an empty stage
    """
    counts = list(layers_per_stage)
    told = ", ".join(map(str, counts))
    if not counts:
        raise LayoutError("layers of each stage: none are given; name at least one stage")
    for stage, count in enumerate(counts):
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise LayoutError(f"layers of each stage: {told}: stage {stage} cannot have {count!r} layers")
        if count == 0 and 0 < stage < len(counts) - 1:
            raise LayoutError(
                f"layers of each stage: {told}: stage {stage} would have nothing to do; only the first and "
                "the last, which have the embedding and the head, may go without layers"
            )
    if sum(counts) != layers:
        raise LayoutError(
            f"layers of each stage: {told} are {sum(counts)} together, but the model has {layers}; "
            f"change one of them by {layers - sum(counts):+d}"
        )
    counts[0] += 1
    counts[-1] += 1
    return tuple(pairwise(offsets(counts)))


def require_split(split: Sequence[tuple[int, int]], items: int) -> None:
    """Raise LayoutError unless the stages are contiguous, not empty, and cover all items."""
    reached = 0
    for stage, (start, stop) in enumerate(split):
        if start != reached or stop <= start:
            raise LayoutError(
                f"stage {stage} has items {start} to {stop}; it should begin at {reached}, where the one "
                "before ends, and have at least one"
            )
        reached = stop
    if reached != items:
        raise LayoutError(
            f"the stages have {reached} items, but the model {items} (embedding, layers, head); "
            "split all of them"
        )


def stage_costs(costs: Sequence[float], split: Sequence[tuple[int, int]]) -> list[float]:
    """Sum the costs of each stage."""
    return [sum(costs[start:stop]) for start, stop in split]


def _require_costs(costs: Sequence[float]) -> None:
    for item, cost in enumerate(costs):
        if not (math.isfinite(cost) and cost >= 0):
            raise LayoutError(f"item {item} costs {cost!r}; a cost is a finite number, 0 or more")


def _whole_numbers(costs: Sequence[float]) -> list[int]:
    """Scale costs to integers, so that sums are exact and equal ones tie."""
    exact = [Fraction(cost) if isinstance(cost, int) else Fraction(float(cost)) for cost in costs]
    unit = math.lcm(*(cost.denominator for cost in exact))
    return [int(cost * unit) for cost in exact]


def _smallest_limit(loads: Sequence[int], stages: int) -> int:
    """Find the least cost of the most expensive stage."""
    low, high = max(loads), sum(loads)
    while low < high:
        middle = (low + high) // 2
        if _stages_within(loads, middle) <= stages:
            high = middle
        else:
            low = middle + 1
    return low


def _stages_within(loads: Sequence[int], limit: int) -> int:
    """Count the stages needed if each is filled up to the limit."""
    stages, filled = 1, 0
    for load in loads:
        if filled + load > limit:
            stages, filled = stages + 1, 0
        filled += load
    return stages


def _evenest(loads: Sequence[int], stages: int, limit: int) -> list[int]:
    """Find the split of least sum of squares under the limit, with the earliest edges among equals."""
    items = len(loads)
    total = list(accumulate(loads, initial=0))
    # best[i]: (least sum of squares of items from i on, end of their first stage), by stages left.
    best: dict[int, tuple[int, int]] = {items: (0, items)}
    table = [best]
    for _ in range(stages):
        after, best = best, {}
        for start in range(items):
            for stop in range(start + 1, items + 1):
                load = total[stop] - total[start]
                if load > limit:
                    break
                if stop in after:
                    squares = load * load + after[stop][0]
                    if start not in best or squares < best[start][0]:
                        best[start] = (squares, stop)
        table.append(best)
    edges = [0]
    for left in range(stages, 0, -1):
        edges.append(table[left][edges[-1]][1])
    return edges


def _even_ranks(loads: Sequence[int], edges: Sequence[int], ranks: Sequence[int]) -> list[int]:
    """Move items between stages, one at a time, until no move lowers the ranks' costs."""
    total = list(accumulate(loads, initial=0))

    def badness(edges: Sequence[int]) -> tuple[int, int, int, int]:
        of_stage = [total[stop] - total[start] for start, stop in pairwise(edges)]
        of_rank = _sums(of_stage, ranks)
        return max(of_rank), _squares(of_rank), max(of_stage), _squares(of_stage)

    edges = list(edges)
    least = badness(edges)
    while True:
        candidates = [(badness(moved), moved) for moved in _moves(edges)]
        found, moved = min(candidates, default=(least, edges))
        if found >= least:
            return edges
        least, edges = found, moved


def _moves(edges: list[int]) -> list[list[int]]:
    """List the splits with one item less in one stage, and one more in another."""
    counts = [stop - start for start, stop in pairwise(edges)]
    moves = []
    for giver, count in enumerate(counts):
        for taker in range(len(counts)):
            if count > 1 and taker != giver:
                changed = counts.copy()
                changed[giver] -= 1
                changed[taker] += 1
                moves.append(list(offsets(changed)))
    return moves


def _sums(of_stage: Sequence[Cost], ranks: Sequence[int]) -> list[Cost]:
    """Sum the costs of each rank's stages."""
    return [
        sum(cost for cost, home in zip(of_stage, ranks, strict=True) if home == rank)
        for rank in range(max(ranks) + 1)
    ]


def _squares(numbers: Sequence[int]) -> int:
    return sum(number * number for number in numbers)


def _rank_of(placement: RankOfStage, stage: int) -> int:
    try:
        return placement[stage]
    except (IndexError, KeyError) as error:
        raise LayoutError(
            f"stage {stage} is on no rank: the placement has {len(placement)} stages; place each of them"
        ) from error
