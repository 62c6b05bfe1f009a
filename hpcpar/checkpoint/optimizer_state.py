"""An optimizer's state by parameter name, independent of the order of parameters.

tensors      "state/<parameter>/<key>": whole; or, of a split parameter and of an optimizer that steps on
             pieces, each rank's own, flat. "options/<group>/<key>"
state.json   `manifest.SavedOptimizer`: states and options that are no tensors, groups, loss scale

A parameter goes by the first name that its model has for it. In a pipeline each position writes the states
of its parameters, and its groups are parts of the whole optimizer's groups of the same number.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from hpcpar.checkpoint.files import ShardReader, ShardWriter, StoredTensor, on_cpu
from hpcpar.checkpoint.local_tensor import LocalTensor, is_replicated
from hpcpar.checkpoint.manifest import SavedOptimizer
from hpcpar.checkpoint.ownership import WritePlan
from hpcpar.data_parallel import DistributedOptimizer
from hpcpar.data_parallel.combined_optimizer import OPTIMIZER
from hpcpar.data_parallel.distributed_optimizer import optimizers_of
from hpcpar.data_parallel.parameters import OwnPiece, in_memory_order, layout_of
from hpcpar.data_parallel.sharded_step import MASTER, State, is_elementwise
from hpcpar.errors import CheckpointError

Scalars = dict[str, dict[str, Any]]
"""Parameter -> key -> value, of states that are no tensors."""

ParameterNames = Mapping[int, str]
"""Name of each parameter, by its id."""


def distributed_of(model: nn.Module, optimizer: Optimizer | None) -> list[DistributedOptimizer]:
    """Return the DistributedOptimizers that step on a model's parameters, `optimizer` or others.

    errors   CheckpointError if `optimizer` is the inner one of these and steps on pieces
    """
    found = optimizers_of(model.parameters())
    if any(each.inner is optimizer and each.steps_on_pieces for each in found):
        raise CheckpointError(
            f"the {type(optimizer).__name__} has been made a DistributedOptimizer, whose states are of "
            "pieces of parameters; give that one as optimizer="
        )
    return found


# --- saving ---------------------------------------------------------------------------------------


def write_states(
    optimizer: Optimizer, name_of: ParameterNames, files: ShardWriter, plan: WritePlan
) -> Scalars:
    """Write this rank's part of the states; return its values that are no tensors."""
    on_pieces = isinstance(optimizer, DistributedOptimizer) and optimizer.steps_on_pieces
    sharded = isinstance(optimizer, DistributedOptimizer) and optimizer.zero_stage > 0
    scalars: Scalars = {}
    for name, piece, state in _own_states(optimizer, name_of):
        if not plan.writes(piece.parameter, sharded=sharded):
            continue
        if on_pieces or not is_replicated(piece.parameter):
            own_scalars = _write_piece(name, piece, state, files, plan)
        else:
            own_scalars, tensors = _separated(state)
            for key, value in tensors.items():
                files.add_whole(f"state/{name}/{key}", value)
        if own_scalars:
            scalars[name] = own_scalars
    return scalars


def _own_states(optimizer: Optimizer, name_of: ParameterNames) -> Iterator[tuple[str, OwnPiece, State]]:
    """Yield this rank's states: flat for pieces, in shape for whole parameters."""
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
    name: str, piece: OwnPiece, state: State, files: ShardWriter, plan: WritePlan
) -> dict[str, Any]:
    """Write a piece's state; return its values that are no tensors.

    Whoever has a parameter's first element writes what the parameter has once, such as a step count.
    """
    local = LocalTensor.of(piece.parameter, piece.layout)
    has_first = piece.start == 0 and plan.has_first_shard(piece.parameter)
    scalars = {}
    for key, value in state.items():
        if is_elementwise(value, piece.stop - piece.start):
            is_flat = value.dim() == 1
            flat = value if is_flat else in_memory_order(value.reshape(piece.layout[0]), piece.layout)
            files.add(f"state/{name}/{key}", flat, local, piece.start)
        elif isinstance(value, Tensor):
            if value.numel() > 1 and not is_replicated(piece.parameter):
                raise CheckpointError(
                    f"the optimizer's {key} of {name}, which is split, has shape {tuple(value.shape)}: "
                    "neither one number nor an element for each of the parameter's, so it cannot be split as "
                    "that is; take an optimizer that treats every element by itself, such as AdamW"
                )
            if has_first:
                files.add_once(f"state/{name}/{key}", value)
        elif has_first:
            scalars[key] = value
    return scalars


