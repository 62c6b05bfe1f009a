"""Reduction operations on host and device memory, by name and element type.

What is guaranteed about rounding, with u = 2^-11 for float16, 2^-8 for bfloat16, 2^-24 for float32:

`combine`   one incoming piece: the exact result, rounded once. For the 16-bit types the sum is formed
            in float32 and then rounded; float32 is wide enough (24 >= 2·11 + 2) for the second
            rounding to change nothing, so no wider type would give other bits.
`fold`      many pieces at once: 16-bit types accumulate, scale and divide in float32 and are rounded
            to 16 bits once, whatever the number of pieces p:
            |error| <= u·|result| + (p - 1)·2^-24·Σ|piece|, with p + 2 for p - 1 when scaled and divided.
            Partial results may exceed the range of float16, as long as the result does not.

An algorithm that passes partial sums from rank to rank rounds them to the element type on every hop,
as they have no other form on the way: p - 1 times in a ring, ⌈log₂p⌉ times in a tree or by doubling,
|error| <= hops·u·Σ|piece|. Only where one rank has the pieces of several in hand (the direct algorithms,
shared memory) does `fold` make 16-bit sums better; no step-wise algorithm gains from it.

Float32 and float64 are added by NumPy, at the speed of a copy at every size, and with a third of torch's
cost of a call; the 16-bit types by torch, which is vectorised for them where NumPy is not (35 times as fast).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, get_args

import numpy as np

from hpcpar.comm.blocks import (
    BLOCK_NBYTES,
    FLOAT_BLOCK_COUNT,
    cut,
    float_blocks,
    in_turn,
    silent,
    silently,
    spans,
    tensor,
)
from hpcpar.errors import OperationError
from hpcpar.transport.buffers import HostBuffer
from hpcpar.transport.gpu.memory import DeviceBuffer
from hpcpar.units import KiB

Op = Literal["sum", "average", "min", "max", "product", "and", "or"]
OPS: tuple[str, ...] = get_args(Op)

Function = Callable[[Any, Any, Any], Any]
"""(left operand, right operand, result)"""
Rescale = Callable[[Any], None]
Block = tuple[Any, Sequence[Any]]
"""A block of the result, and that block of every source."""

NUMPY: dict[str, Function] = {
    "sum": np.add,
    "average": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "product": np.multiply,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
}
"""The function of two arrays and the result's that carries an operation out."""
_TORCH = {"sum": "add", "average": "add", "min": "minimum", "max": "maximum", "product": "mul"}

_HALVES = ("float16", "bfloat16")
_FLOATS = (*_HALVES, "float32", "float64")
_COMPLEX = ("complex64", "complex128")

CHAINED_NBYTES = 16 * KiB
"""Up to this size each sum is a prepared call of its own; beyond, that saves little."""

_FEW = 64
"""Up to this many float16 elements NumPy's slow loop costs less than a call of torch."""


def require_op(op: str, dtype: str) -> None:
    """Refuse an operation that does not exist or has no meaning for the element type.

    and, or    logical on bool, bit by bit on integers
    min, max   not on complex; a NaN on any rank is a NaN in the result
    average    floating point and complex only
    """
    if op not in OPS:
        raise OperationError(f"unknown op {op!r}; known are {', '.join(OPS)}")
    integral = dtype not in _FLOATS and dtype not in _COMPLEX
    if op in ("and", "or") and not integral:
        raise OperationError(f"op {op!r} on {dtype}: it works on bool and integers; use min or max")
    if op in ("min", "max") and dtype in _COMPLEX:
        raise OperationError(f"op {op!r} on {dtype}: complex numbers have no order")
    if op == "average" and integral:
        raise OperationError(f"op 'average' on {dtype} would round; sum, then divide as you see fit")
    if op in ("sum", "product") and dtype == "bool":
        raise OperationError(f"op {op!r} on bool: use 'or' or 'and', or convert to an integer type first")


