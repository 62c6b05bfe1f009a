"""ShardedParameter: a shape without values, in the place of a parameter while its unit is resharded."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hpcpar.autograd.held_parameter import HeldParameter
from hpcpar.data_parallel.parameters import nested_values
from hpcpar.errors import ShardedParameterError
from hpcpar.parameter_info import info_of


class ShardedParameter(HeldParameter):
    """Parameter of a fully sharded model while its unit is resharded; to use it is an error."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        doing = getattr(func, "__name__", "an operation")
        result = None
        with torch._C.DisableTorchFunctionSubclass():
            given = [value for value in nested_values([args, kwargs]) if type(value) is ShardedParameter]
            absent = next((value for value in given if value.numel()), None)
            if absent is None:  # of nothing, nothing is absent
                return func(*args, **kwargs)
        is_use = func in _READS or "out" in kwargs or (_writes(doing) and func not in _HARMLESS)
        if not is_use:
            with torch._C.DisableTorchFunctionSubclass():
                result = func(*args, **kwargs)
            # Whatever is no tensor (its size, its type) says nothing about values, nor does the parameter
            # itself, which model.to(device) returns where nothing is to be moved.
            made = [each for each in nested_values(result) if isinstance(each, Tensor) and each is not absent]
            is_use = func not in _HARMLESS and bool(made)
        if is_use:
            raise ShardedParameterError(
                f"{info_of(absent).name} was used by {doing} outside of its unit "
                f"{info_of(absent).unit_name or 'the model'!r}, where a rank has only a shard of it. Use it "
                "inside the forward of that module, choose a unit around all modules that use it (policy=), "
                "or look at it inside `with hpcpar.summon_full_parameters(model):`"
            )
        return result

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{info_of(self).name}, {list(self.shape)} of {self.dtype}, of which this rank has a shard"


def _writes(name: str) -> bool:
    return name in _WRITING or (name.endswith("_") and not name.endswith("__"))


_HARMLESS = {
    getattr(Tensor, "grad").__get__,  # noqa: B009
    Tensor.requires_grad_,
    *(torch.empty_like, torch.zeros_like, torch.ones_like, torch.full_like),
}
"""What returns a tensor, and says nothing about the values of the one that it was given."""

_READS = {
    *(Tensor.tolist, Tensor.item, Tensor.numpy, Tensor.__array__, Tensor.__contains__),
    *(Tensor.__bool__, Tensor.__complex__, Tensor.__float__, Tensor.__int__),
    *(Tensor.equal, Tensor.allclose, Tensor.is_nonzero, torch.equal, torch.allclose, torch.is_nonzero),
}
"""What returns no tensor, and yet says something about values."""

_OPERATORS = (
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"),
    *("and", "or", "xor", "lshift", "rshift"),
)
_WRITING = {"__setitem__", *(f"__i{name}__" for name in _OPERATORS)}
