"""Arrays on devices as flat memory, and queues that order work without a host that waits."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from hpcpar.errors import BufferTypeError
from hpcpar.transport.cuda_driver import driver
from hpcpar.transport.device_memory import DeviceBuffer, Queue, bind_device, is_on_device


def no_kernels(ordinal: int):
    raise AssertionError("nothing is summed here")


@pytest.fixture
def queue(stand_in) -> Queue:
    return Queue(driver(), 0, no_kernels)


def bound(array, queue: Queue) -> DeviceBuffer:
    buffer = bind_device(array, lambda ordinal: queue, "buffer").host
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


def test_arrays_on_hosts_and_devices_are_told_apart(stand_in) -> None:
    import torch

    assert is_on_device(stand_in.DeviceArray(3, "float32"))
    assert not is_on_device(np.zeros(3))
    assert not is_on_device(torch.zeros(3))
    assert not is_on_device([1, 2])
