"""Views of a user's array as host memory: elements that can be summed, bytes that can travel.

NumPy arrays, torch CPU tensors          used in place when contiguous
the same, not contiguous                 copied; the result is copied back
torch CUDA tensors, CuPy arrays          staged through host memory; the result is copied back
"""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcpar.errors import BufferTypeError
from hpcpar.transport.interface import Octets

DTYPES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
)
"""Element types that can be communicated."""

PYBUF_WRITE = 0x200  # of CPython's object.h: the view may be written to
_memoryview_at: Any = ctypes.pythonapi.PyMemoryView_FromMemory
_memoryview_at.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_memoryview_at.restype = ctypes.py_object

_NUMPY_NAMES = {np.dtype(name): name for name in DTYPES if name != "bfloat16"}


@dataclass(frozen=True, slots=True)
class HostBuffer:
    """One-dimensional contiguous host memory, as bytes and as elements."""

    octets: Octets
    dtype: str
    itemsize: int

    @property
    def elements(self) -> Any:
        """A NumPy array, or a torch tensor where NumPy has no such type (bfloat16)."""
        if self.dtype != "bfloat16":
            return self.octets.view(self.dtype)
        import torch

        return tensor_on(self.octets, torch.bfloat16)

    @property
    def count(self) -> int:
        return self.octets.size // self.itemsize

    def part(self, start: int, stop: int) -> HostBuffer:
        """Elements start to stop, sharing memory."""
        return self.like(self.octets[start * self.itemsize : stop * self.itemsize])

    def like(self, octets: Octets) -> HostBuffer:
        """Other bytes seen as elements of this buffer's type."""
        return HostBuffer(octets, self.dtype, self.itemsize)

    @property
    def address(self) -> int:
        """The address of the first byte."""
        address: int = self.octets.__array_interface__["data"][0]
        return address

    def unowned(self) -> HostBuffer:
        """A borrowed view: the caller must keep the array alive."""
        if not self.octets.size:
            return self
        return self.like(octets_at(self.address, self.octets.size))

    def scratch(self, count: int) -> HostBuffer:
        """Fresh memory for `count` elements of the same type, of any content."""
        return self.like(np.empty(count * self.itemsize, dtype=np.uint8))

    def copy(self) -> HostBuffer:
        """A copy in fresh memory."""
        fresh = self.scratch(self.count)
        fresh.octets[...] = self.octets
        return fresh


@dataclass(frozen=True, slots=True)
class Binding:
    """A user's array bound to host memory for one operation.

    write_back   brings the host memory's content back into the array, in one call of C; None when they are
                 the same
    """

    host: HostBuffer
    write_back: Callable[[], object] | None = None


def bind(array: Any, *, writable: bool, what: str = "buffer", owns: bool = True) -> Binding:
    """See a NumPy array, torch tensor or CuPy array of any shape as flat host memory.

    writable   the operation will write to it
    what       the argument's name, for errors
    owns       False: of an array that is used in place the host memory is a borrowed view, and the caller
               keeps the array alive
    errors     BufferTypeError for other objects, unknown element types, arrays without plain memory of
               their own, and results into read-only memory or into elements that share memory
    """
    if isinstance(array, np.ndarray):
        return _bind_numpy(array, writable=writable, what=what, owns=owns)
    if is_torch(array):
        return _bind_torch(array, writable=writable, what=what, owns=owns)
    if is_cupy(array):
        return _bind_cupy(array, what)
    raise BufferTypeError(
        f"{what} is a {type(array).__module__}.{type(array).__qualname__}; collectives take NumPy arrays, "
        f"torch tensors and CuPy arrays. Wrap numbers with numpy.asarray, or use the *_object calls."
    )


def empty_like(array: Any, count: int) -> Any:
    """A fresh one-dimensional array of the same library, element type and device."""
    if is_torch(array):
        return array.new_empty(count, requires_grad=False)
    if is_cupy(array):
        import cupy

        with array.device:
            return cupy.empty(count, dtype=array.dtype)
    if hasattr(array, "__cuda_array_interface__"):
        raise BufferTypeError(
            f"the result of {type(array).__module__}.{type(array).__qualname__} needs an array that hpcpar "
            f"cannot make: give out"
        )
    return np.empty(count, dtype=array.dtype)


