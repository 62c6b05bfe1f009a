"""A stand-in for the CUDA driver, where there is no GPU: built, loaded, and arrays on it (see libcuda.c).

Loaded before anybody asks for libcuda.so.1, it is what they get: the loader knows it by this name.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import os
import shutil
import subprocess
import tempfile
import threading
import weakref
from pathlib import Path

import numpy as np

from hpcpar.transport.gpu.cuda_driver import driver

SOURCE = Path(__file__).with_name("libcuda.c")
COMPILE = ("gcc", "-std=gnu11", "-O2", "-fPIC", "-shared", "-pthread", "-fvisibility=hidden")
NAME = ("-Wl,-soname,libcuda.so.1",)

HOOKS = {
    "stand_in_translate": (ctypes.c_void_p, ctypes.c_uint64),
    "stand_in_reach": (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64),
    "stand_in_enqueue": (ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p),
    "stand_in_calls": (ctypes.c_uint64, ctypes.c_char_p),
    "stand_in_show": (None, ctypes.c_int),
    "stand_in_release": (ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64),
}
"""What each returns and takes."""

_library = None
_kept = []
"""Functions that a stream may still call."""


def obstacle():
    """Why there can be no stand-in here, or None."""
    if shutil.which("gcc") is None:
        return "needs gcc to build the stand-in for the CUDA driver"
    try:
        import cuda.bindings  # noqa: F401
    except ImportError:
        return "needs cuda-bindings: pip install hpcpar[cuda13] or hpcpar[cuda12]"
    if not Path("/proc/self/maps").exists():
        return "the stand-in for the CUDA driver needs Linux"
    if _library is None and "libcuda.so" in Path("/proc/self/maps").read_text():
        return "the CUDA driver itself is loaded already"
    return None


def build():
    """The library, for the loader under the driver's name."""
    return compiled([*COMPILE, *NAME], SOURCE)


def compiled(command, source, *included):
    """A library of this source, made once for each compiler; several processes may ask at the same time."""
    compiler = subprocess.run([command[0], "--version"], capture_output=True, check=True, timeout=60).stdout
    texts = b"".join(file.read_bytes() for file in (source, *included))
    key = hashlib.sha256(compiler + texts + repr(command).encode()).hexdigest()[:16]
    # A folder of this user's own: another one's library is not to be loaded.
    folder = Path(tempfile.gettempdir()) / f"hpcpar-stand-in-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to somebody else")
    target = folder / f"{source.stem}-{key}.so"
    if not target.exists():
        with tempfile.TemporaryDirectory(dir=folder) as apart:
            fresh = Path(apart) / target.name
            subprocess.run([*command, "-o", fresh, source], check=True, timeout=300)
            fresh.replace(target)
    return target


def load():
    """The stand-in's own library, in place of the CUDA driver's from now on in this process."""
    global _library
    if _library is None:
        if reason := obstacle():
            raise RuntimeError(reason)
        library = ctypes.CDLL(str(build()), mode=ctypes.RTLD_GLOBAL)
        for name, (result, *arguments) in HOOKS.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
        _library = library
    return _library


def show(is_shown):
    """Let the devices be there, or not: other tests of this process cannot do without the library again."""
    load().stand_in_show(is_shown)


def calls(name):
    """How often the driver's call of this name was made in this process."""
    return load().stand_in_calls(name.encode())


def reach(address, nbytes):
    """Where this device memory can be read and written."""
    real = load().stand_in_reach(address, nbytes)
    if real is None:
        raise IndexError(f"{nbytes} bytes at {address:#x} are not all there")
    return real


def alloc_pooled(nbytes):
    """Device memory that cannot be exported, as cudaMallocAsync's."""
    return _allocated("cuMemAllocAsync", nbytes, 0)


def alloc_managed(nbytes):
    """Memory of host and device."""
    return _allocated("cuMemAllocManaged", nbytes, 1)


def _allocated(call, *arguments):
    from cuda.bindings import driver as bindings

    code, address = getattr(bindings, call)(*arguments)
    if code:
        raise MemoryError(f"{call}: {code.name}")
    return int(address)


class Gate:
    """Holds a stream up where it is made, until `open`, and for a minute at most."""

    def __init__(self, stream):
        self._is_open = threading.Event()
        self._callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: self._is_open.wait(60))
        _kept.append(self._callback)
        if result := load().stand_in_enqueue(stream, self._callback, None):
            raise RuntimeError(f"stand_in_enqueue: {result}")

    def open(self):
        self._is_open.set()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.open()


