"""An optimizer's state by parameter name, so that it does not depend on the order of parameters.

tensors      "state/<parameter>/<key>", whole or, of a split parameter and of an optimizer that steps on
             pieces, each rank's own, flat; "options/<group>/<key>"
description  {"scalars": {parameter: {key: value}},
              "groups": [{"parameters": [names], "options": {key: value}}],
              "loss_scale": of an optimizer that scales losses, else null}

A parameter has the first name that its model knows it by. In a pipeline each position writes the states of
its parameters, and what it has of a group is a part of the group of that number.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from hpcpar.checkpoint.holding import Holding, holding_of, is_the_same_everywhere
from hpcpar.checkpoint.piece_files import PieceFiles, on_cpu
from hpcpar.checkpoint.stored import Files, Stored
from hpcpar.checkpoint.writers import Writer
from hpcpar.data_parallel import DistributedOptimizer
from hpcpar.data_parallel.distributed_optimizer import optimizers_of
from hpcpar.data_parallel.parameters import OwnPiece, in_memory_order, layout_of
from hpcpar.data_parallel.sharded_step import MASTER, State, is_elementwise
from hpcpar.errors import CheckpointError

Description = dict[str, Any]
Scalars = dict[str, dict[str, Any]]

ParameterNames = Mapping[int, str]
"""The name of each parameter, by its id."""


def distributed_of(model: nn.Module, optimizer: Optimizer | None) -> list[DistributedOptimizer]:
    """Those that step on a model's parameters, whether or not one of them is the `optimizer` at hand.

    errors   CheckpointError where that is what one of them holds, and steps with on pieces
    """
    found = optimizers_of(model.parameters())
    if any(each.inner is optimizer and each.steps_on_pieces for each in found):
        raise CheckpointError(
            f"the {type(optimizer).__name__} has been made a DistributedOptimizer, whose states are of "
            "pieces of parameters; give that one as optimizer="
        )
    return found


# --- out ------------------------------------------------------------------------------------------


def write_states(
    optimizer: Optimizer, name_of: ParameterNames, files: PieceFiles, writer: Writer
) -> tuple[dict[str, Tensor], Scalars]:
    """Write what this rank is to write of the states.

    Returns (what is whole and for the common file, where this rank writes that, what is no tensor).
    """
    on_pieces = isinstance(optimizer, DistributedOptimizer) and optimizer.steps_on_pieces
    sharded = isinstance(optimizer, DistributedOptimizer) and optimizer.zero_stage > 0
    common: dict[str, Tensor] = {}
    scalars: Scalars = {}
    for name, piece, state in _own_states(optimizer, name_of):
        if not writer.writes(piece.parameter, sharded=sharded):
            continue
        if on_pieces or not is_the_same_everywhere(piece.parameter):
            own_scalars = _write_piece(name, piece, state, files, writer)
        else:
            own_scalars = dict(state)
            wholes: dict[str, Tensor] = {}
            _part(own_scalars, f"state/{name}", wholes)
            if writer.writes_common:
                common |= wholes
            else:
                for key, value in wholes.items():
                    files.add_whole(key, value)
        if own_scalars:
            scalars[name] = own_scalars
    return common, scalars


def _own_states(optimizer: Optimizer, name_of: ParameterNames) -> Iterator[tuple[str, OwnPiece, State]]:
    """The states that this rank has; those of whole parameters are as they are, those of pieces flat."""
    if isinstance(optimizer, DistributedOptimizer) and optimizer.steps_on_pieces:
        for piece, state in optimizer.own_states():
            yield name_of[id(piece.parameter)], piece, state
        return
    states = optimizer.state_dict()["state"]
    for name, parameter, index in _members(optimizer, name_of):
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
                files.add_whole(f"state/{name}/{key}", value)
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


def group_names(optimizer: Optimizer, name_of: ParameterNames) -> list[list[str]]:
    """The names of each group's parameters, in the group's order; CheckpointError for one without a name."""
    for number, group in enumerate(optimizer.param_groups):
        unknown = [tuple(p.shape) for p in group["params"] if id(p) not in name_of]
        if unknown:
            raise CheckpointError(
                f"group {number} of the optimizer has {len(unknown)} parameters that the model does not "
                f"have, the first of shape {unknown[0]}; save the model that the optimizer was made for"
            )
    return [[name_of[id(each)] for each in group["params"]] for group in optimizer.param_groups]


def group_options(optimizer: Optimizer) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """(options that are tensors, all others by group)."""
    tensors: dict[str, Tensor] = {}
    options = [_options(group) for group in optimizer.param_groups]
    for number, values in enumerate(options):
        _part(values, f"options/{number}", tensors)
    return tensors, options


# --- in -------------------------------------------------------------------------------------------


class SavedStates:
    """The optimizer in a checkpoint.

    aliases   further names of parameters -> those by which states are found
    where     its file, for errors
    """

    def __init__(
        self,
        tensors: Mapping[str, Stored],
        description: Description,
        aliases: Mapping[str, str],
        files: Files,
        where: str,
    ) -> None:
        self._description = description
        self._aliases = aliases
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
        return self._states.get(self._first(name), {}).get(MASTER)

    def state_dict(self, optimizer: Optimizer, whole_groups: Sequence[Sequence[str]]) -> dict[str, Any]:
        """What the optimizer's load_state_dict takes to go on from the saved state, but for states.

        Its groups may list their parameters in another order than the saved ones did, and may come in
        another order; but what was one group must be one group. CheckpointError otherwise.

        whole_groups   the names in each group, on all ranks together
        """
        saved: dict[frozenset[str], list[int]] = defaultdict(list)
        for number, group in enumerate(self._description["groups"]):
            saved[frozenset(group["parameters"])].append(number)
        groups = []
        for group, names, indices in zip(
            optimizer.param_groups, whole_groups, _indices(optimizer), strict=True
        ):
            current = {key: value for key, value in group.items() if key != "params"}
            wanted = frozenset(map(self._first, names))
            if saved[wanted]:
                current |= self._options_of(saved[wanted].pop(0), current)
            elif wanted:
                raise CheckpointError(_no_such_group(wanted, self._description, self._where))
            groups.append({**current, "params": indices})
        left = [names for names, numbers in saved.items() if numbers and names]
        if left:
            raise CheckpointError(
                f"{self._where} has {len(left)} groups of parameters that the optimizer does not have; "
                f"one of them holds {min(left[0])}"
            )
        scale = self._description.get("loss_scale")
        return {"param_groups": groups} | ({} if scale is None else {"loss_scale": scale})

    def whole_states(self, optimizer: Optimizer, name_of: ParameterNames) -> dict[int, dict[str, Any]]:
        """The states of parameters as this rank has them, by number in a state_dict; no master weights."""
        return {
            index: self._whole_state(name, holding_of(parameter))
            for name, parameter, index in _members(optimizer, name_of)
            if self._first(name) in self._states or self._first(name) in self._description["scalars"]
        }

    def _first(self, name: str) -> str:
        return self._aliases.get(name, name)

    def _options_of(self, number: int, current: Mapping[str, Any]) -> dict[str, Any]:
        """A saved group's; JSON made lists of what are tuples in the current ones."""
        options = _options(self._description["groups"][number]["options"])
        tensors = {key: stored.whole(self._files) for key, stored in self._options[number].items()}
        return {key: _like(current.get(key), value) for key, value in options.items()} | tensors

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

        first = self._first(name)
        tensors = {key: value(stored) for key, stored in self._states.get(first, {}).items()}
        return {**self._description["scalars"].get(first, {}), **tensors}


def _members(optimizer: Optimizer, name_of: ParameterNames) -> Iterator[tuple[str, Tensor, int]]:
    """(name, parameter, number in torch's state_dict) of all that the optimizer holds."""
    groups = zip(optimizer.param_groups, group_names(optimizer, name_of), _indices(optimizer), strict=True)
    for group, names, indices in groups:
        yield from zip(names, group["params"], indices, strict=True)


def _indices(optimizer: Optimizer) -> Iterator[list[int]]:
    """The numbers that torch's state_dict gives each group's parameters."""
    start = 0
    for group in optimizer.param_groups:
        yield list(range(start, start + len(group["params"])))
        start += len(group["params"])


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """All of a group but its parameters, and their names, which torch keeps there if it was told them."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


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
