"""What goes from stage to stage, one tensor or a tuple of tensors and None, and what it looks like.

    a tensor              (float64[4, 8] with gradient)
    (x, None, mask)       (float64[4, 8] with gradient, None, int64[4, 4])

Both sides derive from the form which messages there are: each tensor is one, and so is the gradient of each
tensor that requires one. None takes no message.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hpcpar.errors import BufferTypeError
from hpcpar.transport.buffers import DTYPES

Tensors = tuple[Tensor | None, ...]


class TensorForm(NamedTuple):
    """Of one tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        return f"{name}{list(self.shape)}{' with gradient' if self.requires_grad else ''}"

    def empty(self, device: torch.device) -> Tensor:
        """Memory for such a tensor, its values unset."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)

    def zeros(self) -> Tensor:
        """Such a tensor of zeros, in host memory."""
        return torch.zeros(self.shape, dtype=self.dtype)


@dataclass(frozen=True)
class Form:
    """Of all that one stage hands to the next for one microbatch."""

    tensors: tuple[TensorForm | None, ...]

    def __str__(self) -> str:
        return f"({', '.join(map(str, self.tensors))})"

    @property
    def present(self) -> tuple[TensorForm, ...]:
        """Without the Nones."""
        return tuple(each for each in self.tensors if each is not None)

    @property
    def differentiable(self) -> tuple[TensorForm, ...]:
        """Of those a gradient comes back."""
        return tuple(each for each in self.present if each.requires_grad)


def as_tensors(output: Any, whose: str) -> Tensors:
    """What a module returned, as a tuple.

    whose    "stage 1", for the error
    errors   BufferTypeError where something else than dense tensors and None is in it
    """
    outputs = tuple(output) if isinstance(output, (tuple, list)) else (output,)
    for place, each in enumerate(outputs):
        if each is None:
            continue
        if not isinstance(each, Tensor):
            raise BufferTypeError(
                f"{whose} returned a {type(each).__qualname__} at place {place} of {len(outputs)}; between "
                "stages go tensors and None: make a tensor of it, or give it to the next stage from the start"
            )
        dtype = str(each.dtype).removeprefix("torch.")
        if each.layout is not torch.strided or each.is_meta or dtype not in DTYPES:
            raise BufferTypeError(
                f"{whose} returned a tensor of {dtype}, {each.layout}, on {each.device} at place {place} of "
                f"{len(outputs)}; between stages go dense tensors of {', '.join(DTYPES)}"
            )
    return outputs


def form_of(tensors: Tensors) -> Form:
    return Form(
        tuple(
            None if each is None else TensorForm(tuple(each.shape), each.dtype, each.requires_grad)
            for each in tensors
        )
    )
