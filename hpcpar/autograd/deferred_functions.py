"""Forms of torch's functions that leave the gradients of parameters for later.

    linear(x, W, b)     W, b: parameters, or views of them    backward keeps dy and x; W multiplies them
    embedding(i, W)                                           backward keeps dy and i
    any other function  is called with stand-ins              backward makes the gradient, which waits for W

The backward of the first two makes the input's gradient only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from hpcpar.autograd.grad_accumulation_fusion import (
    EmbeddingWeightGrad,
    LinearWeightGrad,
    bias_gradient,
    matrix,
)
from hpcpar.autograd.held_parameter import is_ordinary
from hpcpar.autograd.own_functions import differentiated_once, is_transformed, no_view, under_autocast

if TYPE_CHECKING:
    from hpcpar.autograd.weight_grad_mode import DeferredGradients

LEFT_ALONE = frozenset(
    {
        *("__get__", "__set__", "__delete__", "__deepcopy__", "__reduce_ex__", "backward", "detach", "grad"),
        *("register_hook", "register_post_accumulate_grad_hook", "requires_grad_", "retain_grad"),
    }
)
"""Names of functions that are about a parameter itself, not about its values."""

OF_VALUES = frozenset(getattr(Tensor, name).__get__ for name in ("T", "mT", "H", "mH", "real", "imag"))
"""Attributes that are about its values nevertheless."""

VALUES = frozenset({Tensor, torch.Size, torch.dtype, torch.device, int, float, bool, str, slice, type(None)})
"""Types of arguments that are no parameters and hold none."""

DEFERRED = "layers whose weights' gradients wait for W; take a schedule without it, such as 1f1b"

VIEWS = {"_CopyToBackward"} | {
    f"{name}Backward0"
    for name in (
        *("Alias", "Clone", "Expand", "Permute", "ReshapeAlias", "Select", "Slice", "Split"),
        *("SplitWithSizes", "Squeeze", "T", "ToCopy", "Transpose"),
        *("Unbind", "UnsafeView", "Unsqueeze", "View"),
    )
}
"""Backwards that keep nothing of forward, and so may run in part in B and in part in W.

With `copy_to` in W runs the sum over ranks; all of them come to it in the same order.
"""


class WeightGradMode(TorchFunctionMode):
    """Mode that defers weights' gradients of what is computed inside; `again`, while it is recomputed."""

    def __init__(self, deferred: DeferredGradients, *, again: bool) -> None:
        super().__init__()
        self.deferred = deferred
        self.again = again

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        special = SPECIAL.get(func)
        # Most calls have no parameter, and are not to wait until that is looked at more closely.
        if (
            special is None
            and VALUES.issuperset(map(type, args))
            and VALUES.issuperset(map(type, kwargs.values()))
        ):
            return func(*args, **kwargs)
        if not torch.is_grad_enabled() or is_transformed():
            return func(*args, **kwargs)
        if special is not None:
            output = special(self, *args, **kwargs)
            if output is not NotImplemented:
                return output
        elif getattr(func, "__name__", "") in LEFT_ALONE and func not in OF_VALUES:
            return func(*args, **kwargs)
        return func(
            *[self._replaced(each) for each in args],
            **{name: self._replaced(each) for name, each in kwargs.items()},
        )

    def _replaced(self, given: Any) -> Any:
        """Replace parameters by their stand-ins, also in a list."""
        if isinstance(given, Tensor):
            return self.deferred.stand_in(given)
        if type(given) in (list, tuple):
            return type(given)(self._replaced(each) for each in given)
        return given


def made_of_parameters(tensor: Tensor) -> bool:
    """Return whether it is a parameter, its stand-in, or a view or cast of one (its gradient may wait)."""
    node: Any = tensor.grad_fn
    if node is None:
        return isinstance(tensor, nn.Parameter) or hasattr(tensor, "stands_for")
    while type(node).__name__ in VIEWS:
        node = node.next_functions[0][0]
    return hasattr(getattr(node, "variable", None), "stands_for")


