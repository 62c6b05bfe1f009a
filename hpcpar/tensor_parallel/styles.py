"""Styles: the values of a plan, which turn modules of a plain model into parallel ones.

    Column, Row, Vocabulary        nn.Linear -> ColumnParallelLinear, RowParallelLinear      (this file)
    VocabularyEmbedding            nn.Embedding -> VocabParallelEmbedding
    Enter                          sum the gradient of a shared input once  (from here on: region_styles.py)
    LocalHeads                     numbers of heads become those of this rank
    Norm(of_heads=True)            between a column and a row layer: sum gradients of replicated parameters
    Norm, Scatter, Gather, Whole   sequence parallelism; without it they do nothing

     tokens ─ embed ─ Scatter │ Norm ─ Enter ─ Column ═ Row ─ Norm ─ … ─ Norm ─ Gather │ head ─ logits
     whole sequence           │ this rank's shard of it, but between Enter and Row     │ whole sequence

Styles are values without tensors and communicators.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
from torch import nn

from hpcpar.autograd.optimizers_on_parts import note_replaced
from hpcpar.errors import LayoutError
from hpcpar.tensor_parallel.axis import TensorParallel
from hpcpar.tensor_parallel.embedding import VocabParallelEmbedding
from hpcpar.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from hpcpar.tensor_parallel.split import (
    Heads,
    Section,
    Split,
    own_shard,
    padded_length,
    require_divisible,
    require_shareable,
    split_evenly,
    split_sections,
)

Plain = TypeVar("Plain", nn.Linear, nn.Embedding)


class Style(ABC):
    """Change of a module. Your own style implements `applied`, and `splits` if it divides weights.

    Make it a frozen dataclass, so that ranks can compare their plans.

    covers          the style handles the gradients of all parameters in the module
    is_region       ranks have different activations in the module, so its parameters need a style that covers
    optional        a pattern with this style may match no module
    needs_entered   the module's input must come through an `Enter` around it
    """

    covers: ClassVar[bool] = False
    is_region: ClassVar[bool] = False
    optional: ClassVar[bool] = False

    @property
    def needs_entered(self) -> bool:
        return False

    def splits(self, name: str, module: nn.Module, size: int) -> dict[str, Split]:
        """Splits of the module's parameters, by name; called before anything is changed.

        errors   LayoutError for a module of another kind, or one that does not divide
        """
        return {}

    @abstractmethod
    def applied(self, module: nn.Module, tp: TensorParallel) -> nn.Module:
        """Return the parallel module: the same one, changed, or its replacement. Collective."""


# --- layers that are divided ----------------------------------------------------------------------


@dataclass(frozen=True)
class Column(Style):
    """Replace torch.nn.Linear by ColumnParallelLinear: the outputs are divided.

    heads          number of heads that the outputs form, each of which stays whole; None: no heads
    share_heads    heads may be fewer than ranks: several ranks then hold the same one (keys, values)
    sections       fused parts of the outputs, each of which is divided by itself; instead of `heads`
    gather_output  every rank gets all outputs
    enter          False: an `Enter` around this layer sums the gradient of its input
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
        linear = _plain(name, module, nn.Linear, self)
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
        linear = _plain("", module, nn.Linear, self)
        options = {"gather_output": self.gather_output, "enter": self.enter}
        return _column(linear, self._sections(linear), tp, **options)

    def _sections(self, linear: nn.Linear) -> tuple[Section, ...]:
        if self.sections or self.heads is None:
            return self.sections or (linear.out_features,)
        return (Heads(self.heads, linear.out_features // self.heads),)


@dataclass(frozen=True)
class Row(Style):
    """Replace torch.nn.Linear by RowParallelLinear: the inputs are divided, and outputs are summed.

    input_is_parallel   False: the input is whole, and each rank takes its shard
    """

    input_is_parallel: bool = True

    covers: ClassVar[bool] = True

    def splits(self, name: str, module: nn.Module, size: int) -> dict[str, Split]:
        linear = _plain(name, module, nn.Linear, self)
        require_divisible(linear.in_features, size, f"{name}: in_features")
        return {"weight": split_evenly(linear.in_features, size, dim=1)}

    def applied(self, module: nn.Module, tp: TensorParallel) -> nn.Module:
        linear = _plain("", module, nn.Linear, self)
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
    """Replace the torch.nn.Linear to logits by ColumnParallelLinear, with a padded vocabulary.

    gather_output    every rank gets all logits; False: a shard, for `vocabulary_parallel_cross_entropy`
    whole_sequence   the input is whole under sequence parallelism, too, after a `Gather`
    """

    gather_output: bool = True
    whole_sequence: bool = False

    covers: ClassVar[bool] = True

    def splits(self, name: str, module: nn.Module, size: int) -> dict[str, Split]:
        linear = _plain(name, module, nn.Linear, self)
        return _of_weight_and_bias(linear, _of_vocabulary(linear.out_features, size))

    def applied(self, module: nn.Module, tp: TensorParallel) -> nn.Module:
        linear = _plain("", module, nn.Linear, self)
        own = _on_whole_sequences(tp) if self.whole_sequence else tp
        return _column(linear, linear.out_features, own, gather_output=self.gather_output, pad=True)


@dataclass(frozen=True)
class VocabularyEmbedding(Style):
    """Replace torch.nn.Embedding by VocabParallelEmbedding, with a padded vocabulary.

    whole_sequence   the output is whole under sequence parallelism, too, before a `Scatter`
    """

    whole_sequence: bool = False

    covers: ClassVar[bool] = True

    def splits(self, name: str, module: nn.Module, size: int) -> dict[str, Split]:
        embedding = _embedding(name, module, self)
        return {"weight": _of_vocabulary(embedding.num_embeddings, size)}

    def applied(self, module: nn.Module, tp: TensorParallel) -> nn.Module:
        embedding = _embedding("", module, self)
        parallel = VocabParallelEmbedding(
            embedding.num_embeddings,
            embedding.embedding_dim,
            _on_whole_sequences(tp) if self.whole_sequence else tp,
            padding_token=embedding.padding_idx,
            draw=False,
        )
        return _with_shards(parallel, embedding)


def _column(linear: nn.Linear, sections: Any, tp: TensorParallel, **options: Any) -> nn.Module:
    """Make a linear layer column-parallel."""
    bias = linear.bias is not None
    column = ColumnParallelLinear(linear.in_features, sections, tp, bias=bias, draw=False, **options)
    return _with_shards(column, linear)


def _plain(name: str, module: nn.Module, kind: type[Plain], style: Style) -> Plain:
    """Return a layer of this very kind, which holds nothing that its replacement would lose."""
    # Not a subclass: the replacement would lose the function of an adapter or a quantised layer.
    if type(module) is not kind:
        raise LayoutError(
            f"{name} is a {kind_of(module)}, and {type(style).__name__} is for torch.nn.{kind.__name__}; "
            f"name another module, or give this one another style"
        )
    _require_plain(name, module)
    return module


def _embedding(name: str, module: nn.Module, style: Style) -> nn.Embedding:
    embedding = _plain(name, module, nn.Embedding, style)
    for option in ("max_norm", "scale_grad_by_freq", "sparse"):
        if value := getattr(embedding, option):
            raise LayoutError(
                f"{name} has {option}={value}, which a divided vocabulary does not have; "
                f"build the model without it"
            )
    return embedding


def _require_plain(name: str, module: nn.Module) -> None:
    """Refuse parameters, children, buffers and hooks that the replacement would lose.

    A weight that is computed from other parameters (weight norm, pruning) cannot be divided.
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


def kind_of(module: nn.Module) -> str:
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
"""Attributes in which torch.nn.Module keeps hooks of forward and backward."""


@torch.no_grad()
def _with_shards(layer: nn.Module, whole: nn.Module) -> nn.Module:
    """Give a layer this rank's shards of a whole layer's parameters, with its dtype, device and hooks.

    Hooks of a divided layer see this rank's shards.
    """
    wholes = dict(whole.named_parameters(recurse=False))
    for name, parameter in layer.named_parameters(recurse=False):
        parameter.data = own_shard(parameter, wholes[name])
        parameter.requires_grad_(wholes[name].requires_grad)
        note_replaced(wholes[name])
    # The same dicts, so that the handles of registered hooks still remove them.
    for hooks in HOOKS:
        setattr(layer, hooks, getattr(whole, hooks))
    return layer.train(whole.training)
