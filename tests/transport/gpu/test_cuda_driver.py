"""The CUDA driver's calls over a stand-in whose device pages fault on host access; the stand-in too."""

from __future__ import annotations

import ctypes
import ctypes.util
import signal
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import numpy as np
import pytest

from hpcpar.errors import CudaError
from hpcpar.transport.buffers import octets_at
from hpcpar.transport.gpu import cuda_driver

ROOT = Path(__file__).parents[3]


@pytest.fixture
def cuda(stand_in):
    return cuda_driver.driver()


@pytest.fixture
def host(cuda):
    """A NumPy array in pinned memory: `host([1, 2])`."""
    begun = []

    def pinned(values):
        values = np.asarray(values)
        begun.append(cuda.alloc_pinned(values.nbytes))
        array = octets_at(begun[-1], values.nbytes).view(values.dtype).reshape(values.shape)
        array[...] = values
        return array

    yield pinned
    for address in begun:
        cuda.free_pinned(address)


def address_of(array):
    return array.ctypes.data


def wait_for(cuda, event):
    """Return when the event is complete; the test's own limit ends a wait in vain."""
    while not cuda.is_complete(event):
        time.sleep(1e-4)


def run(script):
    """A script in a process of its own, beside this repository."""
    return subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )


LOADED = """
from tests.transport.gpu import cuda_stand_in
cuda_stand_in.load()
from hpcpar.errors import CudaError
from hpcpar.transport.gpu.cuda_driver import driver
cuda = driver()
cuda.use(0)
"""


# The library


def test_importing_the_module_loads_neither_driver_nor_bindings():
    ended = run(
        "import sys, hpcpar.transport.gpu.cuda_driver; "
        "print('libcuda.so' in open('/proc/self/maps').read(), 'cuda.bindings' in sys.modules)"
    )
    assert ended.stdout == "False False\n"


ASKED = """
from hpcpar.transport.gpu.cuda_driver import driver, is_available
print(is_available())
driver()
"""


@pytest.mark.skipif(bool(ctypes.util.find_library("cuda")), reason="this machine has a CUDA driver")
def test_without_a_driver_the_error_says_where_it_comes_from():
    pytest.importorskip("cuda.bindings", reason="needs cuda-bindings: pip install hpcpar[cuda13]")
    ended = run(ASKED)
    assert ended.stdout == "False\n"
    assert "hpcpar.errors.CudaError: no CUDA driver (libcuda.so.1)" in ended.stderr
    assert "--nv or --gpus" in ended.stderr


def test_a_library_without_the_calls_is_no_driver(tmp_path):
    """As a driver older than CUDA 12, which lacks the call that finds the others."""
    pytest.importorskip("cuda.bindings", reason="needs cuda-bindings: pip install hpcpar[cuda13]")
    subprocess.run(
        ["gcc", "-shared", "-Wl,-soname,libcuda.so.1", "-o", tmp_path / "libcuda.so.1", "-xc", "/dev/null"],
        check=True,
        timeout=60,
    )
    ended = run(f"import ctypes; ctypes.CDLL('{tmp_path}/libcuda.so.1', mode=ctypes.RTLD_GLOBAL){ASKED}")
    assert ended.stdout == "False\n"
    assert "for CUDA 12 or newer could be loaded" in ended.stderr


def test_without_cuda_bindings_the_error_says_what_to_install():
    ended = run(f"import sys; sys.modules['cuda.bindings'] = None{ASKED}")
    assert ended.stdout == "False\n"
    assert "needs cuda-bindings" in ended.stderr
    assert "pip install 'hpcpar[cuda13]'" in ended.stderr


def test_the_driver_is_one_for_the_process_and_says_its_version(cuda):
    assert cuda_driver.driver() is cuda
    assert cuda.version == 13000


def test_a_driver_without_devices_is_not_available(cuda, stand_in, monkeypatch):
    assert cuda_driver.is_available()
    stand_in.show(False)
    assert not cuda_driver.is_available()
    stand_in.show(True)
    monkeypatch.setenv("STAND_IN_DEVICES", "0")
    assert not cuda_driver.is_available()


