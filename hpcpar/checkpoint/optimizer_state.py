"""An optimizer's state by parameter name, so that it does not depend on the order of parameters.

tensors      "state/<parameter>/<key>", "options/<group>/<key>"
description  {"scalars": {parameter: {key: value}},
              "groups": [{"parameters": [names], "options": {key: value}}]}
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from hpcpar.checkpoint.model_state import on_cpu
from hpcpar.errors import CheckpointError

Description = dict[str, Any]


def optimizer_state(optimizer: Optimizer, model: nn.Module) -> tuple[dict[str, Tensor], Description]:
    """(tensors, all that is not a tensor) of an optimizer over the model's parameters."""
    state = optimizer.state_dict()
    tensors: dict[str, Tensor] = {}
    scalars: dict[str, dict[str, Any]] = {}
    groups: list[dict[str, Any]] = []
    for number, (group, names) in enumerate(
        zip(state["param_groups"], _names(optimizer, model), strict=True)
    ):
        options = {key: value for key, value in group.items() if key != "params"}
        _part(options, f"options/{number}", tensors)
        groups.append({"parameters": names, "options": options})
        for index, name in zip(group["params"], names, strict=True):
            if index in state["state"]:
                scalars[name] = dict(state["state"][index])
                _part(scalars[name], f"state/{name}", tensors)
    return tensors, {"scalars": scalars, "groups": groups}


def restored_state(
    optimizer: Optimizer,
    model: nn.Module,
    tensors: Mapping[str, Tensor],
    description: Description,
    where: str,
) -> dict[str, Any]:
    """What this optimizer's load_state_dict takes to go on from the saved state.

    Its groups may list their parameters in another order than the saved ones did, and may come in
    another order; but what was one group must be one group. CheckpointError otherwise.
    """
    saved_groups = {
        frozenset(group["parameters"]): number for number, group in enumerate(description["groups"])
    }
    by_name: dict[str, dict[str, Any]] = {
        name: dict(values) for name, values in description["scalars"].items()
    }
    by_group = [dict(group["options"]) for group in description["groups"]]
    for path, tensor in tensors.items():
        kind, rest = path.split("/", 1)
        owner, key = rest.rsplit("/", 1)
        # A copy, because what safetensors reads may be a view of the file, which will be removed some day.
        (by_name[owner] if kind == "state" else by_group[int(owner)])[key] = tensor.clone()
    current = optimizer.state_dict()["param_groups"]
    result: dict[str, Any] = {"state": {}, "param_groups": []}
    for group, names in zip(current, _names(optimizer, model), strict=True):
        number = saved_groups.pop(frozenset(names), None)
        if number is None:
            raise CheckpointError(_no_such_group(names, description, where))
        options = {key: _like(group.get(key), value) for key, value in by_group[number].items()}
        result["param_groups"].append({**group, **options})
        result["state"] |= {
            index: by_name[name]
            for index, name in zip(group["params"], names, strict=True)
            if name in by_name
        }
    if saved_groups:
        first = sorted(next(iter(saved_groups)))[0]
        raise CheckpointError(
            f"{where} has {len(saved_groups)} groups of parameters that the optimizer does not have; "
            f"one of them holds {first}"
        )
    return result


def _names(optimizer: Optimizer, model: nn.Module) -> Iterator[list[str]]:
    """The names of each group's parameters, in the group's order."""
    name_of = {id(parameter): name for name, parameter in model.named_parameters()}
    for number, group in enumerate(optimizer.param_groups):
        unknown = [tuple(p.shape) for p in group["params"] if id(p) not in name_of]
        if unknown:
            raise CheckpointError(
                f"group {number} of the optimizer has {len(unknown)} parameters that the model does not "
                f"have, the first of shape {unknown[0]}; save the model that the optimizer was made for"
            )
        yield [name_of[id(parameter)] for parameter in group["params"]]


def _part(values: dict[str, Any], prefix: str, tensors: dict[str, Tensor]) -> None:
    """Move the tensors among `values` to `tensors`."""
    for key in [key for key, value in values.items() if isinstance(value, Tensor)]:
        tensors[f"{prefix}/{key}"] = on_cpu(values.pop(key))


def _like(current: Any, saved: Any) -> Any:
    """JSON has lists only: what the optimizer holds as a tuple becomes one again."""
    return tuple(saved) if isinstance(current, tuple) and isinstance(saved, list) else saved


def _no_such_group(names: Iterable[str], description: Description, where: str) -> str:
    wanted = set(names)
    nearest = max(
        (set(group["parameters"]) for group in description["groups"]),
        key=lambda saved: len(saved & wanted),
        default=set(),
    )
    differing = sorted(wanted ^ nearest)
    return (
        f"{where} has no group of the {len(wanted)} parameters that the optimizer has in one; the nearest "
        f"has {len(nearest)}, and the first difference is {differing[0] if differing else 'none'}"
    )
