"""1F1B and eager 1F1B: the rows as drawn in the papers, their idle time, their memory, with a limit too."""

from __future__ import annotations

from fractions import Fraction

import pytest

from hpcpar.pipeline_schedules.one_f_one_b import eager_one_f_one_b, one_f_one_b
from hpcpar.pipeline_schedules.pipeline_simulation import Durations, simulate
from hpcpar.pipeline_schedules.proof import peak_chunks, prove
from hpcpar.pipeline_schedules.text import parse

# Figure 3 of Narayanan et al. 2021, of one step.
FOUR_RANKS = """
0F0 0F1 0F2 0F3                         0B0 0F4 0B1 0F5 0B2 0F6 0B3 0F7 0B4     0B5     0B6     0B7
    1F0 1F1 1F2                 1B0 1F3 1B1 1F4 1B2 1F5 1B3 1F6 1B4 1F7 1B5     1B6     1B7
        2F0 2F1         2B0 2F2 2B1 2F3 2B2 2F4 2B3 2F5 2B4 2F6 2B5 2F7 2B6     2B7
            3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3 3F4 3B4 3F5 3B5 3F6 3B6 3F7 3B7
"""

EAGER_THREE_RANKS = """
0F0 0F1 0F2 0F3 0F4 0B0 0F5 0B1 0B2 0B3 0B4 0B5
    1F0 1F1 1F2 1B0 1F3 1B1 1F4 1B2 1F5 1B3 1B4 1B5
        2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3 2F4 2B4 2F5 2B5
"""

ONE_ALIVE = """
0F0         0B0 0F1         0B1
    1F0 1B0         1F1 1B1
"""

SHAPES = [(1, 1), (1, 5), (2, 2), (3, 8), (4, 4), (8, 9), (8, 32)]
EXACT = Durations(Fraction(3), Fraction(4), Fraction(2))


def test_1f1b_is_as_drawn_in_the_paper() -> None:
    assert one_f_one_b(4, 8) == parse(FOUR_RANKS)


def test_eager_1f1b_starts_with_forwards_for_the_way_there_and_back() -> None:
    assert eager_one_f_one_b(3, 6) == parse(EAGER_THREE_RANKS)


@pytest.mark.parametrize(("ranks", "microbatches"), SHAPES)
def test_the_bubble_is_p_minus_1_by_m(ranks: int, microbatches: int) -> None:
    for make in (one_f_one_b, eager_one_f_one_b):
        timetable = simulate(make(ranks, microbatches), EXACT)
        assert (timetable.cost_s / timetable.work_s - 1) == Fraction(ranks - 1, microbatches)


@pytest.mark.parametrize(("ranks", "microbatches"), [*SHAPES, (6, 2), (5, 1)])
def test_a_rank_keeps_as_many_microbatches_as_lie_between_it_and_the_end(
    ranks: int, microbatches: int
) -> None:
    near = [ranks - rank for rank in range(ranks)]
    assert list(peak_chunks(one_f_one_b(ranks, microbatches))) == [min(microbatches, each) for each in near]
    assert list(peak_chunks(eager_one_f_one_b(ranks, microbatches))) == [
        min(microbatches, 2 * each - 1) for each in near
    ]


def test_eager_1f1b_hides_messages_that_1f1b_waits_for() -> None:
    slow = Durations(4, 4, 4, hop_s=1)
    work = 24 * (4 + 4 + 4)
    eager = simulate(eager_one_f_one_b(8, 24), slow)
    # What is left is one way there and one way back, of the first microbatch and of the last.
    assert eager.cost_s == work + 7 * (4 + 4 + 4) + 2 * 7 * 1
    assert simulate(one_f_one_b(8, 24), slow).cost_s > eager.cost_s


@pytest.mark.parametrize("make", [one_f_one_b, eager_one_f_one_b])
@pytest.mark.parametrize(("ranks", "microbatches"), SHAPES)
def test_any_memory_limit_is_kept_and_less_memory_is_not_faster(make, ranks: int, microbatches: int) -> None:
    seconds = []
    for limit in range(1, 2 * ranks + 1):
        schedule = make(ranks, microbatches, memory_limit=limit)
        prove(schedule, memory_limit=limit)
        seconds.append(simulate(schedule, EXACT).seconds)
    assert seconds == sorted(seconds, reverse=True)
    assert make(ranks, microbatches, memory_limit=2 * ranks) == make(ranks, microbatches)


def test_with_one_microbatch_alive_1f1b_is_naive() -> None:
    assert one_f_one_b(2, 2, memory_limit=1) == parse(ONE_ALIVE)
