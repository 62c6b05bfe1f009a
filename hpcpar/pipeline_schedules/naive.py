"""Layer-wise model parallelism: one microbatch at a time, so one rank works and all others wait.

    rank 0   0F0         0B0 0F1         0B1
    rank 1       1F0 1B0         1F1 1B1

idle     (p - 1) m (F + B + W) on every rank of p, over the whole step
alive    one microbatch
"""

from __future__ import annotations

from hpcpar.pipeline_schedules.action import Action
from hpcpar.pipeline_schedules.placement import Placement
from hpcpar.pipeline_schedules.schedule import Schedule


def naive(placement: Placement, microbatches: int) -> Schedule:
    """Every microbatch goes all the way forward and back before the next starts."""
    return Schedule(
        tuple(
            tuple(
                action
                for microbatch in range(microbatches)
                for action in (
                    *(Action(stage, "F", microbatch) for stage in stages),
                    *(Action(stage, "B", microbatch) for stage in reversed(stages)),
                )
            )
            for stages in placement.stages
        ),
        "naive",
    )
