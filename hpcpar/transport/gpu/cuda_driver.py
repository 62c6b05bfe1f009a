"""The CUDA driver by ctypes: memory, streams, events, and both of another process.

PyTorch and CuPy keep these calls to themselves, or lack the ones that peers on a node need: the range of an
allocation, its identity, whether it can be exported. Every context here is the device's primary one, which
both of them use too, so addresses, streams and events pass freely between the three.

Addresses, streams and events are integers; stream 0 is the default one. A thread chooses its device by `use`
before anything else.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from typing import Any

from hpcpar.errors import CudaError

PLACES = ("libcuda.so.1", "/usr/lib/wsl/lib/libcuda.so.1")
"""Names of the library: for the loader, and in Windows' subsystem for Linux."""

HANDLE_NBYTES = 64
"""Bytes of an IPC handle of memory or of an event."""

_SUCCESS = 0
_INVALID_VALUE = 1
_NOT_READY = 600

_STREAM_NON_BLOCKING = 1
_EVENT_DISABLE_TIMING = 2
_EVENT_INTERPROCESS = 4
_WAIT_DEFAULT = 0
_MEMORY_HOST_PORTABLE = 1
_IPC_LAZY_ENABLE_PEER_ACCESS = 1

_BUFFER_ID = 7
_DEVICE_ORDINAL = 9
_IS_LEGACY_IPC_CAPABLE = 10


class _Handle(ctypes.Structure):
    """`CUipcMemHandle` and `CUipcEventHandle`, which pass by value."""

    _fields_ = (("octets", ctypes.c_ubyte * HANDLE_NBYTES),)


_address = ctypes.c_uint64
_opaque = ctypes.c_void_p
"""A context, a stream, an event; also where a result is to be put."""

_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "cuInit": (ctypes.c_uint,),
    "cuDriverGetVersion": (_opaque,),
    "cuGetErrorName": (ctypes.c_int, _opaque),
    "cuDeviceGetCount": (_opaque,),
    "cuDeviceGet": (_opaque, ctypes.c_int),
    "cuDeviceGetUuid_v2": (_opaque, ctypes.c_int),
    "cuDevicePrimaryCtxRetain": (_opaque, ctypes.c_int),
    "cuCtxGetCurrent": (_opaque,),
    "cuCtxSetCurrent": (_opaque,),
    "cuMemAlloc_v2": (_opaque, ctypes.c_size_t),
    "cuMemFree_v2": (_address,),
    "cuMemHostAlloc": (_opaque, ctypes.c_size_t, ctypes.c_uint),
    "cuMemFreeHost": (_opaque,),
    "cuMemGetAddressRange_v2": (_opaque, _opaque, _address),
    "cuPointerGetAttribute": (_opaque, ctypes.c_int, _address),
    "cuMemcpyAsync": (_address, _address, ctypes.c_size_t, _opaque),
    "cuIpcGetMemHandle": (_opaque, _address),
    "cuIpcOpenMemHandle_v2": (_opaque, _Handle, ctypes.c_uint),
    "cuIpcCloseMemHandle": (_address,),
    "cuStreamCreate": (_opaque, ctypes.c_uint),
    "cuStreamDestroy_v2": (_opaque,),
    "cuStreamSynchronize": (_opaque,),
    "cuStreamWaitEvent": (_opaque, _opaque, ctypes.c_uint),
    "cuEventCreate": (_opaque, ctypes.c_uint),
    "cuEventDestroy_v2": (_opaque,),
    "cuEventRecord": (_opaque, _opaque),
    "cuEventQuery": (_opaque,),
    "cuIpcGetEventHandle": (_opaque, _opaque),
    "cuIpcOpenEventHandle": (_opaque, _Handle),
}

_NO_ERROR_OF: dict[str, tuple[int, ...]] = {
    "cuEventQuery": (_NOT_READY,),
    "cuPointerGetAttribute": (_INVALID_VALUE,),
}
"""Results of a call that answer a question."""

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
    ("cuMemAlloc_v2", _INVALID_VALUE): "an allocation has at least one byte",
    ("cuMemHostAlloc", _INVALID_VALUE): "an allocation has at least one byte",
    ("cuMemFree_v2", _INVALID_VALUE): "no allocation begins at this address",
    ("cuMemcpyAsync", _INVALID_VALUE): "not all of these bytes are there",
    ("cuIpcGetMemHandle", _INVALID_VALUE): _NOT_EXPORTABLE,
    ("cuIpcGetMemHandle", 801): _NOT_EXPORTABLE,
    ("cuIpcGetEventHandle", _INVALID_VALUE): "the event was not made with interprocess=True",
    ("cuIpcOpenMemHandle_v2", 201): "a process cannot open memory that it has exported itself, nor open "
    "any before use(ordinal)",
    ("cuIpcOpenEventHandle", 201): "a process cannot open an event that it has exported itself, nor open "
    "any before use(ordinal)",
    ("cuIpcOpenMemHandle_v2", 208): "memory that was there before is still open and must be closed first",
}
"""Explanations that hold for one call only."""


