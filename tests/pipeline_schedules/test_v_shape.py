"""ZB-V and DualPipe-V: the rows as drawn, their idle time and memory, forward and backward side by side."""

from __future__ import annotations

from itertools import pairwise

import pytest

from hpcpar.pipeline_schedules.pipeline_simulation import Durations, simulate
from hpcpar.pipeline_schedules.proof import peak_chunks
from hpcpar.pipeline_schedules.text import parse
from hpcpar.pipeline_schedules.v_shape import dualpipe_v, zb_v

ZB_V = """
0F0 0F1 0F2 3F0 3B0 3W0 3F1 3B1 3W1 0F3 0B0 0W0 3F2 3B2 3W2 0B1 0W1 3F3 3B3 3W3 0B2 0W2 0B3 0W3
    1F0 2F0 1F1 2F1 2B0 2W0 1F2 1B0 1W0 2F2 2B1 2W1 1F3 1B1 1W1 2F3 2B2 2W2 1B2 2B3 1B3 1W2 2W3 1W3
"""

# A B without its W is a whole backward.
DUALPIPE_V = """
0F0 0F1 0F2 3F0 3B0 3W0 3F1 0F3 3B1 3F2 0B0 0F4 3B2 3F3 0B1 3B3 3F4 0B2 3B4 0B3 0W3 0B4 0W4
1F0 2F0 1F1 2F1 1F2 2B0 2F2 1B0 1F3 2B1 2F3 1B1 1F4 2B2 2F4 1B2 2B3 1B3 2B4 1B4 2W4 1W4
"""

ZB_V_OF_TWO = """
0F0 0F1 3F0 3B0 3W0 3F1 3B1 3W1 0B0 0W0 0B1 0W1
1F0 2F0 1F1 2F1 2B0 2W0 1B0 1W0 2B1 2W1 1B1 1W1
"""

SIDES = [1, 2, 3, 4, 8]


def test_rows_are_as_drawn() -> None:
    assert zb_v(2, 4) == parse(ZB_V)
    assert dualpipe_v(2, 5) == parse(DUALPIPE_V)


def test_few_microbatches_are_the_pattern_without_those_that_there_are_not() -> None:
    assert zb_v(2, 2) == parse(ZB_V_OF_TWO)


@pytest.mark.parametrize("ranks", SIDES)
def test_zb_v_has_no_idle_time_and_1f1bs_memory_from_2p_minus_1_microbatches_on(ranks: int) -> None:
    for microbatches in (2 * ranks - 1, 2 * ranks, 3 * ranks, 32):
        schedule = zb_v(ranks, microbatches)
        timetable = simulate(schedule, Durations(1, 1, 1))
        assert [timetable.span_s(rank) - timetable.busy_s(rank) for rank in range(ranks)] == [0] * ranks
        # A chunk is half of a rank's layers, so 2p chunks are the p microbatches of 1F1B's first rank.
        assert peak_chunks(schedule) == ((2 * ranks if microbatches > 1 or ranks > 1 else 2),) * ranks


@pytest.mark.parametrize("ranks", SIDES)
def test_dualpipe_v_idles_less_towards_the_turn_and_keeps_one_chunk_more(ranks: int) -> None:
    for microbatches in (2 * ranks, 2 * ranks + 1, 32):
        schedule = dualpipe_v(ranks, microbatches)
        timetable = simulate(schedule, Durations(1, 1, 1))
        assert [timetable.span_s(rank) - timetable.busy_s(rank) for rank in range(ranks)] == [
            ranks - 1 - rank for rank in range(ranks)
        ]
        assert peak_chunks(schedule) == (2 * ranks + 1,) * ranks


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_most_of_dualpipe_v_is_a_forward_beside_the_backward_of_the_ranks_other_stage(ranks: int) -> None:
    microbatches = 16
    for rank, row in enumerate(dualpipe_v(ranks, microbatches).rows):
        beside = sum(
            first.kind == "F" and second.kind == "B" and first.stage != second.stage
            for first, second in pairwise(row)
        )
        # down F with up B while forwards enter, up F with down B until the last forward is through
        assert beside >= 2 * (microbatches - 2 * ranks) + ranks + rank
