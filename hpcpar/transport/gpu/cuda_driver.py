"""The CUDA driver by cuda-bindings: memory, streams, events, and both of another process.

PyTorch and CuPy keep these calls to themselves, or lack the ones that peers on a node need: the range of an
allocation, its identity, whether it can be exported. Every context here is the device's primary one, which
both of them use too, so addresses, streams and events pass freely between the three.

Addresses, streams and events are integers; stream 0 is the default one. A thread chooses its device by `use`
before anything else.
"""

from __future__ import annotations

import ctypes
import threading
from typing import Any

from hpcpar.errors import CudaError

HANDLE_NBYTES = 64
"""Bytes of an IPC handle of memory or of an event."""

_INVALID_VALUE = 1
_NOT_READY = 600

_MEANINGS = {
    2: "the device's memory, or that of the host which it can lock, is full",
    3: "the driver was not started in this process: one forked after its parent used CUDA cannot use it; "
    "start such processes by spawn",
    4: "the driver has ended with its process",
    46: "another process has the device for itself (nvidia-smi shows its compute mode)",
    100: "no device is visible; see nvidia-smi and CUDA_VISIBLE_DEVICES",
    101: "there is no device of this number; see CUDA_VISIBLE_DEVICES",
    201: "no device is current in this thread; call use(ordinal) first",
    205: "the device could not map this memory",
    217: "the two devices cannot reach each other's memory",
    304: "the operating system refused; processes in different containers cannot share memory of a device",
    400: "this stream, event or handle is not, or no longer, there",
    500: "this address lies in no allocation of a device",
    700: "a kernel or a copy touched memory that is not there; the process has lost the device and must end",
    719: "a kernel failed; the process has lost the device and must end",
    801: "this device or driver does not do that",
    802: "the system is not ready for CUDA: on a node with NVSwitch, nvidia-fabricmanager must run",
    803: "the driver's library does not fit the kernel's module; the node must be restarted",
}
"""Explanations of the driver's errors."""

_NOT_EXPORTABLE = (
    "only whole allocations of cudaMalloc can be exported, not memory of cudaMallocAsync nor of PyTorch's "
    "expandable segments (PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False does without)"
)

_MEANINGS_OF = {
    ("cuMemAlloc", _INVALID_VALUE): "an allocation has at least one byte",
    ("cuMemHostAlloc", _INVALID_VALUE): "an allocation has at least one byte",
    ("cuMemFree", _INVALID_VALUE): "no allocation begins at this address",
    ("cuMemcpyAsync", _INVALID_VALUE): "not all of these bytes are there",
    ("cuIpcGetMemHandle", _INVALID_VALUE): _NOT_EXPORTABLE,
    ("cuIpcGetMemHandle", 801): _NOT_EXPORTABLE,
    ("cuIpcGetEventHandle", _INVALID_VALUE): "the event was not made with interprocess=True",
    ("cuIpcOpenMemHandle", 201): "a process cannot open memory that it has exported itself, nor open "
    "any before use(ordinal)",
    ("cuIpcOpenEventHandle", 201): "a process cannot open an event that it has exported itself, nor open "
    "any before use(ordinal)",
    ("cuIpcOpenMemHandle", 208): "memory that was there before is still open and must be closed first",
}
"""Explanations that hold for one call only."""


