"""A caller's request: one immutable value, which is the cache's key and what ranks compare."""

from __future__ import annotations

import ctypes
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from hpcpar.errors import OperationError
from hpcpar.transport.buffers import HostBuffer, is_torch
from hpcpar.transport.gpu.device_buffer import DeviceBuffer

Memory = tuple[Any, ...]
"""Address, length, element type and layout of an array that is used in place."""

NO_ARRAY: Memory = ()

Scaling = tuple[Any, Any, Any]
"""(prescale_factor, postscale_factor, compression)."""

PLAIN: Scaling = (1.0, 1.0, None)

Asked = tuple[Any, ...]
"""(op, root, algorithm, scaling, counts, name) of a `Request`; of a message, (…, peer, tag), too."""

Key = tuple[Any, ...]
"""(collective, input, output, label, asked) of a `Request`, made in a third of its time: calls are looked up
by this."""

NUMBERS = (float, int)

WHOLE = (int, np.integer)

_NUMPY = np.ndarray
_address = ctypes.addressof
_first_byte: Callable[[Any], ctypes.c_char] = ctypes.c_char.from_buffer


class Request(NamedTuple):
    """One collective or message, as the caller asked for it.

    input, output    the arrays; None: memory that is not used in place, so the call is not cached
    label            name under which the call is counted; None: the collective's
    scaling          factors and compression of an all-reduce or reduce-scatter
    counts           elements of each rank's piece, where the caller gave them; of an all-to-all, pieces sent
                     and pieces received
    name             the caller's, which tells it from other calls of the same kind and size
    peer, tag        of a point-to-point message
    """

    collective: str
    input: Memory | None
    output: Memory | None
    label: str | None
    op: Any
    root: Any
    algorithm: Any
    scaling: Scaling
    counts: Any
    name: Any
    peer: Any = None
    tag: Any = None


def memory_of(array: Any) -> Memory | None:
    """Identify the memory of an array: equal for two calls exactly if they work on the same memory alike.

    Only arrays that are used in place can be identified; None for all others. Address and layout suffice:
    an array elsewhere that has the same ones is the same memory. Ranks compare the shape.
    """
    if type(array) is _NUMPY or (isinstance(array, _NUMPY) and not isinstance(array, np.ma.MaskedArray)):
        try:  # a quarter of the cost of array.ctypes.data; what it refuses could not be used in place
            return _address(_first_byte(array)), array.shape, array.dtype
        except (TypeError, ValueError):
            return None
    try:
        # The flags belong to the key, so that a look at them costs no branch here.
        return (
            array.data_ptr(),
            array.shape,
            array.dtype,
            array.is_contiguous(),
            array.is_conj(),
            array.is_neg(),
        )
    except (AttributeError, RuntimeError, NotImplementedError):
        return None


def is_used_in_place(array: Any) -> bool:
    """True for arrays whose calls can be cached: CPU memory that is read and written where it lies."""
    if isinstance(array, np.ndarray):
        return bool(array.size and array.flags.carray)
    if not is_torch(array):
        return False
    flags = array.is_cpu and array.is_contiguous() and not array.is_conj() and not array.is_neg()
    return bool(flags and array.numel())


def is_fixed(request: Request) -> bool:
    """True if all numbers asked for stay as they are: those in arrays and tensors may change."""
    counts = request.counts or ()
    if request.collective == "alltoall":
        counts = [count for side in counts for count in side or ()]
    wholes = (request.root, request.peer, request.tag, *counts)
    return all(type(factor) in NUMBERS for factor in request.scaling[:2]) and all(
        number is None or isinstance(number, WHOLE) for number in wholes
    )


def require_name(request: Request) -> None:
    """Refuse a name that is no text."""
    name = request.name
    if name is not None and not isinstance(name, str):
        raise OperationError(f"{request.collective} has the name {name!r}; give a str")


def scaling_of(asked: Scaling) -> Scaling:
    """Factors as numbers: those in arrays of one number, too."""
    prescale_factor, postscale_factor, compression = asked
    factors = _number("prescale_factor", prescale_factor), _number("postscale_factor", postscale_factor)
    return PLAIN if compression is None and factors == PLAIN[:2] else (*factors, compression)


def _number(what: str, value: Any) -> float:
    try:
        found = float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise OperationError(f"{what} is {_shortened(value)}; give a number that a float holds") from error
    return value if type(value) in NUMBERS else found


def _shortened(value: Any) -> str:
    """The value as Python writes it, or its beginning."""
    try:
        text = repr(value)
    except ValueError:  # an int of more digits than Python writes
        text = f"an int of {value.bit_length()} bits"
    return text if len(text) <= 100 else f"{text[:100]}…"


def counts_of(counts: Sequence[int] | None) -> Any:
    """Make counts hashable; what is no sequence is refused when the request is validated."""
    return tuple(counts) if isinstance(counts, Iterable) else counts


def rank_of(rank: Any, size: int, what: str, name: str) -> int:
    """A rank as a Python integer.

    errors   OperationError unless it is a whole number from 0 to size - 1
    """
    try:
        found = operator.index(rank)
    except TypeError:
        found = -1
    if not 0 <= found < size:
        raise OperationError(f"{what} is rank {rank!r}, but communicator {name!r} has ranks 0 to {size - 1}")
    return found


def typed(array: Any, host: HostBuffer) -> str:
    """Element type, shape and kind of memory, as ranks compare them: float32[1024, 1024] on a GPU."""
    return f"{host.dtype}{list(array.shape)}{' on a GPU' if isinstance(host, DeviceBuffer) else ''}"
