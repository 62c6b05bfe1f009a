"""Peak memory of activations on each rank of a pipeline.

A forward saves activations for its backward. A whole backward frees them all. A split backward frees in B
what only B reads, and in W the rest, the inputs of the weight products.

    row      0F0 0F1 0B0 0W0 0F2 ...        a chunk is one microbatch's activations of one stage
    chunks     1   2   2   1   2
"""

from __future__ import annotations

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
