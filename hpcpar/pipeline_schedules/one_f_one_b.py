"""1F1B, one forward and one backward in turn: each backward frees memory for a forward.

    1F1B, rank 0    0F0 0F1         0B0 0F2 0B1     0B2
          rank 1        1F0 1B0 1F1 1B1 1F2 1B2

A rank warms up with as many forwards as there are ranks from it to the last one. Eager 1F1B runs more, so
that messages travel while the rank computes: it always has one more forward to run.

          warm-up and first forward, rank r of p     bubble, no hops         alive
    1F1B  p - r                                      (p - 1)(F + B + W)      min(m, p - r)
    eager 2 (p - r) - 1                              (p - 1)(F + B + W)      min(m, 2 (p - r) - 1)

source   Harlap et al. 2018, PipeDream, arXiv 1806.03377; with a flush at the end of every step: Narayanan et
         al. 2021, arXiv 2104.04473, section 2.2; eager: Zhuang et al. 2022, arXiv 2211.05322
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hpcpar.pipeline_schedules.action import Action
from hpcpar.pipeline_schedules.pipeline_schedule import Schedule


def one_f_one_b(ranks: int, microbatches: int, *, memory_limit: int | None = None) -> Schedule:
    """Build 1F1B, one stage on each rank.

    memory_limit   microbatches that may be alive on a rank, from 1; fewer than the ranks make it slower
    """
    ahead = [ranks - rank for rank in range(ranks)]
    return Schedule(_rows(ahead, microbatches, memory_limit), "1f1b")


def eager_one_f_one_b(ranks: int, microbatches: int, *, memory_limit: int | None = None) -> Schedule:
    """Build 1F1B with about twice as many warm-up forwards, one stage on each rank.

    memory_limit   microbatches that may be alive on a rank, from 1
    """
    ahead = [2 * (ranks - rank) - 1 for rank in range(ranks)]
    return Schedule(_rows(ahead, microbatches, memory_limit), "eager-1f1b")


def in_turn(forwards: Sequence[Action], backwards: Sequence[Action], ahead: int) -> Iterator[Action]:
    """Yield `ahead` forwards, then a backward and a forward in turn, then the remaining backwards."""
    yield from forwards[:ahead]
    for place, backward in enumerate(backwards):
        yield backward
        yield from forwards[ahead + place : ahead + place + 1]


def _rows(
    ahead: Sequence[int], microbatches: int, memory_limit: int | None
) -> tuple[tuple[Action, ...], ...]:
    return tuple(
        tuple(
            in_turn(
                [Action(stage, "F", each) for each in range(microbatches)],
                [Action(stage, "B", each) for each in range(microbatches)],
                forwards if memory_limit is None else min(forwards, memory_limit),
            )
        )
        for stage, forwards in enumerate(ahead)
    )
