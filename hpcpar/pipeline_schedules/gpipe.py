"""GPipe, all forwards and then all backwards; and layer-wise model parallelism, one microbatch at a time.

    gpipe    rank 0   0F0 0F1 0F2             0B0 0B1 0B2
             rank 1       1F0 1F1 1F2 1B0 1B1 1B2

    naive    rank 0   0F0         0B0 0F1         0B1
             rank 1       1F0 1B0         1F1 1B1

             bubble on every rank of p                               microbatches alive
    gpipe    (p - 1)(F + B + W), over v with v stages per rank and m >= p   m
    naive    (p - 1) m (F + B + W), over the whole step                     1

With several stages on a rank, GPipe's microbatches all pass one stage before they enter the rank's next one.

source   Huang et al. 2018, GPipe, arXiv 1811.06965; with several stages per rank: Lamy-Poirier 2022,
         Breadth-First Pipeline Parallelism, arXiv 2211.05953
"""

from __future__ import annotations

from hpcpar.pipeline_schedules.action import Action
from hpcpar.pipeline_schedules.pipeline_schedule import Schedule
from hpcpar.pipeline_schedules.stage_placement import StagePlacement


def gpipe(placement: StagePlacement, microbatches: int) -> Schedule:
    """Run all forwards and then all backwards.

    Backwards run in the order of the forwards, where the paper reverses them. Bubble and memory are the same,
    and gradients add up in the order in which one process would add them.
    """
    return Schedule(
        tuple(
            (
                *(Action(stage, "F", each) for stage in stages for each in range(microbatches)),
                *(Action(stage, "B", each) for stage in reversed(stages) for each in range(microbatches)),
            )
            for stages in placement.stages
        ),
        "gpipe",
    )


def naive(placement: StagePlacement, microbatches: int) -> Schedule:
    """Run every microbatch all the way forward and back before the next one starts."""
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
