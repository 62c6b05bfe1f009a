"""Schedules for given times and memory: the paper's figures, drawn cases, a grid, and all possible orders."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from itertools import product

import pytest

from hpcpar.errors import ScheduleError
from hpcpar.pipeline_schedules.action import Action
from hpcpar.pipeline_schedules.one_f_one_b import one_f_one_b
from hpcpar.pipeline_schedules.pipeline_schedule import Schedule
from hpcpar.pipeline_schedules.pipeline_simulation import Durations, simulate
from hpcpar.pipeline_schedules.proof import prove
from hpcpar.pipeline_schedules.schedule_search import (
    Choices,
    HeuristicOrder,
    SearchProblem,
    automatic,
    warm_up_counts,
)
from hpcpar.pipeline_schedules.zero_bubble import zb_h1, zb_h2

ALIKE = Durations(1, 1, 1, 0)

# Ranks, microbatches, milliseconds of F, B, W and a hop, and the printed rates of ZB-1p and ZB-2p.
PAPER = {
    "1.5 B": (8, 24, Durations(18.522, 18.086, 9.337, 0.601), "0.1585", "0.0433"),
    "6.2 B": (8, 24, Durations(29.718, 29.444, 19.927, 0.527), "0.1323", "0.0029"),
    "14.6 B": (16, 48, Durations(11.347, 11.248, 8.132, 0.377), "0.1397", "0.0066"),
    "28.3 B": (32, 96, Durations(10.419, 10.207, 7.715, 0.408), "0.1421", "0.0038"),
}

# The inputs of the products, which W reads, are 0.37 to 0.43 of a layer's activations in these models; any
# share up to a half gives the same figures.
PAPER_KEPT = 0.5

# Times are summed in another order here and there.
SAME = 1 + 1e-9


def cost_s(schedule: Schedule, durations: Durations) -> float:
    return simulate(schedule, durations).cost_s


def text(schedule: Schedule) -> list[str]:
    return [" ".join(map(str, row)) for row in schedule.rows]


def prove_split(schedule: Schedule, ranks: int, microbatches: int, limit: int | None = None) -> None:
    """Right, complete, one stage per rank, every backward in two parts."""
    proof = prove(schedule, memory_limit=limit)
    assert (proof.ranks, proof.stages, proof.microbatches) == (ranks, ranks, microbatches)
    assert all(len(row) == 3 * microbatches for row in schedule.rows)


def require_within(schedule: Schedule, limit: float, kept: float) -> None:
    """Check the microbatches alive on each rank, of which B leaves a share of `kept` for W."""
    freed = {"F": -1.0, "B": 1 - kept, "W": kept}
    for row in schedule.rows:
        alive = 0.0
        for action in row:
            alive -= freed[action.kind]
            assert alive <= limit * SAME


def split(schedule: Schedule) -> Schedule:
    """Add a W right after each B."""
    return Schedule(
        tuple(
            tuple(each for a in row for each in ((a, a._replace(kind="W")) if a.kind == "B" else (a,)))
            for row in schedule.rows
        )
    )


# --- the paper's figures --------------------------------------------------------------------------


@pytest.mark.parametrize(("model", "per_rank"), list(product(PAPER, (1, 2))))
def test_the_paper_s_bubble_rates_come_out_to_every_printed_digit(model: str, per_rank: int) -> None:
    ranks, microbatches, durations, *printed = PAPER[model]
    limit = per_rank * ranks
    schedule = automatic(ranks, microbatches, durations, limit, kept_after_backward=PAPER_KEPT)
    prove_split(schedule, ranks, microbatches)
    require_within(schedule, limit, PAPER_KEPT)
    assert f"{simulate(schedule, durations).bubble_rate:.4f}" == printed[per_rank - 1]


# --- drawn by hand --------------------------------------------------------------------------------


def test_twice_the_memory_leaves_no_bubble_between_alike_actions() -> None:
    schedule = automatic(3, 7, ALIKE, 5)
    assert text(schedule) == [
        "0F0 0F1 0F2 0F3 0F4 0B0 0W0 0F5 0B1 0W1 0F6 0B2 0B3 0W2 0W3 0B4 0B5 0W4 0W5 0B6 0W6",
        "1F0 1F1 1F2 1B0 1F3 1B1 1F4 1B2 1W0 1F5 1B3 1W1 1F6 1B4 1B5 1W2 1W3 1B6 1W4 1W5 1W6",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3 2F4 2B4 2W0 2F5 2B5 2W1 2F6 2B6 2W2 2W3 2W4 2W5 2W6",
    ]
    assert simulate(schedule, ALIKE).bubble_rate == 0


def test_memory_for_one_microbatch_lets_one_through_at_a_time() -> None:
    schedule = automatic(3, 2, ALIKE, 1)
    assert text(schedule) == [f"{s}F0 {s}B0 {s}W0 {s}F1 {s}B1 {s}W1" for s in range(3)]


def test_w_goes_before_the_backward_that_still_has_to_come() -> None:
    # Rank 1's gradient of microbatch 1 takes 5 s: rank 0 does 0W0 while it waits.
    assert text(automatic(2, 2, Durations(1, (1, 5), 1, 0)))[0] == "0F0 0F1 0B0 0W0 0B1 0W1"


@pytest.mark.parametrize("ranks", range(1, 7))
def test_alike_actions_wait_only_for_the_first_and_last_microbatch(ranks: int) -> None:
    # A rank 0 that has all forwards done waits for the first backward: 2p - 1 forwards fill that time.
    for microbatches in range(1, 3 * ranks + 2):
        schedule = automatic(ranks, microbatches, ALIKE, 2 * ranks - 1)
        assert cost_s(schedule, ALIKE) == 3 * microbatches + max(0, 2 * ranks - 1 - microbatches)


@pytest.mark.parametrize("ranks", range(1, 6))
def test_with_memory_for_one_microbatch_rank_0_waits_for_each_one_s_whole_way(ranks: int) -> None:
    durations = Durations(3, 2, 1, 1)
    way = ranks * (3 + 2) + 2 * (ranks - 1) * 1 + 1
    assert cost_s(automatic(ranks, 4, durations, 1), durations) == 4 * way


# --- a grid ---------------------------------------------------------------------------------------


@cache
def grid() -> tuple[tuple[int, int, Durations, int, float], ...]:
    """Ranks, microbatches, times, limit and share kept: half with stages alike, half with each its own."""
    chance = random.Random(8)

    def seconds(ranks: int, alike: bool) -> list[float]:
        drawn = [chance.uniform(0.5, 2) for _ in range(ranks)]
        return drawn[:1] * ranks if alike else drawn

    cases = []
    for ranks, microbatches, alike in product(range(1, 7), (1, 3, 6, 12), (True, False)):
        for limit in {1, 2, ranks, ranks + 1, 2 * ranks}:
            times = Durations(*(seconds(ranks, alike) for _ in range(3)), hop_s=chance.choice([0, 0.1, 0.5]))
            cases.append((ranks, microbatches, times, limit, chance.choice([1.0, 0.5, 0.0])))
    return tuple(cases)


def test_schedules_are_right_within_memory_and_no_worse_than_the_fixed_patterns() -> None:
    gains = []
    for ranks, microbatches, times, limit, kept in grid():
        patterns = (
            split(one_f_one_b(ranks, microbatches, memory_limit=limit)),
            zb_h1(ranks, microbatches, memory_limit=limit),
            zb_h2(ranks, microbatches, memory_limit=limit),
        )
        schedule = automatic(ranks, microbatches, times, limit, kept_after_backward=kept)
        prove_split(schedule, ranks, microbatches, limit if kept == 1 else None)
        require_within(schedule, limit, kept)
        gains.append(min(cost_s(pattern, times) for pattern in patterns) / cost_s(schedule, times))
    assert min(gains) * SAME >= 1
    assert max(gains) > 1.02


def test_more_memory_is_no_more_than_may_be_used() -> None:
    for microbatches in (1, 4, 9):
        every = automatic(3, microbatches, ALIKE)
        assert every == automatic(3, microbatches, ALIKE, microbatches)
        assert every == automatic(3, microbatches, ALIKE, float("inf"))


def test_an_order_knows_its_cost_as_price_does() -> None:
    for ranks, microbatches, times, limit, kept in grid()[::5]:
        forward_s, backward_s, weight_s = map(tuple, times.of_stages(ranks))
        pipeline = SearchProblem(
            microbatches, forward_s, backward_s, weight_s, times.hop_s, min(limit, microbatches), kept
        )
        for delay, room, postpone, short in product((False, True), repeat=4):
            way = Choices(warm_up_counts(pipeline, delay_backward=delay, leave_room=room), postpone, short)
            order = HeuristicOrder(pipeline, way)
            assert order.cost_s == pytest.approx(cost_s(Schedule(order.rows), times), rel=1e-9)


# --- against all orders, against what no order can undercut, and choice by choice -----------------


def orders(stage: int, microbatches: int, limit: int) -> Iterator[tuple[Action, ...]]:
    """All rows of a stage that do the same kind of action in the microbatches' order, within memory."""

    def go_on(row: tuple[Action, ...], f: int, b: int, w: int) -> Iterator[tuple[Action, ...]]:
        if w == microbatches:
            yield row
        if f < microbatches and f - w < limit:
            yield from go_on((*row, Action(stage, "F", f)), f + 1, b, w)
        if b < f:
            yield from go_on((*row, Action(stage, "B", b)), f, b + 1, w)
        if w < b:
            yield from go_on((*row, Action(stage, "W", w)), f, b, w + 1)

    return go_on((), 0, 0, 0)


