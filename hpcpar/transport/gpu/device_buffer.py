"""A user's array on a GPU as memory that schedules work on.

torch CUDA tensors, CuPy arrays            used in place when contiguous, else copied within the GPU
what has __cuda_array_interface__ (Numba)  used in place; must be contiguous
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from hpcpar.errors import BufferTypeError
from hpcpar.transport.buffers import (
    DTYPES,
    Binding,
    HostBuffer,
    is_cupy,
    is_torch,
    require_distinct_elements,
    torch_dtype_name,
    unknown_dtype,
)
from hpcpar.transport.gpu.kernels import cupy_stream
from hpcpar.transport.gpu.queue import DeviceOctets, Queue


@dataclass(frozen=True, slots=True)
class DeviceBuffer(HostBuffer):
    """Device memory with the face of host memory; copies and sums are given to its queue.

    octets   `DeviceOctets`
    stream   tells the stream in which the caller works just now
    """

    stream: Callable[[], int]

    @property
    def queue(self) -> Queue:
        queue: Queue = self._device.queue
        return queue

    @property
    def _device(self) -> Any:
        return self.octets

    @property
    def address(self) -> int:
        address: int = self._device.address
        return address

    def like(self, octets: Any) -> HostBuffer:
        return DeviceBuffer(octets, self.dtype, self.itemsize, self.stream)

    def unowned(self) -> HostBuffer:
        return self.like(DeviceOctets(self.address, self.octets.size, self.queue))

    def scratch(self, count: int) -> HostBuffer:
        return self.like(self.queue.take(count * self.itemsize))


def is_on_device(array: Any) -> bool:
    """True if an array's elements lie in a GPU's memory."""
    if isinstance(array, np.ndarray):
        return False
    if is_torch(array):
        return bool(array.is_cuda)
    return hasattr(array, "__cuda_array_interface__")


def bind_device(
    array: Any, queue: Callable[[int | None], Queue], *, writable: bool, what: str = "buffer"
) -> Binding:
    """See an array on a GPU as flat memory; what is given to its queue comes after what made the array.

    queue    gives the one to use on a device, by its number; None: for no elements, which lie on none
    writable, what   as for `bind`
    errors   BufferTypeError for unknown element types, sparse tensors, read-only memory, and gaps in what
             is no tensor or CuPy array
    """
    if is_torch(array):
        return _bind_torch(array, queue(array.device.index), writable=writable, what=what)
    interface = array.__cuda_array_interface__
    name = str(getattr(array, "dtype", "") or np.dtype(interface["typestr"]))
    if name not in DTYPES:
        raise unknown_dtype(what, name)
    if writable and interface["data"][1]:
        raise BufferTypeError(
            f"{what} is a read-only {type(array).__qualname__} and the result is to be written into it; "
            f"pass a copy that may be written, or give out="
        )
    packed = array
    if interface.get("strides") is not None and not _has_no_gaps(interface):
        if not is_cupy(array):
            raise BufferTypeError(
                f"{what} is a {type(array).__qualname__} whose elements do not lie side by side in the order "
                f"of its indices; pass a contiguous copy"
            )
        import cupy

        with array.device:  # else the copy is on the device that is current
            packed = cupy.ascontiguousarray(array)
        interface = packed.__cuda_array_interface__
    used = queue(_ordinal(array, interface))
    buffer = _buffer(packed, int(interface["data"][0]), name, _cupy_stream(array), used)
    if packed is array:
        return Binding(buffer)

    def write_back() -> None:
        with array.device, cupy_stream(used.stream):
            array[...] = packed.reshape(array.shape)

    return Binding(buffer, write_back)


def _bind_torch(tensor: Any, queue: Queue, *, writable: bool, what: str) -> Binding:
    import torch

    name = torch_dtype_name(tensor, what)
    tensor = tensor.detach()
    if writable and not tensor.is_contiguous():
        require_distinct_elements(tensor.shape, tensor.stride(), what, "tensor.contiguous()")
    packed = tensor.resolve_conj().resolve_neg().contiguous()
    index = tensor.device.index

    def stream() -> int:
        return int(torch.cuda.current_stream(index).cuda_stream)

    buffer = _buffer(packed, packed.data_ptr(), name, stream, queue)
    if packed.data_ptr() == tensor.data_ptr():
        return Binding(buffer)

    def write_back() -> None:
        ours: Any = torch.cuda.ExternalStream(queue.stream, device=tensor.device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(ours):
            tensor.copy_(packed)

    return Binding(buffer, write_back)


def _buffer(array: Any, address: int, dtype: str, stream: Callable[[], int], queue: Queue) -> DeviceBuffer:
    itemsize = 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize
    count = array.numel() if is_torch(array) else array.size
    octets: Any = DeviceOctets(address, count * itemsize, queue, array)
    queue.follow(stream())
    return DeviceBuffer(octets, dtype, itemsize, stream)


def _cupy_stream(array: Any) -> Callable[[], int]:
    """The caller's stream: CuPy's current one on the device, else the one that the array names."""
    if is_cupy(array):
        import cupy

        return lambda: int(cupy.cuda.get_current_stream(array.device.id).ptr)
    return lambda: int(array.__cuda_array_interface__.get("stream") or 0)


def _ordinal(array: Any, interface: dict[str, Any]) -> int | None:
    if is_cupy(array):
        return int(array.device.id)
    from hpcpar.transport.gpu.cuda_driver import driver

    return driver().ordinal_of(int(interface["data"][0])) if interface["data"][0] else None


def _has_no_gaps(interface: dict[str, Any]) -> bool:
    """True if the strides are those of a C-contiguous array."""
    expected = np.dtype(interface["typestr"]).itemsize
    for length, stride in zip(reversed(interface["shape"]), reversed(interface["strides"]), strict=True):
        if length > 1 and stride != expected:
            return False
        expected *= length
    return True
