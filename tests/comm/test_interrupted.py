"""Exceptions of signal handlers, calls that handlers make, and forked processes."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from hpcpar.comm import Communicator
from hpcpar.comm.compiled import Handle
from hpcpar.errors import OperationError

SHORT, LONG = 1000, 1_500_000
"""Elements of float32: one step in shared memory, and some milliseconds."""


EVERY_S = 0.001


class Alarm(Exception):
    """Raised by a handler: no error of hpcpar."""


class Bell:
    """Calls a handler now and then: once after each time that it is armed."""

    def __init__(self) -> None:
        self.handler: Callable[[], None] | None = None

    def arm(self, handler: Callable[[], None]) -> None:
        self.handler = handler

    def disarm(self) -> None:
        self.handler = None

    def ring(self, number: int, frame: Any) -> None:
        handler, self.handler = self.handler, None
        if handler is not None:
            handler()


@pytest.fixture
def bell() -> Iterator[Bell]:
    found = Bell()
    before = signal.signal(signal.SIGALRM, found.ring)
    signal.setitimer(signal.ITIMER_REAL, EVERY_S, EVERY_S)
    yield found
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def ring_alarm() -> None:
    raise Alarm


def ones(count: int) -> np.ndarray:
    return np.ones(count, np.float32)


def repeated(comm: Communicator, count: int) -> np.ndarray:
    """An element of every rank's number, `count` times each."""
    return np.repeat(np.arange(comm.size, dtype=np.float32), count)


Start = Callable[[Communicator, int], tuple[Handle, Any]]
"""Begin a call on `count` elements for each rank; the handle, and what it should bring."""

STARTS: dict[str, Start] = {
    "allreduce": lambda c, n: (c.start_allreduce(ones(n)), c.size * ones(n)),
    "allreduce as float16": lambda c, n: (
        c.start_allreduce(ones(n), "average", prescale_factor=0.5, compression="float16"),
        0.5 * ones(n),
    ),
    "allreduce of every second": lambda c, n: (c.start_allreduce(ones(2 * n)[::2]), c.size * ones(n)),
    "reduce_scatter": lambda c, n: (c.start_reduce_scatter(ones(c.size * n)), c.size * ones(n)),
    "allgather": lambda c, n: (c.start_allgather(c.rank * ones(n)), repeated(c, n)),
    "broadcast": lambda c, n: (c.start_broadcast((1 + c.rank) * ones(n), c.size - 1), c.size * ones(n)),
    "reduce": lambda c, n: (c.start_reduce(ones(n)), c.size * ones(n) if c.rank == 0 else None),
    "gather": lambda c, n: (c.start_gather(c.rank * ones(n)), repeated(c, n) if c.rank == 0 else None),
    "scatter": lambda c, n: (
        c.start_scatter(repeated(c, n) if c.rank == 0 else None, out=ones(n)),
        c.rank * ones(n),
    ),
    "alltoall": lambda c, n: (c.start_alltoall(repeated(c, n)), c.rank * ones(c.size * n)),
    "barrier": lambda c, n: (c.start_barrier(), None),
}


def waited(bell: Bell, handle: Handle) -> Any:
    """Wait again after each alarm; the result."""
    while True:
        try:
            bell.arm(ring_alarm)
            found = handle.wait()
            bell.disarm()
            return found
        except Alarm:
            continue


@pytest.mark.mpi
@pytest.mark.parametrize("count", [SHORT, LONG])
@pytest.mark.parametrize("collective", STARTS)
def test_waiting_again_after_an_exception_of_a_handler_is_right(collective, count, any_world, bell):
    right = []
    for _ in range(4):
        handle, expected = STARTS[collective](any_world, count)
        found = waited(bell, handle)
        right.append(expected is None or np.array_equal(found, expected))
    assert right == [True] * 4


