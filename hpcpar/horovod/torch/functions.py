"""The common start of all ranks: parameters, optimizer state and Python objects of one rank, everywhere.

Ranks first compare what they are about to exchange (one small all-gather), so that different models are
an error on every rank at once and not a wait for a tensor that one of them does not have.
"""

from __future__ import annotations

import hashlib
import importlib
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, TypeVar

import torch

from hpcpar.errors import PeerFailedError
from hpcpar.horovod.exceptions import HorovodInternalError
from hpcpar.horovod.process_sets import ProcessSet, global_process_set
from hpcpar.horovod.torch.mpi_ops import allgather, broadcast_, broadcast_async_, rank, synchronize
from hpcpar.uncompiled import uncompiled

T = TypeVar("T")
Named = tuple[str, torch.Tensor]


@uncompiled
def broadcast_parameters(params: Any, root_rank: int) -> None:
    """Overwrite tensors on every rank with those of `root_rank`; collective over all ranks.

    params   a dict of tensors (`model.state_dict()`), or a list of tensors or of (name, tensor) pairs
             (`list(model.named_parameters())`); entries that are None are left out
    errors   ValueError for anything else; HorovodInternalError on every rank when names, shapes or dtypes
             differ between ranks

    Any dtype, and dense in any order of memory; all tensors are under way at once.
    """
    named = _named(params)
    require_same("broadcast_parameters", [_described(name, tensor) for name, tensor in named])
    _broadcast_tensors("broadcast_parameters", named, root_rank)


@uncompiled
def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, model: torch.nn.Module | None = None
) -> None:
    """Give every rank the root's optimizer state and options (lr, betas, ...); collective over all ranks.

    The root's structure wins. A rank that has no state, or another, gets that of the root: tensors of any
    shape, numbers, None, and lists and dicts of them. Types stay: an int lr is an int everywhere. Tensors
    that are there already are overwritten in place.

    An optimizer that has not stepped yet on the root is one that has not stepped yet on any rank
    afterwards. Horovod lets it take a step with zero gradients, to learn what to receive; then Adam has
    counted one step too many, and its first real update is 0.74 of what it should be. Here the root tells
    the structure, no step is taken, and training goes on as in one process. As in Horovod, parameters
    that require a gradient, and have neither state nor gradient, have a gradient of zeros afterwards.

    Of an optimizer with zero_stage the options alone are sent: of its one state each rank has a shard. What
    state there was before it was wrapped, is to be broadcast before.

    optimizer   of torch.optim or like them, wrapped as DistributedOptimizer or not
    model       accepted because Horovod has it; there is nothing to put right in it
    errors      ValueError for LBFGS; HorovodInternalError on every rank when the parameters' shapes or
                dtypes or the number of parameter groups differ between ranks
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(
            "broadcast_optimizer_state was given an LBFGS optimizer, whose state is its own history of "
            "steps; create it anew on every rank after broadcast_parameters"
        )
    groups = optimizer.param_groups
    require_same(
        "broadcast_optimizer_state",
        [_described(f"group {i}", p) for i, group in enumerate(groups) for p in group["params"]],
    )
    if hasattr(optimizer, "_adopt_options"):  # each rank has its shard of the one state that there is
        optimizer._adopt_options(
            lambda own: broadcast_object(own, root_rank, "broadcast_optimizer_state.options")
        )
        return
    own = _tree(optimizer)
    outline = broadcast_object(_outlined(own), root_rank, "broadcast_optimizer_state.outline")
    tree = own if rank() == root_rank else _filled_tree(outline, own, _parameters(optimizer))
    tensors = [(str(index), tensor) for index, tensor in enumerate(_tensors(tree))]
    _broadcast_tensors("broadcast_optimizer_state", tensors, root_rank)
    if rank() != root_rank:
        _adopt(optimizer, tree)
    _zero_missing_gradients(optimizer)


@uncompiled
def broadcast_object(
    obj: Any = None, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Return the root's object on every rank of the process set; other ranks' are ignored. Collective.

    obj         what pickle can carry, or cloudpickle where that is installed (functions, lambdas)
    root_rank   a rank of the whole job, also with a process set
    errors      PeerFailedError on every rank when the root cannot pickle its object
    """
    payload, failure = _pickled(obj) if rank() == root_rank else (_octets(b""), None)
    length = torch.tensor([payload.numel() if failure is None else -payload.numel()], device="cpu")
    broadcast_(length, root_rank, _part(name, "length"), process_set)
    if rank() != root_rank:
        payload = torch.empty(abs(int(length)), dtype=torch.uint8, device="cpu")
    broadcast_(payload, root_rank, _part(name, "bytes"), process_set)
    if int(length) < 0:
        raise _unpicklable("broadcast_object", root_rank, payload) from failure
    return obj if rank() == root_rank else _unpickled(payload)