def itemsize_of_dtype(dtype: Any) -> int:
    """Bytes of an element of a NumPy or torch type; BufferTypeError for what cannot be communicated."""
    if is_torch_dtype(dtype):
        name, itemsize = str(dtype).removeprefix("torch."), dtype.itemsize
    else:
        try:
            known = np.dtype(dtype)
        except TypeError:
            raise unknown_dtype("the array", repr(dtype)) from None
        name, itemsize = str(known), known.itemsize
    if name not in DTYPES:
        raise unknown_dtype("the array", name)
    return int(itemsize)


def from_octets(octets: Octets | None, shape: Sequence[int], dtype: Any) -> Any:
    """Bytes as an array of a NumPy or torch type, sharing memory; None: an array of zeros of its own."""
    if octets is None or not octets.size:
        octets = np.zeros(math.prod(shape) * itemsize_of_dtype(dtype), dtype=np.uint8)
    if not is_torch_dtype(dtype):
        return octets.view(dtype).reshape(shape)
    return tensor_on(octets, dtype).view(tuple(shape))


def octets_at(address: int, nbytes: int) -> Octets:
    """Memory as bytes: a borrowed view, whose owner the caller must keep alive."""
    return np.frombuffer(_memoryview_at(address, nbytes, PYBUF_WRITE), dtype=np.uint8)


def tensor_on(memory: NDArray[Any], dtype: Any = None) -> Any:
    """A torch tensor on a NumPy array's memory, its bytes seen as `dtype`.

    Also inside of `torch.inference_mode` one that may be written to outside of it: it may be kept.
    """
    import torch

    with torch.inference_mode(False):
        if dtype is None:
            return torch.from_numpy(memory)
        # torch sees no elements of one type as elements of another.
        return torch.from_numpy(memory).view(dtype) if memory.size else torch.empty(0, dtype=dtype)


