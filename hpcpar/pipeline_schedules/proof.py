"""Prove that a schedule is complete, free of deadlock and within memory, from its rows alone.

The proof holds for the executor's way to send, even if MPI buffers no message:

- every stage runs F and B of every microbatch exactly once, and W at most once, after its B; all on one rank;
- no deadlock. A rank waits only before an action, for its inputs. It posts their receives by then; the
  producer starts a non-blocking send when its action ends. So an action that can start stays able to start,
  and one serial order of all actions is enough: then every timing gets through;
- no message is left over: a value that crosses ranks has one producer and one consumer, both of which run, so
  every send is complete when all rows have ended;
- each rank's peak of chunks (one microbatch's activations of one stage) is within a limit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hpcpar.errors import ScheduleError
from hpcpar.pipeline_schedules.action import KINDS, Action
from hpcpar.pipeline_schedules.order import in_order
from hpcpar.pipeline_schedules.peak_memory import chunks_kept
from hpcpar.pipeline_schedules.pipeline_schedule import Schedule


@dataclass(frozen=True)
class Proof:
    """Counts of a correct schedule; tuples have a number for every rank.

    peaks      most chunks alive at once
    sends      values sent to other ranks
    receives   values received from other ranks
    """

    ranks: int
    stages: int
    microbatches: int
    peaks: tuple[int, ...]
    sends: tuple[int, ...]
    receives: tuple[int, ...]


def prove(schedule: Schedule, *, memory_limit: int | None = None) -> Proof:
    """Prove a schedule and count what each rank does.

    memory_limit   chunks that may be alive at once on any rank; None: any number
    errors         ScheduleError that names the first wrong action, and why
    """
    _prove_complete(schedule)
    in_order(schedule)
    kept = chunks_kept(schedule)
    if memory_limit is not None:
        _prove_within(schedule, kept, memory_limit)
    sends, receives = _messages(schedule)
    return Proof(
        schedule.ranks,
        schedule.stages,
        schedule.microbatches,
        tuple(max(during, default=0) for during in kept),
        sends,
        receives,
    )


def _prove_complete(schedule: Schedule) -> None:
    """Check that every action exists exactly once; `Schedule` itself puts each stage on one rank."""
    seen: dict[Action, int] = {}
    for rank, row in enumerate(schedule.rows):
        for place, action in enumerate(row):
            if action.kind not in KINDS or action.stage < 0 or action.microbatch < 0:
                raise ScheduleError(
                    f"{action} (rank {rank}, place {place}) is no action: stages and microbatches count "
                    f"from 0, kinds are {', '.join(KINDS)}"
                )
            if action in seen:
                raise ScheduleError(
                    f"{action} is twice in the row of rank {rank}, at places {seen[action]} and {place}: "
                    "leave one of them out"
                )
            seen[action] = place
    if not seen:
        raise ScheduleError(f"the schedule of {schedule.ranks} ranks has no actions: give it some")
    for action in _wanted(schedule):
        if action not in seen:
            raise ScheduleError(
                f"{action} is missing: the schedule has stages 0 to {schedule.stages - 1} and microbatches "
                f"0 to {schedule.microbatches - 1}; put it into the row of {_row_for(schedule, action.stage)}"
            )


def _wanted(schedule: Schedule) -> Iterator[Action]:
    for stage in range(schedule.stages):
        for microbatch in range(schedule.microbatches):
            yield Action(stage, "F", microbatch)
            yield Action(stage, "B", microbatch)


def _row_for(schedule: Schedule, stage: int) -> str:
    home = schedule.rank_of_stage.get(stage)
    return "one rank" if home is None else f"rank {home}"


def _prove_within(schedule: Schedule, kept: tuple[tuple[int, ...], ...], memory_limit: int) -> None:
    for rank, during in enumerate(kept):
        for place, chunks in enumerate(during):
            if chunks > memory_limit:
                raise ScheduleError(
                    f"{schedule.rows[rank][place]} (rank {rank}, place {place}) makes {chunks} chunks alive "
                    f"at once, but the limit is {memory_limit}: put a backward first, or raise the limit"
                )


def _messages(schedule: Schedule) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Count the values that every rank sends to others, and receives from them."""
    sends, receives = [0] * schedule.ranks, [0] * schedule.ranks
    home = schedule.rank_of_stage
    for stage in range(schedule.stages - 1):
        if home[stage] != home[stage + 1]:
            # A forward of every microbatch goes up, a backward comes down.
            for rank in (home[stage], home[stage + 1]):
                sends[rank] += schedule.microbatches
                receives[rank] += schedule.microbatches
    return tuple(sends), tuple(receives)
