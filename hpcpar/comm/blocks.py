"""Blocks of long arrays, float32 scratch for them, and NumPy calls without warnings.

An array longer than the caches is worked on block by block, so that what one operation leaves behind
is still in the cache for the next. The blocks are larger than a second-level cache; that was measured:
with 8 sources of 64 MiB, blocks of 1 to 4 MiB are 1.3 times as fast as none at all, and as those of 128
or 256 KiB, which pay for more calls and leave the prefetchers less far to run.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hpcpar.transport.buffers import HostBuffer, tensor_on
from hpcpar.units import MiB

if TYPE_CHECKING:
    import torch

Action = Callable[[], object]

FLOAT_BLOCK_COUNT = 256 * 1024
"""Elements of a block of float32 scratch: 1 MiB."""
BLOCK_NBYTES = 4 * MiB
"""Bytes of a block of an array that needs no scratch."""


def spans(count: int, block_count: int = FLOAT_BLOCK_COUNT) -> Iterator[tuple[int, int]]:
    """(start, stop) of each block of `count` elements, in order; the last may be short."""
    for start in range(0, count, block_count):
        yield start, min(start + block_count, count)


def cut(elements: Any, block_count: int) -> list[Any]:
    """A NumPy array or torch tensor as blocks that share its memory; as it is when it is only one."""
    if len(elements) <= block_count:
        return [elements]
    return [elements[start:stop] for start, stop in spans(len(elements), block_count)]


@dataclass(frozen=True, slots=True)
class FloatBlock:
    """One block of float32 scratch under two faces: NumPy calculates in it, torch converts to and from it."""

    array: NDArray[np.float32]
    tensor: torch.Tensor

    @classmethod
    def fresh(cls) -> FloatBlock:
        array = np.empty(FLOAT_BLOCK_COUNT, dtype=np.float32)
        return cls(array, tensor_on(array))

    def first(self, count: int) -> FloatBlock:
        return FloatBlock(self.array[:count], self.tensor[:count])


FloatBlocks = tuple[FloatBlock, FloatBlock]


class _OfThisThread(threading.local):
    """Ranks may be threads: each has blocks of its own."""

    KEPT = 64

    def __init__(self) -> None:
        self._whole: FloatBlocks | None = None
        self._by_count: dict[int, FloatBlocks] = {}

    def floats(self, count: int) -> FloatBlocks:
        """Two blocks in one piece of memory per thread; views of the last few counts are cached."""
        found = self._by_count.get(count)
        if found is not None:
            return found
        if self._whole is None:
            self._whole = FloatBlock.fresh(), FloatBlock.fresh()
        if len(self._by_count) == self.KEPT:
            self._by_count.clear()
        first, second = self._whole
        return self._by_count.setdefault(count, (first.first(count), second.first(count)))


def _silence() -> contextvars.Context | None:
    """A context where NumPy ignores overflows and invalid values; None before NumPy 2.0.

    Entering a context costs 0.1 µs, `numpy.errstate` 1 µs: a quarter of a small message's time.
    """
    if np.lib.NumpyVersion(np.__version__) < "2.0.0":
        return None
    context = contextvars.Context()
    context.run(lambda: np.seterr(all="ignore"))
    return context


_SILENCE = _silence()


def _silent_run() -> Callable[..., Any]:
    """`run(function, …)` without warnings, for one thread at a time."""
    return _run_in_errstate if _SILENCE is None else _SILENCE.copy().run


def _run_in_errstate(function: Callable[..., Any], a: Any, b: Any, out: Any) -> None:
    with np.errstate(all="ignore"):
        function(a, b, out=out)


_THREAD = _OfThisThread()


def silent(function: Callable[..., Any], a: Any, b: Any, out: Any) -> Action:
    """out = function(a, b) of NumPy as a call of no arguments, by one thread at a time, without Python code.

    An overflow is the caller's to find, as with MPI.
    """
    if function in (np.minimum, np.maximum):  # these want to be given `out` by name, which costs more
        return partial(_silent_run(), function, a, b, out=out)
    return partial(_silent_run(), function, a, b, out)


def float_blocks(count: int) -> FloatBlocks:
    """Two blocks of float32 scratch, of `count` elements of any content; good until the next call."""
    return _THREAD.floats(count)


def tensor(buffer: HostBuffer) -> torch.Tensor:
    """The elements as a torch tensor that shares their memory. Memory that is read-only must only be read."""
    import torch

    elements = buffer.elements
    if isinstance(elements, torch.Tensor):
        return elements
    if not elements.flags.writeable:  # torch warns about such memory, whatever is done with it
        elements = elements.copy() if not elements.size else buffer.unowned().elements
    tensor: torch.Tensor = tensor_on(elements)
    return tensor
