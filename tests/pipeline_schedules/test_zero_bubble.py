"""ZB-H1 and ZB-H2: the rows as drawn in the paper, their idle time and memory, limits between the two."""

from __future__ import annotations

from fractions import Fraction
from itertools import product

import pytest

from hpcpar.pipeline_schedules.one_f_one_b import one_f_one_b
from hpcpar.pipeline_schedules.pipeline_simulation import Durations, simulate
from hpcpar.pipeline_schedules.proof import peak_chunks, prove
from hpcpar.pipeline_schedules.text import parse
from hpcpar.pipeline_schedules.timetable import Timetable
from hpcpar.pipeline_schedules.zero_bubble import zb_h1, zb_h2

# Figure 3 of the paper shows both on four ranks.
H1 = """
0F0 0F1 0F2 0F3             0B0 0W0 0F4 0B1 0W1 0B2 0W2 0B3 0W3 0B4 0W4
    1F0 1F1 1F2         1B0 1F3 1B1 1W0 1F4 1B2 1W1 1B3 1W2 1B4 1W3 1W4
        2F0 2F1     2B0 2F2 2B1 2F3 2B2 2W0 2F4 2B3 2W1 2B4 2W2 2W3 2W4
            3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3 3W0 3F4 3B4 3W1 3W2 3W3 3W4
"""

H2 = """
0F0 0F1 0F2 0F3 0F4 0B0 0W0 0F5 0B1 0W1 0B2 0W2 0B3 0W3 0B4 0W4 0B5 0W5
    1F0 1F1 1F2 1B0 1F3 1B1 1F4 1B2 1W0 1F5 1B3 1W1 1B4 1W2 1B5 1W3 1W4 1W5
        2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3 2F4 2B4 2W0 2F5 2B5 2W1 2W2 2W3 2W4 2W5
"""

SHAPES = [(1, 1), (1, 4), (2, 3), (3, 5), (4, 7), (4, 12), (8, 15), (8, 32)]


def _idle_s(timetable: Timetable) -> float:
    """Idle time of rank 0 within its span."""
    return timetable.span_s(0) - timetable.busy_s(0)


def test_rows_are_as_drawn() -> None:
    assert zb_h1(4, 5) == parse(H1)
    assert zb_h2(3, 6) == parse(H2)


@pytest.mark.parametrize(("ranks", "microbatches"), SHAPES)
def test_where_all_takes_equally_long_h1_idles_p_minus_1_forwards_and_h2_not_at_all(
    ranks: int, microbatches: int
) -> None:
    h1, h2 = (simulate(make(ranks, microbatches), Durations(1, 1, 1)) for make in (zb_h1, zb_h2))
    assert all(h1.seconds - h1.busy_s(rank) == ranks - 1 for rank in range(ranks))
    assert h1.cost_s - h1.work_s == ranks - 1
    assert [h2.span_s(rank) - h2.busy_s(rank) for rank in range(ranks)] == [0] * ranks
    assert h2.bubble_rate == 0


@pytest.mark.parametrize(("ranks", "microbatches"), SHAPES)
def test_idle_time_is_the_papers_also_where_parts_take_different_times(ranks: int, microbatches: int) -> None:
    for forward, backward, weight in product((2, 3, 5), (2, 3, 5), (1, 2, 3)):
        durations = Durations(forward, backward, weight)
        if weight <= forward:
            idle_s = _idle_s(simulate(zb_h1(ranks, microbatches), durations))
            assert idle_s == (ranks - 1) * (forward + backward - weight)
        if weight <= forward and 2 * weight <= forward + backward:
            idle_s = _idle_s(simulate(zb_h2(ranks, microbatches), durations))
            assert idle_s == (ranks - 1) * (forward + backward - 2 * weight)


@pytest.mark.parametrize(("ranks", "microbatches"), [*SHAPES, (4, 1), (6, 3)])
def test_every_rank_keeps_p_microbatches_under_h1_and_2p_minus_1_under_h2(
    ranks: int, microbatches: int
) -> None:
    assert peak_chunks(zb_h1(ranks, microbatches)) == (min(microbatches, ranks),) * ranks
    assert peak_chunks(zb_h2(ranks, microbatches)) == (min(microbatches, 2 * ranks - 1),) * ranks
    assert max(peak_chunks(zb_h1(ranks, microbatches))) == max(peak_chunks(one_f_one_b(ranks, microbatches)))


@pytest.mark.parametrize(("ranks", "microbatches"), SHAPES)
def test_any_memory_limit_is_kept_and_less_memory_is_not_faster(ranks: int, microbatches: int) -> None:
    exact = Durations(Fraction(1), Fraction(1), Fraction(1))
    seconds = []
    for limit in range(1, 2 * ranks):
        schedule = zb_h2(ranks, microbatches, memory_limit=limit)
        assert schedule == zb_h1(ranks, microbatches, memory_limit=limit) or limit > ranks
        prove(schedule, memory_limit=limit)
        seconds.append(simulate(schedule, exact).cost_s)
    assert seconds == sorted(seconds, reverse=True)
    assert zb_h1(ranks, microbatches, memory_limit=99) == zb_h1(ranks, microbatches)
    assert zb_h2(ranks, microbatches, memory_limit=99) == zb_h2(ranks, microbatches)


@pytest.mark.parametrize(("ranks", "microbatches"), SHAPES)
def test_in_any_memory_split_backwards_are_no_slower_than_1f1b_and_as_fast_if_w_takes_no_time(
    ranks: int, microbatches: int
) -> None:
    for limit in range(1, ranks + 1):
        schedules = [make(ranks, microbatches, memory_limit=limit) for make in (zb_h1, one_f_one_b)]
        split, whole = (simulate(schedule, Durations(1, 1, 1)).seconds for schedule in schedules)
        assert split <= whole
        split, whole = (simulate(schedule, Durations(1, 2, 0)).seconds for schedule in schedules)
        assert split == whole