class CudaDriver:
    """The driver's calls.

    version   of CUDA that the driver serves at most: 13000 is 13.0

    errors   CudaError if there is no driver, it cannot start, or cuda-bindings is not installed
    """

    def __init__(self) -> None:
        try:
            from cuda.bindings import driver as cuda
        except ImportError as error:
            raise CudaError(
                f"memory of a GPU needs cuda-bindings, which calls the CUDA driver: pip install "
                f"'hpcpar[cuda13]', or hpcpar[cuda12] with a driver for CUDA 12 ({error})"
            ) from error
        self._cuda: Any = cuda
        try:
            code = cuda.cuInit(0)[0]
        except RuntimeError as error:
            raise CudaError(
                f"no CUDA driver (libcuda.so.1) for CUDA 12 or newer could be loaded; it comes with NVIDIA's "
                f"driver on nodes that have a GPU, and into a container by --nv or --gpus ({error})"
            ) from error
        if code:
            raise _refused(code, cuda.cuInit, 0)
        self.version: int = _result(cuda.cuDriverGetVersion)
        self._contexts: dict[int, int] = {}
        self._lock = threading.Lock()

    # Devices

    def device_count(self) -> int:
        return int(_result(self._cuda.cuDeviceGetCount))

    def use(self, ordinal: int) -> None:
        """Make the device's primary context this thread's, if it is not."""
        context = self._contexts.get(ordinal)
        if context is None:
            with self._lock:
                context = self._contexts.get(ordinal) or self._retained(ordinal)
                self._contexts[ordinal] = context
        if int(_result(self._cuda.cuCtxGetCurrent)) != context:
            _result(self._cuda.cuCtxSetCurrent, context)

    def _retained(self, ordinal: int) -> int:
        device = _result(self._cuda.cuDeviceGet, ordinal)
        return int(_result(self._cuda.cuDevicePrimaryCtxRetain, device))

    def identity(self, ordinal: int) -> str:
        """The UUID of a device, or of a part of one (MIG), whatever its ordinal here."""
        # Of CUDA 12, the call without _v2 does not tell the parts of a device apart; CUDA 13 has only one.
        uuid = getattr(self._cuda, "cuDeviceGetUuid_v2", self._cuda.cuDeviceGetUuid)
        octets: bytes = _result(uuid, _result(self._cuda.cuDeviceGet, ordinal)).bytes
        return octets.hex()

    # Memory

    def alloc(self, nbytes: int) -> int:
        """Device memory of any content, of the kind that other processes can open."""
        return int(_result(self._cuda.cuMemAlloc, nbytes))

    def free(self, address: int) -> None:
        """Waits for what the device has under way."""
        _result(self._cuda.cuMemFree, address)

    def alloc_pinned(self, nbytes: int) -> int:
        """Host memory that a copy reads or writes by itself, for every device."""
        return int(_result(self._cuda.cuMemHostAlloc, nbytes, self._cuda.CU_MEMHOSTALLOC_PORTABLE))

    def free_pinned(self, address: int) -> None:
        _result(self._cuda.cuMemFreeHost, address)

    def ordinal_of(self, address: int) -> int:
        """The ordinal of the device that holds the memory."""
        return self._known("DEVICE_ORDINAL", address)

    def range_of(self, address: int) -> tuple[int, int]:
        """Base address and bytes of the allocation around the address."""
        base, nbytes = _result(self._cuda.cuMemGetAddressRange, address)
        return int(base), nbytes

    def buffer_id(self, address: int) -> int:
        """Tells an allocation of this process from a later one in the same place."""
        return self._known("BUFFER_ID", address)

    def is_exportable(self, address: int) -> bool:
        return bool(self._attribute("IS_LEGACY_CUDA_IPC_CAPABLE", address))

    def _attribute(self, name: str, address: int) -> int | None:
        """None of memory that the driver does not know."""
        attribute = getattr(self._cuda.CUpointer_attribute, f"CU_POINTER_ATTRIBUTE_{name}")
        code, value = self._cuda.cuPointerGetAttribute(attribute, address)
        if code == _INVALID_VALUE:
            return None
        if code:
            raise _refused(code, self._cuda.cuPointerGetAttribute, attribute, address)
        return int(value)

    def _known(self, attribute: str, address: int) -> int:
        value = self._attribute(attribute, address)
        if value is None:
            raise CudaError(f"{address:#x} is no memory of CUDA; device memory or pinned memory is needed")
        return value

    def export_memory(self, base: int) -> bytes:
        """The IPC handle of the whole allocation, for another process of this node."""
        return _octets(_result(self._cuda.cuIpcGetMemHandle, base))

    def open_memory(self, handle: bytes) -> int:
        """Map another process's allocation and return its address here, until close_memory."""
        there = _filled(self._cuda.CUipcMemHandle(), handle)
        lazily = self._cuda.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
        return int(_result(self._cuda.cuIpcOpenMemHandle, there, lazily))

    def close_memory(self, address: int) -> None:
        _result(self._cuda.cuIpcCloseMemHandle, address)

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """On the stream, between pinned and device memory in any direction, of any device and process."""
        _result(self._cuda.cuMemcpyAsync, target, source, nbytes, stream)

    # Streams and events

    def stream(self) -> int:
        """A new one that the default stream does not hold up."""
        return int(_result(self._cuda.cuStreamCreate, self._cuda.CUstream_flags.CU_STREAM_NON_BLOCKING))

    def destroy_stream(self, stream: int) -> None:
        """Destroy the stream; work under way on it still ends."""
        _result(self._cuda.cuStreamDestroy, stream)

    def synchronize(self, stream: int) -> None:
        """Block this thread until the stream is idle."""
        _result(self._cuda.cuStreamSynchronize, stream)

    def event(self, *, interprocess: bool = False) -> int:
        flags = self._cuda.CUevent_flags
        shared = flags.CU_EVENT_INTERPROCESS if interprocess else 0
        return int(_result(self._cuda.cuEventCreate, flags.CU_EVENT_DISABLE_TIMING | shared))

    def destroy_event(self, event: int) -> None:
        _result(self._cuda.cuEventDestroy, event)

    def record(self, event: int, stream: int) -> None:
        """The event is complete once the stream has done what it has to do now."""
        _result(self._cuda.cuEventRecord, event, stream)

    def is_complete(self, event: int) -> bool:
        """True once the last record is complete; an event that was never recorded is complete."""
        (code,) = self._cuda.cuEventQuery(event)
        if code == _NOT_READY:
            return False
        if code:
            raise _refused(code, self._cuda.cuEventQuery, event)
        return True

    def wait(self, stream: int, event: int) -> None:
        """Make the stream wait for the last record made before this call; the host goes on."""
        _result(self._cuda.cuStreamWaitEvent, stream, event, 0)

    def export_event(self, event: int) -> bytes:
        """The IPC handle of the event, for another process of this node."""
        return _octets(_result(self._cuda.cuIpcGetEventHandle, event))

    def open_event(self, handle: bytes) -> int:
        """Another process's event, until destroy_event."""
        return int(_result(self._cuda.cuIpcOpenEventHandle, _filled(self._cuda.CUipcEventHandle(), handle)))


