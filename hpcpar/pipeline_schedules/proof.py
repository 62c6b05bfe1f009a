"""Prove that a schedule is complete, free of deadlock and within memory, from its rows alone.

The proof holds for the executor's way to send, even if MPI buffers no message:

- every stage runs F and B of every microbatch exactly once, and W at most once, after its B; all on one rank;
- no deadlock. A rank runs its row from left to right and waits only before an action, for its inputs. It
  posts their receives by then; the producer starts a non-blocking send when its action ends. So an action
  that can start stays able to start, and one serial order of all actions is enough: then every timing gets
  through;
- no message is left over: a value that crosses ranks has one producer and one consumer, both of which run, so
  every send is complete when all rows have ended;
- each rank's peak of chunks (one microbatch's activations of one stage) is within a limit. A forward saves
  them for its backward. A whole backward frees them all. A split one frees in B what only B reads, and in W
  the rest, the inputs of the weight products.

    row      0F0 0F1 0B0 0W0 0F2 ...
    chunks     1   2   2   1   2
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product

from hpcpar.errors import ScheduleError
from hpcpar.pipeline_schedules.action import KINDS, Action
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
    for stage, microbatch, kind in product(range(schedule.stages), range(schedule.microbatches), KINDS[:2]):
        action = Action(stage, kind, microbatch)
        if action not in seen:
            home = schedule.rank_of_stage.get(stage)
            raise ScheduleError(
                f"{action} is missing: the schedule has stages 0 to {schedule.stages - 1} and microbatches "
                f"0 to {schedule.microbatches - 1}; put it into the row of "
                f"{'one rank' if home is None else f'rank {home}'}"
            )


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


# --- deadlock -------------------------------------------------------------------------------------


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
            missing = next((need for need in schedule.needs(action) if need not in done), None)
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
        f"{_head(schedule, at, rank)} needs {waits[rank]} of rank {schedule.rank_of_stage[waits[rank].stage]}"
        for rank in cycle
    )
    return f"ranks wait for each other: {', '.join(told)}; let one of them do earlier what another needs"


def _head(schedule: Schedule, at: list[int], rank: int) -> str:
    return f"{schedule.rows[rank][at[rank]]} (rank {rank}, place {at[rank]})"


# --- memory ---------------------------------------------------------------------------------------


def peak_chunks(schedule: Schedule) -> tuple[int, ...]:
    """Count, for every rank, the most chunks alive at once: until their whole backward, or their W."""
    return tuple(max(kept, default=0) for kept in chunks_kept(schedule))


def chunks_kept(schedule: Schedule) -> tuple[tuple[int, ...], ...]:
    """Count, for every rank, the chunks alive during each of its actions."""
    return tuple(
        tuple(sum(alive.values()) for alive in chunks_by_stage(schedule, rank))
        for rank in range(schedule.ranks)
    )


def chunks_by_stage(
    schedule: Schedule, rank: int, *, saved_only: bool = False
) -> Iterator[Mapping[int, int]]:
    """Yield the chunks of each stage that are alive on a rank during each of its actions.

    saved_only   until B, which frees what autograd saved, though W needs inputs and gradients still
    """
    alive: Counter[int] = Counter()
    for stage, kind, microbatch in schedule.rows[rank]:
        alive[stage] += kind == "F"
        yield alive
        is_over = saved_only or not schedule.is_split(stage, microbatch)
        alive[stage] -= kind == ("B" if is_over else "W")
