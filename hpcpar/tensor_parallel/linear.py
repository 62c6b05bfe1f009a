"""Column- and row-parallel linear layers: the weight is divided by its outputs, or by its inputs.

    Y = X [A₁ A₂]          column: every rank has X, and computes its shard of the outputs
    Z = [Y₁ Y₂] [B₁; B₂]   row: every rank has its shard of Y; the products are summed over ranks

The styles `Column` and `Row` replace torch.nn.Linear by these layers.

source   Shoeybi et al. 2019, Megatron-LM, arXiv 1909.08053, section 3
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from hpcpar.autograd import copy_to, gather_from, scatter_to
from hpcpar.autograd.dim_collectives import checked_dim, require_dividing
from hpcpar.autograd.weight_grad_mode import stand_in
from hpcpar.errors import LayoutError, MismatchError
from hpcpar.tensor_parallel.axis import Sharers, TensorParallel
from hpcpar.tensor_parallel.products import SEQUENCE, column_products, row_product
from hpcpar.tensor_parallel.sameness import Sameness
from hpcpar.tensor_parallel.split import (
    Divided,
    Heads,
    Section,
    draw_shard,
    padded_length,
    place,
    replicated,
    require_divisible,
    require_shareable,
    split_evenly,
    split_sections,
)

if TYPE_CHECKING:
    from hpcpar.comm import Communicator


class _ParallelLinear(Divided):
    """Initial values of a linear layer with a divided weight."""

    in_features: int
    bias: nn.Parameter | None

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw as torch.nn.Linear, uniform within 1/√in_features: equal for any number of ranks."""
        bound = 1 / math.sqrt(self.in_features) if self.in_features else 0.0
        for parameter in (self.weight, self.bias):
            if parameter is not None:
                draw_shard(parameter, lambda whole: whole.uniform_(-bound, bound, generator=generator))


class ColumnParallelLinear(_ParallelLinear):
    """x · Wᵀ + b, with the outputs divided among ranks.

    in_features      of the whole layer
    out_features     of the whole layer; or several fused sections (queries, keys, values; gate, up), each of
                     which is divided by itself. `Heads(count, size)` is a section of whole heads; if they are
                     fewer than ranks, several ranks hold the same one, in all sections
    tp               communicator, or a TensorParallel with options
    gather_output    every rank gets all outputs, in the whole layer's order
    pad              pad outputs that do not divide with rows of zeros at the end (a vocabulary)
    enter            False: the caller passes a whole input and sums its gradient over ranks (`copy_to`, once
                     for several layers); this layer sends nothing
    draw             draw initial values; False leaves memory unset, for the caller to fill

    input    [..., in_features], the same on all ranks; with sequence parallelism dim -2 is a shard
    output   [..., this rank's outputs], or [..., out_features] with gather_output
    values   those of torch.nn.Linear, drawn whole from the process's generator, whose state must be equal on
             all ranks
    errors   LayoutError for outputs that do not divide
    """

    def __init__(
        self,
        in_features: int,
        out_features: int | Heads | Sequence[Section],
        tp: TensorParallel | Communicator,
        *,
        bias: bool = True,
        gather_output: bool = False,
        pad: bool = False,
        enter: bool = True,
        draw: bool = True,
    ) -> None:
        super().__init__()
        self.tp = TensorParallel.of(tp)
        self.in_features = in_features
        self.sections = (out_features,) if isinstance(out_features, (int, Heads)) else tuple(out_features)
        self.gather_output = gather_output
        self.enter = enter
        size = self.tp.size
        if pad:
            if len(self.sections) > 1 or isinstance(self.sections[0], Heads):
                raise LayoutError("pad is for one section of rows, but there are heads or several sections")
            length = self.sections[0]
            self.split = split_evenly(length, size, padded=padded_length(length, size))
        else:
            for section in self.sections:
                if isinstance(section, Heads):
                    require_shareable(section.count, size, "heads")
                else:
                    require_divisible(section, size, "out_features")
            self.split = split_sections(self.sections, size)
        rows = self.split.shard_length(self.tp.rank)
        self.weight = nn.Parameter(torch.empty(rows, in_features))
        self.bias = nn.Parameter(torch.empty(rows)) if bias else None
        # Collective, so made here and not in the first forward.
        self._sharers = self._shared_heads()
        distinct = None if self._sharers is None else self._sharers.distinct
        for parameter in self.parameters(recurse=False):
            place(parameter, self.split, self.tp.comm, distinct=distinct)
        self.shared_input: SharedInput | None = None
        self.shards = Sameness(distinct or self.tp.comm, "the weight of a column-parallel layer")
        self.sameness = Sameness(self.tp.comm, "the input of a column-parallel layer")
        self.sameness_of_gradient = Sameness(
            self.tp.comm, "the gradient of a column-parallel layer's gathered output"
        )
        if draw:
            self.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        if self.enter:
            (output,) = _project_together([self], x)
            return output
        self.require_own_shard()
        if self.shared_input is not None:
            x = self.shared_input.entered(x)
        bias = None if self.bias is None else self.summed(self.bias)
        output = functional.linear(x, self.summed(self.weight), bias)
        return self.gathered(output) if self.gather_output else output

    def sections_of(self, output: Tensor) -> list[Tensor]:
        """Split an output that was not gathered into this rank's shard of each section."""
        return list(
            torch.split(output, [stop - start for start, stop in self.split.parts[self.tp.rank]], dim=-1)
        )

    def summed(self, parameter: Tensor) -> Tensor:
        """Wrap weight or bias: ranks that hold the same heads sum its gradients."""
        return parameter if self._sharers is None else copy_to(stand_in(parameter), self._sharers.same)

    def _shared_heads(self) -> Sharers | None:
        """Communicators of ranks with the same rows; None if no two ranks share any."""
        shared = {
            section.count
            for section in self.sections
            if isinstance(section, Heads) and section.count < self.tp.size
        }
        if not shared:
            return None
        counts = {section.count if isinstance(section, Heads) else 0 for section in self.sections}
        if counts != shared or len(shared) > 1:
            raise LayoutError(
                f"of the sections {self.sections}, tp={self.tp.size} ranks would share the heads of some and "
                f"divide others; make one layer of those that are shared and another of the rest"
            )
        return self.tp.sharers(shared.pop())

    def gathered(self, output: Tensor) -> Tensor:
        """Gather all ranks' outputs, in the order of the whole layer."""
        whole = gather_from(output, self.tp.comm, -1)
        self.sameness_of_gradient.require_of_gradient(whole)
        if len(self.sections) == 1 and self._sharers is None:  # in order already, with padding at the end
            return whole[..., : self.split.length].contiguous()
        return whole.index_select(-1, self._order.to(whole.device))

    @property
    def _order(self) -> Tensor:
        """Index of each output of the whole layer among the concatenated shards."""
        places = torch.empty(self.split.length, dtype=torch.long)
        begin = 0
        for rank, part in enumerate(self.split.parts):
            at = begin
            for start, stop in part:
                if not self.split.replicas[rank]:
                    places[start:stop] = torch.arange(at, at + stop - start)
                at += stop - start
            begin += self.split.shard_length(rank)
        return places

    def extra_repr(self) -> str:
        rows = self.weight.shape[0]
        return f"{self.in_features}, {rows} of {self.split.length}, bias={self.bias is not None}"


