"""The stream of a GPU that calls give their work to, over the stand-in."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from hpcpar.transport.gpu.cuda_driver import driver
from hpcpar.transport.gpu.queue import Queue, queue_of_thread


def no_kernels(ordinal: int):
    raise AssertionError("nothing is summed here")


@pytest.fixture
def queue(stand_in) -> Queue:
    return Queue(driver(), 0, no_kernels)


def test_a_thread_goes_on_with_the_queues_of_one_that_has_ended(stand_in) -> None:
    """Else each took a stream, events and memory with it."""

    used: list[Queue] = []
    for _ in range(3):
        thread = threading.Thread(target=lambda: used.append(queue_of_thread(7, driver(), 0, no_kernels)))
        thread.start()
        thread.join()
    here = queue_of_thread(7, driver(), 0, no_kernels)
    assert all(queue is here for queue in used)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(queue_of_thread, 7, driver(), 0, no_kernels).result() is not here


def test_what_is_due_is_called_when_the_queue_has_come_so_far(stand_in, queue: Queue) -> None:
    called: list[int] = []
    with stand_in.Gate(queue.stream) as gate:
        queue.afterwards(lambda: called.append(1))
        queue.look()
        assert not called
        gate.open()
        queue.synchronize()
    queue.look()
    assert called == [1]
    queue.look()
    assert called == [1]
