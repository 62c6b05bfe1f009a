"""Kernels that fold pieces of device memory into one, or convert its type (kernels.cu).

The result has the bits that comm/reductions.py gives on the host, down to subnormal numbers, whatever the
order of CuPy's compiler options. Left open, here as there, where the host's own bits hang on its processor:

    which NaN a NaN is (its sign and digits), and which zero the min or max of -0.0 and +0.0 is
    the product of complex numbers: NumPy fuses a product and a sum where the processor can, the kernel never
    a complex number with an infinite part × factor: NumPy multiplies by factor + 0j, ∞ × 0 gives it a NaN

CuPy compiles them when they are needed: one for each operation and element type, and for each conversion,
that is asked for. The first call of each waits for that (half a second; CuPy keeps the binary in its own
cache). One launch takes 64 sources. More are folded 64 at a time, the result so far in the memory of the
result: 16-bit types are then rounded once per launch.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hpcpar.errors import CudaError, OperationError
from hpcpar.transport.buffers import DTYPES
from hpcpar.units import format_nbytes

SOURCE = Path(__file__).with_name("kernels.cu")
OPTIONS = ("-std=c++17", "--fmad=false")

# What follows stands in kernels.cu too.
THREADS = 256
PACK_NBYTES = 16
"""Bytes of each source that a thread loads at a time."""
MOST_SOURCES = 64
NARROW = -1
ARGUMENTS = struct.Struct(f"@Qqddii{MOST_SOURCES}Q")
"""Arguments of `fold`: into, count, factor, divisor, source_count, head, sources."""
CONVERTED = 8
"""Elements that a thread converts at a time."""
CONVERT_ARGUMENTS = struct.Struct("@QQqdd")
"""Arguments of `convert`: into, source, count, factor, divisor."""

BLOCKS_PER_PROCESSOR = 8
"""Blocks of 256 threads that a multiprocessor holds; for longer arrays each block does more."""

_ITEMSIZES = {name: 2 if name == "bfloat16" else np.dtype(name).itemsize for name in DTYPES}


class Kernels:
    """Arithmetic on the memory of one device, compiled and launched by CuPy, and memory of CuPy's for it."""

    def __init__(self, ordinal: int) -> None:
        try:
            import cupy
        except ImportError as error:
            raise CudaError(
                f"collectives on GPU memory need CuPy, which compiles the kernels that add it up: "
                f"pip install 'hpcpar[cuda13]', or hpcpar[cuda12] with a driver for CUDA 12 ({error})"
            ) from error
        self._cupy = cupy
        self._device = cupy.cuda.Device(ordinal)
        self._most_blocks = BLOCKS_PER_PROCESSOR * self._device.attributes["MultiProcessorCount"]
        # One of our own: the user's may be of a kind that other processes cannot be shown.
        self._pool = cupy.cuda.MemoryPool()
        self._compiled: dict[tuple[str, ...], Any] = {}
        self._streams: dict[int, Any] = {}

    def memory(self, nbytes: int, stream: int) -> Any:
        """Memory for work in `stream`, at its `ptr`: free for later work there with its last reference.

        errors   CudaError where the device is full
        """
        with self._device, self._stream(stream):
            try:
                return self._pool.malloc(max(1, nbytes))
            except self._cupy.cuda.memory.OutOfMemoryError as error:
                raise CudaError(f"{format_nbytes(nbytes)} of scratch memory for a call: {error}") from error

    def fold(
        self,
        op: str,
        dtype: str,
        into: int,
        sources: Sequence[int],
        count: int,
        *,
        factor: float = 1.0,
        divisor: int = 1,
        stream: int,
    ) -> None:
        """Have `stream` do into = (sources[0] (op) sources[1] (op) …) × factor ÷ divisor, `count` elements.

        into, sources   addresses, each as its element type wants it; `into` may be one of the first 64
                        sources, and must not overlap them otherwise. Fastest where all have the same
                        remainder by 16, as pieces of scratch memory can be given that of the result.
        errors          OperationError if `into` is a source beyond the first 64; whether the operation and
                        the factor have a meaning for the element type is the caller's to know
        """
        found = launches(dtype, into, sources, count, factor=factor, divisor=divisor)
        self._launch("fold", defines(op, dtype), block_count(dtype, count), found, stream)

    def convert(
        self,
        dtype: str,
        into: int,
        source_dtype: str,
        source: int,
        count: int,
        *,
        factor: float = 1.0,
        divisor: int = 1,
        stream: int,
    ) -> None:
        """Have `stream` do into = source × factor ÷ divisor, `count` elements, in the wider of both types.

        dtype, source_dtype   floating point
        into, source          addresses of memory that does not overlap
        """
        found = [CONVERT_ARGUMENTS.pack(into, source, count, factor, divisor)] if count else []
        self._launch("convert", convert_defines(source_dtype, dtype), convert_blocks(count), found, stream)

    def _launch(
        self, name: str, defined: tuple[str, str], blocks: int, found: Iterable[bytes], stream: int
    ) -> None:
        """Once for each of the arguments."""
        kernel = self._compiled.get(defined) or self._compile(name, defined)
        grid = (min(blocks, self._most_blocks),)
        with self._device, self._stream(stream):
            for arguments in found:
                # CuPy passes a NumPy array of one element by value, whatever that element is.
                by_value = np.frombuffer(arguments, dtype=f"V{len(arguments)}")
                kernel(grid, (THREADS,), (by_value,))

    def _compile(self, name: str, defined: tuple[str, str]) -> Any:
        # Not by name expressions: kernels found by those are compiled anew by every process.
        module = self._cupy.RawModule(code=SOURCE.read_text(encoding="utf-8"), options=(*OPTIONS, *defined))
        return self._compiled.setdefault(defined, module.get_function(name))

    def _stream(self, address: int) -> Any:
        return self._streams.get(address) or self._streams.setdefault(address, cupy_stream(address))


