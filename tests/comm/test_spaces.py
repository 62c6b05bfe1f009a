"""Scratch memory that calls borrow."""

from __future__ import annotations

import sys
import threading

import numpy as np

from hpcpar.comm.spaces import ScratchPool


def test_the_smallest_memory_that_is_large_enough_is_lent_again():
    pool = ScratchPool()
    given = [np.empty(nbytes, np.uint8) for nbytes in (50, 10, 30)]
    for octets in given:
        pool.give_back(octets)
    assert pool.take(20) is given[2]
    assert pool.take(20) is given[0]
    assert pool.take(20).size == 20


def test_of_more_memory_than_is_kept_the_smallest_goes():
    pool = ScratchPool()
    for nbytes in range(ScratchPool.KEPT + 2):
        pool.give_back(np.empty(nbytes + 1, np.uint8))
    assert sorted(pool.take(1).size for _ in range(ScratchPool.KEPT)) == list(range(3, ScratchPool.KEPT + 3))


class Interrupting:
    """Memory that is looked at just as another thread, or a signal handler, takes some, too."""

    def __init__(self, pool: ScratchPool) -> None:
        self.pool = pool
        self.taken: list[object] = []

    @property
    def size(self) -> int:
        if not self.taken:
            self.taken.append(None)
            self.taken.append(self.pool.take(5))
        return 20


def test_memory_that_another_thread_takes_meanwhile_is_not_lent_twice():
    pool, short = ScratchPool(), np.empty(10, np.uint8)
    long = Interrupting(pool)
    pool.give_back(short)
    pool.give_back(long)  # type: ignore[arg-type]
    assert pool.take(5) is long
    assert long.taken[1] is short


def test_threads_that_borrow_at_once_get_memory_of_their_own():
    pool, errors = ScratchPool(), []

    def borrow(mark: int) -> None:
        try:
            for nbytes in range(3000):
                octets = pool.take(1 + nbytes % 7)
                octets[0] = mark
                if octets[0] != mark:
                    errors.append("two had the same")
                pool.give_back(octets)
        except Exception as error:
            errors.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=borrow, args=(mark,)) for mark in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert errors == []
