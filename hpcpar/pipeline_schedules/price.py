"""When every action of a schedule starts and ends, if each takes as long as was measured or assumed.

An action starts when its rank is free and what it needs has arrived. What comes from another rank arrives
`hop_s` after it was made; it travels while both ranks work, as the executor's sends do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hpcpar.errors import ScheduleError
from hpcpar.pipeline_schedules.action import Action
from hpcpar.pipeline_schedules.order import in_order
from hpcpar.pipeline_schedules.schedule import Schedule
from hpcpar.pipeline_schedules.timetable import Timed, Timetable


@dataclass(frozen=True)
class Durations:
    """Seconds that each kind of action takes: of every stage alike, or one for each stage.

    forward_s    F
    backward_s   B that only makes the input's gradient
    weight_s     W; a whole B takes backward_s + weight_s
    hop_s        from one rank to another
    numbers      may be of any exact type too, as integers or Fraction: times then are of that type
    errors       ScheduleError for seconds that are negative or not finite
    """

    forward_s: float | Sequence[float] = 1
    backward_s: float | Sequence[float] = 1
    weight_s: float | Sequence[float] = 1
    hop_s: float = 0

    def __post_init__(self) -> None:
        for name in ("forward_s", "backward_s", "weight_s", "hop_s"):
            given = getattr(self, name)
            for seconds in given if isinstance(given, Sequence) else (given,):
                if not (math.isfinite(seconds) and seconds >= 0):
                    raise ScheduleError(f"{name} has {seconds}: seconds are finite and not negative")

    def of_stages(self, stages: int) -> tuple[list[float], list[float], list[float]]:
        """Seconds of F, B and W of every stage; ScheduleError if they were given for another number."""
        forward, backward, weight = (
            self._each(name, stages) for name in ("forward_s", "backward_s", "weight_s")
        )
        return forward, backward, weight

    def _each(self, name: str, stages: int) -> list[float]:
        given = getattr(self, name)
        if not isinstance(given, Sequence):
            return [given] * stages
        if len(given) != stages:
            raise ScheduleError(
                f"{name} has seconds for {len(given)} stages, but the schedule has {stages}: "
                "give one for each stage, or one number for all"
            )
        return list(given)


def price(schedule: Schedule, durations: Durations) -> Timetable:
    """When every action starts and ends.

    errors   ScheduleError where an action can never start, or durations are of another number of stages
    """
    forward, backward, weight = durations.of_stages(schedule.stages)

    def seconds_of(action: Action) -> float:
        stage, kind, microbatch = action
        if kind == "F":
            return forward[stage]
        if kind == "W":
            return weight[stage]
        whole = not schedule.is_split(stage, microbatch)
        return backward[stage] + weight[stage] if whole else backward[stage]

    return price_each(schedule, seconds_of, durations.hop_s)


def price_each(schedule: Schedule, seconds_of: Callable[[Action], float], hop_s: float = 0) -> Timetable:
    """`price`, where every action takes a time of its own."""
    home = schedule.rank_of_stage
    ends: dict[Action, float] = {}
    free: list[float] = [0] * schedule.ranks
    rows: list[list[Timed]] = [[] for _ in range(schedule.ranks)]
    for action in in_order(schedule):
        rank = home[action.stage]
        start = free[rank]
        for need in schedule.needs(action):
            hop = 0 if home[need.stage] == rank else hop_s
            start = max(start, ends[need] + hop)
        seconds = seconds_of(action)
        ends[action] = free[rank] = start + seconds
        rows[rank].append(Timed(action, start, start + seconds))
    return Timetable(tuple(tuple(row) for row in rows))
