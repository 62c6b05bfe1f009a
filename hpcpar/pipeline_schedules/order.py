"""A serial order of all actions of a schedule, or the reason why it deadlocks.

A rank runs its row from left to right and waits only for the inputs of its next action. So the timing does
not matter: a schedule deadlocks always or never.
"""

from __future__ import annotations

from hpcpar.errors import ScheduleError
from hpcpar.pipeline_schedules.action import Action
from hpcpar.pipeline_schedules.pipeline_schedule import Schedule


def in_order(schedule: Schedule) -> tuple[Action, ...]:
    """Sort all actions: each after its dependencies and after its row's earlier ones.

    errors   ScheduleError that names an action that can never start, and its missing dependency
    """
    rows = schedule.rows
    done: set[Action] = set()
    found: list[Action] = []
    at = [0] * len(rows)
    waiting: dict[Action, list[int]] = {}
    able = list(range(len(rows)))
    while able:
        rank = able.pop()
        row = rows[rank]
        while at[rank] < len(row):
            action = row[at[rank]]
            missing = _first_not_in(done, schedule.needs(action))
            if missing is not None:
                waiting.setdefault(missing, []).append(rank)
                break
            at[rank] += 1
            done.add(action)
            found.append(action)
            able += waiting.pop(action, ())
    if waiting:
        waits = {rank: need for need, ranks in waiting.items() for rank in ranks}
        raise ScheduleError(_why(schedule, at, dict(sorted(waits.items()))))
    return tuple(found)


def _first_not_in(done: set[Action], needs: tuple[Action, ...]) -> Action | None:
    for need in needs:
        if need not in done:
            return need
    return None


def _why(schedule: Schedule, at: list[int], waits: dict[int, Action]) -> str:
    """Explain a deadlock: a missing action, one too late in its own row, or a cycle of ranks."""
    for rank, need in waits.items():
        if not any(need in row for row in schedule.rows):
            return (
                f"{_head(schedule, at, rank)} cannot start: it needs {need}, which no rank does; "
                f"put {need} into the row of the rank that has stage {need.stage}"
            )
    for rank, need in waits.items():
        row = schedule.rows[rank]
        if need in row:
            return (
                f"{_head(schedule, at, rank)} cannot start: it needs {need}, which comes later in the same "
                f"row, at place {row.index(need)}; put {need} first"
            )
    # Every blocked rank waits for another blocked rank, so following them ends in a cycle.
    seen: list[int] = []
    rank = next(iter(waits))
    while rank not in seen:
        seen.append(rank)
        rank = schedule.rank_of_stage[waits[rank].stage]
    cycle = seen[seen.index(rank) :]
    told = (
        f"{_head(schedule, at, rank)} needs {waits[rank]} of rank {_home(schedule, waits[rank])}"
        for rank in cycle
    )
    return f"ranks wait for each other: {', '.join(told)}; let one of them do earlier what another needs"


def _head(schedule: Schedule, at: list[int], rank: int) -> str:
    return f"{schedule.rows[rank][at[rank]]} (rank {rank}, place {at[rank]})"


def _home(schedule: Schedule, action: Action) -> int:
    return schedule.rank_of_stage[action.stage]