class DeviceArray:
    """An array in the memory of a device, as far as a test needs one.

    dtype     a NumPy dtype, or "bfloat16" (with the bits as uint16 on the host)
    shape     of elements; strides are bytes
    stream    its producing stream: what it holds is there once this stream has come so far
    address   where it begins on the device
    """

    def __init__(self, shape, dtype, *, stream=0, ordinal=0, alloc=None):
        load()
        cuda = driver()
        cuda.use(ordinal)
        self.dtype = dtype if isinstance(dtype, str) and dtype == "bfloat16" else np.dtype(dtype)
        self.shape = (shape,) if isinstance(shape, int) else tuple(shape)
        self.strides = _contiguous(self.shape, self.itemsize)
        self.stream = stream
        self.ordinal = ordinal
        self.base = None
        self.address = (alloc or cuda.alloc)(max(self.nbytes, 1))
        self._release_at_last(self.address)

    def _release_at_last(self, address):
        """With the array; at the process's end, memory goes by itself."""
        release = weakref.finalize(self, load().stand_in_release, address, driver().buffer_id(address))
        release.atexit = False

    @classmethod
    def from_host(cls, values, *, dtype=None, stream=0, ordinal=0, wait=True, alloc=None):
        """`values` (bits as uint16 of bfloat16), copied on `stream`; without `wait` perhaps later."""
        values = np.ascontiguousarray(values)
        array = cls(values.shape, dtype or values.dtype, stream=stream, ordinal=ordinal, alloc=alloc)
        if values.itemsize != array.itemsize:
            raise TypeError(f"{values.dtype} has not the bits of {array.dtype}")
        array.put(values, wait=wait)
        return array

    def put(self, values, *, wait=True):
        """Copy values of the same shape and element size here, on the array's stream."""
        values = np.ascontiguousarray(values)
        if values.shape != self.shape or self.strides != _contiguous(self.shape, self.itemsize):
            raise ValueError(f"{values.shape} does not fill {self.shape} with strides {self.strides}")
        if not self.nbytes:
            return
        cuda = driver()
        cuda.use(self.ordinal)
        pinned = cuda.alloc_pinned(self.nbytes)
        ctypes.memmove(pinned, values.ctypes.data, self.nbytes)
        cuda.copy(self.address, pinned, self.nbytes, self.stream)
        if wait:
            cuda.synchronize(self.stream)
            cuda.free_pinned(pinned)
        else:
            self._release_at_last(pinned)

    def to_host(self):
        """The values once its stream has come so far; bits as uint16 of bfloat16."""
        dtype = np.dtype(np.uint16) if self.dtype == "bfloat16" else self.dtype
        span = sum((n - 1) * step for n, step in zip(self.shape, self.strides, strict=True)) + self.itemsize
        host = np.empty(span if self.size else 0, dtype=np.uint8)
        if host.size:
            cuda = driver()
            cuda.use(self.ordinal)
            cuda.copy(host.ctypes.data, self.address, host.size, self.stream)
            cuda.synchronize(self.stream)
        return np.ndarray(self.shape, dtype, host.data, strides=self.strides).copy()

    @property
    def itemsize(self):
        return 2 if self.dtype == "bfloat16" else self.dtype.itemsize

    @property
    def size(self):
        return math.prod(self.shape)

    @property
    def nbytes(self):
        return self.size * self.itemsize

    @property
    def ndim(self):
        return len(self.shape)

    def __len__(self):
        return self.shape[0]

    @property
    def __cuda_array_interface__(self):
        is_contiguous = self.strides == _contiguous(self.shape, self.itemsize)
        return {
            "shape": self.shape,
            "typestr": "<V2" if self.dtype == "bfloat16" else self.dtype.str,
            "data": (self.address if self.size else 0, False),
            "version": 3,
            "strides": None if is_contiguous else self.strides,
            "stream": self.stream or 1,
        }

    def _view(self, address, shape, strides):
        view = object.__new__(DeviceArray)
        view.__dict__.update(self.__dict__, address=address, shape=shape, strides=strides, base=self)
        return view

    def reshape(self, *shape):
        if self.strides != _contiguous(self.shape, self.itemsize):
            raise ValueError("only a contiguous array is given another shape")
        shape = np.empty(self.shape, np.bool_).reshape(*shape).shape
        return self._view(self.address, shape, _contiguous(shape, self.itemsize))

    def __getitem__(self, part):
        """[a:b] or [a:b:c] along the first dim: the same memory."""
        start, stop, step = part.indices(self.shape[0])
        shape = (len(range(start, stop, step)), *self.shape[1:])
        strides = (self.strides[0] * step, *self.strides[1:])
        return self._view(self.address + start * self.strides[0], shape, strides)


def _contiguous(shape, itemsize):
    return tuple(itemsize * math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
