"""Registry of pipeline schedules: their names, options and builders.

`make("interleaved", ranks=4, microbatches=8, stages_per_rank=2)` returns a schedule.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from hpcpar.errors import ScheduleError, did_you_mean
from hpcpar.pipeline_schedules.gpipe import gpipe, naive
from hpcpar.pipeline_schedules.interleaved import interleaved
from hpcpar.pipeline_schedules.one_f_one_b import eager_one_f_one_b, one_f_one_b
from hpcpar.pipeline_schedules.pipeline_schedule import Schedule
from hpcpar.pipeline_schedules.pipeline_simulation import Durations
from hpcpar.pipeline_schedules.proof import peak_chunks
from hpcpar.pipeline_schedules.schedule_search import automatic
from hpcpar.pipeline_schedules.stage_placement import Shape, StagePlacement, loop, v_shape
from hpcpar.pipeline_schedules.v_shape import dualpipe_v, zb_v
from hpcpar.pipeline_schedules.zero_bubble import zb_h1, zb_h2


@dataclass(frozen=True)
class ScheduleRequest:
    """Arguments of a method's builder, checked against what the method allows."""

    placement: StagePlacement
    microbatches: int
    memory_limit: int | None
    durations: Durations | None

    @property
    def ranks(self) -> int:
        return self.placement.ranks


@dataclass(frozen=True)
class Method:
    """Named kind of schedule.

    summary           its strength, in a line
    build             makes the schedule
    stages_per_rank   fewest stages per rank, and the default
    most_stages       most stages per rank; None: any number
    limited           can keep to a memory limit
    timed             needs durations
    """

    name: str
    summary: str
    source: str
    build: Callable[[ScheduleRequest], Schedule]
    placement: Shape = "loop"
    stages_per_rank: int = 1
    most_stages: int | None = 1
    limited: bool = False
    timed: bool = False

    @property
    def allowed_stages(self) -> str:
        """Stages that a rank can have, in words."""
        if self.most_stages is None:
            return f"{self.stages_per_rank} or more"
        return str(self.most_stages)

    def allows(self, stages_per_rank: int) -> bool:
        return self.stages_per_rank <= stages_per_rank and (
            self.most_stages is None or stages_per_rank <= self.most_stages
        )

    def place(self, ranks: int, stages_per_rank: int | None = None) -> StagePlacement:
        """Place stages on ranks; ScheduleError for a number of stages that the method does not allow."""
        per_rank = self.stages_per_rank if stages_per_rank is None else stages_per_rank
        if not self.allows(per_rank):
            fitting = [one.name for one in METHODS.values() if one.allows(per_rank)]
            raise ScheduleError(
                f"{self.name} with {per_rank} stages per rank: it has {self.allowed_stages}"
                + (f"; with {per_rank} there are {', '.join(fitting)}" if fitting else "")
            )
        return v_shape(ranks) if self.placement == "v" else loop(ranks, per_rank)


def make(
    name: str,
    ranks: int,
    microbatches: int,
    *,
    stages_per_rank: int | None = None,
    memory_limit: int | None = None,
    durations: Durations | None = None,
) -> Schedule:
    """Make the schedule with this name.

    stages_per_rank   None: the method's default
    memory_limit      chunks (a microbatch's activations of one stage) alive on a rank at once; None: the
                      method's own number
    durations         seconds of actions, for methods that need them
    errors            ScheduleError for an unknown name, and for options that the method does not allow
    """
    method = find(name)
    counts: dict[str, Any] = {"ranks": ranks, "microbatches": microbatches}
    if memory_limit is not None:
        counts["memory_limit"] = memory_limit
    for what, count in counts.items():
        if not isinstance(count, Integral) or count < 1:
            raise ScheduleError(f"{name} with {what} {count!r}: give an integer, at least 1")
    if method.timed and durations is None:
        raise ScheduleError(
            f"{name} is made for given durations, but has none: pass durations=Durations(...)"
        )
    placement = method.place(ranks, stages_per_rank)
    schedule = method.build(ScheduleRequest(placement, microbatches, memory_limit, durations))
    if memory_limit is not None:
        _keep_within(method, schedule, memory_limit)
    return schedule