def _result(call: Any, *arguments: Any) -> Any:
    """Make a call of the driver and return its result: a list where it has several.

    errors   CudaError if the driver refuses
    """
    code, *found = call(*arguments)
    if code:
        raise _refused(code, call, *arguments)
    return found[0] if len(found) == 1 else found


def _refused(code: Any, call: Any, *arguments: Any) -> CudaError:
    name = call.__name__
    meaning = _MEANINGS_OF.get((name, int(code))) or _MEANINGS.get(int(code))
    text = f"{name}({_shown(arguments)}): {code.name} ({int(code)})"
    return CudaError(f"{text}: {meaning}" if meaning else text)


def _shown(arguments: tuple[Any, ...]) -> str:
    """The numbers that a call was given; what looks like an address in hexadecimal."""
    numbers = (int(argument) for argument in arguments if isinstance(argument, int))
    return ", ".join(hex(number) if number >= 2**32 else str(number) for number in numbers)


# Not all versions of cuda-bindings have an attribute for the bytes of an IPC handle. Its memory goes with it.


def _octets(handle: Any) -> bytes:
    """The bytes of an IPC handle."""
    return ctypes.string_at(handle.getPtr(), HANDLE_NBYTES)


def _filled(handle: Any, octets: bytes) -> Any:
    """An IPC handle with these bytes."""
    ctypes.memmove(handle.getPtr(), octets, HANDLE_NBYTES)
    return handle


_driver: CudaDriver | None = None
_driver_lock = threading.Lock()


def driver() -> CudaDriver:
    """The driver of this process, loaded by the first call.

    errors   CudaError, every time, if there is none
    """
    global _driver
    with _driver_lock:
        if _driver is None:
            _driver = CudaDriver()
        return _driver


def is_available() -> bool:
    """True if there is a driver with a device."""
    try:
        return driver().device_count() > 0
    except CudaError:
        return False