def group_names(optimizer: Optimizer, name_of: ParameterNames) -> list[list[str]]:
    """Return each group's parameter names, in order; CheckpointError for a parameter without a name."""
    for number, group in enumerate(optimizer.param_groups):
        unknown = [tuple(p.shape) for p in group["params"] if id(p) not in name_of]
        if unknown:
            raise CheckpointError(
                f"group {number} of the optimizer has {len(unknown)} parameters that the model does not "
                f"have, the first of shape {unknown[0]}; save the model that the optimizer was made for"
            )
    return [[name_of[id(each)] for each in group["params"]] for group in optimizer.param_groups]


def group_options(optimizer: Optimizer) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """Return (options that are tensors, all others by group, with the class that steps on the group)."""
    tensors: dict[str, Tensor] = {}
    options = []
    for number, group in enumerate(optimizer.param_groups):
        others, found = _separated(_options(group))
        tensors |= {f"options/{number}/{key}": on_cpu(value) for key, value in found.items()}
        options.append({OPTIMIZER: _class_of(optimizer), **others})
    return tensors, options


def _class_of(optimizer: Optimizer) -> str:
    """Return the name of the class that steps on groups, unless they name another one."""
    return type(optimizer.inner if isinstance(optimizer, DistributedOptimizer) else optimizer).__name__


# --- loading --------------------------------------------------------------------------------------


