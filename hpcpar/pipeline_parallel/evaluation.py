"""The rows of a pass that only goes forward, for stages where a schedule has put them.

    loop, 2 stages a rank          V, 2 stages a rank
    0F0 2F0 0F1 2F1 0F2 2F2        0F0 0F1 3F0 0F2 3F1 3F2
        1F0 3F0 1F1 3F1 1F2 3F2        1F0 2F0 1F1 2F1 1F2 2F2

With v stages on the rank that has the most, a microbatch can enter every v actions: stage s comes to
microbatch k in slot s + vk. Every action needs one of an earlier slot, and rows go by slots, so that no rank
waits for ever; nor does it where it sends microbatch k over a boundary only once k - 2 has been received.
"""

from __future__ import annotations

from hpcpar.pipeline_schedules.action import Action
from hpcpar.pipeline_schedules.schedule import Schedule

MOST_UNDELIVERED = 2
"""Activations of a boundary on their way, so that no rank is ahead of the others without end."""


def forward_only(schedule: Schedule, microbatches: int) -> Schedule:
    """The stages of a schedule on their ranks, forward alone."""
    stages_of = [schedule.stages_of(rank) for rank in range(schedule.ranks)]
    most = max(map(len, stages_of))
    rows = []
    for stages in stages_of:
        actions = [Action(stage, "F", number) for stage in stages for number in range(microbatches)]
        rows.append(tuple(sorted(actions, key=lambda a: (a.stage + most * a.microbatch, a.stage))))
    return Schedule(tuple(rows), name=f"{schedule.name} forward")