def cut_off(weight: Tensor) -> Tensor:
    """Return a weight's values as a leaf: autograd knows that a gradient is wanted, but not where it goes."""
    return weight.detach().requires_grad_(weight.requires_grad)


# --- linear ---------------------------------------------------------------------------------------


def _linear(mode: WeightGradMode, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    """Return linear(input, weight, bias), or NotImplemented where weights are no ordinary parameters."""
    given = (input, weight) if bias is None else (input, weight, bias)
    if not all(_is_ordinary(each) for each in given):
        return NotImplemented
    if not weight.requires_grad or weight.dim() != 2 or input.dim() < 1:
        return NotImplemented
    if bias is not None and bias.shape != weight.shape[:1]:
        return NotImplemented
    weights = given[1:]
    if not all(made_of_parameters(each) for each in weights if each.requires_grad):
        return NotImplemented
    (x,) = under_autocast(mode.deferred.stand_in(input))
    anchors = [cut_off(each) for each in weights]
    if mode.again:
        _Kept.apply(x, anchors[0])  # type: ignore[no-untyped-call]
    return _DeferredLinear.apply(mode, weights, x, *anchors)  # type: ignore[no-untyped-call]


def _is_ordinary(tensor: Tensor) -> bool:
    return (
        (type(tensor) is Tensor or is_ordinary(tensor))
        and tensor.is_floating_point()
        and tensor.layout is torch.strided
        and not tensor.is_nested
    )


class _Kept(Function):
    """Keeps what a product would, and before it: with the last tensor that is kept recomputation stops."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x.new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:
        return None, None


class _DeferredLinear(Function):
    @staticmethod
    def forward(
        ctx: Any,
        mode: WeightGradMode,
        weights: Sequence[Tensor],
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
    ) -> Tensor:
        ctx.deferred, ctx.weights = mode.deferred, weights
        if not mode.again:
            ctx.save_for_backward(x, weight)
        return no_view(functional.linear(x, weight, bias))

    @staticmethod
    @differentiated_once(DEFERRED)
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        need_x, *needs = ctx.needs_input_grad[2:]
        rows = matrix(gradient)
        # The tensor itself where it will do: autograd then sees that someone holds it, and lets it be.
        kept = gradient if gradient.is_contiguous() else rows
        of_x = None
        if need_x:
            of_x = rows.mm(weight.to(rows.dtype)).view(x.shape)
        # Without what the input was made by: the rest of the graph is to go.
        inputs = x.detach()
        parts = (LinearWeightGrad(kept, lambda: inputs), partial(bias_gradient, kept))
        for target, need, part in zip(ctx.weights, needs, parts, strict=False):
            if need:
                ctx.deferred.add(target, part)
        return None, None, of_x, *([None] * len(needs))


# --- embeddings -----------------------------------------------------------------------------------


def _embedding(
    mode: WeightGradMode,
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    if not weight.requires_grad or not made_of_parameters(weight):
        return NotImplemented
    options = (padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
    return _DeferredEmbedding.apply(mode.deferred, (weight,), options, input, cut_off(weight))  # type: ignore[no-untyped-call]


class _DeferredEmbedding(Function):
    @staticmethod
    def forward(
        ctx: Any,
        deferred: DeferredGradients,
        weights: tuple[Tensor],
        options: tuple[Any, ...],
        tokens: Tensor,
        weight: Tensor,
    ) -> Tensor:
        (ctx.weight,) = weights
        padding_idx, _, _, scale_grad_by_freq, sparse = options
        ctx.deferred, ctx.options = deferred, (padding_idx, scale_grad_by_freq, sparse)
        ctx.save_for_backward(tokens)
        return functional.embedding(tokens, weight, *options)

    @staticmethod
    @differentiated_once(DEFERRED)
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (tokens,) = ctx.saved_tensors
        ctx.deferred.add(ctx.weight, EmbeddingWeightGrad(gradient, tokens, ctx.weight.shape[0], *ctx.options))
        return None, None, None, None, None


SPECIAL: dict[Any, Callable[..., Any]] = {functional.linear: _linear, functional.embedding: _embedding}
"""Functions that have a form of their own, which may decline with NotImplemented."""