def test_a_driver_that_finds_no_device_when_it_starts_says_so(stand_in):
    script = """
import os
os.environ["STAND_IN_DEVICES"] = "0"
from tests.transport.gpu import cuda_stand_in
cuda_stand_in.load()
"""
    ended = run(script + ASKED)
    assert ended.stdout == "False\n"
    assert "cuInit(0): CUDA_ERROR_NO_DEVICE (100): no device is visible" in ended.stderr


# Devices


def test_a_thread_that_has_chosen_no_device_is_told_to(cuda):
    refusals = []

    def work():
        for call in (lambda: cuda.alloc(8), lambda: cuda.stream()):
            with pytest.raises(CudaError, match=r"INVALID_CONTEXT \(201\).*use\(ordinal\)") as refused:
                call()
            refusals.append(refused)
        cuda.use(0)
        cuda.free(cuda.alloc(8))
        refusals.append(None)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    assert len(refusals) == 3


def test_each_device_has_memory_and_streams_of_its_own(cuda, stand_in, monkeypatch):
    monkeypatch.setenv("STAND_IN_DEVICES", "2")
    assert cuda.device_count() == 2
    arrays = [stand_in.DeviceArray.from_host(np.arange(4) + 10 * i, ordinal=i) for i in (0, 1)]
    assert [cuda.ordinal_of(array.address) for array in arrays] == [0, 1]
    cuda.copy(arrays[0].address, arrays[1].address, arrays[0].nbytes, 0)
    cuda.synchronize(0)  # the default stream of device 1, which that of device 0 does not know
    assert arrays[0].to_host().tolist() == [10, 11, 12, 13]
    cuda.use(1)
    event = cuda.event()
    cuda.use(0)
    stream = cuda.stream()
    with pytest.raises(CudaError, match=r"cuEventRecord.*INVALID_HANDLE"):
        cuda.record(event, stream)


def test_a_forked_child_is_told_to_be_spawned(stand_in):
    script = f"""{LOADED}
import os, sys
child = os.fork()
if child == 0:
    try:
        cuda.alloc(8)
    except CudaError as error:
        print(error, flush=True)
    os._exit(0)
os.waitpid(child, 0)
"""
    assert "start such processes by spawn" in run(script).stdout


# Memory


def test_what_was_copied_to_the_device_comes_back(cuda, host):
    sent, received = host(np.arange(1000.0)), host(np.zeros(1000))
    first, second = cuda.alloc(8000), cuda.alloc(8000)
    stream = cuda.stream()
    cuda.copy(first, address_of(sent), 8000, stream)
    cuda.copy(second, first, 8000, stream)
    cuda.copy(second + 80, address_of(host([0, 0])), 16, stream)
    cuda.copy(address_of(received), second, 8000, stream)
    cuda.synchronize(stream)
    assert received.tolist() == [*range(10), 0, 0, *range(12, 1000)]
    cuda.free(first)
    cuda.free(second)


def test_an_inner_address_is_in_its_allocation(cuda):
    base = cuda.alloc(1000)
    assert cuda.range_of(base) == cuda.range_of(base + 999) == (base, 1000)
    cuda.free(base)
    with pytest.raises(CudaError, match=r"cuMemGetAddressRange.*NOT_FOUND.*in no allocation"):
        cuda.range_of(base)


def test_an_allocation_in_the_place_of_another_has_an_id_of_its_own(cuda):
    base = cuda.alloc(1000)
    before = cuda.buffer_id(base)
    assert cuda.buffer_id(base + 10) == before
    cuda.free(base)
    assert cuda.alloc(1000) == base, "the stand-in gives the place again"
    assert cuda.buffer_id(base) != before
    cuda.free(base)


