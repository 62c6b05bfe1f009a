"""`.grad` of a parameter whose average gradient each rank has a shard of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hpcpar.data_parallel.parameters import in_memory_order, nested_values
from hpcpar.errors import OperationError

if TYPE_CHECKING:
    from hpcpar.data_parallel.average_gradients import AverageGradients


class HeldGradient(Tensor):
    """A gradient that has the parameter's shape and changes the shards; to read its values is an error.

        p.grad.mul_(0.5)      p.grad.clamp_(-1, 1)      p.grad.zero_()      p.grad.add_(p, alpha=0.01)

    What changes each element by itself, in place, each rank does to its shard, and nothing is sent.
    """

    parameter: Tensor
    shards: AverageGradients

    @classmethod
    def of(cls, parameter: Tensor, shards: AverageGradients) -> HeldGradient:
        """Return one that takes no memory."""
        with torch._C.DisableTorchFunctionSubclass():
            shown = torch.zeros((), dtype=parameter.dtype, device=parameter.device)
            held = shown.expand(parameter.shape).as_subclass(cls)
        held.parameter, held.shards = parameter, shards
        return held

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "an operation")
        if func in _ITSELF:  # model.float() converts the gradients, too
            return args[0]
        if func == _SET_DATA:
            return None
        if name in _HARMLESS and func not in _VALUES:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if name == "zero_":
            args[0].shards.zero_gradient_of(args[0].parameter)
            return args[0]
        if name in _ELEMENTWISE and type(args[0]) is cls:
            _change(args[0], func, args[1:], kwargs)
            return args[0]
        single = name.removeprefix("_foreach_")
        if single != name and single in {*_ELEMENTWISE, "zero_"}:
            for number, gradient in enumerate(args[0]):
                own = [each[number] if isinstance(each, list | tuple) else each for each in args[1:]]
                getattr(gradient, single)(*own)
            return None
        held = next(value for value in nested_values([args, kwargs]) if type(value) is cls)
        raise OperationError(
            f"a gradient was used by {name}, of which this rank has only a shard, as with zero_stage="
            f"{held.shards.zero_stage}, precision or offload. Clip by optimizer.clip_grad_norm_() or "
            "torch.nn.utils.clip_grad_norm_(model.parameters(), …), ask optimizer.gradients_are_finite(), "
            "change elements in place (p.grad.mul_(), clamp_(), zero_()), and look at this rank's shards by "
            "optimizer.named_gradients()"
        )

    @classmethod
    def total_norm(cls, gradients: Sequence[Tensor], norm_type: float) -> Tensor:
        """Return the norm of gradients together, some of them held. Collective over optimizers' ranks."""
        held: dict[AverageGradients, list[Tensor]] = {}
        norms: list[Tensor] = []
        for gradient in gradients:
            if type(gradient) is cls:
                held.setdefault(gradient.shards, []).append(gradient.parameter)
            else:
                norms.append(torch.linalg.vector_norm(gradient, norm_type))
        norms += [shards.norm_of(parameters, norm_type) for shards, parameters in held.items()]
        total: Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type)
        return total

    @property
    def shard(self) -> Tensor:
        """This rank's part of the gradient, flat, which may be written to; empty where it has none."""
        found = self.shards.own_gradient_of(self.parameter)
        return torch.empty(0, dtype=self.dtype, device=self.device) if found is None else found[1]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"HeldGradient of {list(self.shape)}, of which this rank has a shard"


def _change(gradient: HeldGradient, func: Callable[..., Any], args: Any, kwargs: Any) -> None:
    """Do to this rank's shard what an operation in place does to the whole."""
    found = gradient.shards.own_gradient_of(gradient.parameter)
    if any(type(value) is HeldGradient for value in nested_values([args, kwargs])):
        raise OperationError(
            f"{getattr(func, '__name__', 'an operation')} was to combine gradients of which this rank has "
            "shards of different elements; do it with optimizer.named_gradients(), shard by shard"
        )
    if found is None:
        return
    piece, own = found
    shape = gradient.shape

    def cut(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dim() == 0:
            return value
        return in_memory_order(value.expand(shape), piece.layout)[piece.start : piece.stop]

    with torch.no_grad():
        func(own, *map(cut, args), **{key: cut(value) for key, value in kwargs.items()})


_DATA: Any = vars(torch._C.TensorBase)["data"]
_SET_DATA = _DATA.__set__
_ITSELF = {_DATA.__get__} | {
    getattr(Tensor, name)
    for name in (
        *("detach", "detach_", "requires_grad_", "to", "cpu", "cuda", "float", "double", "half", "bfloat16"),
        *("type", "contiguous"),
    )
}
"""What returns the same elements, wherever and in whatever type."""

_HARMLESS = {
    *("__get__", "size", "dim", "numel", "stride", "is_floating_point", "is_complex", "element_size"),
    "_has_compatible_shallow_copy_type",
}
"""What says nothing about values."""

_VALUES = {getattr(Tensor, name).__get__ for name in ("T", "mT", "H", "mH", "real", "imag")}

_ELEMENTWISE = frozenset(
    {
        *("mul_", "multiply_", "__imul__", "div_", "divide_", "true_divide_", "__itruediv__", "__idiv__"),
        *("add_", "__iadd__", "sub_", "subtract_", "__isub__", "neg_", "negative_", "fill_", "copy_"),
        *("clamp_", "clamp_min_", "clamp_max_", "clip_", "nan_to_num_", "sign_", "abs_", "masked_fill_"),
        *("addcmul_", "addcdiv_", "lerp_"),
    }
)
"""Operations in place that treat each element by itself."""