class CudaDriver:
    """The calls of one library.

    path      the file it was loaded from
    version   of CUDA that the driver serves at most: 13000 is 13.0

    errors   CudaError if there is no library or it cannot start
    """

    def __init__(self) -> None:
        library, name = _load()
        try:
            functions = {call: getattr(library, call) for call in _ARGUMENTS}
        except AttributeError as error:
            raise CudaError(f"{name} is too old or no CUDA driver: {error}") from None
        self._cuda: Any = library
        for call, function in functions.items():
            function.argtypes, function.restype = _ARGUMENTS[call], ctypes.c_int
            if call != "cuGetErrorName":
                function.errcheck = self._checked(call)
        self.path = _file_of(functions["cuInit"]) or name
        library.cuInit(0)
        self.version = self._int("cuDriverGetVersion")
        self._contexts: dict[int, int] = {}
        self._lock = threading.Lock()

    def _checked(self, call: str) -> Callable[[int, Any, tuple[Any, ...]], int]:
        allowed = (_SUCCESS, *_NO_ERROR_OF.get(call, ()))

        def check(result: int, _: Any, arguments: tuple[Any, ...]) -> int:
            if result in allowed:
                return result
            raise CudaError(self._message(call, arguments, result))

        return check

    def _message(self, call: str, arguments: tuple[Any, ...], result: int) -> str:
        name = ctypes.c_char_p()
        self._cuda.cuGetErrorName(result, ctypes.byref(name))
        meaning = _MEANINGS_OF.get((call, result)) or _MEANINGS.get(result)
        text = f"{call}({_shown(arguments)}): {(name.value or b'error').decode()} ({result})"
        return f"{text}: {meaning}" if meaning else text

    def _int(self, call: str, *arguments: Any, of: Any = ctypes.c_int) -> int:
        """Call a function whose first argument points to its result, and return the result."""
        found = of()
        getattr(self._cuda, call)(ctypes.byref(found), *arguments)
        return found.value or 0

    # Devices

    def device_count(self) -> int:
        return self._int("cuDeviceGetCount")

    def use(self, ordinal: int) -> None:
        """Make the device's primary context this thread's, if it is not."""
        context = self._contexts.get(ordinal)
        if context is None:
            with self._lock:
                context = self._contexts.get(ordinal) or self._retained(ordinal)
                self._contexts[ordinal] = context
        if self._int("cuCtxGetCurrent", of=_opaque) != context:
            self._cuda.cuCtxSetCurrent(context)

    def _retained(self, ordinal: int) -> int:
        device = self._int("cuDeviceGet", ordinal)
        return self._int("cuDevicePrimaryCtxRetain", device, of=_opaque)

    def identity(self, ordinal: int) -> str:
        """The UUID of a device, or of a part of one (MIG), whatever its ordinal here."""
        octets = (ctypes.c_ubyte * 16)()
        self._cuda.cuDeviceGetUuid_v2(ctypes.byref(octets), self._int("cuDeviceGet", ordinal))
        return bytes(octets).hex()

    # Memory

    def alloc(self, nbytes: int) -> int:
        """Device memory of any content, of the kind that other processes can open."""
        return self._int("cuMemAlloc_v2", nbytes, of=_address)

    def free(self, address: int) -> None:
        """Waits for what the device has under way."""
        self._cuda.cuMemFree_v2(address)

    def alloc_pinned(self, nbytes: int) -> int:
        """Host memory that a copy reads or writes by itself, for every device."""
        return self._int("cuMemHostAlloc", nbytes, _MEMORY_HOST_PORTABLE, of=_opaque)

    def free_pinned(self, address: int) -> None:
        self._cuda.cuMemFreeHost(address)

    def ordinal_of(self, address: int) -> int:
        """The ordinal of the device that holds the memory."""
        return self._known(_DEVICE_ORDINAL, address)

    def range_of(self, address: int) -> tuple[int, int]:
        """Base address and bytes of the allocation around the address."""
        base, nbytes = _address(), ctypes.c_size_t()
        self._cuda.cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(nbytes), address)
        return base.value, nbytes.value

    def buffer_id(self, address: int) -> int:
        """Tells an allocation of this process from a later one in the same place."""
        return self._known(_BUFFER_ID, address)

    def is_exportable(self, address: int) -> bool:
        return bool(self._attribute(_IS_LEGACY_IPC_CAPABLE, address))

    def _attribute(self, attribute: int, address: int) -> int | None:
        """None of memory that the driver does not know."""
        value = ctypes.c_uint64()  # the widest of them; the others fill the lower part
        found = self._cuda.cuPointerGetAttribute(ctypes.byref(value), attribute, address)
        return value.value if found == _SUCCESS else None

    def _known(self, attribute: int, address: int) -> int:
        value = self._attribute(attribute, address)
        if value is None:
            raise CudaError(f"{address:#x} is no memory of CUDA; device memory or pinned memory is needed")
        return value

    def export_memory(self, base: int) -> bytes:
        """The IPC handle of the whole allocation, for another process of this node."""
        handle = _Handle()
        self._cuda.cuIpcGetMemHandle(ctypes.byref(handle), base)
        return bytes(handle.octets)

    def open_memory(self, handle: bytes) -> int:
        """Map another process's allocation and return its address here, until close_memory."""
        there = _Handle.from_buffer_copy(handle)
        return self._int("cuIpcOpenMemHandle_v2", there, _IPC_LAZY_ENABLE_PEER_ACCESS, of=_address)

    def close_memory(self, address: int) -> None:
        self._cuda.cuIpcCloseMemHandle(address)

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """On the stream, between pinned and device memory in any direction, of any device and process."""
        self._cuda.cuMemcpyAsync(target, source, nbytes, stream)

    # Streams and events

    def stream(self) -> int:
        """A new one that the default stream does not hold up."""
        return self._int("cuStreamCreate", _STREAM_NON_BLOCKING, of=_opaque)

    def destroy_stream(self, stream: int) -> None:
        """Destroy the stream; work under way on it still ends."""
        self._cuda.cuStreamDestroy_v2(stream)

    def synchronize(self, stream: int) -> None:
        """Block this thread until the stream is idle."""
        self._cuda.cuStreamSynchronize(stream)

    def event(self, *, interprocess: bool = False) -> int:
        flags = _EVENT_DISABLE_TIMING | (_EVENT_INTERPROCESS if interprocess else 0)
        return self._int("cuEventCreate", flags, of=_opaque)

    def destroy_event(self, event: int) -> None:
        self._cuda.cuEventDestroy_v2(event)

    def record(self, event: int, stream: int) -> None:
        """The event is complete once the stream has done what it has to do now."""
        self._cuda.cuEventRecord(event, stream)

    def is_complete(self, event: int) -> bool:
        """True once the last record is complete; an event that was never recorded is complete."""
        return bool(self._cuda.cuEventQuery(event) == _SUCCESS)

    def wait(self, stream: int, event: int) -> None:
        """Make the stream wait for the last record made before this call; the host goes on."""
        self._cuda.cuStreamWaitEvent(stream, event, _WAIT_DEFAULT)

    def export_event(self, event: int) -> bytes:
        """The IPC handle of the event, for another process of this node."""
        handle = _Handle()
        self._cuda.cuIpcGetEventHandle(ctypes.byref(handle), event)
        return bytes(handle.octets)

    def open_event(self, handle: bytes) -> int:
        """Another process's event, until destroy_event."""
        return self._int("cuIpcOpenEventHandle", _Handle.from_buffer_copy(handle), of=_opaque)


def _load() -> tuple[Any, str]:
    """The library and the name that found it."""
    refusals = []
    for name in PLACES:
        try:
            return ctypes.CDLL(name), name
        except OSError as error:
            refusals.append(str(error))
    raise CudaError(
        f"the CUDA driver was looked for as {' and '.join(PLACES)}, and is not there; it comes with NVIDIA's "
        f"driver on nodes that have a GPU, and into a container by --nv or --gpus ({'; '.join(refusals)})"
    )


def _file_of(function: Any) -> str | None:
    """The file that a function was mapped from, where the system tells."""
    address = ctypes.cast(function, ctypes.c_void_p).value or 0
    try:
        with open("/proc/self/maps") as maps:
            for line in maps:
                begin, _, rest = line.partition("-")
                if int(begin, 16) <= address < int(rest.split()[0], 16):
                    return os.path.realpath(line[line.index("/") :].rstrip("\n"))
    except (OSError, ValueError):
        pass
    return None


def _shown(arguments: tuple[Any, ...]) -> str:
    """The numbers that a call was given; what looks like an address in hexadecimal."""
    numbers = (argument for argument in arguments if isinstance(argument, int))
    return ", ".join(hex(number) if number >= 2**32 else str(number) for number in numbers)


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
