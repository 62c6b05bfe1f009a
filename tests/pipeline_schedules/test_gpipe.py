"""GPipe and naive: the rows as drawn, bubble and memory as in the paper."""

from __future__ import annotations

from fractions import Fraction

import pytest

from hpcpar.pipeline_schedules.gpipe import gpipe, naive
from hpcpar.pipeline_schedules.pipeline_simulation import Durations, simulate
from hpcpar.pipeline_schedules.proof import peak_chunks
from hpcpar.pipeline_schedules.stage_placement import loop
from hpcpar.pipeline_schedules.text import parse

THREE_RANKS = """
0F0 0F1 0F2 0F3 -   -   -   -   0B0 0B1 0B2 0B3
-   1F0 1F1 1F2 1F3 -   -   1B0 1B1 1B2 1B3
-   -   2F0 2F1 2F2 2F3 2B0 2B1 2B2 2B3
"""

TWO_STAGES_EACH = """
0F0 0F1 2F0 2F1 -   -   2B0 2B1 0B0 0B1
-   1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1
"""

EXACT = Durations(Fraction(3), Fraction(4), Fraction(2))


def test_rows_are_all_forwards_and_then_all_backwards() -> None:
    assert gpipe(loop(3), 4) == parse(THREE_RANKS)
    assert gpipe(loop(2, 2), 2) == parse(TWO_STAGES_EACH)


@pytest.mark.parametrize("per_rank", [1, 2, 4])
@pytest.mark.parametrize("ranks", [1, 2, 4, 7])
def test_the_bubble_is_p_minus_1_by_m_and_by_the_stages_per_rank(ranks: int, per_rank: int) -> None:
    for microbatches in (ranks, ranks + 1, 3 * ranks):
        timetable = simulate(gpipe(loop(ranks, per_rank), microbatches), EXACT)
        assert (timetable.cost_s / timetable.work_s - 1) == Fraction(ranks - 1, per_rank * microbatches)
        # Also where a rank waits: each idles for p - 1 forwards and backwards in all.
        assert all(
            timetable.seconds - timetable.busy_s(rank) == (ranks - 1) * (3 + 4 + 2) for rank in range(ranks)
        )


@pytest.mark.parametrize("microbatches", [1, 2, 9])
def test_all_microbatches_are_alive_at_once(microbatches: int) -> None:
    assert peak_chunks(gpipe(loop(4), microbatches)) == (microbatches,) * 4
    assert peak_chunks(gpipe(loop(4, 3), microbatches)) == (3 * microbatches,) * 4


NAIVE = """
0F0 -   -   0B0 0F1 -   -   0B1
-   1F0 1B0 -   -   1F1 1B1 -
"""

NAIVE_TWO_STAGES_EACH = """
0F0 -   2F0 -   -   2B0 -   0B0 0F1 -   2F1 -   -   2B1 -   0B1
-   1F0 -   3F0 3B0 -   1B0 -   -   1F1 -   3F1 3B1 -   1B1 -
"""


def test_a_naive_microbatch_goes_all_the_way_before_the_next_starts() -> None:
    assert naive(loop(2), 2) == parse(NAIVE)
    assert naive(loop(2, 2), 2) == parse(NAIVE_TWO_STAGES_EACH)


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_all_ranks_but_one_are_idle_at_any_time(ranks: int) -> None:
    schedule = naive(loop(ranks, 3), 4)
    timetable = simulate(schedule, Durations(2, 3, 1))
    assert timetable.seconds == ranks * timetable.work_s
    assert peak_chunks(schedule) == (3,) * ranks
