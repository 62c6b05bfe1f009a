"""One microbatch at a time: the row as drawn, one microbatch alive, idle time as long as it can be."""

from __future__ import annotations

import pytest

from hpcpar.pipeline_schedules.memory import peak_chunks
from hpcpar.pipeline_schedules.naive import naive
from hpcpar.pipeline_schedules.placement import loop
from hpcpar.pipeline_schedules.price import Durations, price
from hpcpar.pipeline_schedules.text import parse

TWO_RANKS = """
0F0 -   -   0B0 0F1 -   -   0B1
-   1F0 1B0 -   -   1F1 1B1 -
"""

TWO_STAGES_EACH = """
0F0 -   2F0 -   -   2B0 -   0B0 0F1 -   2F1 -   -   2B1 -   0B1
-   1F0 -   3F0 3B0 -   1B0 -   -   1F1 -   3F1 3B1 -   1B1 -
"""


def test_a_microbatch_goes_all_the_way_before_the_next_starts() -> None:
    assert naive(loop(2), 2) == parse(TWO_RANKS)
    assert naive(loop(2, 2), 2) == parse(TWO_STAGES_EACH)


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_all_ranks_but_one_are_idle_at_any_time(ranks: int) -> None:
    schedule = naive(loop(ranks, 3), 4)
    timetable = price(schedule, Durations(2, 3, 1))
    assert timetable.seconds == ranks * timetable.work_s
    assert peak_chunks(schedule) == (3,) * ranks
