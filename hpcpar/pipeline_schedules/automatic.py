"""A schedule made for measured times and a limit of memory.

The zero-bubble paper's heuristic leaves some choices open. It is run with all of them, and the cheapest order
is taken. `effort="search"` goes on from there: rank by rank it changes how many forwards come before the
first backward, for as long as that helps.

    bubble rate of 8 ranks, 24 microbatches       memory of 8      of 16 microbatches
    F 29.718, B 29.444, W 19.927, hop 0.527
        heuristic                                 0.1323           0.0029     as printed for ZB-1p and ZB-2p
        search                                    0.1323           0.0012

Nothing here depends on chance or on a clock: ranks that give the same arguments get the same schedule. Times
that ranks have measured differ from rank to rank, so they agree on them first.

source   Qi et al. 2023, Zero Bubble Pipeline Parallelism, arXiv 2401.10241, section 3.1
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import product
from typing import Literal, get_args

from hpcpar.errors import ScheduleError
from hpcpar.pipeline_schedules.action import Action
from hpcpar.pipeline_schedules.heuristic import ROUNDING, Order, Pipeline, Way, warm_up
from hpcpar.pipeline_schedules.one_f_one_b import one_f_one_b
from hpcpar.pipeline_schedules.price import Durations, price
from hpcpar.pipeline_schedules.schedule import Schedule
from hpcpar.pipeline_schedules.zero_bubble import zb_h1, zb_h2

Effort = Literal["heuristic", "search"]

# Orders that a search makes at the most: a few seconds' work for 32 ranks and 96 microbatches.
TRIALS = 400


def automatic(
    ranks: int,
    microbatches: int,
    durations: Durations,
    memory_limit: float | None = None,
    *,
    kept_after_backward: float = 1.0,
    effort: Effort = "heuristic",
) -> Schedule:
    """The cheapest schedule found, by the `cost_s` of its `price`: one stage per rank, every backward split.

    durations             seconds of F, B, W and a hop; of all stages alike, or of each
    memory_limit          microbatches that may be alive on a rank, from 1; None: no limit. The paper's ZB-1p
                          has as many as there are ranks, its ZB-2p twice that
    kept_after_backward   the share of its memory that a microbatch takes between B and W, from 0 to 1. With 1
                          a schedule is within the limit as `prove` counts. The paper counts the inputs of a
                          layer's products, 32 / (34 + 5as/h), which is less than a half of its models'
    effort                "heuristic": up to a second at 32 ranks and 96 microbatches; "search": a few
    errors                ScheduleError for a limit that lets no forward run, and for other numbers that
                          leave no schedule
    """
    pipeline = _pipeline(ranks, microbatches, durations, memory_limit, kept_after_backward)
    if effort not in get_args(Effort):
        raise ScheduleError(f"effort is {effort!r}: take one of {', '.join(get_args(Effort))}")
    cost_s, way = _grid(pipeline)
    if effort == "search":
        cost_s, way = _climb(pipeline, cost_s, way)
    rows = Order(pipeline, way).rows
    # Where stages differ much, a fixed pattern is better now and then.
    for pattern in _patterns(pipeline):
        pattern_s = price(pattern, durations).cost_s
        if pattern_s < cost_s * (1 - ROUNDING):
            cost_s, rows = pattern_s, pattern.rows
    return Schedule(rows, "automatic")


def _pipeline(
    ranks: int,
    microbatches: int,
    durations: Durations,
    memory_limit: float | None,
    kept_after_backward: float,
) -> Pipeline:
    if ranks < 1 or microbatches < 1:
        raise ScheduleError(
            f"asked for {ranks} ranks and {microbatches} microbatches: a schedule needs at least one of each"
        )
    if memory_limit is not None and not memory_limit >= 1:
        raise ScheduleError(
            f"memory_limit is {memory_limit} microbatches alive on a rank, so that no forward can run: "
            f"give 1 or more; 1F1B takes {min(ranks, microbatches)}"
        )
    if not 0 <= kept_after_backward <= 1:
        raise ScheduleError(
            f"kept_after_backward is {kept_after_backward}: give a share of its memory, from 0 to 1"
        )
    forward_s, backward_s, weight_s = durations.of_stages(ranks)
    return Pipeline(
        microbatches=microbatches,
        forward_s=tuple(forward_s),
        backward_s=tuple(backward_s),
        weight_s=tuple(weight_s),
        hop_s=durations.hop_s,
        memory_limit=microbatches if memory_limit is None else min(memory_limit, microbatches),
        kept_after_backward=kept_after_backward,
    )


def _grid(pipeline: Pipeline) -> tuple[float, Way]:
    """The cheapest of all ways that the heuristic knows by itself, and its cost; the first among equals."""
    both = (False, True)
    starts = (
        warm_up(pipeline, delay_backward=delay, leave_room=room)
        for room, delay in product((True, False), both)
    )
    ways = dict.fromkeys(
        Way(start, postpone, short) for start, postpone, short in product(starts, both, (True, False))
    )
    best, *others = ways
    cost_s = Order(pipeline, best).cost_s
    for way in others:
        cost_s, best = _cheaper(pipeline, way, cost_s, best)
    return cost_s, best


def _climb(pipeline: Pipeline, cost_s: float, best: Way) -> tuple[float, Way]:
    """Change the warm-up of one rank at a time by one forward, and keep what costs less."""
    trials = 0
    before_s = None
    while cost_s != before_s:
        before_s = cost_s
        for rank, by in product(range(pipeline.ranks - 1), (1, -1)):
            changed = _changed(pipeline, best.warm_up, rank, by)
            if changed is not None and trials < TRIALS:
                trials += 1
                cost_s, best = _cheaper(pipeline, replace(best, warm_up=changed), cost_s, best)
    return cost_s, best


def _cheaper(pipeline: Pipeline, way: Way, cost_s: float, best: Way) -> tuple[float, Way]:
    """The other way and its cost if that is less, else the best one so far."""
    below_s = cost_s * (1 - ROUNDING)
    found_s = Order(pipeline, way, below_s).cost_s
    return (found_s, way) if found_s < below_s else (cost_s, best)


def _changed(pipeline: Pipeline, counts: tuple[int, ...], rank: int, by: int) -> tuple[int, ...] | None:
    """The warm-up with so many more on one rank; no less on those before it, and no more on those after."""
    count = counts[rank] + by
    if not 1 <= count <= int(pipeline.memory_limit + ROUNDING):
        return None
    before = (max(each, count) for each in counts[:rank])
    after = (min(each, count) for each in counts[rank + 1 :])
    return (*before, count, *after)


def _patterns(pipeline: Pipeline) -> Iterator[Schedule]:
    """1F1B with W after each B, ZB-H1 and ZB-H2, each in memory's limit."""
    limit = int(pipeline.memory_limit + ROUNDING)
    whole = one_f_one_b(pipeline.ranks, pipeline.microbatches, memory_limit=limit)
    yield Schedule(tuple(tuple(_split(row)) for row in whole.rows))
    yield zb_h1(pipeline.ranks, pipeline.microbatches, memory_limit=limit)
    yield zb_h2(pipeline.ranks, pipeline.microbatches, memory_limit=limit)


def _split(row: Iterable[Action]) -> Iterator[Action]:
    for action in row:
        yield action
        if action.kind == "B":
            yield Action(action.stage, "W", action.microbatch)
