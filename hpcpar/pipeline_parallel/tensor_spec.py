"""Specifications of the tensors that a stage sends to the next: shape, dtype, gradient or not.

    a tensor              (float64[4, 8] with gradient)
    (x, None, mask)       (float64[4, 8] with gradient, None, int64[4, 4])

Both sides of a boundary derive their messages from the specification: one for each tensor, and one for the
gradient of each tensor that requires it. None takes no message.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hpcpar.errors import BufferTypeError
from hpcpar.transport.buffers import DTYPES

Tensors = tuple[Tensor | None, ...]


class TensorSpec(NamedTuple):
    """Specification of one tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        return f"{name}{list(self.shape)}{' with gradient' if self.requires_grad else ''}"

    def empty(self, device: torch.device) -> Tensor:
        """Allocate such a tensor, its values unset."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)

    def zeros(self) -> Tensor:
        """Allocate such a tensor of zeros, in host memory."""
        return torch.zeros(self.shape, dtype=self.dtype)


@dataclass(frozen=True)
class OutputSpec:
    """Specification of a stage's outputs for one microbatch."""

    tensors: tuple[TensorSpec | None, ...]

    def __str__(self) -> str:
        return f"({', '.join(map(str, self.tensors))})"

    @property
    def present(self) -> tuple[TensorSpec, ...]:
        """Tensors, without the Nones."""
        return tuple(each for each in self.tensors if each is not None)

    @property
    def differentiable(self) -> tuple[TensorSpec, ...]:
        """Tensors whose gradients come back."""
        return tuple(each for each in self.present if each.requires_grad)


def as_tensors(output: Any, whose: str) -> Tensors:
    """Return a module's output as a tuple.

    whose    "stage 1", for the error
    errors   BufferTypeError for anything but dense tensors and None
    """
    outputs = tuple(output) if isinstance(output, (tuple, list)) else (output,)
    for place, each in enumerate(outputs):
        if each is None:
            continue
        kind = type(each).__qualname__
        if isinstance(each, Tensor) and each.is_nested:
            kind = "nested tensor"
        # A tensor that holds others, such as a DTensor, has no elements of its own.
        if not isinstance(each, Tensor) or each.is_nested or hasattr(each, "__tensor_flatten__"):
            raise BufferTypeError(
                f"{whose} returned a {kind} at place {place} of {len(outputs)}; between stages go plain "
                "tensors and None: make one of it, or give it to the next stage from the start"
            )
        dtype = str(each.dtype).removeprefix("torch.")
        if each.layout is not torch.strided or each.is_meta or dtype not in DTYPES:
            raise BufferTypeError(
                f"{whose} returned a tensor of {dtype}, {each.layout}, on {each.device} at place {place} of "
                f"{len(outputs)}; between stages go dense tensors of {', '.join(DTYPES)}"
            )
    return outputs


def spec_of(tensors: Tensors) -> OutputSpec:
    return OutputSpec(
        tuple(
            None if each is None else TensorSpec(tuple(each.shape), each.dtype, each.requires_grad)
            for each in tensors
        )
    )
