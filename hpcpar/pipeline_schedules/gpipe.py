"""All forwards, then all backwards.

    rank 0   0F0 0F1 0F2             0B0 0B1 0B2
    rank 1       1F0 1F1 1F2 1B0 1B1 1B2

With several stages on a rank, all microbatches pass one stage before they enter the rank's next one.

idle     (p - 1)(F + B + W) on every rank of p; (p - 1)/v of it with v stages per rank, if m >= p
alive    all m microbatches
source   Huang et al. 2018, GPipe, arXiv 1811.06965; with several stages per rank: Lamy-Poirier 2022,
         Breadth-First Pipeline Parallelism, arXiv 2211.05953
"""

from __future__ import annotations

from hpcpar.pipeline_schedules.action import Action
from hpcpar.pipeline_schedules.placement import Placement
from hpcpar.pipeline_schedules.schedule import Schedule


def gpipe(placement: Placement, microbatches: int) -> Schedule:
    """All forwards and then all backwards.

    Backwards come in the order of the forwards too, where the paper has them reversed: idle time and memory
    are the same, and gradients add up in the order in which one process would add them.
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
