"""What becomes of a plain module when several ranks share its model: the values of a plan.

    Column, Row, Vocabulary, VocabularyEmbedding    a layer has this rank's part of the weight
    Enter                          several column layers read one input: its gradient is summed once
    LocalHeads                     numbers of heads become those of this rank
    Norm(of_heads=True)            between a column and a row layer: gradients of what is whole are summed
    Norm, Scatter, Gather, Whole   sequence parallelism; without it they do nothing

     tokens ─ embed ─ Scatter │ Norm ─ Enter ─ Column ═ Row ─ Norm ─ … ─ Norm ─ Gather │ head ─ logits
     whole sequence           │ this rank's part of it, but between Enter and Row      │ whole sequence

Styles are values: they hold no tensors and no communicators.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.func import functional_call

from hpcpar.autograd import copy_to, gather_from, scatter_to
from hpcpar.autograd.dim_collectives import require_dividing
from hpcpar.autograd.weight_grad_mode import stand_in
from hpcpar.errors import LayoutError, MismatchError
from hpcpar.tensor_parallel.axis import TensorParallel
from hpcpar.tensor_parallel.embedding import VocabParallelEmbedding
from hpcpar.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear, SharedInput
from hpcpar.tensor_parallel.products import SEQUENCE
from hpcpar.tensor_parallel.sameness import Sameness
from hpcpar.tensor_parallel.split import (
    Heads,
    Section,
    Split,
    own_shard,
    padded_length,
    require_divisible,
    require_fitting,
    require_shareable,
    split_evenly,
    split_sections,
)


class Style(ABC):
    """What becomes of a module; one of your own implements `applied`, and `splits` where it divides weights.

    Best a frozen dataclass, so that ranks can compare what they are given.

    covers          it sees to the gradients of all parameters in the module
    is_region       ranks work on different parts in the module, so parameters in it need a style that covers
    optional        a plan's pattern with this style may match no module
    needs_entered   the module's input is to have come through an `Enter` around it
    """

    covers: ClassVar[bool] = False
    is_region: ClassVar[bool] = False
    optional: ClassVar[bool] = False

    @property
    def needs_entered(self) -> bool:
        return False

    def splits(self, name: str, module: nn.Module, size: int) -> dict[str, Split]:
        """How its parameters will be divided, by their names in it: integers, before anything is done.

        errors   LayoutError for a module that this style is not for, or that does not divide
        """
        return {}

    @abstractmethod
    def applied(self, module: nn.Module, tp: TensorParallel) -> nn.Module:
        """The module in its parallel form: itself, changed, or another one of its place. Collective."""


# --- layers that are divided ----------------------------------------------------------------------


@dataclass(frozen=True)
class Column(Style):
    """torch.nn.Linear -> ColumnParallelLinear: each rank makes its part of the outputs.

    heads          outputs are so many heads, which stay whole; None: any that divide
    share_heads    heads may be fewer than ranks: several then hold the same one (keys, values)
    sections       outputs are several fused parts, each of which is divided by itself; instead of `heads`
    gather_output  every rank gets all outputs
    enter          False: an `Enter` around this layer serves it
    """

    heads: int | None = None
    share_heads: bool = False
    sections: tuple[Section, ...] = ()
    gather_output: bool = False
    enter: bool = True

    covers: ClassVar[bool] = True

    @property
    def needs_entered(self) -> bool:
        return not self.enter

    def splits(self, name: str, module: nn.Module, size: int) -> dict[str, Split]:
        linear = _linear(name, module, self)
        parts = self._sections(linear)
        rows = sum(part.rows if isinstance(part, Heads) else part for part in parts)
        if rows != linear.out_features:
            raise LayoutError(
                f"{name}: {self} makes {rows} outputs, but the layer has {linear.out_features}; give heads "
                f"or sections that together are the layer's outputs"
            )
        for part in parts:
            if not isinstance(part, Heads):
                require_divisible(part, size, f"{name}: out_features")
            elif self.share_heads or self.sections:
                require_shareable(part.count, size, f"{name}: heads")
            else:
                require_divisible(part.count, size, f"{name}: heads")
        return _of_weight_and_bias(linear, split_sections(parts, size))

    def applied(self, module: nn.Module, tp: TensorParallel) -> nn.Module:
        linear = _linear("", module, self)
        column = ColumnParallelLinear(
            linear.in_features,
            self._sections(linear),
            tp,
            bias=linear.bias is not None,
            gather_output=self.gather_output,
            enter=self.enter,
            draw=False,
        )
        return _with_shards(column, linear)

    def _sections(self, linear: nn.Linear) -> tuple[Section, ...]:
        if self.sections or self.heads is None:
            return self.sections or (linear.out_features,)
        return (Heads(self.heads, linear.out_features // self.heads),)


@dataclass(frozen=True)
class Row(Style):
    """torch.nn.Linear -> RowParallelLinear: each rank has its part of the inputs; outputs are summed.

    input_is_parallel   False: the input is whole, and each rank takes its part
    """

    input_is_parallel: bool = True

    covers: ClassVar[bool] = True

    def splits(self, name: str, module: nn.Module, size: int) -> dict[str, Split]:
        linear = _linear(name, module, self)
        require_divisible(linear.in_features, size, f"{name}: in_features")
        return {"weight": split_evenly(linear.in_features, size, dim=1)}

    def applied(self, module: nn.Module, tp: TensorParallel) -> nn.Module:
        linear = _linear("", module, self)
        row = RowParallelLinear(
            linear.in_features,
            linear.out_features,
            tp,
            bias=linear.bias is not None,
            input_is_parallel=self.input_is_parallel,
            draw=False,
        )
        return _with_shards(row, linear)


@dataclass(frozen=True)
class Vocabulary(Style):
    """A last torch.nn.Linear, to logits: ColumnParallelLinear with a vocabulary that is padded if need be.

    gather_output    every rank gets all logits; False: its part, for `vocabulary_parallel_cross_entropy`
    whole_sequence   the input is whole under sequence parallelism, too, as a `Gather` makes it
    """

    gather_output: bool = True
    whole_sequence: bool = False

    covers: ClassVar[bool] = True

    def splits(self, name: str, module: nn.Module, size: int) -> dict[str, Split]:
        linear = _linear(name, module, self)
        return _of_weight_and_bias(linear, _of_vocabulary(linear.out_features, size))

    def applied(self, module: nn.Module, tp: TensorParallel) -> nn.Module:
        linear = _linear("", module, self)
        column = ColumnParallelLinear(
            linear.in_features,
            linear.out_features,
            _on_whole_sequences(tp) if self.whole_sequence else tp,
            bias=linear.bias is not None,
            gather_output=self.gather_output,
            pad=True,
            draw=False,
        )
        return _with_shards(column, linear)


@dataclass(frozen=True)
class VocabularyEmbedding(Style):
    """torch.nn.Embedding -> VocabParallelEmbedding, with a vocabulary that is padded if need be.

    whole_sequence   the output is whole under sequence parallelism, too: a `Scatter` comes later
    """

    whole_sequence: bool = False

    covers: ClassVar[bool] = True

    def splits(self, name: str, module: nn.Module, size: int) -> dict[str, Split]:
        embedding = _embedding(name, module)
        return {"weight": _of_vocabulary(embedding.num_embeddings, size)}

    def applied(self, module: nn.Module, tp: TensorParallel) -> nn.Module:
        embedding = _embedding("", module)
        parallel = VocabParallelEmbedding(
            embedding.num_embeddings,
            embedding.embedding_dim,
            _on_whole_sequences(tp) if self.whole_sequence else tp,
            padding_token=embedding.padding_idx,
            draw=False,
        )
        return _with_shards(parallel, embedding)


def _linear(name: str, module: nn.Module, style: Style) -> nn.Linear:
    # Not a subclass, either: an adapter or a quantised layer would lose what it does.
    if type(module) is not nn.Linear:
        raise LayoutError(
            f"{name} is a {_kind(module)}, and {type(style).__name__} is for torch.nn.Linear; name another "
            f"module, or give this one another style"
        )
    _require_plain(name, module)
    return module


def _embedding(name: str, module: nn.Module) -> nn.Embedding:
    if type(module) is not nn.Embedding:
        raise LayoutError(
            f"{name} is a {_kind(module)}, and VocabularyEmbedding is for torch.nn.Embedding; name another "
            f"module, or give this one another style"
        )
    for option in ("max_norm", "scale_grad_by_freq", "sparse"):
        if getattr(module, option):
            raise LayoutError(
                f"{name} has {option}={getattr(module, option)}, which a divided vocabulary does not have; "
                f"build the model without it"
            )
    _require_plain(name, module)
    return module


def _require_plain(name: str, module: nn.Module) -> None:
    """What the layer in its place would not have.

    A weight that is computed from other parameters (weight norm, pruning) is not there to be divided.
    """
    known = {known for known, _ in module.named_parameters(recurse=False)}
    if not {"weight"} <= known <= {"weight", "bias"}:
        raise LayoutError(
            f"{name} has the parameters {', '.join(sorted(known))}, where a plain layer has weight and bias; "
            f"make it a plain one first (torch.nn.utils.parametrize.remove_parametrizations, prune.remove)"
        )
    held = [own for own, _ in (*module.named_children(), *module.named_buffers(recurse=False))]
    if held or "forward" in vars(module):
        found = f"holds {', '.join(held)}" if held else "has a forward of its own"
        raise LayoutError(
            f"{name} {found}, which the parallel layer in its place would not have; add it to that layer "
            f"after parallelize, or give this one another style"
        )
    for own, parameter in module.named_parameters(recurse=False):
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise LayoutError(
                f"{name}.{own} has a hook on its gradient, of which each rank will have its part in another "
                f"parameter; register it after parallelize, on that"
            )


def _kind(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def _of_weight_and_bias(linear: nn.Linear, split: Split) -> dict[str, Split]:
    return {name: split for name, _ in linear.named_parameters(recurse=False)}


def _of_vocabulary(length: int, size: int) -> Split:
    return split_evenly(length, size, padded=padded_length(length, size))


def _on_whole_sequences(tp: TensorParallel) -> TensorParallel:
    if not tp.sequence_parallel:
        return tp
    return TensorParallel(tp.comm, overlap=tp.overlap, twice=tp.twice)


HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_is_full_backward_hook",
)
"""Where torch.nn.Module keeps hooks of forward and backward."""


@torch.no_grad()
def _with_shards(layer: nn.Module, whole: nn.Module) -> nn.Module:
    """This rank's shards of the whole layer's parameters: in memory of their own, of its dtype and device.

    Hooks go along; of a divided layer they see what this rank has.
    """
    wholes = dict(whole.named_parameters(recurse=False))
    for name, parameter in layer.named_parameters(recurse=False):
        parameter.data = own_shard(parameter, wholes[name])
        parameter.requires_grad_(wholes[name].requires_grad)
    # The very dicts, so that the handles that registration gave still remove what is in them.
    for hooks in HOOKS:
        setattr(layer, hooks, getattr(whole, hooks))
    return layer.train(whole.training)


# --- where activations enter and leave ------------------------------------------------------------


@dataclass(frozen=True)
class Enter(Style):
    """A module whose input several column layers inside read, each with enter=False.

    argument   the name of the input among the arguments of its forward; None: the first

    The gradient of what they read is summed over ranks once, instead of once a layer. That is the input, or
    what is made of it: a norm before them, and a residual around them, lie outside of what is divided. With
    sequence parallelism the input is gathered once, and all of the module up to its row layer sees whole
    sequences.
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
    """Attributes in which a module keeps numbers of heads: they become those of this rank.

    names         of attributes whose heads all divide
    share_heads   of attributes whose heads may be fewer than ranks, several of which then hold the same one
    """

    names: tuple[str, ...] = ()
    share_heads: tuple[str, ...] = ()

    is_region: ClassVar[bool] = True

    def splits(self, name: str, module: nn.Module, size: int) -> dict[str, Split]:
        for attribute in (*self.names, *self.share_heads):
            count = getattr(module, attribute, None)
            if not isinstance(count, int):
                raise LayoutError(
                    f"{name} is a {_kind(module)} with {attribute}={count!r}; LocalHeads is for attributes "
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
    """A module that treats each token by itself, with parameters that are the same on all ranks.

    Under sequence parallelism it sees this rank's tokens, and its parameters' gradients are summed.
    of_heads   it lies between a column and a row layer, and sees this rank's heads of all tokens (a norm of
               queries or keys): gradients are summed with and without sequence parallelism. Where ranks share
               a head of keys, each has what its own queries contribute: the sum is the whole gradient, too.
               Elsewhere every rank has the whole: a LayoutError in the first backward
    """

    of_heads: bool = False

    covers: ClassVar[bool] = True

    def applied(self, module: nn.Module, tp: TensorParallel) -> nn.Module:
        return OnOwnPart(module, tp) if self.of_heads or tp.sequence_parallel else module


@dataclass(frozen=True)
class Scatter(Style):
    """Before the module, of a whole sequence each rank goes on with its part; `argument` as of `Enter`."""

    argument: str | None = None

    def splits(self, name: str, module: nn.Module, size: int) -> dict[str, Split]:
        _place_of(self.argument, name, module)
        return {}

    def applied(self, module: nn.Module, tp: TensorParallel) -> nn.Module:
        sameness = Sameness(tp.comm, f"what {_kind(module)} gets whole, to be scattered,")

        def scatter(x: Tensor) -> Tensor:
            sameness.require(x)
            require_dividing(x, tp.comm, SEQUENCE % x.dim(), "a sequence")
            return scatter_to(x, tp.comm, SEQUENCE)

        return _with_argument_changed(module, self.argument, scatter) if tp.sequence_parallel else module


@dataclass(frozen=True)
class Gather(Style):
    """After the module, every rank has the whole sequence again, for what is the same on all ranks."""

    def applied(self, module: nn.Module, tp: TensorParallel) -> nn.Module:
        sameness = Sameness(tp.comm, f"the gradient of what is gathered after {_kind(module)}")

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
    """Left as it is: it sees whole sequences, the same on all ranks, under sequence parallelism, too.

    Within an `Enter` that holds for what comes after the row layer only.
    """

    covers: ClassVar[bool] = True

    def applied(self, module: nn.Module, tp: TensorParallel) -> nn.Module:
        return module


class OnOwnPart(nn.Module):
    """A module with parameters that are the same on all ranks, for use on what each has for itself.

    Gradients are summed over ranks. Its parameters and submodules have the names that they had.
    """

    def __init__(self, module: nn.Module, tp: TensorParallel) -> None:
        super().__init__()
        self.tp = tp
        self.training = module.training
        # In a tuple, so that what is in it is not registered twice, under names of its own.
        self._module = (module,)
        # The very dicts: what `.to()` or a loaded state puts in one is in the other.
        self._sameness = Sameness(tp.comm, f"a {_kind(module)}")
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
        # Under sequence parallelism ranks have parts, of features or of tokens, wherever it lies.
        if given is not None and isinstance(made, Tensor) and not self.tp.sequence_parallel:
            self._sameness.require_parts(given, made)
        return made

    def extra_repr(self) -> str:
        return f"{_kind(self._module[0])}, {self._module[0].extra_repr()}"


def _place_of(argument: str | None, name: str, module: nn.Module) -> tuple[str, int]:
    """The name of an argument of the module's forward, and its place."""
    parameters = list(inspect.signature(module.forward).parameters)
    if not parameters or (argument is not None and argument not in parameters):
        asked = "an argument" if argument is None else f"the argument {argument!r}"
        raise LayoutError(
            f"{name}: forward of {_kind(module)} does not have {asked}; it has "
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