@pytest.mark.parametrize(
    ("microbatches", "limit", "durations"),
    [
        (3, 3, Durations(2, 2, 1, 0)),
        (3, 2, Durations((1, 4), (3, 2), (5, 1), 1)),
        (3, 2, Durations(3, 1, 4, 2)),
        (2, 1, Durations((4, 1), (1, 3), (1, 5), 0)),
    ],
)
def test_of_all_orders_of_two_ranks_none_costs_less(
    microbatches: int, limit: int, durations: Durations
) -> None:
    found_s = cost_s(automatic(2, microbatches, durations, limit), durations)
    least_s = min(
        cost_s(schedule, durations)
        for rows in product(*(orders(stage, microbatches, limit) for stage in range(2)))
        if may_run(schedule := Schedule(rows))
    )
    assert found_s == least_s


def may_run(schedule: Schedule) -> bool:
    try:
        prove(schedule)
    except ScheduleError:
        return False
    return True


@pytest.mark.parametrize(("ranks", "more"), list(product((2, 4, 8), (0, 1, 9))))
def test_short_w_at_twice_the_memory_cost_no_more_than_they_must(ranks: int, more: int) -> None:
    # When the last rank does its last forward, m - L microbatches have had their W there. Rank 0 was ahead of
    # it by p - 1 forwards and hops, comes after it by p - 1 backwards and hops, and ends with a W.
    microbatches, limit, durations = 3 * ranks + more, 2 * ranks, Durations(7, 6, 2, 1)
    way = (ranks - 1) * (7 + 1 + 6 + 1)
    least_s = microbatches * (7 + 6) + (microbatches - limit) * 2 + way + 2
    assert cost_s(automatic(ranks, microbatches, durations, limit), durations) == least_s


