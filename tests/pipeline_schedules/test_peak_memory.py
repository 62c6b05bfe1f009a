"""Activations alive: chunks counted by hand."""

from __future__ import annotations

from hpcpar.pipeline_schedules.peak_memory import chunks_kept, peak_chunks
from hpcpar.pipeline_schedules.text import parse

SPLIT = """
0F0 0F1 0B0 0F2 0W0 0B1 0B2 0W2
    1F0 1B0 1F1 1B1 1F2 1B2
"""


def test_a_chunk_is_alive_from_its_forward_to_its_w_or_whole_backward() -> None:
    assert chunks_kept(parse(SPLIT)) == ((1, 2, 2, 3, 3, 2, 1, 1), (1, 1, 1, 1, 1, 1))
    assert peak_chunks(parse(SPLIT)) == (3, 1)