def require_scale(factor: float, dtype: str) -> None:
    """Refuse a factor that has no meaning for the element type: any on bool, not finite on integers."""
    if factor == 1.0 or dtype in _FLOATS or dtype in _COMPLEX:
        return
    if dtype == "bool":
        raise OperationError(f"scaling bool by {factor}: truth has no half; convert to a number type first")
    if not math.isfinite(factor):
        raise OperationError(f"scaling {dtype} by {factor}: integers take a finite factor")


def combine(op: str, target: HostBuffer, incoming: HostBuffer) -> None:
    """target = target (op) incoming, element by element; each rounded once to the type of the elements."""
    prepare_combine(op, target, target, incoming)()


def prepare_combine(op: str, into: HostBuffer, one: HostBuffer, other: HostBuffer) -> Callable[[], None]:
    """into = one (op) other as `combine` does it, as a call for memory that is combined again and again.

    into   may be one of the two
    """
    if not into.count:
        return _do_nothing
    if isinstance(into, DeviceBuffer):
        return partial(_fold_on_device, op, into, (one, other))
    if into.dtype not in _HALVES or (_is_numpy(into) and into.count <= _FEW):
        function, arrays = NUMPY[op], (into.elements, one.elements, other.elements)
        if _are_numbers(op, into.dtype, arrays):
            return partial(_add_numbers, *(memoryview(array) for array in arrays))
        if into.count == 1:
            # NumPy takes one element that is source and result for an overlap, and copies: 0.5 µs.
            return partial(_combine_one, function, *arrays, np.empty_like(into.elements))
        return silent(function, one.elements, other.elements, into.elements)
    return partial(_torch_function(op), tensor(one), tensor(other), tensor(into))


def _are_numbers(op: str, dtype: str, arrays: Sequence[Any]) -> bool:
    """True for arrays of one number each, which `_add_numbers` takes."""
    is_sum = NUMPY[op] is np.add and dtype in ("float32", "float64") and len(arrays[0]) == 1
    return is_sum and all(array.flags.aligned for array in arrays)  # memoryviews cannot tell types of others


def _add_numbers(total: memoryview, one: memoryview, other: memoryview) -> None:
    """One number, such as a loss, by Python itself: 0.1 µs.

    The sum is formed in float64 and rounded again, which for float32 changes nothing (53 >= 2·24 + 2).
    """
    total[0] = one[0] + other[0]


def _combine_one(function: Function, total: Any, one: Any, other: Any, aside: Any) -> None:
    silently(function, one, other, aside)
    total[...] = aside


def fold(
    op: str, into: HostBuffer, sources: Sequence[HostBuffer], *, factor: float = 1.0, divisor: int = 1
) -> None:
    """into = (sources[0] (op) sources[1] (op) …) × factor ÷ divisor, in this order, in one pass over blocks.

    into     may be one of the sources; must not overlap them otherwise
    factor   prescale × postscale of a sum: one factor stands for both; integers as in `scale`
    divisor  the number of ranks, for an average: a division, which for a float32 rounds better than
             the product with the reciprocal
    cost     each source is read once and `into` written once, beyond the caches
    errors   OperationError for no sources, or a factor without meaning for the element type
    """
    prepare_fold(op, into, sources, factor=factor, divisor=divisor)()


