"""Plans: which messages lie in a rank's input."""

from __future__ import annotations

import pytest

from hpcpar.algorithms.registry import ALGORITHMS
from hpcpar.comm.plan import plan, reading_input, writes_all

CASES = [(collective, name) for collective in ("allreduce", "reduce") for name in ALGORITHMS[collective]]


def test_a_ring_reads_its_input_until_it_has_summed():
    """Rank 0 of 2 sends its own chunk 1, reduces chunk 0, sends that sum, and gets the sum of chunk 1."""
    found = plan(ALGORITHMS["allreduce"]["ring"], 0, 2, 0, 1, (("data", (0, 3, 6)),), reads_input=True)
    sent = [message.runs for step in found.steps for message in step.sends]
    received = [(message.runs, message.own) for step in found.steps for message in step.receives]
    assert sent == [(("input", 3, 6),), (("data", 0, 3),)]
    assert received == [((("data", 0, 3),), (("input", 0, 3),)), ((("data", 3, 6),), None)]
    assert writes_all(found, 6)
    assert not writes_all(found, 7)


@pytest.mark.parametrize("size", [2, 3, 5, 8])
@pytest.mark.parametrize(("collective", "name"), CASES)
def test_chunks_come_from_the_input_until_something_is_received_there(collective, name, size):
    for rank in range(size):
        schedule = ALGORITHMS[collective][name].schedule(rank, size, segments=2, nodes=(0,) * size)
        found = reading_input(schedule)
        if found is None:
            assert name in ("double_binary", "hierarchical_pipelined")
            continue
        written: set[int] = set()
        for before, after, fresh in zip(schedule, *found, strict=True):
            for send, changed in zip(before.sends, after.sends, strict=True):
                is_fresh = send.space == "data" and not written & set(send.chunks)
                assert (changed.space == "input") == is_fresh
                assert is_fresh or send.space != "data" or written >= set(send.chunks)
            reduced: set[int] = set()
            for receive, is_fresh in zip(before.receives, fresh, strict=True):
                combines = receive.combine and receive.space == "data"
                assert is_fresh == (combines and not written & set(receive.chunks))
                reduced |= set(receive.chunks) if receive.space == "data" else set()
            written |= reduced
