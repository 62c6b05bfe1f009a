"""Zero-bubble schedules with one stage on each rank: W, split from the backward, fills the bubble.

    ZB-H1   rank 0   0F0 0F1         0B0 0W0 0F2 0B1 0W1 0B2 0W2
            rank 1       1F0 1B0 1F1 1B1 1W0 1F2 1B2 1W1 1W2

B sends the input's gradient to the rank before at once. W runs when a forward needs its memory, and in the
cool-down, where a rank would wait for a backward.

          warm-up forwards, rank r of p bubble of rank 0, no hops                 alive on every rank
    H1    p - r                         (p - 1)(F + B - W), if W <= F             min(m, p)
    H2    2 (p - r) - 1                 (p - 1)(F + B - 2W), if also 2W <= F + B  min(m, 2p - 1)

with m >= p microbatches for H1, and m >= 2p - 1 for H2. 1F1B has (p - 1)(F + B + W).

source   Qi, Wan, Huang, Lin 2023, Zero Bubble Pipeline Parallelism, arXiv 2401.10241, section 2
"""

from __future__ import annotations

from collections.abc import Iterator

from hpcpar.pipeline_schedules.action import Action
from hpcpar.pipeline_schedules.pipeline_schedule import Schedule


def zb_h1(ranks: int, microbatches: int, *, memory_limit: int | None = None) -> Schedule:
    """Build ZB-H1: on all ranks the memory of 1F1B's first rank, and a third of its bubble.

    memory_limit   microbatches that may be alive on a rank, from 1; more than the ranks are not used
    """
    limit = ranks if memory_limit is None else min(memory_limit, ranks)
    return Schedule(_rows(ranks, microbatches, limit), "zb-h1")


def zb_h2(ranks: int, microbatches: int, *, memory_limit: int | None = None) -> Schedule:
    """Build ZB-H2: twice the memory, so that no rank waits between its first and its last action.

    memory_limit   microbatches that may be alive on a rank, from 1; from ZB-H1's p to the 2p - 1 that
                   this takes by itself, the bubble shrinks step by step
    """
    limit = 2 * ranks - 1 if memory_limit is None else min(memory_limit, 2 * ranks - 1)
    return Schedule(_rows(ranks, microbatches, limit), "zb-h2")


def _rows(ranks: int, microbatches: int, limit: int) -> tuple[tuple[Action, ...], ...]:
    return tuple(
        tuple(_row(stage, microbatches, _ahead(stage, ranks, limit), limit)) for stage in range(ranks)
    )


def _ahead(stage: int, ranks: int, limit: int) -> int:
    """Count the warm-up forwards: those of 1F1B, and up to eager 1F1B's as far as the limit allows."""
    to_the_end = ranks - stage
    return min(2 * to_the_end - 1, max(limit - stage, min(limit, to_the_end)))


def _row(stage: int, microbatches: int, ahead: int, limit: int) -> Iterator[Action]:
    forwards, weights = min(ahead, microbatches), 0
    yield from (Action(stage, "F", each) for each in range(forwards))
    for microbatch in range(microbatches):
        yield Action(stage, "B", microbatch)
        # Alive: forward done, W not. Once no forward is left, a W fills the wait for the next backward.
        if forwards - weights == limit or forwards == microbatches:
            yield Action(stage, "W", weights)
            weights += 1
        if forwards < microbatches:
            yield Action(stage, "F", forwards)
            forwards += 1
    yield from (Action(stage, "W", each) for each in range(weights, microbatches))
