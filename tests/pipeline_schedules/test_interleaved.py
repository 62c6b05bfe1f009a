"""Interleaved 1F1B: the rows as drawn, idle time and memory by the paper's formulas, any microbatches."""

from __future__ import annotations

from fractions import Fraction
from itertools import product

import pytest

from hpcpar.errors import ScheduleError
from hpcpar.pipeline_schedules.interleaved import interleaved
from hpcpar.pipeline_schedules.pipeline_simulation import Durations, simulate
from hpcpar.pipeline_schedules.proof import peak_chunks, prove
from hpcpar.pipeline_schedules.stage_placement import loop
from hpcpar.pipeline_schedules.text import parse

TWO_RANKS = """
0F0 0F1 2F0 2F1 0F2     2B0 0F3 2B1 2F2 0B0 2F3 0B1     2B2     2B3 0B2 0B3
    1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3
"""

# Five microbatches on two ranks: a round of three, then one of two.
ROUNDS_OF_THREE_AND_TWO = """
0F0 0F1 0F2 2F0 2F1 2F2 2B0 0F3 2B1 0F4 2B2 2F3 0B0 2F4 0B1 0B2 2B3 2B4 0B3 0B4
1F0 1F1 1F2 3F0 3B0 3F1 3B1 3F2 3B2 1F3 1B0 1F4 1B1 3F3 1B2 3F4 3B3 3B4 1B3 1B4
"""

# With three chunks at the most, rounds of one leave room for a forward before the first backward is back.
THREE_CHUNKS = """
0F0     2F0 0F1         2B0 2F1     0B0 0F2 2B1 2F2 0B1 0F3 2B2 2F3 0B2     2B3     0B3
    1F0     3F0 3B0 1F1     1B0 3F1 3B1 1F2 1B1 3F2 3B2 1F3 1B2 3F3 3B3         1B3
"""

EXACT = Durations(Fraction(3), Fraction(4), Fraction(2))


def test_rows_are_as_drawn() -> None:
    assert interleaved(loop(2, 2), 4) == parse(TWO_RANKS)
    assert interleaved(loop(2, 2), 5) == parse(ROUNDS_OF_THREE_AND_TWO)


@pytest.mark.parametrize(("ranks", "per_rank"), [*product((1, 2, 3, 4, 8), (2, 3, 4))])
def test_the_bubble_is_p_minus_1_by_m_and_by_the_stages_per_rank(ranks: int, per_rank: int) -> None:
    for microbatches in (ranks, ranks + 1, 2 * ranks - 1, 2 * ranks, 3 * ranks + 1):
        timetable = simulate(interleaved(loop(ranks, per_rank), microbatches), EXACT)
        assert (timetable.cost_s / timetable.work_s - 1) == Fraction(ranks - 1, per_rank * microbatches)


@pytest.mark.parametrize(("ranks", "per_rank"), [*product((1, 2, 3, 4, 8), (2, 3, 4))])
def test_memory_is_the_formulas_where_ranks_divide_microbatches(ranks: int, per_rank: int) -> None:
    for microbatches in (2 * ranks, 4 * ranks):
        expected = [
            min(2 * (ranks - rank - 1) + (per_rank - 1) * ranks + 1, per_rank * microbatches)
            for rank in range(ranks)
        ]
        assert list(peak_chunks(interleaved(loop(ranks, per_rank), microbatches))) == expected


def test_memory_of_uneven_microbatches_grows_with_the_longest_round() -> None:
    # 11 microbatches on 4 ranks: rounds of 6 and 5
    assert peak_chunks(interleaved(loop(4, 3), 11)) == tuple(2 * (3 - rank) + 2 * 6 + 1 for rank in range(4))


@pytest.mark.parametrize(("ranks", "per_rank"), [*product((1, 2, 4, 5), (2, 3))])
def test_any_memory_limit_from_the_stages_of_a_rank_is_kept(ranks: int, per_rank: int) -> None:
    for microbatches in (1, ranks, 2 * ranks + 1, 9):
        placement = loop(ranks, per_rank)
        for limit in range(per_rank, max(peak_chunks(interleaved(placement, microbatches))) + 1):
            prove(interleaved(placement, microbatches, memory_limit=limit), memory_limit=limit)
        assert interleaved(placement, microbatches, memory_limit=99) == interleaved(placement, microbatches)


def test_rounds_are_shorter_where_memory_is_short() -> None:
    assert interleaved(loop(2, 2), 4, memory_limit=3) == parse(THREE_CHUNKS)
    assert interleaved(loop(2, 2), 4, memory_limit=5) == parse(TWO_RANKS)


def test_a_limit_below_the_stages_of_a_rank_is_refused() -> None:
    with pytest.raises(ScheduleError, match="at least 3 chunks alive, but the limit is 2"):
        interleaved(loop(2, 3), 4, memory_limit=2)
