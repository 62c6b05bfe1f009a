"""Peak memory of activations on each rank of a pipeline.

A forward saves activations for its backward. A whole backward frees them all. A split backward frees in B
what only B reads, and in W the rest, the inputs of the weight products.

    row      0F0 0F1 0B0 0W0 0F2 ...        a chunk is one microbatch's activations of one stage
    chunks     1   2   2   1   2
"""

from __future__ import annotations

from collections.abc import Sequence

from hpcpar.errors import ScheduleError
from hpcpar.pipeline_schedules.pipeline_schedule import Schedule


def peak_chunks(schedule: Schedule) -> tuple[int, ...]:
    """Count, for every rank, the most chunks alive at once: until their whole backward, or their W."""
    return tuple(max(kept, default=0) for kept in chunks_kept(schedule))


def chunks_kept(schedule: Schedule) -> tuple[tuple[int, ...], ...]:
    """Count, for every rank, the chunks alive during each of its actions."""
    return tuple(_chunks_of_row(schedule, rank) for rank in range(schedule.ranks))


def _chunks_of_row(schedule: Schedule, rank: int) -> tuple[int, ...]:
    alive = 0
    during = []
    for stage, kind, microbatch in schedule.rows[rank]:
        alive += kind == "F"
        during.append(alive)
        alive -= kind == "W" or (kind == "B" and not schedule.is_split(stage, microbatch))
    return tuple(during)


def peak_nbytes(
    schedule: Schedule, chunk_nbytes: float | Sequence[float], *, kept_after_backward: float = 1.0
) -> tuple[float, ...]:
    """Compute, for every rank, the most bytes of activations alive at once.

    chunk_nbytes          activations of one microbatch: one number for all stages, or one for each
    kept_after_backward   share of them that W still reads after B
    errors                ScheduleError for another number of stages, negative bytes, a share not in 0 to 1
    """
    sizes = [chunk_nbytes] * schedule.stages if isinstance(chunk_nbytes, (int, float)) else list(chunk_nbytes)
    if len(sizes) != schedule.stages or min(sizes, default=0) < 0:
        raise ScheduleError(
            f"chunk_nbytes {chunk_nbytes} for {schedule.stages} stages: give one number of bytes, "
            "not negative, or one for each stage"
        )
    if not 0 <= kept_after_backward <= 1:
        raise ScheduleError(
            f"kept_after_backward is {kept_after_backward}: it is the share of a chunk that W reads, 0 to 1"
        )
    return tuple(_peak_of_row(schedule, rank, sizes, kept_after_backward) for rank in range(schedule.ranks))


def _peak_of_row(schedule: Schedule, rank: int, sizes: Sequence[float], kept_share: float) -> float:
    alive = peak = 0.0
    for stage, kind, microbatch in schedule.rows[rank]:
        if kind == "F":
            alive += sizes[stage]
            peak = max(peak, alive)
        elif kind == "W":
            alive -= sizes[stage] * kept_share
        else:
            alive -= sizes[stage] * (1 - kept_share if schedule.is_split(stage, microbatch) else 1)
    return peak