class SharedInput:
    """Inputs of the column layers in an `Enter` region: `copy_to` once for each tensor.

    So gradients of the layers before the region (a norm, a residual) are whole on every rank.
    """

    def __init__(self, tp: TensorParallel) -> None:
        self._tp = tp
        self._entered: list[tuple[Tensor, Tensor]] = []
        self._sameness = Sameness(tp.comm, "the input of the column-parallel layers of an Enter")
        self._is_open = False

    def open(self) -> None:
        """Begin to remember entered tensors."""
        self._is_open = True

    def close(self) -> None:
        """Forget entered tensors, so that their memory is freed."""
        self._is_open = False
        self._entered.clear()

    def entered(self, x: Tensor) -> Tensor:
        """Apply `copy_to` once, for all layers that read `x`: its gradient is summed over ranks once."""
        for given, entered in self._entered:
            # Activation checkpointing may have entered it without a graph.
            if given is x and entered.requires_grad == (x.requires_grad and torch.is_grad_enabled()):
                return entered
        self._sameness.require(x)
        entered = copy_to(x, self._tp.comm)
        if self._is_open:
            self._entered.append((x, entered))
        return entered


def project(layers: Sequence[nn.Module], x: Tensor) -> list[Tensor]:
    """Apply several layers to the same input: `[layer(x) for layer in layers]`, with one communication.

    Column-parallel layers gather the input once and sum its gradient once. Layers with hooks that read or
    change inputs or outputs are called one by one.
    errors   MismatchError for layers on different communicators
    """
    columns = [layer for layer in layers if isinstance(layer, ColumnParallelLinear) and layer.enter]
    if len(columns) < len(layers) or any(_wants_its_call(column) for column in columns):
        return [layer(x) for layer in layers]
    for column in columns:
        for hook in column._forward_pre_hooks.values():
            hook(column, (x,))
    return _project_together(columns, x)


