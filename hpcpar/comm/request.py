"""A caller's request: one immutable value, which is the cache's key and what ranks compare."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
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


def is_used_in_place(array: Any) -> bool:
    """True for arrays whose calls can be cached: CPU memory that is read and written where it lies."""
    if isinstance(array, np.ndarray):
        return bool(array.size and array.flags.carray)
    if not is_torch(array):
        return False
    flags = array.is_cpu and array.is_contiguous() and not array.is_conj() and not array.is_neg()
    return bool(flags and array.numel())


def scaling_of(asked: Scaling) -> Scaling:
    """Factors as numbers: those in arrays of one number, too."""
    if asked == PLAIN:
        return PLAIN
    prescale_factor, postscale_factor, compression = asked
    return (
        _number("prescale_factor", prescale_factor),
        _number("postscale_factor", postscale_factor),
        compression,
    )


def _number(what: str, value: Any) -> float:
    if type(value) in NUMBERS:
        return value  # type: ignore[no-any-return]
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise OperationError(f"{what} is {value!r}; give a number") from error


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