def test_every_choice_pays_for_some_stages() -> None:
    short = SearchProblem(3, (5, 3), (2, 2), (2, 5), 1, 2, 1.0)
    assert HeuristicOrder(short, Choices((2, 1), use_short_gaps=False)).cost_s == 32
    assert HeuristicOrder(short, Choices((2, 1), use_short_gaps=True)).cost_s == 36

    late = SearchProblem(5, (2, 3, 3), (3, 5, 2), (3, 2, 2), 1, 5, 0.5)
    assert HeuristicOrder(late, Choices((5, 4, 1), postpone_forward=True)).cost_s == 52
    assert HeuristicOrder(late, Choices((5, 4, 1), postpone_forward=False)).cost_s == 53
    assert warm_up_counts(late, delay_backward=True, leave_room=True) == (5, 4, 1)
    assert warm_up_counts(late, delay_backward=False, leave_room=True) == (5, 3, 1)

    fixed = Durations((2, 4, 3), (1, 4, 5), (1, 3, 3))
    assert automatic(3, 3, fixed, 2, kept_after_backward=0.5) == zb_h1(3, 3, memory_limit=2)


# --- the same everywhere; what is refused ---------------------------------------------------------


def test_processes_that_hash_differently_make_the_same_schedule() -> None:
    program = (
        "from hpcpar.pipeline_schedules.schedule_search import automatic\n"
        "from hpcpar.pipeline_schedules.pipeline_simulation import Durations\n"
        "made = automatic(4, 6, Durations([1, 2, 1.5, 1], 1.1, 0.7, 0.1), 5)\n"
        "print(*(action for row in made.rows for action in row))\n"
    )
    made = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(made) == 1
    assert len(made.pop().split()) == 4 * 6 * 3


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (
            {"memory_limit": 0},
            "memory_limit is 0 microbatches .* no forward can run: give 1 or more; 1F1B takes 3",
        ),
        ({"memory_limit": float("nan")}, "memory_limit is nan"),
        ({"ranks": 0}, "asked for 0 ranks and 5 microbatches"),
        ({"microbatches": 0}, "asked for 3 ranks and 0 microbatches"),
        ({"kept_after_backward": 1.5}, "kept_after_backward is 1.5: .* from 0 to 1"),
        (
            {"durations": Durations([1, 2], 1, 1)},
            "forward_s has seconds for 2 stages, but the schedule has 3",
        ),
    ],
)
def test_what_leaves_no_schedule_is_refused(asked: dict[str, object], words: str) -> None:
    given = {"ranks": 3, "microbatches": 5, "durations": ALIKE, **asked}
    with pytest.raises(ScheduleError, match=words):
        automatic(**given)  # type: ignore[arg-type]
