"""Handles: several operations under way at once, and waits that end in an error."""

from __future__ import annotations

import gc
import sys
import threading
import time
import weakref
from functools import partial

import numpy as np
import pytest

from hpcpar.comm import Communicator, run_loopback
from hpcpar.errors import StallError


def many_at_once(comm):
    """Operations of several kinds on two communicators, waited for in an order of each rank's own."""
    other = comm.split(0, key=-comm.rank, name="reversed")
    buffers = [np.full(50 + i, comm.rank + i, dtype=float) for i in range(20)]
    handles = [(comm if i % 2 else other).start_allreduce(buffer) for i, buffer in enumerate(buffers)]
    handles += [comm.start_allgather(np.array([comm.rank])), other.start_broadcast(np.array([comm.rank]))]
    order = np.random.default_rng(comm.rank).permutation(len(handles))
    results = {i: handles[i].wait() for i in order}
    total = sum(range(comm.size))
    for i in range(20):
        np.testing.assert_array_equal(results[i], total + i * comm.size)
    assert results[20].tolist() == list(range(comm.size))
    assert results[21].tolist() == [comm.size - 1]  # rank 0 of the reversed one
    other.free()
    return True


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_many_operations_on_two_communicators_complete_in_any_order_of_waiting(size, exchange):
    assert all(run_loopback(size, many_at_once, **exchange))


@pytest.mark.mpi
def test_many_operations_over_mpi_complete_in_any_order_of_waiting(any_world):
    assert many_at_once(any_world)


def test_a_blocking_call_makes_progress_on_what_was_started_before(exchange):
    def work(comm):
        big = np.ones(100_000)
        handle = comm.start_allreduce(big, algorithm="ring")
        for _ in range(50):
            comm.barrier()
        return handle.test() and float(big[-1]) == comm.size

    assert run_loopback(3, work, **exchange) == [True] * 3


def test_poke_alone_completes_an_operation(exchange):
    def work(comm):
        handle = comm.start_allreduce(np.ones(10))
        deadline = time.monotonic() + 20
        while not handle.test() and time.monotonic() < deadline:
            comm.poke()
        return handle.wait().tolist()

    assert run_loopback(2, work, **exchange) == [[2.0] * 10] * 2


def test_threads_with_communicators_of_their_own_may_wait_at_once(exchange):
    def work(comm):
        parts = [comm.split(0, name=f"part {k}") for k in range(2)]
        wrong = []

        def ask(k):
            for step in range(40):
                handles = [parts[k].start_allreduce(np.full(40 + i, float(k + step))) for i in range(5)]
                wrong.extend(step for handle in handles if not np.all(handle.wait() == 2 * (k + step)))

        threads = [threading.Thread(target=ask, args=(k,), daemon=True) for k in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        return wrong, [thread.is_alive() for thread in threads]

    usual_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # they meet in the middle of everything
    try:
        assert run_loopback(2, work, **exchange) == [([], [False, False])] * 2
    finally:
        sys.setswitchinterval(usual_s)


def test_wait_may_be_called_again():
    handle = Communicator.alone().start_allreduce(np.ones(2))
    assert handle.wait() is handle.wait()


def test_a_stall_names_the_chain_of_who_waits_for_whom():
    """Rank 2 is busy elsewhere; 1 waits for 2 and 0 for 1, each in its own message."""
    release = threading.Event()
    told = {}

    def work(comm):
        if comm.rank == 2:
            release.wait(30)
            return
        try:
            comm.recv(np.empty(1), source=comm.rank + 1)
        except StallError as error:
            told[comm.rank] = str(error)
            if len(told) == 2:
                release.set()
            release.wait(5)

    run_loopback_with_timeout(3, work, timeout_s=1.0)
    silent = "rank 2 does not answer: it is busy outside of communication, stopped, or dead"
    assert "rank 1 waits in recv from rank 2" in told[1]
    assert silent in told[1]
    assert "rank 0 waits in recv from rank 1" in told[0]
    assert "timeout_s=1" in told[0]


def test_ranks_that_wait_for_each_other_are_told_so():
    def work(comm):
        try:
            comm.recv(np.empty(1), source=1 - comm.rank)
        except StallError as error:
            return str(error)

    told = run_loopback_with_timeout(2, work, timeout_s=1.0)
    assert any("so they wait for each other (ranks 0, 1)" in text for text in told)


@pytest.mark.parametrize("shares_memory", [False, True])
def test_an_array_outlives_a_known_call_that_stalled(shares_memory):
    """What comes late would otherwise be written to memory that is somebody else's by then."""
    release = threading.Event()

    def work(comm):
        if shares_memory:
            comm.share_memory()
        array = np.ones(1000)
        call = partial(comm.allreduce, array)
        for _ in range(6):
            call()
        if comm.rank == 1:
            release.wait(30)
            call()
            comm.barrier()
            return None
        lives = weakref.ref(array)
        with pytest.raises(StallError):
            call()
        del array, call
        gc.collect()
        held = lives() is not None
        release.set()
        comm.barrier()
        return held, lives() is None

    assert run_loopback_with_timeout(2, work, timeout_s=1.0)[0] == (True, True)


def run_loopback_with_timeout(size, function, timeout_s):
    from hpcpar.transport import loopback

    return loopback.run(size, lambda t: function(Communicator.over(t, timeout_s=timeout_s)))


def test_what_other_ranks_never_come_to_is_given_up_with_its_communicator(exchange):
    def work(comm):
        other = comm.split(0, name="other").unchecked("other")  # else all agree on each call first
        calls = other.calls
        if comm.rank == 0:
            other.start_allreduce(np.ones(100_000))
        begun, before = other.calls - calls, len(comm._runtime.progress.under_way)
        other.abandon()
        comm.allreduce(np.ones(10))
        return begun, before, len(comm._runtime.progress.under_way)

    assert run_loopback(3, work, **exchange) == [(1, 1, 0), (0, 0, 0), (0, 0, 0)]
