"""Arrays on devices as flat memory, and queues that order work without a host that waits."""

from __future__ import annotations

import sys
import types
from contextlib import contextmanager, nullcontext

import numpy as np
import pytest

from hpcpar.errors import BufferTypeError
from hpcpar.transport.buffers import empty_like
from hpcpar.transport.gpu.cuda_driver import driver
from hpcpar.transport.gpu.device_buffer import DeviceBuffer, bind_device, is_on_device
from hpcpar.transport.gpu.queue import Queue
from tests.transport.gpu.kernel_stand_in import StandInKernels

KERNELS = StandInKernels()


@pytest.fixture
def queue(stand_in) -> Queue:
    return Queue(driver(), 0, lambda ordinal: KERNELS)


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
    queue = Queue(cuda, 1, lambda ordinal: KERNELS)
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
        assert bound.host.stream() == streams[1]
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
