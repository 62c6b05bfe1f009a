"""A model cut into stages: contiguous pieces whose costs are as even as can be. Pure numbers.

    items     embedding   layer 0   layer 1   …   layer L - 1   norm, head and loss        L + 2 of them
    split     ╰──────── stage 0 ───────╯╰─ stage 1 ─ …   ╰──────── last stage ──────╯

Which rank has which stage is the schedule's to say.
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

Placement = Mapping[int, int] | Sequence[int]
"""The rank of each stage, as `Schedule.rank_of_stage`."""

Cost = TypeVar("Cost", int, float)


def balanced(costs: Sequence[float], stages: int, rank_of_stage: Placement | None = None) -> StageSplit:
    """The split of items with these costs whose most expensive stage is the cheapest, exactly.

    Among such splits the one with the smallest sum of squared stage costs; then one whose first stage is the
    smaller, then the second and so on: earlier stages hold more microbatches' activations at a time.
    balanced([1] * 10, 4) has 2, 2, 3 and 3 items.

    rank_of_stage   where ranks have several stages, what counts is their sum: from there on items are moved
                    from stage to stage, one at a time, as long as that makes lower, in this order: the
                    largest sum of a rank, the squares of ranks' sums, the largest stage, the squares of
                    stages. The largest sum is the smallest there is when all layers cost the same; when
                    they do not, it may miss that, but is never above where it began.
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

    The first and the last stage may have no layer beside them.
    errors   LayoutError for numbers that do not add up to the model's layers, and a stage without anything
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
    """LayoutError unless the stages are not empty, follow on each other and have all the items."""
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
    """What each stage costs."""
    return [sum(costs[start:stop]) for start, stop in split]


def _require_costs(costs: Sequence[float]) -> None:
    for item, cost in enumerate(costs):
        if not (math.isfinite(cost) and cost >= 0):
            raise LayoutError(f"item {item} costs {cost!r}; a cost is a finite number, 0 or more")


def _whole_numbers(costs: Sequence[float]) -> list[int]:
    """The same in a unit small enough: sums are exact, so that what is equal ties."""
    exact = [Fraction(cost) if isinstance(cost, int) else Fraction(float(cost)) for cost in costs]
    unit = math.lcm(*(cost.denominator for cost in exact))
    return [int(cost * unit) for cost in exact]


def _smallest_limit(loads: Sequence[int], stages: int) -> int:
    """The smallest number that no stage needs to be above."""
    low, high = max(loads), sum(loads)
    while low < high:
        middle = (low + high) // 2
        if _stages_within(loads, middle) <= stages:
            high = middle
        else:
            low = middle + 1
    return low


def _stages_within(loads: Sequence[int], limit: int) -> int:
    """How many stages it takes when each is filled up to the limit."""
    stages, filled = 1, 0
    for load in loads:
        if filled + load > limit:
            stages, filled = stages + 1, 0
        filled += load
    return stages


def _evenest(loads: Sequence[int], stages: int, limit: int) -> list[int]:
    """Edges of the split with the smallest sum of squares under the limit; of such the first ends first."""
    items = len(loads)
    total = list(accumulate(loads, initial=0))
    # best[i]: (smallest sum of squares of items from i on, where their first stage ends), by stages left.
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
    """Edges after one item at a time has gone from one stage to another; those between pass theirs on."""
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
    """Every split in which one stage has an item less, and another one more."""
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
    """What the stages of each rank cost together."""
    return [
        sum(cost for cost, home in zip(of_stage, ranks, strict=True) if home == rank)
        for rank in range(max(ranks) + 1)
    ]


def _squares(numbers: Sequence[int]) -> int:
    return sum(number * number for number in numbers)


def _rank_of(placement: Placement, stage: int) -> int:
    try:
        return placement[stage]
    except (IndexError, KeyError) as error:
        raise LayoutError(
            f"stage {stage} is on no rank: the placement has {len(placement)} stages; place each of them"
        ) from error