@pytest.mark.mpi
def test_messages_that_handlers_interrupt_arrive_once(any_world, bell):
    after, before = (any_world.rank + 1) % any_world.size, (any_world.rank - 1) % any_world.size
    right = []
    for call in range(4):
        receive = any_world.start_recv(np.empty(LONG, np.float32), before)
        send = any_world.start_send((any_world.rank + call) * ones(LONG), after)
        found = waited(bell, receive)
        waited(bell, send)
        right.append(np.array_equal(found, (before + call) * ones(LONG)))
    assert right == [True] * 4


@pytest.mark.mpi
def test_a_blocking_call_that_a_handler_ends_goes_on_and_later_ones_are_right(any_world, bell):
    data, right = ones(LONG), []
    for _ in range(6):
        data[:] = 1.0
        before = any_world.calls
        while any_world.calls == before:  # else it was begun before the alarm
            try:
                bell.arm(ring_alarm)
                any_world.allreduce(data)
                bell.disarm()
            except Alarm:
                continue
        any_world.barrier()
        while any_world._runtime.progress.under_way:
            any_world.poke()
        right.append(np.array_equal(data, any_world.size * ones(LONG)))
    assert right == [True] * 6


@pytest.mark.mpi
def test_a_handler_may_make_progress_and_is_told_what_it_may_not(any_world, bell):
    told: set[str] = set()
    begun: set[int] = set()
    handles: list[Handle] = []
    known = ones(3)
    for _ in range(2):
        any_world.allreduce(known)
        any_world.start_barrier().wait()

    def handler() -> None:
        any_world.poke()
        for handle in handles:
            handle.test()
        if any_world._runtime.progress.is_inside:
            before = any_world.calls
            for call in (lambda: any_world.allreduce(known), any_world.start_barrier):
                try:
                    call()
                    told.add("accepted")
                except OperationError as error:
                    told.add(str(error))
            begun.add(any_world.calls - before)
        bell.arm(handler)

    right = []
    for _ in range(10):
        handles[:] = [any_world.start_allreduce(ones(LONG)) for _ in range(2)]
        bell.arm(handler)
        found = [handle.wait() for handle in handles]
        bell.disarm()
        right.append(all(np.array_equal(each, any_world.size * ones(LONG)) for each in found))
    assert right == [True] * 10
    assert all("signal handler" in text for text in told)
    assert begun <= {0}, "what is refused has not been begun"


@pytest.mark.mpi
def test_a_forked_process_is_refused_and_its_rank_goes_on(any_world):
    part = any_world.split(0)
    lent = any_world.lend("to be refused", "lent")  # nothing refers to the communicator that it is a view of
    kept = ones(3)
    for _ in range(2):
        lent.comm.allreduce(kept)
    gc.collect()
    any_world.allreduce(ones(3))
    under_way = any_world.start_allreduce(ones(LONG))
    receive = any_world.start_recv(ones(3), (any_world.rank - 1) % any_world.size)
    calls = [
        lambda: any_world.allreduce(ones(3)),  # known from before
        lambda: lent.comm.allreduce(kept),
        lambda: part.start_barrier(),
        under_way.wait,
        under_way.test,
        receive.wait,
        lambda: any_world.send(ones(1), (any_world.rank + 1) % any_world.size),
        lambda: any_world.allgather_object(1),
        lambda: any_world.split(0),
        part.free,
        any_world.depart,
    ]
    child = os.fork()
    if child == 0:
        refused = 0
        any_world.poke()
        for call in calls if any_world.size > 1 else ():
            try:
                call()
            except OperationError as error:
                refused += "forked from rank" in str(error)
        os._exit(0 if any_world.size == 1 or refused == len(calls) else 1 + refused)
    _, status = os.waitpid(child, 0)
    any_world.barrier()  # else a fast rank's message has come before a slow one forks
    send = any_world.start_send(ones(3), (any_world.rank + 1) % any_world.size)
    assert os.waitstatus_to_exitcode(status) == 0
    assert under_way.wait()[-1] == any_world.size
    assert receive.wait().tolist() == [1.0] * 3
    send.wait()
    part.free()
