"""Parameters whose gradient an optimizer has taken: their `.grad` is asked of that optimizer.

    backward    the gradient leaves for its average, and the parameter becomes a HeldParameter
    .grad       read: the average, waited for; set to None: forgotten (model.zero_grad() does so)
    zero_grad   an ordinary nn.Parameter again

So torch's own functions and a user's loops over `.grad` find what they find in one process, or an error.
Autograd itself, and hpcpar's code, use the gradient's memory by `own_gradient` and `set_own_gradient`.
"""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch._guards import TracingContext
from torch.utils.weak import WeakIdKeyDictionary


class GradientHolder(Protocol):
    """An optimizer that takes gradients."""

    def gradient_of(self, parameter: Tensor) -> Tensor | None:
        """Return what `.grad` of a parameter shows."""

    def set_gradient_of(self, parameter: Tensor, gradient: Tensor | None) -> None:
        """Take what a user sets `.grad` of a parameter to."""


_HOLDERS = WeakIdKeyDictionary()
"""The latest holder of each parameter, weakly. Not an attribute, which would be pickled with it."""

_GRAD: Any = torch._C.TensorBase.grad


def own_gradient(parameter: Tensor) -> Tensor | None:
    """Return the gradient that autograd adds to, whoever holds the parameter."""
    found: Tensor | None = _GRAD.__get__(parameter)
    return found


def set_own_gradient(parameter: Tensor, gradient: Tensor | None) -> None:
    """Set the gradient that autograd adds to, whoever holds the parameter."""
    _GRAD.__set__(parameter, gradient)


def holder_of(parameter: Tensor) -> Any:
    """Return the holder that was last named for a parameter and is still alive, or None."""
    reference = _HOLDERS.get(parameter)  # type: ignore[no-untyped-call]
    return None if reference is None else reference()


def set_holder(parameter: Tensor, holder: GradientHolder) -> None:
    """Name the optimizer that is asked for a parameter's gradient once that is held."""
    _HOLDERS[parameter] = weakref.ref(holder)


class HeldParameter(nn.Parameter):
    """A parameter whose `.grad` is its optimizer's answer."""

    @property
    def grad(self) -> Tensor | None:
        holder = holder_of(self)
        if holder is None or TracingContext.try_get() is not None:  # torch.compile looks at its type
            return own_gradient(self)
        found: Tensor | None = holder.gradient_of(self)
        return found

    @grad.setter
    def grad(self, gradient: Tensor | None) -> None:
        holder = holder_of(self)
        if holder is None:
            set_own_gradient(self, gradient)
        else:
            holder.set_gradient_of(self, gradient)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copy it as the ordinary parameter that it is to everybody else."""
        copy: Any = super().__deepcopy__(memo)  # type: ignore[no-untyped-call]
        copy.__class__ = nn.Parameter
        return copy


def hold(parameter: Tensor) -> None:
    """Ask the holder for `.grad` from now on."""
    if type(parameter) is nn.Parameter:
        parameter.__class__ = HeldParameter


def release(parameter: Tensor) -> None:
    """Leave `.grad` to the parameter again."""
    if type(parameter) is HeldParameter:
        parameter.__class__ = nn.Parameter  # type: ignore[assignment]


def is_ordinary(tensor: Tensor) -> bool:
    """Return whether it is a parameter without a subclass's behaviour, held or not."""
    return type(tensor) in (nn.Parameter, HeldParameter)
