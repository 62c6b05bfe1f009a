"""How long a run's actions took, and what its schedule promised for these times."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import median

from hpcpar.errors import ScheduleError
from hpcpar.pipeline_schedules.action import Kind
from hpcpar.pipeline_schedules.price import Durations, price, price_each
from hpcpar.pipeline_schedules.schedule import Schedule
from hpcpar.pipeline_schedules.timetable import Timetable


def schedule_of(timetable: Timetable, name: str = "") -> Schedule:
    """What the ranks did, in the order in which they did it."""
    return Schedule(tuple(tuple(timed.action for timed in row) for row in timetable.rows), name)


def measured_durations(timetable: Timetable) -> Durations:
    """Each stage's median seconds of F, B and W; of a whole backward, B and W have a half each.

    errors   ScheduleError for a stage without a forward or a backward
    """
    schedule = schedule_of(timetable)
    seconds: dict[tuple[int, Kind], list[float]] = defaultdict(list)
    for row in timetable.rows:
        for timed in row:
            stage, kind, microbatch = timed.action
            if kind == "B" and not schedule.is_split(stage, microbatch):
                seconds[stage, "B"].append(timed.seconds / 2)
                seconds[stage, "W"].append(timed.seconds / 2)
            else:
                seconds[stage, kind].append(timed.seconds)

    def medians(kind: Kind) -> Sequence[float]:
        for stage in range(schedule.stages):
            if (stage, kind) not in seconds:
                raise ScheduleError(
                    f"the timetable has no {kind} of stage {stage}; give that of a whole training step"
                )
        return [median(seconds[stage, kind]) for stage in range(schedule.stages)]

    return Durations(medians("F"), medians("B"), medians("W"))


def replayed(timetable: Timetable, hop_s: float = 0) -> Timetable:
    """What `price` says if every action takes as long as it did: what is idle here nobody can help."""
    taken = {timed.action: timed.seconds for row in timetable.rows for timed in row}
    return price_each(schedule_of(timetable), taken.__getitem__, hop_s)


def predicted(timetable: Timetable) -> Timetable:
    """What `price` says of the same order if every action takes its stage's median, and messages no time."""
    return price(schedule_of(timetable), measured_durations(timetable))