class StoredOptimizer:
    """The optimizer in a checkpoint.

    tensors   by name in its files: "state/<parameter>/<key>", "options/<group>/<key>"
    aliases   further names of parameters -> first names, under which states are found
    where     its file, for errors
    """

    def __init__(
        self,
        tensors: Mapping[str, StoredTensor],
        saved: SavedOptimizer,
        aliases: Mapping[str, str],
        files: ShardReader,
        where: str,
    ) -> None:
        self.tensors = tensors
        self._saved = saved
        self._aliases = aliases
        self._files = files
        self._where = where
        self._states: dict[str, dict[str, StoredTensor]] = defaultdict(dict)
        self._options: dict[int, dict[str, StoredTensor]] = defaultdict(dict)
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

    def master(self, name: str) -> StoredTensor | None:
        """Return a parameter's master weights, if it had any."""
        return self._states.get(self._first(name), {}).get(MASTER)

    def by_parameter(self) -> dict[str, Any]:
        """Return all states and groups, whole, by parameter names, as torch.distributed.checkpoint does."""
        states: dict[str, dict[str, Any]] = {
            name: dict(values) for name, values in self._saved.scalars.items()
        }
        for name, stored in self._states.items():
            found = {key: values.whole(self._files) for key, values in stored.items()}
            states.setdefault(name, {}).update(found)
        groups = []
        for number, group in enumerate(self._saved.groups):
            tensors = {key: stored.whole(self._files) for key, stored in self._options[number].items()}
            groups.append({"params": group.parameters, **group.options, **tensors})
        return {"state": states, "param_groups": groups}

    def state_dict(self, optimizer: Optimizer, whole_groups: Sequence[Sequence[str]]) -> dict[str, Any]:
        """Build a state_dict for the optimizer from the saved one, without states.

        Groups, and parameters in a group, may come in another order than they were saved; but what was one
        group must be one group, and of the same class of optimizers. CheckpointError otherwise.

        whole_groups   names in each group, of all ranks together
        """
        unused: dict[frozenset[str], list[int]] = defaultdict(list)
        for number, saved in enumerate(self._saved.groups):
            unused[frozenset(saved.parameters)].append(number)
        groups = []
        for group, names, indices in zip(
            optimizer.param_groups, whole_groups, _indices(optimizer), strict=True
        ):
            current = {key: value for key, value in group.items() if key != "params"}
            wanted = frozenset(map(self._first, names))
            if unused[wanted]:
                number = unused[wanted].pop(0)
                self._require_class(number, current.get(OPTIMIZER, _class_of(optimizer)))
                current |= self._options_of(number, current)
            elif wanted:
                raise CheckpointError(self._no_such_group(wanted))
            groups.append({**current, "params": indices})
        left = [names for names, numbers in unused.items() if numbers and names]
        if left:
            raise CheckpointError(
                f"{self._where} has {len(left)} groups of parameters that the optimizer does not have; "
                f"one of them holds {min(left[0])}"
            )
        scale = self._saved.loss_scale
        return {"param_groups": groups} | ({} if scale is None else {"loss_scale": scale.model_dump()})

    def whole_states(self, optimizer: Optimizer, name_of: ParameterNames) -> dict[int, dict[str, Any]]:
        """Read this rank's states in shape, by number in a state_dict, without master weights."""
        found = {}
        for name, parameter, index in _members(optimizer, name_of):
            if self._first(name) in self._states or self._first(name) in self._saved.scalars:
                found[index] = self._read(name, LocalTensor.of(parameter), None)
                found[index].pop(MASTER, None)
        return found

    def state_of(self, name: str, piece: OwnPiece) -> dict[str, Any]:
        """Read the state of a piece of a parameter, flat."""
        return self._read(name, LocalTensor.of(piece.parameter, piece.layout), piece)

    def _first(self, name: str) -> str:
        return self._aliases.get(name, name)

    def _options_of(self, number: int, current: Mapping[str, Any]) -> dict[str, Any]:
        """Read a saved group's options, in the types of the current ones."""
        options = _options(self._saved.groups[number].options)
        options.pop(OPTIMIZER, None)
        tensors = {key: stored.whole(self._files) for key, stored in self._options[number].items()}
        return {key: self._like(key, current.get(key), value) for key, value in options.items()} | tensors

    def _like(self, key: str, current: Any, saved: Any) -> Any:
        """Return a saved option as the optimizer holds it: JSON made lists of tuples."""
        if isinstance(current, (int, float)) and isinstance(saved, (str, list, dict)):
            raise CheckpointError(f"{self._where} was saved with {key} = {saved!r}, which is no number")
        return tuple(saved) if isinstance(current, tuple) and isinstance(saved, list) else saved

    def _read(self, name: str, local: LocalTensor, piece: OwnPiece | None) -> dict[str, Any]:
        """Read a parameter's state, flat for a piece; tensors of another shape than its own are whole."""

        def value(stored: StoredTensor) -> Tensor:
            if not stored.shape or stored.shape != local.shape:
                return stored.whole(self._files)
            if piece is None:
                return stored.local(self._files, local)
            return stored.elements(self._files, local, piece.start, piece.stop)

        first = self._first(name)
        tensors = {key: value(stored) for key, stored in self._states.get(first, {}).items()}
        return {**self._saved.scalars.get(first, {}), **tensors}

    def _require_class(self, number: int, wanted: str) -> None:
        """CheckpointError where an optimizer would go on with another one's states and options."""
        group = self._saved.groups[number]
        found = group.options.get(OPTIMIZER, wanted)  # earlier versions did not tell
        if found != wanted:
            raise CheckpointError(
                f"{self._where} is of {found} for group {number}, and here is {wanted}, which has other "
                f"states and options; take {found}, or load with optimizer=None to begin with a fresh one"
            )

    def _no_such_group(self, wanted: frozenset[str]) -> str:
        saved: Iterable[set[str]] = (set(group.parameters) for group in self._saved.groups)
        nearest = max(saved, key=lambda names: len(names & wanted), default=set())
        differing = [*sorted(wanted ^ nearest), "none"]
        return (
            f"{self._where} has no group of the {len(wanted)} parameters that the optimizer has in one; the "
            f"nearest has {len(nearest)}, and the first difference is {differing[0]}; make "
            "the same groups, or load with optimizer=None"
        )


def _members(optimizer: Optimizer, name_of: ParameterNames) -> Iterator[tuple[str, Tensor, int]]:
    """Yield (name, parameter, number in torch's state_dict) of all that the optimizer holds."""
    groups = zip(optimizer.param_groups, group_names(optimizer, name_of), _indices(optimizer), strict=True)
    for group, names, indices in groups:
        yield from zip(names, group["params"], indices, strict=True)


def _indices(optimizer: Optimizer) -> Iterator[list[int]]:
    """Yield the numbers that torch's state_dict gives each group's parameters."""
    start = 0
    for group in optimizer.param_groups:
        yield list(range(start, start + len(group["params"])))
        start += len(group["params"])


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Drop a group's parameters, and the names that torch keeps there if it was told them."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _separated(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return (values that are no tensors, tensors)."""
    tensors = {key: value for key, value in values.items() if isinstance(value, Tensor)}
    return {key: value for key, value in values.items() if key not in tensors}, tensors
