"""Arrays on devices as flat memory, and queues that order work without a host that waits."""

from __future__ import annotations

import gc
import sys
import threading
import types
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext

import numpy as np
import pytest

from hpcpar.errors import BufferTypeError, CudaError
from hpcpar.transport.buffers import empty_like
from hpcpar.transport.gpu.cuda_driver import CudaDriver, driver
from hpcpar.transport.gpu.device_buffer import (
    SMALLEST_SCRATCH_NBYTES,
    DeviceBuffer,
    Queue,
    bind_device,
    is_on_device,
    queue_of_thread,
)


def no_kernels(ordinal: int):
    raise AssertionError("nothing is summed here")


@pytest.fixture
def queue(stand_in) -> Queue:
    return Queue(driver(), 0, no_kernels)


def bound(array, queue: Queue) -> DeviceBuffer:
    buffer = bind_device(array, lambda ordinal: queue, writable=True).host
    assert isinstance(buffer, DeviceBuffer)
    return buffer


def test_parts_copies_and_scratch_have_the_face_of_host_memory(stand_in, queue: Queue) -> None:
    array = stand_in.DeviceArray.from_host(np.arange(12, dtype="int32").reshape(3, 4))
    buffer = bound(array, queue)
    assert (buffer.count, buffer.dtype, buffer.itemsize) == (12, "int32", 4)
    assert buffer.address == array.address
    part = buffer.part(4, 8)
    assert (part.address, part.count) == (array.address + 16, 4)
    copy = part.copy()
    assert copy.address != part.address
    buffer.part(0, 4).octets[...] = copy.octets
    queue.lead(array.stream)
    assert array.to_host().tolist() == [[4, 5, 6, 7], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert buffer.unowned().octets.owner is None


def test_work_comes_after_what_made_the_array_and_before_what_reads_it(stand_in, queue: Queue) -> None:
    cuda = driver()
    theirs = cuda.stream()
    array = stand_in.DeviceArray.from_host(np.zeros(1000, "float32"), stream=theirs)
    with stand_in.Gate(theirs) as gate:
        array.put(np.full(1000, 7, "float32"), wait=False)
        buffer = bound(array, queue)
        copy = buffer.copy()
        mark = queue.mark()
        assert not mark.is_past(), "the caller's stream has not come so far"
        gate.open()
        queue.synchronize()
    assert mark.is_past()
    seen = stand_in.DeviceArray(1000, "float32", stream=theirs)
    with stand_in.Gate(queue.stream) as gate:
        bound(seen, queue).octets[...] = copy.octets
        queue.lead(theirs)
        gate.open()
    assert (seen.to_host() == 7).all()


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


def test_what_cannot_be_used_is_named(stand_in, queue: Queue) -> None:
    array = stand_in.DeviceArray.from_host(np.zeros((4, 6), "float32"))
    with pytest.raises(BufferTypeError, match="contiguous copy"):
        bound(array[::2], queue)
    with pytest.raises(BufferTypeError, match=r"float128|longdouble"):
        bound(stand_in.DeviceArray(4, np.longdouble), queue)
    assert bound(array[1:3], queue).count == 12
    assert bound(array[2:2], queue).count == 0


def test_a_result_is_not_written_into_what_is_read_only(stand_in, queue: Queue, monkeypatch) -> None:
    """As the arrays of JAX, which its users trust to stay as they are."""
    array = stand_in.DeviceArray.from_host(np.zeros(4, "float32"))
    interface = {**array.__cuda_array_interface__, "data": (array.address, True)}
    monkeypatch.setattr(stand_in.DeviceArray, "__cuda_array_interface__", interface)
    with pytest.raises(BufferTypeError, match=r"out is a read-only DeviceArray .* pass a copy"):
        bind_device(array, lambda ordinal: queue, writable=True, what="out")
    assert bind_device(array, lambda ordinal: queue, writable=False).host.address == array.address


def fake_cupy(device_array: type, streams: list[int]) -> types.ModuleType:
    """CuPy as far as devices matter to it: fresh memory is on the current one, a stream is of one."""
    cupy = types.ModuleType("cupy")
    current = [0]

    @contextmanager
    def device(ordinal: int):
        current.append(ordinal)
        yield
        current.pop()

    class Array(device_array):
        @property
        def device(self):
            found = device(self.ordinal)
            found.id = self.ordinal
            return found

    def from_external(foreign):
        assert foreign.__cuda_stream__()[1] not in streams
        assert current[-1] == 1, "CuPy uses a stream on the device that is current"
        return nullcontext()

    cupy.ndarray = Array
    cupy.empty = lambda count, dtype: Array(count, dtype, ordinal=current[-1])
    cupy.ascontiguousarray = lambda array: Array.from_host(array.to_host(), ordinal=current[-1])
    cupy.cuda = types.SimpleNamespace(
        Stream=types.SimpleNamespace(from_external=from_external),
        get_current_stream=lambda device_id=-1: types.SimpleNamespace(
            ptr=streams[current[-1] if device_id == -1 else device_id]
        ),
    )
    return cupy


def test_an_array_of_cupy_is_worked_on_where_it_is_whatever_device_is_current(stand_in, monkeypatch) -> None:
    monkeypatch.setenv("STAND_IN_DEVICES", "2")
    cuda = driver()
    queue = Queue(cuda, 1, no_kernels)
    streams = []
    for ordinal in (0, 1):
        cuda.use(ordinal)
        streams.append(cuda.stream())
    cupy = fake_cupy(stand_in.DeviceArray, streams)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    array = cupy.ndarray.from_host(np.arange(6, dtype="float32"), ordinal=1)
    with_gaps = array[::2]
    with_gaps.__class__ = cupy.ndarray
    monkeypatch.setattr(cupy.ndarray, "__setitem__", lambda self, part, values: None, raising=False)
    for each in (array, with_gaps):
        bound = bind_device(each, {1: queue}.__getitem__, writable=True)
        assert bound.host.elements() == streams[1]
        assert cuda.ordinal_of(bound.host.address) == 1
        if bound.write_back is not None:
            bound.write_back()
    assert bound.write_back is not None
    assert cuda.ordinal_of(empty_like(array, 3).address) == 1


def test_arrays_on_hosts_and_devices_are_told_apart(stand_in) -> None:
    import torch

    assert is_on_device(stand_in.DeviceArray(3, "float32"))
    assert not is_on_device(np.zeros(3))
    assert not is_on_device(torch.zeros(3))
    assert not is_on_device([1, 2])
