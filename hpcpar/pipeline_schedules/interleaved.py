"""Interleaved 1F1B: several stages on each rank in a loop, so a shorter bubble.

    2 ranks, 2 stages on each, 2 microbatches to a round

    rank 0   0F0 0F1 2F0 2F1 0F2     2B0 0F3 2B1 2F2 0B0 2F3 0B1     2B2     2B3 0B2 0B3
    rank 1       1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3

Microbatches come in rounds of about as many as there are ranks. A whole round passes the rank's first stage,
then its second one, and so on; then the next round comes. Backwards pass the stages in reverse.

bubble   (p - 1)(F + B + W) / v on rank 0 of p, with v stages per rank and m >= p, no hops
alive    2 (p - r - 1) + (v - 1) R + 1 chunks on rank r; R, microbatches in a round, is p where p divides m
source   Narayanan et al. 2021, arXiv 2104.04473, section 2.2, where p divides m
"""

from __future__ import annotations

from hpcpar.errors import ScheduleError
from hpcpar.partition import bounds
from hpcpar.pipeline_schedules.action import Action
from hpcpar.pipeline_schedules.one_f_one_b import in_turn
from hpcpar.pipeline_schedules.pipeline_schedule import Schedule
from hpcpar.pipeline_schedules.stage_placement import StagePlacement


def interleaved(placement: StagePlacement, microbatches: int, *, memory_limit: int | None = None) -> Schedule:
    """Build 1F1B over the stages of a loop, for any number of microbatches.

    Every round has at least as many microbatches as ranks, if there are so many; rounds are as many and as
    even as can be, the larger ones first.

    memory_limit   chunks that may be alive on a rank, at least its number of stages
    errors         ScheduleError for a smaller limit
    """
    ranks, per_rank = placement.ranks, placement.per_rank
    if memory_limit is not None and memory_limit < per_rank:
        raise ScheduleError(
            f"interleaved with {per_rank} stages per rank keeps at least {per_rank} chunks alive, but the "
            f"limit is {memory_limit}: raise the limit, or ask for fewer stages per rank"
        )
    rounds = _rounds(ranks, per_rank, microbatches, memory_limit)
    most, fewest = len(rounds[0]), len(rounds[-1])
    # The last rank's first backward needs `least` forwards. With short rounds, more than 2 · fewest beyond
    # them would deadlock: a forward would wait for a backward that waits for that forward.
    least = (per_rank - 1) * most + 1
    spare = 2 * fewest if memory_limit is None else min(2 * fewest, memory_limit - least)
    ahead = [least + min(2 * (ranks - rank - 1), spare) for rank in range(ranks)]
    return Schedule(
        tuple(_row(stages, rounds, ahead[rank]) for rank, stages in enumerate(placement.stages)),
        "interleaved",
    )


def _row(stages: tuple[int, ...], rounds: list[range], ahead: int) -> tuple[Action, ...]:
    forwards = [Action(stage, "F", each) for members in rounds for stage in stages for each in members]
    backwards = [Action(stage, "B", each) for members in rounds for stage in stages[::-1] for each in members]
    return tuple(in_turn(forwards, backwards, ahead))


def _rounds(ranks: int, per_rank: int, microbatches: int, memory_limit: int | None) -> list[range]:
    """Divide the microbatches into rounds.

    Under a limit rounds are shorter if that leaves memory for forwards until the first backward arrives; a
    rule of thumb.
    """
    count = max(1, microbatches // ranks)
    if memory_limit is not None:
        while count < microbatches:
            most, fewest = -(-microbatches // count), microbatches // count
            if (per_rank - 1) * most + 1 + min(ranks - 1, fewest) <= memory_limit:
                break
            count += 1
    return [range(*edges) for edges in bounds(microbatches, count)]
