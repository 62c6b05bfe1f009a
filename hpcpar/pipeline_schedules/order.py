"""An order in which all actions of a schedule can run one by one, or why there is none.

A rank does its row from left to right and waits only for what the next action needs. So what has run at the
end does not depend on who is fast: either every timing gets through, or none does.
"""

from __future__ import annotations

from hpcpar.errors import ScheduleError
from hpcpar.pipeline_schedules.action import Action
from hpcpar.pipeline_schedules.schedule import Schedule


def in_order(schedule: Schedule) -> tuple[Action, ...]:
    """All actions, each after those that it needs and after its row's earlier ones.

    errors   ScheduleError that names an action that can never start, and what it waits for
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
    """What holds up the ranks that wait: the plainest cause first."""
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
    # Every rank that waits now waits for another that waits: going from one to the next ends in a cycle.
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
