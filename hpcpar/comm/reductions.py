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

`combining`, `folding`, `scaling` and `finishing` give the calls that do it, none of which runs Python code: a
signal handler runs between two of them, never inside of one.

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
    Action,
    cut,
    float_blocks,
    silent,
    spans,
    tensor,
)
from hpcpar.errors import OperationError
from hpcpar.transport.buffers import HostBuffer
from hpcpar.transport.gpu.device_buffer import DeviceBuffer
from hpcpar.units import KiB

Op = Literal["sum", "average", "min", "max", "product", "and", "or", "xor"]
OPS: tuple[str, ...] = get_args(Op)

Function = Callable[..., Any]
Prepare = Callable[[Any, Any, Any], Action]
"""(left operand, right operand, result)"""
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
    "xor": np.bitwise_xor,
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

    and, or, xor   logical on bool, bit by bit on integers
    min, max       not on complex; a NaN on any rank is a NaN in the result
    average        floating point and complex only
    """
    if not isinstance(op, str) or op not in OPS:
        raise OperationError(f"unknown op {op!r}; known are {', '.join(OPS)}")
    integral = dtype not in _FLOATS and dtype not in _COMPLEX
    if op in ("and", "or", "xor") and not integral:
        raise OperationError(f"op {op!r} on {dtype}: it works on bool and integers; use min or max")
    if op in ("min", "max") and dtype in _COMPLEX:
        raise OperationError(f"op {op!r} on {dtype}: complex numbers have no order")
    if op == "average" and integral:
        raise OperationError(f"op 'average' on {dtype} would round; sum, then divide as you see fit")
    if op in ("sum", "product") and dtype == "bool":
        raise OperationError(
            f"op {op!r} on bool: use 'or', 'and' or 'xor', or convert to an integer type first"
        )


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
    _run(combining(op, target, target, incoming))


def combining(op: str, into: HostBuffer, one: HostBuffer, other: HostBuffer) -> list[Action]:
    """into = one (op) other as `combine` does it, for memory that is combined again and again.

    into   may be one of the two
    """
    if not into.count:
        return []
    if isinstance(into, DeviceBuffer):
        return [partial(_fold_on_device, op, into, (one, other))]
    if into.dtype not in _HALVES or (into.dtype == "float16" and into.count <= _FEW):
        function, total = NUMPY[op], into.elements
        if into.count == 1 and into.address in (one.address, other.address):
            # NumPy takes one element that is source and result for an overlap, and copies: 0.5 µs.
            aside = np.empty_like(total)
            return [silent(function, one.elements, other.elements, aside), _copying(total, aside)]
        return [silent(function, one.elements, other.elements, total)]
    return [_by_torch(op)(tensor(one), tensor(other), tensor(into))]


def _run(actions: Sequence[Action]) -> None:
    for action in actions:
        action()


def _copying(target: Any, source: Any) -> Action:
    return partial(target.__setitem__, ..., source)


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
    _run(folding(op, into, sources, factor=factor, divisor=divisor))


def folding(
    op: str, into: HostBuffer, sources: Sequence[HostBuffer], *, factor: float = 1.0, divisor: int = 1
) -> list[Action]:
    """`fold` as calls without arguments, for memory that is folded again and again."""
    if not sources:
        raise OperationError(f"fold({op!r}) of no sources: give at least one")
    require_scale(factor, into.dtype)
    if not into.count:
        return []
    if isinstance(into, DeviceBuffer):
        return [partial(_fold_on_device, op, into, sources, factor=factor, divisor=divisor)]
    scaled = factor != 1.0 or divisor != 1
    if len(sources) == 2 and not scaled:
        return combining(op, into, *sources)
    chosen = op in ("min", "max")  # one of the pieces as it is, so there is nothing to round
    actions: list[Action] = []
    if into.dtype in _HALVES and (scaled or (len(sources) > 2 and not chosen)):
        for result, pieces in _blocks(into, sources, FLOAT_BLOCK_COUNT):
            actions += _folding_in_float32(NUMPY[op], result, pieces, factor, divisor)
        return actions
    by: Prepare = _by_torch(op) if into.dtype in _HALVES else partial(silent, NUMPY[op])
    for total, pieces in _blocks(into, sources, BLOCK_NBYTES // into.itemsize):
        actions += _accumulating(by, total, pieces)
        actions += _rescaling(total, factor, divisor)
    return actions


def _accumulating(by: Prepare, total: Any, pieces: Sequence[Any]) -> list[Action]:
    """total = pieces[0] (op) pieces[1] (op) …; a piece may lie in the memory of the total."""
    if len(pieces) == 1:
        return [] if _is_same(total, pieces[0]) else [_copying(total, pieces[0])]
    is_short = total.nbytes <= CHAINED_NBYTES
    # NumPy copies a single element that is source and result, and adds it by another loop, which takes the
    # other operand's NaN: ranks that differ in which source is the result would differ in their bits.
    is_apart = len(total) == 1 or any(_is_same(piece, total) for piece in pieces[1 if is_short else 2 :])
    results = [total] * (len(pieces) - 1)
    if is_apart:
        between = [_empty_like(total) for _ in range(2 if len(total) == 1 else 1)]
        results = [between[number % len(between)] for number in range(len(pieces) - 1)]
    actions = [
        by(so_far, piece, result)
        for so_far, piece, result in zip([pieces[0], *results], pieces[1:], results, strict=False)
    ]
    return [*actions, _copying(total, results[-1])] if is_apart else actions


def _empty_like(elements: Any) -> Any:
    return np.empty_like(elements) if isinstance(elements, np.ndarray) else elements.new_empty(len(elements))


def _is_same(a: Any, b: Any) -> bool:
    """True for two arrays, or two tensors, that begin at the same address."""
    if isinstance(a, np.ndarray):
        return bool(a.__array_interface__["data"] == b.__array_interface__["data"])
    return bool(a.data_ptr() == b.data_ptr())


def scale(target: HostBuffer, factor: float) -> None:
    """target = target × factor, in place; before or after a sum.

    16-bit types   multiplied in float32, rounded once
    float, complex the factor is rounded to the element type, then multiplied in it
    integers       multiplied in float64 and truncated towards zero, as Horovod does: beyond 2^53 the last
                   digits are lost. A product out of range becomes the nearest number of the type.
    errors         OperationError on bool, and for a factor that is not finite on integers
    """
    _run(scaling(target, factor))


def scaling(target: HostBuffer, factor: float) -> list[Action]:
    """`scale` as calls without arguments."""
    require_scale(factor, target.dtype)
    if isinstance(target, DeviceBuffer):
        return folding("sum", target, (target,), factor=factor)
    return _rescaling(_arithmetic(target), factor, 1) if target.count else []


def finish(op: str, total: HostBuffer, size: int, factor: float = 1.0) -> None:
    """Turn the total into the result: × factor, and an average ÷ the number of ranks, as in `fold`.

    16-bit types are rounded once for both.
    """
    _run(finishing(op, total, size, factor))


def finishing(op: str, total: HostBuffer, size: int, factor: float = 1.0) -> list[Action]:
    """`finish` as calls without arguments."""
    divisor = size if op == "average" else 1
    if not total.count or (factor == 1.0 and divisor == 1):
        return []
    if isinstance(total, DeviceBuffer) or (total.dtype in _HALVES and factor != 1.0):
        return folding(op, total, (total,), factor=factor, divisor=divisor)
    return _rescaling(_arithmetic(total), factor, divisor)


def _fold_on_device(
    op: str, into: DeviceBuffer, sources: Sequence[HostBuffer], *, factor: float = 1.0, divisor: int = 1
) -> None:
    """`fold` by a kernel, given to the queue."""
    queue = into.queue
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


def _arithmetic(buffer: HostBuffer) -> Any:
    """The elements as what is quick and exact with them: torch for the 16-bit types, else NumPy."""
    return tensor(buffer) if buffer.dtype in _HALVES else buffer.elements


def _by_torch(op: str) -> Prepare:
    import torch

    function = getattr(torch, _TORCH[op])
    return lambda a, b, out: partial(function, a, b, out=out)


def _blocks(into: HostBuffer, sources: Sequence[HostBuffer], block_count: int) -> list[Block]:
    results = cut(_arithmetic(into), block_count)
    pieces = [cut(_arithmetic(source), block_count) for source in sources]
    return list(zip(results, zip(*pieces, strict=True), strict=True))


def _folding_in_float32(
    function: Function, result: Any, pieces: Sequence[Any], factor: float, divisor: int
) -> list[Action]:
    """`fold` of a block of 16-bit elements: NumPy's function on float32, rounded once at the end."""
    total, incoming = float_blocks(len(result))
    actions: list[Action] = [partial(total.tensor.copy_, pieces[0])]
    for piece in pieces[1:]:
        actions.append(partial(incoming.tensor.copy_, piece))
        actions.append(silent(function, total.array, incoming.array, total.array))
    return [*actions, *_rescaling(total.array, factor, divisor), partial(result.copy_, total.tensor)]


