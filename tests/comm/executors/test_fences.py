"""Fences of the shared-memory protocol, on a stand-in of a processor that makes writes visible late.

What a rank writes into its body, and where its arrays lie, becomes visible to the others only by a fence, or
long after; state words do at once. A protocol that has a fence before each state word is right there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hpcpar.comm import Communicator, run_loopback, sharing
from hpcpar.comm.shm_segment import LINE_NBYTES, SLOTS, WORD_NBYTES, ShmSegment


class LateWords:
    """The words of a segment: those of a header beside its state are written by `flush`."""

    def __init__(self, words: memoryview, states: set[int], first_ended: int) -> None:
        self._words = words
        self._states = states
        self._first_ended = first_ended
        self._late: dict[int, int] = {}

    def __getitem__(self, at: Any) -> Any:
        return self._words[at]

    def __setitem__(self, at: int, value: int) -> None:
        if at in self._states or at >= self._first_ended:
            self._words[at] = value
        else:
            self._late[at] = value

    def flush(self) -> None:
        for at, value in self._late.items():
            self._words[at] = value
        self._late.clear()


class LateSegment(ShmSegment):
    """Keeps what its rank writes to itself until a fence."""

    FENCED = True

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.fence = self.flush if self.FENCED else None
        states = {header for headers in self.headers for header in headers}
        self.words: Any = LateWords(self.words, states, self._told)
        self._bodies = [np.zeros(self.post_nbytes, np.uint8) for _ in range(SLOTS)]

    def body(self, slot: int, rank: int) -> Any:
        return self._bodies[slot] if rank == self.rank else super().body(slot, rank)

    def flush(self) -> None:
        self.words.flush()
        for slot, body in enumerate(self._bodies):
            begin = self.headers[slot][self.rank] * WORD_NBYTES + LINE_NBYTES
            self.octets[begin : begin + self.post_nbytes] = body


class UnfencedSegment(LateSegment):
    FENCED = False


def sums(count: int) -> Callable[[Communicator], bool]:
    def work(comm: Communicator) -> bool:
        right = True
        for call in range(3 * SLOTS):
            found = comm.allreduce(np.full(count, comm.rank + call, np.float32))
            right = right and bool((found == sum(rank + call for rank in range(comm.size))).all())
        return right

    return work


@pytest.mark.parametrize("size", [2, 3])
def test_sums_are_right_where_writes_become_visible_by_fences_alone(size, monkeypatch):
    monkeypatch.setattr(sharing, "ShmSegment", LateSegment)
    assert run_loopback(size, sums(100), shared_memory=True) == [True] * size


@pytest.mark.parametrize("size", [2, 3])
def test_without_fences_the_stand_in_gives_wrong_sums(size, monkeypatch):
    monkeypatch.setattr(sharing, "ShmSegment", UnfencedSegment)
    assert not all(run_loopback(size, sums(100), shared_memory=True))
