"""Activations alive: chunks counted by hand, bytes of stages of different sizes, what W keeps."""

from __future__ import annotations

import pytest

from hpcpar.errors import ScheduleError
from hpcpar.pipeline_schedules.peak_memory import chunks_kept, peak_chunks, peak_nbytes
from hpcpar.pipeline_schedules.schedule_registry import METHODS, make
from hpcpar.pipeline_schedules.text import parse

SPLIT = """
0F0 0F1 0B0 0F2 0W0 0B1 0B2 0W2
    1F0 1B0 1F1 1B1 1F2 1B2
"""


def test_a_chunk_is_alive_from_its_forward_to_its_w_or_whole_backward() -> None:
    assert chunks_kept(parse(SPLIT)) == ((1, 2, 2, 3, 3, 2, 1, 1), (1, 1, 1, 1, 1, 1))
    assert peak_chunks(parse(SPLIT)) == (3, 1)


def test_bytes_follow_the_stages_and_what_w_reads() -> None:
    assert peak_nbytes(parse(SPLIT), 10) == (30, 10)
    assert peak_nbytes(parse(SPLIT), (8, 20)) == (24, 20)
    # After 0B0 half of its eight bytes are left beside two whole chunks.
    assert peak_nbytes(parse(SPLIT), (8, 20), kept_after_backward=0.5) == (20, 20)
    assert peak_nbytes(parse(SPLIT), 8, kept_after_backward=0) == (16, 8)


@pytest.mark.parametrize("name", [method.name for method in METHODS.values() if not method.timed])
def test_equal_chunks_of_which_all_is_kept_are_counted_alike(name: str) -> None:
    schedule = make(name, 4, 9)
    assert peak_nbytes(schedule, 3) == tuple(3 * chunks for chunks in peak_chunks(schedule))


def test_another_number_of_stages_and_impossible_sizes_are_refused() -> None:
    for wrong in ((1, 2, 3), (1, -1), -1):
        with pytest.raises(ScheduleError, match="for 2 stages: give one number of bytes"):
            peak_nbytes(parse(SPLIT), wrong)
    with pytest.raises(ScheduleError, match=r"kept_after_backward is 1.5"):
        peak_nbytes(parse(SPLIT), 1, kept_after_backward=1.5)
