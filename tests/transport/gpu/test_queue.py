"""The stream of a GPU that calls give their work to, and its scratch memory, over the stand-in."""

from __future__ import annotations

import gc
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from hpcpar.errors import CudaError
from hpcpar.transport.gpu.cuda_driver import CudaDriver, driver
from hpcpar.transport.gpu.queue import SMALLEST_SCRATCH_NBYTES, Queue, queue_of_thread


def no_kernels(ordinal: int):
    raise AssertionError("nothing is summed here")


@pytest.fixture
def queue(stand_in) -> Queue:
    return Queue(driver(), 0, no_kernels)


def test_scratch_is_used_again_and_can_be_shown(stand_in, queue: Queue) -> None:
    first = queue.take(1000)
    address = first.address
    assert driver().is_exportable(address)
    kept = first[10:20]
    del first
    gc.collect()
    other = queue.take(1000)
    assert other.address != address, "a slice still needs it"
    del kept
    gc.collect()
    assert queue.take(500).address == address


def test_scratch_is_little_more_than_what_is_needed(stand_in, queue: Queue) -> None:
    for nbytes in (1, 3 << 18, (1 << 20) + 1, 9 << 20, (9 << 20) + 1):
        _, size = driver().range_of(queue.take(nbytes).address)
        assert nbytes <= size <= max(nbytes * 9 / 8 + 1, nbytes + SMALLEST_SCRATCH_NBYTES)


def test_what_lies_idle_makes_room_where_the_device_is_full(stand_in, monkeypatch) -> None:
    """Calls take the queues in turn, and each would keep as much as the largest of them took."""
    alloc, free = CudaDriver.alloc, CudaDriver.free
    taken: dict[int, int] = {}

    def limited(cuda: CudaDriver, nbytes: int) -> int:
        if sum(taken.values()) + nbytes > 5 << 20:
            raise CudaError("the device's memory is full")
        address = alloc(cuda, nbytes)
        taken[address] = nbytes
        return address

    def freed(cuda: CudaDriver, address: int) -> None:
        taken.pop(address, None)  # others' scratch, from before, makes room as well
        free(cuda, address)

    monkeypatch.setattr(CudaDriver, "alloc", limited)
    monkeypatch.setattr(CudaDriver, "free", freed)
    queues = [queue_of_thread(turn, driver(), 0, no_kernels) for turn in range(2)]
    kept = queues[0].take(1 << 20)
    for _ in range(3):
        for each in queues:
            octets = each.take(3 << 20)
            octets[...] = octets[:]
            each.afterwards(lambda octets=octets: octets)
            del octets
    with pytest.raises(CudaError, match="full"):
        queues[0].take(5 << 20)
    assert list(taken) == [kept.address], "it may be in use"
    del kept
    for each in queues:
        each.give_back()


def test_a_piece_that_is_freed_meanwhile_is_not_taken(stand_in, queue: Queue) -> None:
    """As by the collector, at any moment and in any thread."""
    pieces = [queue.take(count << 20) for count in (1, 2, 3)]
    addresses = [piece.address for piece in pieces]
    del pieces

    class Disturbed(list):
        def __iter__(self):
            found = [*super().__iter__()]
            self[:] = found[1:]
            return iter(found)

    queue._free = Disturbed(sorted(queue._free, key=lambda piece: piece[1]))
    assert queue.take(1 << 20).address == addresses[1]


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