def _wants_its_call(module: nn.Module) -> bool:
    """True if a module has hooks that read or change its inputs or outputs.

    Exempt are hooks that only wait (`only_waits`) and optional ones (`may_be_left_out`).
    """
    if module._backward_hooks or module._backward_pre_hooks:
        return True
    before, after = module._forward_pre_hooks.values(), module._forward_hooks.values()
    return not (
        all(getattr(hook, "only_waits", False) for hook in before)
        and all(getattr(hook, "may_be_left_out", False) for hook in after)
    )


def _project_together(columns: Sequence[ColumnParallelLinear], x: Tensor) -> list[Tensor]:
    tp = columns[0].tp
    for column in columns[1:]:
        if column.tp is not tp and column.tp.comm is not tp.comm:
            raise MismatchError(
                f"layers that share an input are on different communicators, {tp.comm.name!r} and "
                f"{column.tp.comm.name!r}; build them with the same one"
            )
    for column in columns:
        column.require_own_shard()
        if x.shape[-1] != column.in_features:
            raise MismatchError(
                f"a layer of {column.in_features} inputs got a tensor of shape {list(x.shape)}; its last "
                f"dim must be {column.in_features} on every rank"
            )
    if tp.sequence_parallel:
        checked_dim(x, SEQUENCE)
    else:
        columns[0].sameness.require(x)
    outputs = column_products(
        tp,
        x,
        [column.summed(column.weight) for column in columns],
        [None if column.bias is None else column.summed(column.bias) for column in columns],
    )
    return [
        column.gathered(output) if column.gather_output else output
        for column, output in zip(columns, outputs, strict=True)
    ]


class RowParallelLinear(_ParallelLinear):
    """x · Wᵀ + b, with the inputs divided among ranks; the bias is added once, after the sum.

    in_features, out_features   of the whole layer
    input_is_parallel   False: x is whole and the same on all ranks, and each rank takes its shard
    tp, draw            as in ColumnParallelLinear

    input    [..., this rank's inputs]
    output   [..., out_features], the same on all ranks; with sequence parallelism dim -2 is a shard
    errors   LayoutError for inputs that do not divide; MismatchError for a sequence that does not
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        tp: TensorParallel | Communicator,
        *,
        bias: bool = True,
        input_is_parallel: bool = True,
        draw: bool = True,
    ) -> None:
        super().__init__()
        self.tp = TensorParallel.of(tp)
        self.in_features, self.out_features = in_features, out_features
        self.input_is_parallel = input_is_parallel
        require_divisible(in_features, self.tp.size, "in_features")
        self.split = split_evenly(in_features, self.tp.size, dim=1)
        self.weight = nn.Parameter(torch.empty(out_features, in_features // self.tp.size))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None
        self.shards = Sameness(self.tp.comm, "the weight of a row-parallel layer")
        self.sameness = Sameness(self.tp.comm, "the gradient of a row-parallel layer's output")
        self.sameness_of_input = Sameness(self.tp.comm, "the input of a row-parallel layer")
        place(self.weight, self.split, self.tp.comm)
        if self.bias is not None:
            place(self.bias, replicated(out_features, self.tp.size), self.tp.comm)
        if draw:
            self.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        self.require_own_shard()
        if not self.input_is_parallel:
            if x.shape[-1] == self.in_features:
                self.sameness_of_input.require(x)
            x = scatter_to(x, self.tp.comm, -1)
        if x.shape[-1] != self.weight.shape[1]:
            raise MismatchError(
                f"each of {self.tp.size} ranks has {self.weight.shape[1]} of this layer's "
                f"{self.in_features} inputs, but got a tensor of shape {list(x.shape)}; "
                f"pass a column-parallel layer's output, or set input_is_parallel=False"
            )
        if self.tp.sequence_parallel:
            require_dividing(x, self.tp.comm, SEQUENCE, "a sequence")
        output = row_product(self.tp, x, self.weight)
        if not self.tp.sequence_parallel:
            self.sameness.require_of_gradient(output)
        return output if self.bias is None else output + on_own_tokens(self.bias, self.tp).to(output.dtype)

    def extra_repr(self) -> str:
        columns = self.weight.shape[1]
        return f"{columns} of {self.in_features}, {self.out_features}, bias={self.bias is not None}"


def on_own_tokens(parameter: Tensor, tp: TensorParallel) -> Tensor:
    """Wrap a replicated parameter: with sequence parallelism, ranks sum its gradients over their tokens.

    Without sequence parallelism every rank has all tokens, and so the whole gradient.
    """
    return copy_to(stand_in(parameter), tp.comm) if tp.sequence_parallel else parameter
