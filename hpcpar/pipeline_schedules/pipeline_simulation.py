"""Simulate a schedule: the start and end of every action, from measured or assumed durations.

An action starts when its rank is free and its inputs have arrived. A value from another rank arrives `hop_s`
after it was made; it travels while both ranks compute, as the executor's sends do.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from hpcpar.errors import ScheduleError
from hpcpar.pipeline_schedules.action import Action, Kind
from hpcpar.pipeline_schedules.pipeline_schedule import Schedule
from hpcpar.pipeline_schedules.proof import in_order
from hpcpar.pipeline_schedules.timetable import Timed, Timetable


@dataclass(frozen=True)
class Durations:
    """Seconds of each kind of action: one number for all stages, or one for each stage.

    forward_s    F
    backward_s   B that computes the input's gradient alone
    weight_s     W; a whole B takes backward_s + weight_s
    hop_s        transfer from one rank to another
    numbers      of any exact type, such as int or Fraction; simulated times are then of that type
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
        """List the seconds of F, B and W by stage; ScheduleError if given for another number of them."""
        forward, backward, weight = (
            self._per_stage(name, stages) for name in ("forward_s", "backward_s", "weight_s")
        )
        return forward, backward, weight

    def _per_stage(self, name: str, stages: int) -> list[float]:
        given = getattr(self, name)
        if not isinstance(given, Sequence):
            return [given] * stages
        if len(given) != stages:
            raise ScheduleError(
                f"{name} has seconds for {len(given)} stages, but the schedule has {stages}: "
                "give one for each stage, or one number for all"
            )
        return list(given)


def simulate(schedule: Schedule, durations: Durations) -> Timetable:
    """Compute the start and end of every action.

    errors   ScheduleError for an action that can never start, or durations for another number of stages
    """
    forward, backward, weight = durations.of_stages(schedule.stages)

    def seconds_of(action: Action) -> float:
        stage, kind, microbatch = action
        if kind == "F":
            return forward[stage]
        if kind == "W":
            return weight[stage]
        is_whole = not schedule.is_split(stage, microbatch)
        return backward[stage] + weight[stage] if is_whole else backward[stage]

    return simulate_actions(schedule, seconds_of, durations.hop_s)


def simulate_actions(
    schedule: Schedule, seconds_of: Callable[[Action], float], hop_s: float = 0
) -> Timetable:
    """Simulate a schedule whose actions each have a duration of their own."""
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


# --- from a measured run --------------------------------------------------------------------------


def schedule_of(timetable: Timetable, name: str = "") -> Schedule:
    """Return the schedule that the ranks ran, in the order in which they ran it."""
    return Schedule(tuple(tuple(timed.action for timed in row) for row in timetable.rows), name)


def measured_durations(timetable: Timetable) -> Durations:
    """Take each stage's median seconds of F, B and W; a whole backward counts half as B and half as W.

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
    """Simulate the run with each action's own measured time; bubbles that remain are the schedule's."""
    measured = {timed.action: timed.seconds for row in timetable.rows for timed in row}
    return simulate_actions(schedule_of(timetable), measured.__getitem__, hop_s)


def predicted(timetable: Timetable) -> Timetable:
    """Simulate the run with each stage's median times and messages that take no time."""
    return simulate(schedule_of(timetable), measured_durations(timetable))