def test_only_memory_of_the_drivers_own_allocator_is_exportable(cuda, stand_in):
    device, pooled = cuda.alloc(8), stand_in.alloc_pooled(8)
    managed, pinned = stand_in.alloc_managed(8), cuda.alloc_pinned(8)
    ordinary = np.zeros(8)
    addresses = [device + 1, pooled, managed, pinned, address_of(ordinary)]
    assert [cuda.is_exportable(address) for address in addresses] == [True, False, False, False, False]
    ctypes.memset(managed, 1, 8)  # the host may
    for address in (device, pooled, managed):
        cuda.free(address)
    cuda.free_pinned(pinned)
    assert not cuda.is_exportable(device)


def test_the_host_cannot_read_device_memory(cuda, stand_in):
    script = f"""{LOADED}
import ctypes
address = cuda.alloc(64)
print("allocated", flush=True)
ctypes.string_at(address, 1)
print("read", flush=True)
"""
    ended = run(script)
    assert (ended.returncode, ended.stdout) == (-signal.SIGSEGV, "allocated\n")


@pytest.mark.parametrize("begin", [0, 8])
def test_a_copy_beyond_an_allocation_is_refused(cuda, host, begin):
    outside = host(np.zeros(16, dtype=np.uint8))
    inside = cuda.alloc(16 + begin - 1)
    for target, source in ((inside + begin, address_of(outside)), (address_of(outside), inside + begin)):
        with pytest.raises(
            CudaError, match=r"cuMemcpyAsync\(.*16, 0\).*INVALID_VALUE.*not all of these bytes"
        ):
            cuda.copy(target, source, 16, 0)
    cuda.copy(inside + begin, address_of(outside), 15, 0)
    cuda.free(inside)


def test_what_the_driver_refuses_is_an_error_with_the_call_and_what_to_do(cuda, stand_in, host):
    ordinary, pinned = np.zeros(8), host(np.zeros(16, dtype=np.uint8))
    base, freed, pooled = cuda.alloc(64), cuda.alloc(16), stand_in.alloc_pooled(64)
    event = cuda.event(interprocess=True)
    memory_handle, event_handle = cuda.export_memory(base), cuda.export_event(event)
    cuda.free(freed)
    for expected, call, *arguments in (
        (r"cuDeviceGet\(7\): CUDA_ERROR_INVALID_DEVICE \(101\)", cuda.use, 7),
        (f"{address_of(ordinary):#x} is no memory of CUDA", cuda.ordinal_of, address_of(ordinary)),
        ("is no memory of CUDA", cuda.buffer_id, address_of(ordinary)),
        ("not all of these bytes", cuda.copy, address_of(pinned), freed, 16, 0),
        (r"cuMemFree.*no allocation begins", cuda.free, base + 1),
        (r"cuMemFree.*no allocation begins", cuda.free, freed),
        (r"cuMemAlloc\(0\).*at least one byte", cuda.alloc, 0),
        (r"cuIpcOpenMemHandle.*cannot open memory that it has exported", cuda.open_memory, memory_handle),
        (r"cuIpcOpenEventHandle.*cannot open an event that it has exported", cuda.open_event, event_handle),
        (r"cudaMallocAsync.*expandable_segments:False", cuda.export_memory, pooled),
        (r"cuIpcGetEventHandle.*interprocess=True", cuda.export_event, cuda.event()),
        (r"cuIpcOpenMemHandle.*INVALID_VALUE", cuda.open_memory, bytes(64)),
        (r"cuIpcOpenEventHandle.*INVALID_VALUE", cuda.open_event, memory_handle),
    ):
        with pytest.raises(CudaError, match=expected):
            call(*arguments)
    for address in (base, pooled):
        cuda.free(address)


class Handle:
    """An IPC handle of cuda-bindings whose memory is seen to go with it."""

    def __init__(self):
        self._memory = ctypes.create_string_buffer(bytes(range(64)), 64)
        freed.append(self._memory)

    def getPtr(self):  # noqa: N802
        return ctypes.addressof(self._memory)

    def __del__(self):
        ctypes.memset(self._memory, 0, 64)


freed = []
"""What handles leave, so that it is not used again."""