def find(name: str) -> Method:
    """Look a method up; ScheduleError with similar names if there is none."""
    if name not in METHODS:
        hint = did_you_mean(str(name).lower().replace("_", "-"), METHODS)
        raise ScheduleError(f"no pipeline schedule {name!r}: {hint}there are {', '.join(METHODS)}")
    return METHODS[name]


def _keep_within(method: Method, schedule: Schedule, memory_limit: int) -> None:
    peaks = peak_chunks(schedule)
    if max(peaks) > memory_limit:
        limited = [one.name for one in METHODS.values() if one.limited and not one.timed]
        raise ScheduleError(
            f"{method.name} keeps {max(peaks)} chunks on rank {peaks.index(max(peaks))}, but the limit is "
            f"{memory_limit}: raise it, or ask for one that can keep to it: {', '.join(limited)}"
        )


def _automatic(asked: ScheduleRequest) -> Schedule:
    assert asked.durations is not None  # make() has seen to it
    return automatic(asked.ranks, asked.microbatches, asked.durations, asked.memory_limit)


def _within_limit(build: Callable[..., Schedule]) -> Callable[[ScheduleRequest], Schedule]:
    return lambda asked: build(asked.ranks, asked.microbatches, memory_limit=asked.memory_limit)


TWO_IN_A_V: Any = {"placement": "v", "stages_per_rank": 2, "most_stages": 2}

METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method(
            "naive",
            "one microbatch at a time, all other ranks wait",
            "layer-wise model parallelism",
            lambda asked: naive(asked.placement, asked.microbatches),
            most_stages=None,
        ),
        Method(
            "gpipe",
            "all forwards, then all backwards; every microbatch stays in memory",
            "Huang et al. 2018, arXiv 1811.06965",
            lambda asked: gpipe(asked.placement, asked.microbatches),
            most_stages=None,
        ),
        Method(
            "1f1b",
            "GPipe's idle time, in the memory of as many microbatches as ranks",
            "Narayanan et al. 2021, arXiv 2104.04473",
            _within_limit(one_f_one_b),
            limited=True,
        ),
        Method(
            "eager-1f1b",
            "1F1B with more forwards at the start, so that messages hide behind work",
            "Zhuang et al. 2022, arXiv 2211.05322",
            _within_limit(eager_one_f_one_b),
            limited=True,
        ),
        Method(
            "interleaved",
            "1F1B over several stages per rank: idle time divided by their number, more messages",
            "Narayanan et al. 2021, arXiv 2104.04473",
            lambda asked: interleaved(asked.placement, asked.microbatches, memory_limit=asked.memory_limit),
            stages_per_rank=2,
            most_stages=None,
            limited=True,
        ),
        Method(
            "zb-h1",
            "split backwards; 1F1B's memory, a third of its idle time",
            "Qi et al. 2023, arXiv 2401.10241",
            _within_limit(zb_h1),
            limited=True,
        ),
        Method(
            "zb-h2",
            "split backwards; no idle time within a step, in twice the memory",
            "Qi et al. 2023, arXiv 2401.10241",
            _within_limit(zb_h2),
            limited=True,
        ),
        Method(
            "zb-v",
            "two stages per rank in a V: no idle time in 1F1B's memory if F, B and W take equally long",
            "Qi et al. 2024, arXiv 2405.15362",
            lambda asked: zb_v(asked.ranks, asked.microbatches),
            **TWO_IN_A_V,
        ),
        Method(
            "dualpipe-v",
            "two stages per rank in a V: forward and backward side by side hide each other's messages",
            "DeepSeek-AI 2024, arXiv 2412.19437, cut in half",
            lambda asked: dualpipe_v(asked.ranks, asked.microbatches),
            **TWO_IN_A_V,
        ),
        Method(
            "automatic",
            "split backwards, put in the order that is best for given durations and memory",
            "Qi et al. 2023, arXiv 2401.10241, section 3.1",
            _automatic,
            limited=True,
            timed=True,
        ),
    )
}