def _rescaling(elements: Any, factor: float, divisor: int) -> list[Action]:
    """elements = elements × factor ÷ divisor, in place."""
    if isinstance(elements, np.ndarray) and elements.dtype.kind in "iu":
        return _rescaling_integers(elements, factor / divisor)
    actions: list[Action] = []
    if factor != 1.0:
        by_numpy = isinstance(elements, np.ndarray)
        actions.append(
            silent(np.multiply, elements, factor, elements) if by_numpy else partial(elements.mul_, factor)
        )
    if divisor != 1:
        by_numpy = isinstance(elements, np.ndarray)
        actions.append(
            silent(np.true_divide, elements, divisor, elements)
            if by_numpy
            else partial(elements.div_, divisor)
        )
    return actions


def _rescaling_integers(elements: Any, factor: float) -> list[Action]:
    if factor == 1.0:
        return []
    limits = np.iinfo(elements.dtype)
    # The largest number of the type that float64 has too: 2^63 - 1 itself would become 2^63.
    highest = float(limits.max)
    if int(highest) > limits.max:
        highest = math.nextafter(highest, 0.0)
    actions: list[Action] = []
    most = min(len(elements), FLOAT_BLOCK_COUNT)
    scratch, is_beyond = np.empty(most, np.float64), np.empty(most, np.bool_)
    for start, stop in spans(len(elements)):
        part, scaled, beyond = elements[start:stop], scratch[: stop - start], is_beyond[: stop - start]
        actions += [
            _copying(scaled, part),
            silent(np.multiply, scaled, factor, scaled),
            partial(np.greater, scaled, highest, beyond),
            silent(np.minimum, scaled, highest, scaled),
            silent(np.maximum, scaled, float(limits.min), scaled),
            partial(np.trunc, scaled, scaled),
            _copying(part, scaled),
            partial(part.__setitem__, beyond, limits.max),
        ]
    return actions
