"""Arguments of torch.distributed's calls as communicators have them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, distributed

from hpcpar.errors import OperationError
from hpcpar.transport.buffers import DTYPES

_OPS = {
    "SUM": "sum",
    "AVG": "average",
    "PREMUL_SUM": "sum",
    "PRODUCT": "product",
    "MIN": "min",
    "MAX": "max",
    "BAND": "and",
    "BOR": "or",
    "BXOR": "xor",
}
_OPS_OF_BOOL = {
    **dict.fromkeys(("sum", "max", "or"), "or"),
    **dict.fromkeys(("product", "min", "and"), "and"),
    "xor": "xor",
}
_SUM = distributed.ReduceOp(distributed.ReduceOp.SUM)


def listed(tensors: Any) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def op_of(opts: Any, op: Any) -> Any:
    """The operation: of torch's options, or given itself, or SUM."""
    found = getattr(opts, "reduceOp", opts if op is None else op)
    return _SUM if found is None else found


def root_of(opts: Any) -> int:
    """The root: of torch's options, or given itself, or rank 0."""
    root: int = getattr(opts, "rootRank", opts if isinstance(opts, int) else 0)
    return root


def name_of(op: Any) -> str:
    name: str = getattr(getattr(op, "op", op), "name", str(op))
    return name


def reduction(op: Any, tensor: Tensor) -> tuple[str, float]:
    """Name of the operation as communicators have it, and what is multiplied first.

    errors   OperationError for an element type that cannot be reduced, or not by this operation
    """
    torch_name = name_of(op)
    name = _OPS[torch_name]
    if tensor.dtype == torch.bool:
        if name not in _OPS_OF_BOOL:
            raise OperationError(f"all_reduce of bool by {torch_name}: convert it to an integer type first")
        return _OPS_OF_BOOL[name], 1.0
    if tensor.dtype not in _KNOWN:
        raise OperationError(
            f"a reduction of {tensor.dtype} by {torch_name} was asked for: this type can be moved, not added "
            f"up; convert it to float32 or bfloat16 first"
        )
    if torch_name != "PREMUL_SUM":
        return name, 1.0
    factor = op.factor if hasattr(op, "factor") else op.__getstate__()[1]
    return name, float(factor)


_KNOWN = frozenset(getattr(torch, name) for name in DTYPES if hasattr(torch, name))


def width_of(tensor: Tensor) -> int:
    """Return the elements of `movable(tensor)` for each of the tensor's: 1, or its bytes."""
    return 1 if tensor.dtype in _KNOWN else tensor.element_size()


def movable(tensor: Tensor) -> Tensor:
    """The tensor without its graph; as bytes where communicators do not know its type."""
    tensor = tensor.detach()
    if tensor.dtype in _KNOWN:
        return tensor
    if not tensor.is_contiguous():
        raise OperationError(
            f"a tensor of {tensor.dtype} that is not contiguous cannot be moved as bytes: pass contiguous()"
        )
    return tensor.view(-1).view(torch.uint8)


def joined(pieces: Sequence[Tensor]) -> Tensor:
    return torch.cat([piece.detach().reshape(-1) for piece in pieces])


def uneven(pieces: Sequence[Tensor]) -> list[int] | None:
    """Elements of each piece; None if all have as many."""
    counts = [piece.numel() for piece in pieces]
    return None if len(set(counts)) == 1 else counts


def copy_to(pieces: Sequence[Tensor], whole: Tensor) -> None:
    start = 0
    for piece in pieces:
        stop = start + piece.numel()
        piece.detach().copy_(whole[start:stop].view(piece.shape))
        start = stop
