"""An optimizer's state by parameter name, so that it does not depend on the order of parameters.

tensors      "state/<parameter>/<key>", whole or, of an optimizer that steps on pieces, each rank's own, flat;
             "options/<group>/<key>"
description  {"scalars": {parameter: {key: value}},
              "groups": [{"parameters": [names], "options": {key: value}}],
              "loss_scale": of an optimizer that scales losses, else null}
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from hpcpar.checkpoint.piece_files import PieceFiles, on_cpu
from hpcpar.checkpoint.stored import Files, Stored, contiguous
from hpcpar.data_parallel import DistributedOptimizer
from hpcpar.data_parallel.parameters import OwnPiece
from hpcpar.data_parallel.sharded_step import MASTER, is_elementwise
from hpcpar.errors import CheckpointError

Description = dict[str, Any]
Scalars = dict[str, dict[str, Any]]


# --- out ------------------------------------------------------------------------------------------


def whole_states(optimizer: Optimizer, model: nn.Module) -> tuple[dict[str, Tensor], Scalars]:
    """(tensors, scalars) of an optimizer that steps on whole parameters of the model."""
    state = optimizer.state_dict()
    tensors: dict[str, Tensor] = {}
    scalars: Scalars = {}
    for group, names in zip(state["param_groups"], _names(optimizer, model), strict=True):
        for index, name in zip(group["params"], names, strict=True):
            if index in state["state"]:
                scalars[name] = dict(state["state"][index])
                _part(scalars[name], f"state/{name}", tensors)
    return tensors, scalars


def write_pieces(optimizer: DistributedOptimizer, model: nn.Module, files: PieceFiles) -> Scalars:
    """Write this rank's pieces of the states; what is no tensor is returned.

    What a parameter has but once, such as a number of steps, is written by who has its first element.
    """
    name_of = {id(parameter): name for name, parameter in model.named_parameters()}
    scalars: Scalars = {}
    for piece, state in optimizer.own_states():
        name = name_of[id(piece.parameter)]
        for key, value in state.items():
            if is_elementwise(value, piece.stop - piece.start):
                files.add(f"state/{name}/{key}", value, piece.layout, piece.start)
            elif piece.start == 0 and isinstance(value, Tensor):
                files.add(f"state/{name}/{key}", value, contiguous(value.shape), 0)
            elif piece.start == 0:
                scalars.setdefault(name, {})[key] = value
    return scalars


def described_groups(
    optimizer: Optimizer, model: nn.Module
) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """(options that are tensors, all others by group)."""
    tensors: dict[str, Tensor] = {}
    groups: list[dict[str, Any]] = []
    for number, (group, names) in enumerate(
        zip(optimizer.param_groups, _names(optimizer, model), strict=True)
    ):
        options = {key: value for key, value in group.items() if key != "params"}
        _part(options, f"options/{number}", tensors)
        groups.append({"parameters": names, "options": options})
    return tensors, groups


# --- in -------------------------------------------------------------------------------------------


class SavedStates:
    """The optimizer in a checkpoint.

    where   its file, for errors
    """

    def __init__(
        self, tensors: Mapping[str, Stored], description: Description, files: Files, where: str
    ) -> None:
        self._description = description
        self._files = files
        self._where = where
        self._states: dict[str, dict[str, Stored]] = defaultdict(dict)
        self._options: dict[int, dict[str, Stored]] = defaultdict(dict)
        for path, stored in tensors.items():
            kind, rest = path.split("/", 1)
            owner, key = rest.rsplit("/", 1)
            if kind == "state":
                self._states[owner][key] = stored
            else:
                self._options[int(owner)][key] = stored

    @property
    def has_masters(self) -> bool:
        return any(MASTER in states for states in self._states.values())

    def master(self, name: str) -> Stored | None:
        """A parameter's master weights, if it had any."""
        return self._states.get(name, {}).get(MASTER)

    def state_dict(self, optimizer: Optimizer, model: nn.Module) -> dict[str, Any]:
        """What the optimizer's load_state_dict takes to go on from the saved state, but for states.

        Its groups may list their parameters in another order than the saved ones did, and may come in
        another order; but what was one group must be one group. CheckpointError otherwise.
        """
        saved = {
            frozenset(group["parameters"]): number for number, group in enumerate(self._description["groups"])
        }
        groups = []
        for group, names, indices in zip(
            optimizer.param_groups, _names(optimizer, model), _indices(optimizer), strict=True
        ):
            number = saved.pop(frozenset(names), None)
            if number is None:
                raise CheckpointError(_no_such_group(names, self._description, self._where))
            current = {key: value for key, value in group.items() if key != "params"}
            options = {
                key: _like(current.get(key), value)
                for key, value in self._description["groups"][number]["options"].items()
            }
            tensors = {key: stored.whole(self._files) for key, stored in self._options[number].items()}
            groups.append({**current, **options, **tensors, "params": indices})
        if saved:
            first = sorted(next(iter(saved)))[0]
            raise CheckpointError(
                f"{self._where} has {len(saved)} groups of parameters that the optimizer does not have; "
                f"one of them holds {first}"
            )
        scale = self._description.get("loss_scale")
        return {"param_groups": groups} | ({} if scale is None else {"loss_scale": scale})

    def whole_states(self, optimizer: Optimizer, model: nn.Module) -> dict[int, dict[str, Any]]:
        """The states of whole parameters, without master weights, by number as in a state_dict."""
        return {
            index: {
                key: value
                for key, value in self._read(name, lambda stored: stored.whole(self._files)).items()
                if key != MASTER
            }
            for names, indices in zip(_names(optimizer, model), _indices(optimizer), strict=True)
            for name, index in zip(names, indices, strict=True)
            if name in self._states or name in self._description["scalars"]
        }

    def state_of(self, name: str, piece: OwnPiece) -> dict[str, Any]:
        """The state of a piece of the parameter of a name, flat."""

        def read(stored: Stored) -> Tensor:
            if stored.shape and stored.numel == piece.parameter.numel():
                return stored.elements(self._files, piece.start, piece.stop, piece.layout)
            return stored.whole(self._files)

        return self._read(name, read)

    def _read(self, name: str, read: Callable[[Stored], Tensor]) -> dict[str, Any]:
        tensors = {key: read(stored) for key, stored in self._states.get(name, {}).items()}
        return {**self._description["scalars"].get(name, {}), **tensors}


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


def _indices(optimizer: Optimizer) -> Iterator[list[int]]:
    """The numbers that torch's state_dict gives each group's parameters."""
    start = 0
    for group in optimizer.param_groups:
        yield list(range(start, start + len(group["params"])))
        start += len(group["params"])


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