def cupy_stream(address: int) -> Any:
    """CuPy's view of a stream of ours, which is to outlive it."""
    import cupy

    return cupy.cuda.Stream.from_external(_Stream(address))


class _Stream:
    """A stream as other libraries take it."""

    def __init__(self, address: int) -> None:
        self._address = address

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._address


def defines(op: str, dtype: str) -> tuple[str, str]:
    """Compiler options that select one `fold` kernel."""
    return f"-DOPERATION=op_{'sum' if op == 'average' else op}", f"-DELEMENT=element_{dtype}"


def convert_defines(source_dtype: str, dtype: str) -> tuple[str, str]:
    """Compiler options that select one `convert` kernel."""
    return f"-DSOURCE_ELEMENT=element_{source_dtype}", f"-DELEMENT=element_{dtype}"


def convert_blocks(count: int) -> int:
    """Blocks of a conversion that have elements of their own each."""
    return -(-count // (THREADS * CONVERTED))


def block_count(dtype: str, count: int) -> int:
    """Blocks that have a tile of their own each."""
    tile = THREADS * PACK_NBYTES // _ITEMSIZES[dtype]
    return -(-count // tile)


def launches(
    dtype: str, into: int, sources: Sequence[int], count: int, *, factor: float = 1.0, divisor: int = 1
) -> Iterator[bytes]:
    """The argument of each launch of a fold, in order: `struct Fold`."""
    if not count:
        return
    if into in sources[MOST_SOURCES:]:
        raise OperationError(
            f"fold of {len(sources)} sources whose result takes the place of source "
            f"{sources.index(into, MOST_SOURCES)}: of more than {MOST_SOURCES}, only the first "
            f"{MOST_SOURCES} can be; give that source first"
        )
    if np.dtype("V2" if dtype == "bfloat16" else dtype).kind in "iu":
        factor, divisor = factor / divisor, 1
    now, later = tuple(sources[:MOST_SOURCES]), tuple(sources[MOST_SOURCES:])
    while later:
        yield _arguments(dtype, into, now, count, 1.0, 1)
        now, later = (into, *later[: MOST_SOURCES - 1]), later[MOST_SOURCES - 1 :]
    yield _arguments(dtype, into, now, count, factor, divisor)


def _arguments(
    dtype: str, into: int, sources: tuple[int, ...], count: int, factor: float, divisor: int
) -> bytes:
    unused = (0,) * (MOST_SOURCES - len(sources))
    head = head_of(_ITEMSIZES[dtype], into, sources)
    return ARGUMENTS.pack(into, count, factor, divisor, len(sources), min(head, count), *sources, *unused)


def head_of(itemsize: int, into: int, sources: Sequence[int]) -> int:
    """Elements before the first that lies on a 16-byte boundary everywhere; NARROW: there is none."""
    head_nbytes = -into % PACK_NBYTES
    if head_nbytes % itemsize or any((source - into) % PACK_NBYTES for source in sources):
        return NARROW
    return head_nbytes // itemsize


_lock = threading.Lock()
_known: dict[int, Kernels] = {}
_instead: Kernels | None = None


def kernels(ordinal: int) -> Kernels:
    """The kernels of a device, the same for every caller in this process.

    errors   CudaError if CuPy is not installed
    """
    if _instead is not None:
        return _instead
    with _lock:
        if ordinal not in _known:
            _known[ordinal] = Kernels(ordinal)
        return _known[ordinal]


def use_instead(kernels: Any) -> None:
    """For tests: what `kernels` gives from now on, on every device; None: CuPy's again."""
    global _instead
    _instead = kernels