@uncompiled
def allgather_object(
    obj: T, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[T]:
    """Return the objects of all ranks of the process set, in rank order, on each of them. Collective.

    errors   PeerFailedError on every rank when one cannot pickle its object
    """
    payload, failure = _pickled(obj)
    length = torch.tensor([payload.numel() if failure is None else -payload.numel()], device="cpu")
    lengths = allgather(length, _part(name, "length"), process_set).tolist()
    gathered = allgather(payload, _part(name, "bytes"), process_set)
    pieces = torch.split(gathered, [abs(length) for length in lengths])
    for position, piece in enumerate(pieces):
        if lengths[position] < 0:
            who = (process_set.ranks or [])[position]
            raise _unpicklable("allgather_object", who, piece) from failure
    return [_unpickled(piece) for piece in pieces]


# Tensors


def _named(params: Any) -> list[Named]:
    """Return (name, tensor) pairs, those of a dict sorted by name; ValueError for anything else."""
    if isinstance(params, Mapping):
        pairs: list[tuple[Any, Any]] = sorted(params.items())
    elif isinstance(params, list | tuple):
        pairs = [
            entry if isinstance(entry, tuple) else (position, entry) for position, entry in enumerate(params)
        ]
    else:
        raise ValueError(
            f"invalid params of type {type(params).__name__}: broadcast_parameters takes a dict of tensors, "
            f"or a list of tensors or (name, tensor) pairs, such as model.state_dict() or "
            f"list(model.named_parameters())"
        )
    for name, tensor in pairs:
        kind = getattr(tensor, "layout", type(tensor).__name__)
        if tensor is not None and kind is not torch.strided:
            raise ValueError(
                f"invalid params: {name!r} is of type {kind}, where broadcast_parameters needs a dense "
                f"tensor; send other values by broadcast_object"
            )
    return [(str(name), tensor) for name, tensor in pairs if tensor is not None]


def _described(name: str, tensor: torch.Tensor) -> str:
    return f"{name} {list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def require_same(doing: str, description: Sequence[str]) -> None:
    """Raise HorovodInternalError on every rank when the ranks' descriptions differ. Collective."""
    digest = hashlib.sha256("\n".join(description).encode()).digest()
    digests = allgather(_octets(digest).unsqueeze(0), f"{doing}.digest")
    if bool((digests == digests[0]).all()):
        return
    descriptions = allgather_object(list(description), f"{doing}.description")
    first = descriptions[0]
    other = next(r for r, found in enumerate(descriptions) if found != first)
    found = descriptions[other]
    place = next(i for i in range(len(first) + 1) if first[i : i + 1] != found[i : i + 1])
    raise HorovodInternalError(
        f"{doing}: ranks have different tensors: rank 0 has {len(first)}, rank {other} has {len(found)}; "
        f"number {place} is {_entry(first, place)} on rank 0 and {_entry(found, place)} on rank {other}. "
        f"Build the same model on every rank before"
    )


def _entry(description: Sequence[str], place: int) -> str:
    return description[place] if place < len(description) else "missing"


def _broadcast_tensors(prefix: str, named: Sequence[Named], root_rank: int) -> None:
    """Broadcast all tensors at once; non-contiguous ones go through a copy."""
    under_way = []
    for name, tensor in named:
        if tensor.numel() > 0:
            target = _carriable(tensor.detach())
            wire = target.resolve_conj().resolve_neg().contiguous()
            under_way.append((broadcast_async_(wire, root_rank, f"{prefix}.{name}"), wire, target, tensor))
    for handle, wire, target, tensor in under_way:
        synchronize(handle)
        if wire is not target:
            target.copy_(wire)
        torch.autograd.graph.increment_version(tensor)  # as every operation in place does


_CARRIED_AS = {
    torch.uint16: torch.int16,
    torch.uint32: torch.int32,
    torch.uint64: torch.int64,
    torch.complex32: torch.int32,
}


def _carriable(tensor: torch.Tensor) -> torch.Tensor:
    """View the memory, each element once, under a dtype of the same size that collectives move."""
    for dim, step in enumerate(tensor.stride()):
        if step == 0:  # an expanded tensor, whose elements share memory
            tensor = tensor.narrow(dim, 0, 1)
    is_float8 = tensor.dtype.itemsize == 1 and tensor.is_floating_point()
    dtype = torch.uint8 if is_float8 else _CARRIED_AS.get(tensor.dtype, tensor.dtype)
    # Not a view of its own type, which a conjugated or negated view refuses.
    return tensor if dtype is tensor.dtype else tensor.view(dtype)


# The state of an optimizer, as nested dicts and lists, with parameters by position:
#
#   {"state": {0: {"step": tensor, "exp_avg": tensor}, 1: ...}, "options": [{"lr": 0.1, ...}, ...]}
#
# Its outline is the same with a _Slot in place of every tensor.


@dataclass(frozen=True)
class _Slot:
    """Placeholder of a tensor, on the host or on its parameter's device."""

    shape: torch.Size
    dtype: torch.dtype
    on_host: bool


def _tree(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the optimizer's own tensors, not copies; state that no parameter has goes by its own key."""
    positions = {parameter: position for position, parameter in enumerate(_parameters(optimizer))}
    return {
        "state": {positions.get(key, key): values for key, values in optimizer.state.items()},
        "options": [
            {option: value for option, value in group.items() if option != "params"}
            for group in optimizer.param_groups
        ],
    }


def _filled_tree(
    outline: dict[str, Any], own: dict[str, Any], parameters: Sequence[torch.Tensor]
) -> dict[str, Any]:
    """Return the tree to receive into: this rank's own tensors where they fit, else new ones without values.

    State that belongs to no one parameter goes to the device of the first.
    """
    first = parameters[0].device if parameters else torch.device("cpu")

    def filled(outline: Any, own: Any, device: torch.device) -> Any:
        def fill(slot: Any, mine: Any) -> Any:
            if not isinstance(slot, _Slot):
                return slot
            if isinstance(mine, torch.Tensor) and (mine.shape, mine.dtype) == (slot.shape, slot.dtype):
                return mine
            return torch.empty(slot.shape, dtype=slot.dtype, device="cpu" if slot.on_host else device)

        return _mapped(fill, outline, own)

    state = {
        key: filled(value, own["state"].get(key), parameters[key].device if isinstance(key, int) else first)
        for key, value in outline["state"].items()
    }
    return {"state": state, "options": filled(outline["options"], own["options"], first)}


def _adopt(optimizer: torch.optim.Optimizer, tree: dict[str, Any]) -> None:
    """Make the tree the optimizer's state and options."""
    parameters = _parameters(optimizer)
    optimizer.state.clear()
    for key, values in tree["state"].items():
        optimizer.state[parameters[key] if isinstance(key, int) else key] = values
    for group, options in zip(optimizer.param_groups, tree["options"], strict=True):
        for option in group.keys() - options.keys() - {"params"}:
            del group[option]
        group.update(options)


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _zero_missing_gradients(optimizer: torch.optim.Optimizer) -> None:
    for parameter in _parameters(optimizer):
        if parameter.requires_grad and parameter.grad is None and not optimizer.state.get(parameter):
            parameter.grad = torch.zeros_like(parameter)


def _outlined(tree: Any) -> Any:
    return _mapped(
        lambda leaf, _: (
            _Slot(leaf.shape, leaf.dtype, leaf.is_cpu) if isinstance(leaf, torch.Tensor) else leaf
        ),
        tree,
    )


def _tensors(tree: Any) -> list[torch.Tensor]:
    """Return all tensors of a tree, in an order that only the outline decides."""
    leaves: list[Any] = []
    _mapped(lambda leaf, _: leaves.append(leaf), tree)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _mapped(function: Callable[[Any, Any], Any], tree: Any, other: Any = None) -> Any:
    """Replace each leaf of nested dicts, lists and tuples by function(leaf, leaf of `other` in its place)."""
    if type(tree) is dict:
        others = other if type(other) is dict else {}
        return {key: _mapped(function, value, others.get(key)) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        listed = other[: len(tree)] if type(other) in (list, tuple) else ()
        return type(tree)(_mapped(function, value, mine) for value, mine in zip_longest(tree, listed))
    return function(tree, other)


# Objects


def _pickled(value: Any) -> tuple[torch.Tensor, Exception | None]:
    """Return the pickle as bytes; or the reason why there is none, as bytes and as an exception."""
    try:
        return _octets(_pickler().dumps(value, protocol=pickle.HIGHEST_PROTOCOL)), None
    except Exception as failure:  # whatever an object's own code raises; the other ranks must hear of it
        return _octets(f"{type(failure).__name__}: {failure}".encode()), failure


def _pickler() -> Any:
    try:
        return importlib.import_module("cloudpickle")
    except ImportError:
        return pickle


def _unpickled(payload: torch.Tensor) -> Any:
    return pickle.loads(payload.numpy().data)


def _unpicklable(doing: str, who: int, reason: torch.Tensor) -> PeerFailedError:
    return PeerFailedError(
        f"{doing}: rank {who} cannot pickle its object: {bytes(reason.numpy()).decode()}. Send what pickle "
        f"can carry, or install cloudpickle for functions and lambdas"
    )


def _octets(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def _part(name: str | None, part: str) -> str | None:
    return None if name is None else f"{name}.{part}"
