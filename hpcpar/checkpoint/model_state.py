"""A model's parameters and buffers, by name, and whether a checkpoint is of a model that is built alike.

Names are those of the whole model, also where a rank has a few of its layers only. What the whole model has
once, under two names, may then be two tensors of two ranks, which is for the model to say:

    model.tied_names = {"lm_head.weight": "model.embed_tokens.weight"}        further name: first name

the same on all ranks, whichever of them they have. What several have under one name is tied to that name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from hpcpar.checkpoint.holding import holding_of
from hpcpar.checkpoint.stored import Stored
from hpcpar.errors import CheckpointError


@dataclass(frozen=True)
class Names:
    """What one rank's model calls its tensors.

    parameters, buffers   all names, in the model's order
    aliases               further name -> first name of the same tensor, or of its equal on another rank
    tied                  those of the aliases that the model told
    """

    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    aliases: Mapping[str, str]
    tied: Mapping[str, str]

    @cached_property
    def all(self) -> frozenset[str]:
        return frozenset(self.parameters + self.buffers)

    @cached_property
    def digest(self) -> str:
        """The same for the same names, in whatever order."""
        return hashlib.sha256("\n".join(sorted(self.all)).encode()).hexdigest()

    def first(self, name: str) -> str:
        return self.aliases.get(name, name)


class ModelState:
    """A rank's model as a checkpoint sees it.

    errors   CheckpointError for a state that is no tensor, for a tensor that is not the model's own or has no
             values, and for `tied_names` that go round
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._state = _tensors_of(model)
        tied = _told_ties(model)
        first_names: dict[int, str] = {}
        for name, value in self._state.items():
            if name in tied:
                first_names.setdefault(id(value), tied[name])
        self._name_of: dict[int, str] = first_names
        for name, value in self._state.items():
            self._name_of.setdefault(id(value), name)
        firsts = {name: self._name_of[id(value)] for name, value in self._state.items()}
        parameters = tuple(name for name, value in self._state.items() if isinstance(value, nn.Parameter))
        self.names = Names(
            parameters,
            tuple(name for name in self._state if name not in set(parameters)),
            {name: first for name, first in {**tied, **firsts}.items() if name != first},
            tied,
        )

    def name_of(self, tensor: Tensor) -> str:
        """Its first name, under which a checkpoint has it."""
        return self._name_of[id(tensor)]

    @cached_property
    def parameter_names(self) -> dict[int, str]:
        """The first name of each parameter, by its id."""
        return {id(each): self.names.first(name) for name, each in self._model.named_parameters()}

    @cached_property
    def tensors(self) -> list[Tensor]:
        """Each once. Two have the same first name where both ends of a tie are tensors of their own here."""
        return list({id(value): value for value in self._state.values()}.values())

    @cached_property
    def copies(self) -> list[Tensor]:
        """Those that have the first name of another one, by itself or before them."""
        first_of = {self.name_of(value): value for value in reversed(self.tensors)}
        first_of |= {name: self._state[name] for name in first_of if name in self._state}
        return [value for value in self.tensors if first_of[self.name_of(value)] is not value]

    def items(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor), tied ones under each of their names."""
        return iter(self._state.items())


def _tensors_of(model: nn.Module) -> dict[str, Tensor]:
    state: dict[str, Any] = model.state_dict(keep_vars=True)
    held = {id(tensor) for several in (model.parameters(), model.buffers()) for tensor in several}
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise CheckpointError(
                f"{name} in the model's state is a {type(value).__name__}, but only tensors can be saved; "
                f"pass it in extra= instead"
            )
        if id(value) not in held:
            raise CheckpointError(
                f"{name} in the model's state is a tensor that is made when the state is asked for; what was "
                "loaded into it would be lost. Make it a buffer of its module, or pass it in extra= instead"
            )
        if value.is_meta:
            raise CheckpointError(
                f"{name} is on the meta device, where it has a shape and no values; give the model memory "
                'first, as by model.to_empty(device="cpu"), or shard it by fully_shard'
            )
    return state


def _told_ties(model: nn.Module) -> dict[str, str]:
    """`tied_names`, with what stands at the end of a chain as the first name."""
    tied: Mapping[str, str] = getattr(model, "tied_names", None) or {}
    ends = {}
    for name in tied:
        end, passed = name, {name}
        while tied.get(end, end) != end:
            end = tied[end]
            if end in passed:
                raise CheckpointError(
                    f"in the model's tied_names {name} is tied to itself by way of {end}; give for each "
                    "further name the first one, which is tied to no other"
                )
            passed.add(end)
        ends[name] = end
    return ends


def check_names(
    names: Collection[str], aliases: Mapping[str, str], found: Collection[str], where: str
) -> None:
    """CheckpointError that names the first tensors which are missing or too many.

    names     of the whole model: all that its ranks have
    aliases   in the model
    found     in the checkpoint, with aliases
    """
    expected = set(names)
    missing = [name for name in names if name not in found and aliases.get(name, name) not in found]
    unexpected = [name for name in found if name not in expected]
    if missing or unexpected:
        raise CheckpointError(
            f"{where} is of another model: "
            + "; ".join(
                f"{len(several)} tensors {word}, the first is {several[0]}"
                for several, word in ((missing, "missing"), (unexpected, "that the model does not have"))
                if several
            )
        )


def check_forms(
    state: ModelState, found: Mapping[str, Stored], where: str, *, precision_may_differ: bool
) -> None:
    """CheckpointError that names the first tensor of this rank which is of another form there.

    Shapes are those of whole tensors, however they are split there and here.

    found                  by name, with aliases
    precision_may_differ   a floating-point type may be another one
    """
    for name, value in state.items():
        stored = found[state.name_of(value)]
        dtype, shape = stored.dtype, holding_of(value).shape
        both_float = dtype.is_floating_point and value.dtype.is_floating_point
        if stored.shape == shape and (dtype == value.dtype or (both_float and precision_may_differ)):
            continue
        forms = f"{name} there is {stored.shape} {dtype}, in the model {shape} {value.dtype}"
        if stored.shape != shape or not both_float:
            raise CheckpointError(f"{where} is of another model: {forms}")
        raise CheckpointError(
            f"{where} was saved in {_name(dtype)}: {forms}; build the model in that type "
            f"(train.precision={_name(dtype)}), or give the optimizer a precision, which rounds"
        )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
