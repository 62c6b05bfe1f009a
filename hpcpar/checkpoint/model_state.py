"""Parameters and buffers of a model by name, and the check that a checkpoint is of a model built alike.

Names are those of the whole model, also on a rank with a few of its layers. A tensor that the whole model has
once, under two names, may then be two tensors of two ranks; the model says so:

    model.tied_names = {"lm_head.weight": "model.embed_tokens.weight"}        further name: first name

identically on all ranks, whichever of the names they have. A parameter that several positions of a pipeline
have under one name is tied to that name itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from hpcpar.checkpoint.files import StoredTensor
from hpcpar.checkpoint.local_tensor import LocalTensor
from hpcpar.errors import CheckpointError
from hpcpar.parameter_info import info_of


@dataclass(frozen=True)
class TensorNames:
    """Names of one rank's tensors.

    parameters, buffers   all names, in the model's order
    aliases               further name -> first name of the same tensor, or of its equal on another rank
    tied                  the aliases that come from the model's `tied_names`
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
        """SHA-256 of the names, independent of their order."""
        return self.digest_without(frozenset())

    def digest_without(self, names: frozenset[str]) -> str:
        """SHA-256 of all other names."""
        return hashlib.sha256("\n".join(sorted(self.all - names)).encode()).hexdigest()

    def first(self, name: str) -> str:
        return self.aliases.get(name, name)


class ModelState:
    """A rank's model as a checkpoint sees it.

    errors   CheckpointError for a state that is no tensor, for a tensor that is not the model's own or has no
             values, and for cyclic `tied_names`
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._state = _tensors_of(model)
        tied = _resolved_ties(model)
        # A tensor goes by the first name that its ties give it, else by its first name in the model.
        self._name_of: dict[int, str] = {}
        for name, value in self._state.items():
            if name in tied:
                self._name_of.setdefault(id(value), tied[name])
        for name, value in self._state.items():
            self._name_of.setdefault(id(value), name)
        firsts = {name: self._name_of[id(value)] for name, value in self._state.items()}
        is_parameter = {name: isinstance(value, nn.Parameter) for name, value in self._state.items()}
        self.names = TensorNames(
            tuple(name for name in self._state if is_parameter[name]),
            tuple(name for name in self._state if not is_parameter[name]),
            {name: first for name, first in {**tied, **firsts}.items() if name != first},
            tied,
        )

    def name_of(self, tensor: Tensor) -> str:
        """Return the first name of a tensor, under which a checkpoint has it."""
        return self._name_of[id(tensor)]

    @cached_property
    def parameter_names(self) -> dict[int, str]:
        """First name of each parameter, by its id."""
        return {id(each): self.names.first(name) for name, each in self._model.named_parameters()}

    @cached_property
    def tensors(self) -> list[Tensor]:
        """Each tensor once. Two have the same first name if both ends of a tie are separate tensors here."""
        return list({id(value): value for value in self._state.values()}.values())

    @cached_property
    def copies(self) -> list[Tensor]:
        """Tensors whose first name belongs to another tensor here."""
        first_of = {self.name_of(value): value for value in reversed(self.tensors)}
        first_of |= {name: self._state[name] for name in first_of if name in self._state}
        return [value for value in self.tensors if first_of[self.name_of(value)] is not value]

    @cached_property
    def experts(self) -> frozenset[str]:
        """Names of parameters that some ranks with the same layers do not have."""
        return frozenset(name for name, value in self._state.items() if info_of(value).replicas is not None)

    def items(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor), tied ones under each of their names."""
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


def _resolved_ties(model: nn.Module) -> dict[str, str]:
    """Return `tied_names` with each chain followed to its end."""
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
    names: Collection[str], aliases: Mapping[str, str], found: Mapping[str, StoredTensor], where: str
) -> None:
    """CheckpointError that names the first missing and the first superfluous tensor, or two for a tied one.

    names     of the whole model, that is of all ranks
    aliases   in the model
    found     in the checkpoint, with aliases
    """
    expected = set(names)
    missing = [name for name in names if name not in found and aliases.get(name, name) not in found]
    unexpected = [name for name in found if name not in expected]
    if missing or unexpected:
        differing = ((missing, "missing"), (unexpected, "that the model does not have"))
        told = [f"{len(some)} tensors {word}, the first is {some[0]}" for some, word in differing if some]
        advice = "`hpcpar checkpoint convert` makes it a file, to take single tensors from"
        if {"module", "_orig_mod"} & {*".".join(some[0] for some, _ in differing if some).split(".")}:
            advice = "save and load the module that DDP or torch.compile wrap (.module, ._orig_mod)"
        raise CheckpointError(f"{where} is of another model: {'; '.join((*told, advice))}")
    for name, first in aliases.items():
        if name in found and found.get(first, found[name]) is not found[name]:
            raise CheckpointError(
                f"{where} is of another model: {name} and {first} are two tensors there, and one in the "
                "model; load it into one that does not tie them"
            )


def check_forms(
    state: ModelState, found: Mapping[str, StoredTensor], where: str, *, precision_may_differ: bool
) -> None:
    """CheckpointError that names the first tensor of this rank whose whole shape or dtype differs.

    found                  by name, with aliases
    precision_may_differ   accept another floating-point type
    """
    for name, value in state.items():
        stored = found[state.name_of(value)]
        dtype, shape = stored.dtype, LocalTensor.of(value).shape
        both_float = dtype.is_floating_point and value.dtype.is_floating_point
        if stored.shape == shape and (dtype == value.dtype or (both_float and precision_may_differ)):
            continue
        forms = f"{name} there is {stored.shape} {dtype}, in the model {shape} {value.dtype}"
        if stored.shape != shape or not both_float:
            raise CheckpointError(f"{where} is of another model: {forms}")
        short = str(dtype).removeprefix("torch.")
        raise CheckpointError(
            f"{where} was saved in {short}: {forms}; build the model in that type "
            f"(train.precision={short}), or give the optimizer a precision, which rounds"
        )
