"""Styles of regions: entry of activations into divided layers, scatter and gather of the sequence."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.func import functional_call

from hpcpar.autograd import copy_to, gather_from, scatter_to
from hpcpar.autograd.dim_collectives import require_dividing
from hpcpar.autograd.weight_grad_mode import stand_in
from hpcpar.errors import LayoutError, MismatchError
from hpcpar.tensor_parallel.axis import TensorParallel
from hpcpar.tensor_parallel.linear import ColumnParallelLinear, SharedInput
from hpcpar.tensor_parallel.products import SEQUENCE
from hpcpar.tensor_parallel.sameness import Sameness
from hpcpar.tensor_parallel.split import Split, require_fitting
from hpcpar.tensor_parallel.styles import Style, kind_of


@dataclass(frozen=True)
class Enter(Style):
    """Region around several column layers with enter=False that read one input.

    argument   name of the input among the arguments of the module's forward; None: the first

    The gradient of the tensor that they read is summed over ranks once, instead of once a layer. That tensor
    is the input or made from it: a norm before the layers and a residual around them are not divided. With
    sequence parallelism the input is gathered once, and the module sees whole sequences up to its row layer.
    """

    argument: str | None = None

    is_region: ClassVar[bool] = True

    def splits(self, name: str, module: nn.Module, size: int) -> dict[str, Split]:
        _place_of(self.argument, name, module)
        return {}

    def applied(self, module: nn.Module, tp: TensorParallel) -> nn.Module:
        if tp.sequence_parallel:
            return _with_argument_changed(
                module, self.argument, lambda x: gather_from(x, tp.comm, SEQUENCE, "partial")
            )
        shared = SharedInput(tp)

        def begin(module: nn.Module, arguments: object) -> None:
            for layer in module.modules():
                if isinstance(layer, ColumnParallelLinear) and not layer.enter:
                    layer.shared_input = shared
            shared.open()

        module.register_forward_pre_hook(begin)
        module.register_forward_hook(lambda *_: shared.close(), always_call=True)
        return module


@dataclass(frozen=True)
class LocalHeads(Style):
    """Divide a module's attributes that hold numbers of heads by the number of ranks.

    names         attributes whose heads divide among ranks
    share_heads   attributes whose heads may be fewer than ranks: several ranks then hold the same one
    """

    names: tuple[str, ...] = ()
    share_heads: tuple[str, ...] = ()

    is_region: ClassVar[bool] = True

    def splits(self, name: str, module: nn.Module, size: int) -> dict[str, Split]:
        for attribute in (*self.names, *self.share_heads):
            count = getattr(module, attribute, None)
            if not isinstance(count, int):
                raise LayoutError(
                    f"{name} is a {kind_of(module)} with {attribute}={count!r}; LocalHeads is for attributes "
                    f"that are numbers of heads"
                )
        divided, shared = (
            {f"{name}: {attribute}": getattr(module, attribute) for attribute in attributes}
            for attributes in (self.names, self.share_heads)
        )
        require_fitting(divided, shared, size)
        return {}

    def applied(self, module: nn.Module, tp: TensorParallel) -> nn.Module:
        for attribute in (*self.names, *self.share_heads):
            setattr(module, attribute, max(1, getattr(module, attribute) // tp.size))
        return module


# --- sequence parallelism -------------------------------------------------------------------------


@dataclass(frozen=True)
class Norm(Style):
    """Module that treats each token by itself, with replicated parameters.

    Under sequence parallelism it sees this rank's tokens, and ranks sum its parameters' gradients.
    of_heads   the module lies between a column and a row layer, and sees this rank's heads of all tokens (a
               norm of queries or keys): gradients are summed without sequence parallelism, too. Ranks that
               share a key head contribute the gradients of their own queries, so the sum is right. In another
               place every rank has the whole gradient: a LayoutError in the first backward
    """

    of_heads: bool = False

    covers: ClassVar[bool] = True

    def applied(self, module: nn.Module, tp: TensorParallel) -> nn.Module:
        return OnOwnPart(module, tp) if self.of_heads or tp.sequence_parallel else module


@dataclass(frozen=True)
class Scatter(Style):
    """Scatter the whole sequence before the module: each rank keeps its shard; `argument` as in `Enter`."""

    argument: str | None = None

    def splits(self, name: str, module: nn.Module, size: int) -> dict[str, Split]:
        _place_of(self.argument, name, module)
        return {}

    def applied(self, module: nn.Module, tp: TensorParallel) -> nn.Module:
        sameness = Sameness(tp.comm, f"what {kind_of(module)} gets whole, to be scattered,")

        def scatter(x: Tensor) -> Tensor:
            sameness.require(x)
            require_dividing(x, tp.comm, SEQUENCE, "a sequence")
            return scatter_to(x, tp.comm, SEQUENCE)

        return _with_argument_changed(module, self.argument, scatter) if tp.sequence_parallel else module


@dataclass(frozen=True)
class Gather(Style):
    """Gather the whole sequence after the module, for layers that are the same on all ranks."""

    def applied(self, module: nn.Module, tp: TensorParallel) -> nn.Module:
        sameness = Sameness(tp.comm, f"the gradient of what is gathered after {kind_of(module)}")

        def gather(module: nn.Module, arguments: object, output: Any) -> Any:
            if isinstance(output, tuple):
                return (gather(module, arguments, output[0]), *output[1:])
            whole = gather_from(output, tp.comm, SEQUENCE)
            sameness.require_of_gradient(whole)
            return whole

        if tp.sequence_parallel:
            module.register_forward_hook(gather)
        return module


@dataclass(frozen=True)
class Whole(Style):
    """Leave a module unchanged: it sees whole sequences, the same on all ranks, in every mode.

    Within an `Enter` this holds only after the row layer.
    """

    covers: ClassVar[bool] = True

    def applied(self, module: nn.Module, tp: TensorParallel) -> nn.Module:
        return module


class OnOwnPart(nn.Module):
    """Wrapper of a module with replicated parameters that runs on this rank's tokens or heads.

    Ranks sum the gradients. Parameters and submodules keep their names.
    """

    def __init__(self, module: nn.Module, tp: TensorParallel) -> None:
        super().__init__()
        self.tp = tp
        self.training = module.training
        # In a tuple, so that the module is not registered a second time.
        self._module = (module,)
        # The same dicts below: `.to()` and loading a state change both.
        self._sameness = Sameness(tp.comm, f"a {kind_of(module)}")
        self._parameters, self._buffers, self._modules = (
            module._parameters,
            module._buffers,
            module._modules,
        )

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        (module,) = self._module
        module.training = self.training
        summed = {
            name: copy_to(stand_in(parameter), self.tp.comm) for name, parameter in self.named_parameters()
        }
        made = functional_call(module, summed, arguments, keywords)
        given = next((each for each in (*arguments, *keywords.values()) if isinstance(each, Tensor)), None)
        # Under sequence parallelism ranks have different tokens or features everywhere.
        if given is not None and isinstance(made, Tensor) and not self.tp.sequence_parallel:
            self._sameness.require_parts(given, made)
        return made

    def extra_repr(self) -> str:
        return f"{kind_of(self._module[0])}, {self._module[0].extra_repr()}"


def _place_of(argument: str | None, name: str, module: nn.Module) -> tuple[str, int]:
    """Name and position of an argument of the module's forward."""
    parameters = list(inspect.signature(module.forward).parameters)
    if not parameters or (argument is not None and argument not in parameters):
        asked = "an argument" if argument is None else f"the argument {argument!r}"
        raise LayoutError(
            f"{name}: forward of {kind_of(module)} does not have {asked}; it has "
            f"{', '.join(parameters) or 'none'}"
        )
    found = argument or parameters[0]
    return found, parameters.index(found)


def _with_argument_changed(
    module: nn.Module, argument: str | None, change: Callable[[Tensor], Tensor]
) -> nn.Module:
    name, place = _place_of(argument, type(module).__name__, module)

    def hook(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        if name in keywords:
            return arguments, {**keywords, name: change(keywords[name])}
        if place < len(arguments):
            changed = change(arguments[place])
            return (*arguments[:place], changed, *arguments[place + 1 :]), keywords
        raise MismatchError(
            f"{type(module).__name__} was called without its {name!r}, which its plan is about; pass it, or "
            f"name another argument in the plan"
        )

    module.register_forward_pre_hook(hook, with_kwargs=True)
    return module