def is_torch_dtype(dtype: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(dtype, torch.dtype)


def flat(array: Any) -> Any:
    """The array as one dimension, without its autograd history; shares memory where contiguous."""
    if not is_torch(array):
        return np.asarray(array).reshape(-1) if isinstance(array, np.matrix) else array.reshape(-1)
    is_flat = array.dim() == 1 and not array.requires_grad
    return array if is_flat else array.detach().reshape(-1)


def is_torch(array: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)


def write_counter(array: Any) -> Callable[[Any], None] | None:
    """Make what lets autograd know of a write to a tensor, as every operation in place does."""
    if not is_torch(array):
        return None
    count: Callable[[Any], None] = sys.modules["torch"].autograd.graph.increment_version
    return count


def is_cupy(array: Any) -> bool:
    cupy = sys.modules.get("cupy")
    return cupy is not None and isinstance(array, cupy.ndarray)


def _bind_numpy(array: NDArray[Any], *, writable: bool, what: str, owns: bool) -> Binding:
    if isinstance(array, np.ma.MaskedArray):
        raise BufferTypeError(
            f"{what} is a numpy.ma.MaskedArray, whose mask would be lost; pass array.filled(value), or "
            f"array.data and array.mask by a call each"
        )
    host = _numpy_host(np.ascontiguousarray(array).reshape(-1), what)
    if not owns and array.flags.carray:
        host = host.unowned()
    if not writable:
        return Binding(host)
    if not array.flags.writeable:
        raise BufferTypeError(
            f"{what} is a read-only NumPy array and the result is to be written into it; "
            f"pass a copy, or give out="
        )
    if array.flags.c_contiguous:
        return Binding(host)
    require_distinct_elements(array.shape, array.strides, what, "numpy.ascontiguousarray(array)")
    return Binding(host, partial(array.__setitem__, ..., host.elements.reshape(array.shape)))


def _numpy_host(elements: NDArray[Any], what: str) -> HostBuffer:
    name = _NUMPY_NAMES.get(elements.dtype)
    if name is None:
        raise unknown_dtype(what, str(elements.dtype))
    return HostBuffer(elements.view(np.uint8), name, elements.dtype.itemsize)


def require_distinct_elements(shape: Sequence[int], strides: Sequence[int], what: str, copied: str) -> None:
    """Refuse a result into elements that share memory, such as those of an expanded tensor.

    copied   the call that gives every element memory of its own
    """
    extent = 0
    for stride, length in sorted(
        (abs(stride), length) for stride, length in zip(strides, shape, strict=True)
    ):
        if length > 1 and stride <= extent:
            break
        extent += stride * (length - 1)
    else:
        return
    if 0 not in shape and not _are_distinct(shape, strides):
        raise BufferTypeError(
            f"{what} has shape {tuple(shape)} and strides {tuple(strides)}: several of its elements are one "
            f"place in memory, into which the result cannot be written (an expanded tensor, such as the "
            f"gradient of a sum(), is one). Pass {copied}"
        )


def _are_distinct(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """True if no two indices have one offset, by looking at all of them; few arrays come so far."""
    offsets = np.zeros(1, dtype=np.int64)
    for length, stride in zip(shape, strides, strict=True):
        if length > 1 and stride == 0:
            return False
        offsets = (offsets[:, None] + stride * np.arange(length)).reshape(-1)
    return np.unique(offsets).size == offsets.size


def torch_dtype_name(tensor: Any, what: str) -> str:
    """Name of the element type; BufferTypeError for unknown ones and for tensors without dense memory."""
    import torch

    problem = ""
    if tensor.is_nested:
        problem = "is a nested tensor; collectives take dense ones: pass each of tensor.unbind()"
    elif tensor.layout is not torch.strided:
        parts = ", or its indices and values" if str(tensor.layout).startswith("torch.sparse") else ""
        problem = f"is a {tensor.layout} tensor; collectives take dense ones: pass tensor.to_dense(){parts}"
    elif tensor.device.type == "meta":
        problem = "is on the meta device and has no memory; materialise it first"
    elif type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        problem = (
            f"is a {type(tensor).__module__}.{type(tensor).__qualname__}, which stands for its elements; "
            f"pass the plain tensor that holds them (of a DTensor: to_local())"
        )
    else:
        try:
            tensor.data_ptr()
        except RuntimeError:
            problem = (
                "is a tensor of torch.vmap or another function transform, and has no memory of its own; "
                "call the collective outside of the transformed function"
            )
    if problem:
        raise BufferTypeError(f"{what} {problem}")
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise unknown_dtype(what, str(tensor.dtype))
    return name


def _bind_torch(tensor: Any, *, writable: bool, what: str, owns: bool) -> Binding:
    import torch

    name = torch_dtype_name(tensor, what)
    is_contiguous = tensor.is_contiguous()
    if tensor.is_cpu and is_contiguous and not tensor.is_conj() and not tensor.is_neg():
        if not owns and tensor.numel():
            octets = octets_at(tensor.data_ptr(), tensor.nbytes)
            return Binding(HostBuffer(octets, name, tensor.itemsize))
        # Not view(-1), which keeps the stride of a single element: 8 of a column that is one row high.
        return Binding(_torch_host(tensor.detach().as_strided((tensor.numel(),), (1,)), name))
    tensor = tensor.detach()
    if writable and not is_contiguous:
        require_distinct_elements(tensor.shape, tensor.stride(), what, "tensor.contiguous()")
    staged = torch.empty(
        tensor.numel(), dtype=tensor.dtype, device="cpu", pin_memory=tensor.device.type == "cuda"
    )
    # A blocking copy: it waits for the work queued on the current stream that produces the tensor.
    staged.copy_(tensor.reshape(-1))
    return Binding(_torch_host(staged, name), partial(tensor.copy_, staged.view(tensor.shape)))


def _torch_host(flat_tensor: Any, name: str) -> HostBuffer:
    import torch

    return HostBuffer(flat_tensor.view(torch.uint8).numpy(), name, flat_tensor.itemsize)


def _bind_cupy(array: Any, what: str) -> Binding:
    import cupy

    host = _numpy_host(cupy.asnumpy(array).reshape(-1), what)

    def write_back() -> None:
        array.set(host.elements.reshape(array.shape))

    return Binding(host, write_back)


def unknown_dtype(what: str, found: str) -> BufferTypeError:
    """The error for elements that cannot be communicated."""
    return BufferTypeError(
        f"{what} has elements of type {found}; known are {', '.join(DTYPES)} in native byte order. "
        f"Convert it, or send its bytes as uint8."
    )
