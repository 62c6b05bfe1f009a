"""How two pieces of memory become one: the operations of reductions, by name and element type."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, get_args

import numpy as np

from hpcpar.errors import OperationError
from hpcpar.transport.buffers import HostBuffer

Op = Literal["sum", "average", "min", "max", "product", "and", "or"]
OPS: tuple[str, ...] = get_args(Op)

_NUMPY: dict[str, Callable[..., Any]] = {
    "sum": np.add,
    "average": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "product": np.multiply,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
}
_TORCH = {"sum": "add", "average": "add", "min": "minimum", "max": "maximum", "product": "mul"}

_FLOATS = ("float16", "bfloat16", "float32", "float64")
_COMPLEX = ("complex64", "complex128")


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


def combine(op: str, target: HostBuffer, incoming: HostBuffer) -> None:
    """target = target (op) incoming, element by element, in the type of the elements."""
    if isinstance(target.elements, np.ndarray):
        with np.errstate(all="ignore"):  # an overflow is the caller's to find, as with MPI
            _NUMPY[op](target.elements, incoming.elements, out=target.elements)
        return
    import torch

    getattr(torch, _TORCH[op])(target.elements, incoming.elements, out=target.elements)


def finish(op: str, total: HostBuffer, size: int) -> None:
    """Turn the total into the result: an average is the sum divided by the number of ranks."""
    if op == "average" and size > 1:
        elements = total.elements
        elements /= size
