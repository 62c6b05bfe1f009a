"""Which modules of a model are gathered and freed together, and which parameters they have.

    model ─ embed                      root unit    embed.weight, norm.weight, head.weight
          ├ layers.0 ─ attention       unit         layers.0.*
          │          └ mlp
          ├ layers.1 ─ …               unit         layers.1.*
          ├ norm
          └ head

A parameter belongs to the innermost unit that holds all modules which have it. So one that is tied between
two units belongs to a unit around both, at the outermost the whole model's.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from hpcpar.data_parallel.parameters import nested_values
from hpcpar.errors import OperationError

Policy = Callable[[str, nn.Module], bool]
"""(name of a module, the module) -> whether it is a unit."""

Place = tuple[nn.Module, str]
"""A module, and the name by which it has a parameter."""

Entry = tuple[str, nn.Parameter, list[Place]]
"""A parameter's full name, itself, and all places that have it."""

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
"""Modules that are never called."""


@dataclass(frozen=True, eq=False)
class UnitPlan:
    """A unit before anything is sharded.

    name         of its module in the model; "" for the model itself
    parameters   each once, as registered
    """

    name: str
    module: nn.Module
    parameters: list[Entry]


def layers_policy(model: nn.Module) -> Policy:
    """Every member of a ModuleList that is in no other: the layers of a transformer.

    Of a member that is a container itself, and so is never called, the members.
    """
    layers: list[str] = []
    for name, module in model.named_modules():  # outer ones first
        if isinstance(module, nn.ModuleList) and not any(_within(name, layer) for layer in layers):
            layers += [member for member in _members(name, module) if member not in layers]
    chosen = frozenset(layers)
    return lambda name, module: name in chosen


def _members(name: str, container: nn.Module) -> list[str]:
    found = []
    for own_name, member in container.named_children():
        full = f"{name}.{own_name}".lstrip(".")
        found += _members(full, member) if isinstance(member, _CONTAINERS) else [full]
    return found


def plan_stages(
    model: nn.Module, policy: Policy | None, stages: Sequence[nn.Module] | None
) -> list[list[UnitPlan]]:
    """The units of each stage, under the names that the model has for their parameters and modules.

    stages   modules that a pipeline calls; None: the model, which is called as a whole
    errors   OperationError for parameters of several stages, or of none; and as `plan_units`
    """
    if stages is None:
        return [plan_units(model, policy)]
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    modules = {id(module): name for name, module in model.named_modules()}
    left = dict(names)
    planned = []
    for number, stage in enumerate(stages):
        plans = [
            UnitPlan(
                modules.get(id(plan.module), f"stage {number} of this rank"),
                plan.module,
                [(names[id(parameter)], parameter, places) for _, parameter, places in plan.parameters],
            )
            for plan in plan_units(stage, policy)
        ]
        for plan in plans:
            for name, parameter, _ in plan.parameters:
                if left.pop(id(parameter), None) is None:
                    raise OperationError(
                        f"{name} is a parameter of two stages of this rank, and a sharded one belongs to one "
                        "unit; place the two stages on different ranks, or take zero_stage=1"
                    )
        planned.append(plans)
    if left:
        raise OperationError(
            f"{next(iter(left.values()))} is a parameter of the model and of none of its stages"
        )
    return planned


def plan_units(model: nn.Module, policy: Policy | None = None) -> list[UnitPlan]:
    """The units of a model as registered, the root's first; each has parameters or is the root.

    Raises OperationError for a policy that chooses what cannot be called, or nothing at all.
    """
    chosen = policy or layers_policy(model)
    names = [name for name, module in model.named_modules() if name and chosen(name, module)]
    for name in names:
        module = model.get_submodule(name)
        if isinstance(module, _CONTAINERS):
            raise OperationError(
                f"the policy makes {name} a unit, which is a {type(module).__name__} and is never called, so "
                "its parameters would never be gathered; choose its members"
            )
    if policy is not None and not names:
        raise OperationError(
            "the policy chooses none of the model's modules; it is given (name, module) of each"
        )
    owners = ["", *names]
    of_unit: dict[str, list[Entry]] = {name: [] for name in owners}
    name_of = {module: name for name, module in model.named_modules()}
    for entry in _parameters(model):
        # The innermost unit around all of the modules that have it.
        homes = [name_of[module] for module, _ in entry[2]]
        common = [owner for owner in owners if all(_within(home, owner) for home in homes)]
        of_unit[max(common, key=lambda owner: len(owner.split(".")) if owner else 0)].append(entry)
    return [
        UnitPlan(name, model.get_submodule(name), of_unit[name])
        for name in owners
        if of_unit[name] or name == ""
    ]


def _parameters(model: nn.Module) -> list[Entry]:
    """Each parameter once: first name, itself, and all places."""
    found: dict[int, Entry] = {}
    for module_name, module in model.named_modules():
        for own_name, parameter in module._parameters.items():
            if parameter is not None:
                full = f"{module_name}.{own_name}".lstrip(".")
                entry = found.setdefault(id(parameter), (full, parameter, []))
                entry[2].append((module, own_name))
    return list(found.values())


def _within(module_name: str, unit_name: str) -> bool:
    return not unit_name or module_name == unit_name or module_name.startswith(f"{unit_name}.")


def tensors_in(value: object) -> list[Tensor]:
    """The tensors in a module's input or output, through tuples, lists and dictionaries."""
    return [each for each in nested_values(value) if isinstance(each, Tensor)]


def hides(value: object) -> bool:
    """Return whether there is an object in a module's values in which `tensors_in` would not find tensors."""
    plain = Tensor | numbers.Number | str | bytes | None
    return not all(isinstance(each, plain) for each in nested_values(value))
