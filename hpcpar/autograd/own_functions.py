"""Helpers of autograd Functions that stand in for operations of torch, and are to behave as these do."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from hpcpar.errors import OperationError


def no_view(output: Tensor) -> Tensor:
    """Detach a Function's output that may be a view: torch refuses to change such a view in place."""
    return output.detach()


def under_autocast(x: Tensor, *tensors: Tensor | None) -> list[Any]:
    """Cast as torch does for its own products: autocast knows those by name, and not these."""
    kind = x.device.type
    if not torch.is_autocast_enabled(kind):
        return [x, *tensors]
    dtype = torch.get_autocast_dtype(kind)
    return [each if each is None or each.dtype == torch.float64 else each.to(dtype) for each in (x, *tensors)]


def is_transformed() -> bool:
    """Return whether torch.func (vmap, grad, jvp) or forward-mode differentiation is at work.

    They refuse such a Function. Torch has no public name for it; an unknown one counts as no.
    """
    transforms = getattr(torch._C, "_are_functorch_transforms_active", bool)
    return bool(transforms()) or getattr(forward_ad, "_current_level", -1) >= 0


def differentiated_once(what: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate the backward of a Function whose gradients cannot be differentiated again.

    torch's once_differentiable lets them pass as constants, without an error, where the gradient that comes
    in is one: that of a sum, or of a loss.

    what     "attention; do without it": what cannot be differentiated again, and a way out
    errors   OperationError in a backward with create_graph=True
    """

    def decorate(backward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(backward)
        def once(ctx: Any, *gradients: Any) -> Any:
            if torch.is_grad_enabled():
                raise OperationError(
                    f"gradients cannot be differentiated again (create_graph=True) through {what}"
                )
            return backward(ctx, *gradients)

        return once

    return decorate