def test_a_handle_is_read_before_its_memory_goes(cuda, monkeypatch):
    def exported(_):
        return 0, Handle()

    bindings = types.SimpleNamespace(cuIpcGetMemHandle=exported, cuIpcGetEventHandle=exported)
    monkeypatch.setattr(cuda, "_cuda", bindings)
    assert cuda.export_memory(1) == cuda.export_event(1) == bytes(range(64))


# Streams and events


def test_the_host_goes_on_while_a_stream_is_held_up(cuda, stand_in, host):
    stream, event = cuda.stream(), cuda.event()
    value, device = host([5]), cuda.alloc(8)
    with stand_in.Gate(stream) as gate:
        cuda.copy(device, address_of(value), 8, stream)
        cuda.record(event, stream)
        assert not cuda.is_complete(event)
        gate.open()
        wait_for(cuda, event)
        assert cuda.is_complete(event)
    cuda.destroy_event(event)
    cuda.destroy_stream(stream)
    cuda.free(device)


def test_an_event_may_be_destroyed_while_streams_still_use_it(cuda, stand_in):
    event, slow, waiting = cuda.event(), cuda.stream(), cuda.stream()
    with stand_in.Gate(slow) as gate:
        cuda.record(event, slow)
        cuda.wait(waiting, event)
        cuda.destroy_event(event)
        with pytest.raises(CudaError, match=r"cuEventQuery.*INVALID_HANDLE.*no longer, there"):
            cuda.is_complete(event)
        gate.open()
        cuda.synchronize(waiting)


def relayed(cuda, host, *, is_ordered):
    """What a second stream copies of 40 values that a first one brings, waiting for each or not."""
    first, second, device = cuda.stream(), cuda.stream(), cuda.alloc(8)
    there, taken = cuda.event(), cuda.event()
    sent, received = host(np.arange(1, 41)), host(np.zeros(40, dtype=np.int64))
    for i in range(40):
        cuda.wait(first, taken)
        cuda.copy(device, address_of(sent[i:]), 8, first)
        cuda.record(there, first)
        if is_ordered:
            cuda.wait(second, there)
        cuda.copy(address_of(received[i:]), device, 8, second)
        cuda.record(taken, second)
    cuda.synchronize(first)
    cuda.synchronize(second)
    cuda.free(device)
    return received.tolist()


@pytest.mark.parametrize("jitter_us", [0, 500])
def test_streams_that_wait_for_each_other_relay_what_they_should(cuda, host, monkeypatch, jitter_us):
    monkeypatch.setenv("STAND_IN_JITTER_US", str(jitter_us))
    assert relayed(cuda, host, is_ordered=True) == list(range(1, 41))


def test_a_missing_wait_shows_as_wrong_data(cuda, host, monkeypatch):
    monkeypatch.setenv("STAND_IN_JITTER_US", "500")
    assert relayed(cuda, host, is_ordered=False) != list(range(1, 41))


def test_dropped_waits_show_as_wrong_data(cuda, host, monkeypatch):
    monkeypatch.setenv("STAND_IN_JITTER_US", "500")
    monkeypatch.setenv("STAND_IN_DROP_WAITS", "1")
    assert relayed(cuda, host, is_ordered=True) != list(range(1, 41))


# The arrays of the stand-in


def test_an_array_is_what_the_cuda_array_interface_says(cuda, stand_in):
    stream = cuda.stream()
    array = stand_in.DeviceArray.from_host(np.arange(12, dtype=np.float32).reshape(3, 4), stream=stream)
    assert array.__cuda_array_interface__ == {
        "shape": (3, 4),
        "typestr": "<f4",
        "data": (array.address, False),
        "version": 3,
        "strides": None,
        "stream": stream,
    }
    assert (array.size, array.nbytes, array.ndim, len(array)) == (12, 48, 2, 3)
    assert array.reshape(-1)[2:5].to_host().tolist() == [2, 3, 4]
    assert array[::2].to_host().tolist() == [[0, 1, 2, 3], [8, 9, 10, 11]]
    assert array[::2].__cuda_array_interface__["strides"] == (32, 4)
    assert array[1:].__cuda_array_interface__["strides"] is None