def prepare_fold(
    op: str, into: HostBuffer, sources: Sequence[HostBuffer], *, factor: float = 1.0, divisor: int = 1
) -> Callable[[], None]:
    """`fold` as a call without arguments, for memory that is folded again and again."""
    if not sources:
        raise OperationError(f"fold({op!r}) of no sources: give at least one")
    require_scale(factor, into.dtype)
    if not into.count:
        return _do_nothing
    if isinstance(into, DeviceBuffer):
        return partial(_fold_on_device, op, into, sources, factor=factor, divisor=divisor)
    scaled = factor != 1.0 or divisor != 1
    if len(sources) == 2 and not scaled:
        return prepare_combine(op, into, *sources)
    rescale = partial(_rescale, factor=factor, divisor=divisor) if scaled else None
    chosen = op in ("min", "max")  # one of the pieces as it is, so there is nothing to round
    if into.dtype in _HALVES and (scaled or (len(sources) > 2 and not chosen)):
        blocks = _blocks(into, sources, FLOAT_BLOCK_COUNT)
        return partial(_fold_in_float32, NUMPY[op], blocks, rescale)
    blocks = _blocks(into, sources, BLOCK_NBYTES // into.itemsize)
    is_short = len(blocks) == 1 and into.octets.size <= CHAINED_NBYTES
    if is_short and len(sources) > 1 and not scaled and into.dtype not in _HALVES:
        total, pieces = blocks[0]
        return in_turn(_chain(NUMPY[op], total, pieces))
    if _aliases_later(into, sources):
        return partial(_fold_aside, _function(op, into), blocks, rescale)
    return partial(_fold_in_place, _function(op, into), blocks, rescale)


def _chain(function: Function, total: Any, pieces: Sequence[Any]) -> list[Callable[[], None]]:
    """Fold one block by one prepared call per piece, which costs half of what a loop over them does."""
    # NumPy copies a single element that is source and result, and adds it by another loop, which takes the
    # other operand's NaN: ranks that differ in which source is the result would differ in their bits.
    is_apart = len(total) == 1 or any(piece is not pieces[0] and _is_same(piece, total) for piece in pieces)
    between = (np.empty_like(total), np.empty_like(total)) if is_apart else (total, total)
    results = [between[number % 2] for number in range(len(pieces) - 1)]
    calls = [
        silent(function, so_far, piece, result)
        for so_far, piece, result in zip([pieces[0], *results], pieces[1:], results, strict=False)
    ]
    return [*calls, partial(np.copyto, total, results[-1])] if is_apart else calls


def _is_same(a: Any, b: Any) -> bool:
    return bool(a.__array_interface__["data"] == b.__array_interface__["data"])


def scale(target: HostBuffer, factor: float) -> None:
    """target = target × factor, in place; before or after a sum.

    16-bit types   multiplied in float32, rounded once
    float, complex the factor is rounded to the element type, then multiplied in it
    integers       multiplied in float64 and truncated towards zero, as Horovod does: beyond 2^53 the last
                   digits are lost. A product out of range becomes the nearest number of the type.
    errors         OperationError on bool, and for a factor that is not finite on integers
    """
    require_scale(factor, target.dtype)
    if isinstance(target, DeviceBuffer):
        fold("sum", target, (target,), factor=factor)
    elif target.count:
        _rescale(_arithmetic(target), factor=factor)


def finish(op: str, total: HostBuffer, size: int, factor: float = 1.0) -> None:
    """Turn the total into the result: × factor, and an average ÷ the number of ranks, as in `fold`.

    16-bit types are rounded once for both.
    """
    divisor = size if op == "average" else 1
    if not total.count or (factor == 1.0 and divisor == 1):
        return
    if isinstance(total, DeviceBuffer) or (total.dtype in _HALVES and factor != 1.0):
        fold(op, total, (total,), factor=factor, divisor=divisor)
    else:
        _rescale(_arithmetic(total), factor=factor, divisor=divisor)


def _fold_on_device(
    op: str, into: DeviceBuffer, sources: Sequence[HostBuffer], *, factor: float = 1.0, divisor: int = 1
) -> None:
    """`fold` by a kernel, given to the queue."""
    queue = into.queue
    queue.cuda.use(queue.ordinal)
    queue.kernels.fold(
        op,
        into.dtype,
        into.address,
        [source.address for source in sources],
        into.count,
        factor=factor,
        divisor=divisor,
        stream=queue.stream,
    )


def _is_numpy(buffer: HostBuffer) -> bool:
    return isinstance(buffer.elements, np.ndarray)


def _do_nothing() -> None:
    """Nothing to do for no elements."""


def _arithmetic(buffer: HostBuffer) -> Any:
    """The elements as what is quick and exact with them: torch for the 16-bit types, else NumPy."""
    return tensor(buffer) if buffer.dtype in _HALVES else buffer.elements


def _function(op: str, like: HostBuffer) -> Function:
    return _torch_function(op) if like.dtype in _HALVES else partial(silently, NUMPY[op])


def _torch_function(op: str) -> Function:
    import torch

    function = getattr(torch, _TORCH[op])
    return lambda a, b, out: function(a, b, out=out)


def _blocks(into: HostBuffer, sources: Sequence[HostBuffer], block_count: int) -> list[Block]:
    results = cut(_arithmetic(into), block_count)
    pieces = [cut(_arithmetic(source), block_count) for source in sources]
    return list(zip(results, zip(*pieces, strict=True), strict=True))


def _aliases_later(into: HostBuffer, sources: Sequence[HostBuffer]) -> bool:
    """True if a source that is read after the first write lies in the memory of the result."""
    if len(sources) <= 2 or into is sources[0]:
        return False
    return any(source.address == into.address for source in sources[2:])


def _fold_in_place(function: Function, blocks: list[Block], rescale: Rescale | None) -> None:
    """`fold` in the elements' own type, partial results in the memory of the result."""
    for total, pieces in blocks:
        _accumulate(function, total, pieces)
        if rescale is not None:
            rescale(total)


def _fold_aside(function: Function, blocks: list[Block], rescale: Rescale | None) -> None:
    """Fold with partial results elsewhere, because a later source lies in the memory of the result."""
    for result, pieces in blocks:
        total = result.copy() if isinstance(result, np.ndarray) else result.clone()
        _fold_in_place(function, [(total, pieces)], rescale)
        result[...] = total


def _accumulate(function: Function, total: Any, pieces: Sequence[Any]) -> None:
    if len(pieces) == 1:
        total[...] = pieces[0]
        return
    function(pieces[0], pieces[1], total)
    for piece in pieces[2:]:
        function(total, piece, total)


def _fold_in_float32(function: Function, blocks: list[Block], rescale: Rescale | None) -> None:
    """`fold` of 16-bit elements: NumPy's function on float32, rounded once at the end."""
    for result, pieces in blocks:
        total, incoming = float_blocks(len(result))
        total.tensor.copy_(pieces[0])
        for piece in pieces[1:]:
            incoming.tensor.copy_(piece)
            silently(function, total.array, incoming.array, total.array)
        if rescale is not None:
            rescale(total.array)
        result.copy_(total.tensor)


def _rescale(elements: Any, *, factor: float = 1.0, divisor: int = 1) -> None:
    """elements = elements × factor ÷ divisor, in place."""
    if isinstance(elements, np.ndarray):
        if elements.dtype.kind in "iu":
            _rescale_integers(elements, factor / divisor)
            return
        if factor != 1.0:
            silently(np.multiply, elements, factor, elements)
        if divisor != 1:
            silently(np.true_divide, elements, divisor, elements)
        return
    if factor != 1.0:
        elements.mul_(factor)
    if divisor != 1:
        elements.div_(divisor)


def _rescale_integers(elements: Any, factor: float) -> None:
    if factor == 1.0:
        return
    limits = np.iinfo(elements.dtype)
    # The largest number of the type that float64 has too: 2^63 - 1 itself would become 2^63.
    highest = float(limits.max)
    if int(highest) > limits.max:
        highest = math.nextafter(highest, 0.0)
    for start, stop in spans(len(elements)):
        part = elements[start:stop]
        scaled = part.astype(np.float64)
        silently(np.multiply, scaled, factor, scaled)
        beyond = scaled > highest
        np.clip(scaled, float(limits.min), highest, out=scaled)
        part[...] = np.trunc(scaled)
        part[beyond] = limits.max
