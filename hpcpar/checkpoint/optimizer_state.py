"""An optimizer's state by parameter name, so that it does not depend on the order of parameters.

tensors      "state/<parameter>/<key>", whole or, of a split parameter and of an optimizer that steps on
             pieces, each rank's own, flat; "options/<group>/<key>"
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

from hpcpar.checkpoint.holding import Holding, all_of, contiguous, holding_of, is_the_same_everywhere
from hpcpar.checkpoint.piece_files import PieceFiles, on_cpu
from hpcpar.checkpoint.stored import Files, Stored
from hpcpar.checkpoint.writers import Writer
from hpcpar.data_parallel import DistributedOptimizer
from hpcpar.data_parallel.parameters import OwnPiece, in_memory_order, layout_of
from hpcpar.data_parallel.sharded_step import MASTER, State, is_elementwise
from hpcpar.errors import CheckpointError

Description = dict[str, Any]
Scalars = dict[str, dict[str, Any]]


# --- out ------------------------------------------------------------------------------------------


def write_states(
    optimizer: Optimizer, model: nn.Module, files: PieceFiles, writer: Writer
) -> tuple[dict[str, Tensor], Scalars]:
    """Write what this rank is to write of the states.

    Returns (what is whole and the same on all ranks, for one of them to write, what is no tensor).
    """
    on_pieces = isinstance(optimizer, DistributedOptimizer) and optimizer.steps_on_pieces
    sharded = isinstance(optimizer, DistributedOptimizer) and optimizer.zero_stage > 0
    common: dict[str, Tensor] = {}
    scalars: Scalars = {}
    for name, piece, state in _own_states(optimizer, model):
        if not writer.writes(piece.parameter, sharded=sharded):
            continue
        if on_pieces or not is_the_same_everywhere(piece.parameter):
            own_scalars = _write_piece(name, piece, state, files, writer)
        else:
            own_scalars = dict(state)
            _part(own_scalars, f"state/{name}", common)
        if own_scalars:
            scalars[name] = own_scalars
    return common, scalars


def _own_states(optimizer: Optimizer, model: nn.Module) -> Iterator[tuple[str, OwnPiece, State]]:
    """The states that this rank has; those of whole parameters are as they are, those of pieces flat."""
    if isinstance(optimizer, DistributedOptimizer) and optimizer.steps_on_pieces:
        name_of = {id(parameter): name for name, parameter in model.named_parameters()}
        for piece, state in optimizer.own_states():
            yield name_of[id(piece.parameter)], piece, state
        return
    states = optimizer.state_dict()["state"]
    for name, parameter, index in _members(optimizer, model):
        if index in states:
            piece = OwnPiece(name, parameter, layout_of(parameter), 0, parameter.numel())
            yield name, piece, states[index]


def _write_piece(
    name: str, piece: OwnPiece, state: State, files: PieceFiles, writer: Writer
) -> dict[str, Any]:
    """Write a piece's state; what is no tensor in it is returned.

    What a parameter has but once, such as a number of steps, is written by who has its first element.
    """
    holding = holding_of(piece.parameter, piece.layout)
    has_first = piece.start == 0 and writer.has_first_part
    scalars = {}
    for key, value in state.items():
        if is_elementwise(value, piece.stop - piece.start):
            is_flat = value.dim() == 1
            flat = value if is_flat else in_memory_order(value.reshape(piece.layout[0]), piece.layout)
            files.add(f"state/{name}/{key}", flat, holding, piece.start)
        elif isinstance(value, Tensor):
            _require_once(name, key, value, piece.parameter)
            if has_first:
                files.add(f"state/{name}/{key}", value, all_of(contiguous(value.shape)), 0)
        elif has_first:
            scalars[key] = value
    return scalars


def _require_once(name: str, key: str, value: Tensor, parameter: Tensor) -> None:
    if value.numel() > 1 and not is_the_same_everywhere(parameter):
        raise CheckpointError(
            f"the optimizer's {key} of {name}, which is split, has shape {tuple(value.shape)}: neither one "
            "number nor an element for each of the parameter's, so it cannot be split as that is; take an "
            "optimizer that treats every element by itself, such as AdamW"
        )


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
        """The states of parameters as this rank has them, by number in a state_dict; no master weights."""
        return {
            index: self._whole_state(name, holding_of(parameter))
            for name, parameter, index in _members(optimizer, model)
            if name in self._states or name in self._description["scalars"]
        }

    def _whole_state(self, name: str, holding: Holding) -> dict[str, Any]:
        state = self._read(name, holding, lambda stored: stored.held(self._files, holding))
        state.pop(MASTER, None)
        return state

    def state_of(self, name: str, holding: Holding, piece: OwnPiece) -> dict[str, Any]:
        """The state of a piece of the parameter of a name, flat."""
        return self._read(
            name, holding, lambda stored: stored.elements(self._files, holding, piece.start, piece.stop)
        )

    def _read(self, name: str, holding: Holding, own_part: Callable[[Stored], Tensor]) -> dict[str, Any]:
        """A parameter's state; `own_part` reads what has an element for each of the parameter's."""

        def value(stored: Stored) -> Tensor:
            is_of_elements = stored.shape and stored.shape == holding.shape
            return own_part(stored) if is_of_elements else stored.whole(self._files)

        tensors = {key: value(stored) for key, stored in self._states.get(name, {}).items()}
        return {**self._description["scalars"].get(name, {}), **tensors}


def _members(optimizer: Optimizer, model: nn.Module) -> Iterator[tuple[str, Tensor, int]]:
    """(name, parameter, number in torch's state_dict) of all that the optimizer holds."""
    groups = zip(optimizer.param_groups, _names(optimizer, model), _indices(optimizer), strict=True)
    for group, names, indices in groups:
        yield from zip(names, group["params"], indices, strict=True)


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
