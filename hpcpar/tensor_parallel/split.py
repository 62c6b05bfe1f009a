"""Division of whole tensors among ranks: ranges of integers, and the shards that follow from them.

    split_evenly(6, 2)                      rank 0: rows 0 … 2             rank 1: rows 3 … 5
    split_sections((4, 2), 2)               rank 0: rows 0 1, 4            rank 1: rows 2 3, 5      fused
    split_evenly(5, 2, padded=6)            rank 0: rows 0 … 2             rank 1: rows 3 4, and one of zeros
    split_sections((4, Heads(1, 2)), 2)     rank 0: rows 0 1, 4 5          rank 1: rows 2 3, 4 5    replicated

A parameter of a parallel layer carries its split: all that initial values, checkpoints, whole weights and
norms need.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hpcpar.autograd.split_norms import split_over_of
from hpcpar.autograd.torch_clipping import note_split_over
from hpcpar.errors import LayoutError, MismatchError, ShardedParameterError
from hpcpar.parameter_info import info_of, note
from hpcpar.partition import bounds, offsets
from hpcpar.tensor_parallel.sameness import Sameness

if TYPE_CHECKING:
    from hpcpar.comm import Communicator
    from hpcpar.tensor_parallel.axis import TensorParallel

Range = tuple[int, int]
"""start, stop"""


@dataclass(frozen=True)
class Heads:
    """Section of whole heads; if they are fewer than ranks, several ranks hold the same one."""

    count: int
    size: int

    @property
    def rows(self) -> int:
        return self.count * self.size


Section = int | Heads
"""Part of a fused tensor, divided by itself."""


@dataclass(frozen=True)
class Split:
    """Division of a whole tensor over the ranks of a communicator, along one dim.

    dim      divided dim
    length   length of the whole tensor along it
    parts    for each rank, its ranges in order
    padded   length of every rank's shard with padding; 0: no padding
    """

    dim: int
    length: int
    parts: tuple[tuple[Range, ...], ...]
    padded: int = 0

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.parts)

    def held(self, rank: int) -> int:
        """Elements along `dim` that a rank holds, without padding."""
        return sum(stop - start for start, stop in self.parts[rank])

    def shard_length(self, rank: int) -> int:
        """Length of a rank's shard along `dim`, with padding."""
        return self.padded or self.held(rank)

    def shard_shape(self, shape: Sequence[int], rank: int) -> tuple[int, ...]:
        """Shape of a rank's shard, from the whole tensor's shape."""
        return (*shape[: self.dim], self.shard_length(rank), *shape[self.dim + 1 :])

    def whole_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of the whole tensor, from any shard's shape."""
        return (*shape[: self.dim], self.length, *shape[self.dim + 1 :])

    @cached_property
    def replicas(self) -> tuple[int, ...]:
        """Number of lower ranks with the same part, by rank."""
        return tuple(self.parts[:rank].count(part) for rank, part in enumerate(self.parts))

    @property
    def is_divided(self) -> bool:
        """True if any two ranks hold different parts."""
        return len(set(self.parts)) > 1

    def shard(self, whole: Tensor, rank: int) -> Tensor:
        """Cut a rank's shard from the whole tensor, into memory of its own; padding is zeros.

        errors   MismatchError for a tensor of another length
        """
        if whole.dim() <= self.dim or whole.shape[self.dim] != self.length:
            raise MismatchError(
                f"a tensor of shape {list(whole.shape)} is to be divided along dim {self.dim}, which should "
                f"have {self.length} elements; pass the whole tensor"
            )
        pieces = [whole.narrow(self.dim, start, stop - start) for start, stop in self.parts[rank]]
        missing = self.shard_length(rank) - self.held(rank)
        if missing:
            shape = (*whole.shape[: self.dim], missing, *whole.shape[self.dim + 1 :])
            pieces.append(whole.new_zeros(shape))
        return torch.cat(pieces, dim=self.dim)

    def whole(self, shards: Sequence[Tensor]) -> Tensor:
        """Join the shards of all ranks."""
        whole = shards[0].new_empty(self.whole_shape(shards[0].shape))
        for part, shard in zip(self.parts, shards, strict=True):
            lengths = [stop - start for start, stop in part]
            pieces = torch.split(shard.narrow(self.dim, 0, sum(lengths)), lengths, self.dim)
            for (start, stop), piece in zip(part, pieces, strict=True):
                whole.narrow(self.dim, start, stop - start).copy_(piece)
        return whole


def split_evenly(length: int, size: int, *, dim: int = 0, padded: int = 0) -> Split:
    """Split into consecutive parts of equal length.

    padded   length of the whole with padding at its end, a multiple of `size`; 0: none
    """
    per_rank = (padded or length) // size
    parts = tuple(
        ((min(length, rank * per_rank), min(length, (rank + 1) * per_rank)),) for rank in range(size)
    )
    return Split(dim, length, parts, per_rank if padded > length else 0)


def split_sections(sections: Sequence[Section], size: int) -> Split:
    """Split a fused tensor along dim 0, each section among all ranks."""
    lengths = [section.rows if isinstance(section, Heads) else section for section in sections]
    edges = offsets(lengths)
    parts = tuple(
        tuple(
            (begin + start, begin + stop)
            for (begin, _), section in zip(pairwise(edges), sections, strict=True)
            for start, stop in [part_of_section(section, rank, size)]
        )
        for rank in range(size)
    )
    return Split(0, edges[-1], parts)


def replicated(length: int, size: int) -> Split:
    """Return the split of a tensor that every rank holds whole."""
    return Split(0, length, (((0, length),),) * size)


def part_of_section(section: Section, rank: int, size: int) -> Range:
    """Range of a section on a rank: its rows, its heads, or the head that it shares."""
    if not isinstance(section, Heads):
        return bounds(section, size)[rank]
    if section.count >= size:
        first, last = bounds(section.count, size)[rank]
    else:
        first = rank * section.count // size
        last = first + 1
    return first * section.size, last * section.size


# --- what fits ------------------------------------------------------------------------------------


def require_divisible(number: int, size: int, what: str) -> None:
    """Raise LayoutError unless ranks can have equal shares; `what` names the number: "heads"."""
    require_fitting({what: number}, {}, size)


def require_shareable(heads: int, size: int, what: str) -> None:
    """Raise LayoutError unless ranks can have equal shares of the heads, or heads equal numbers of ranks."""
    require_fitting({}, {what: heads}, size)


def require_fitting(divided: Mapping[str, int], shared: Mapping[str, int], size: int) -> None:
    """Raise LayoutError unless all of these numbers fit; it advises degrees that fit all of them.

    divided   numbers by name, of which ranks have equal shares
    shared    numbers by name, that equal numbers of ranks may also share one by one
    """

    def fits(degree: int) -> bool:
        return not any(number % degree for number in divided.values()) and all(
            _shareable(heads, degree) for heads in shared.values()
        )

    for what, number in divided.items():
        if number % size:
            fitting = [degree for degree in divisors(number) if fits(degree)]
            raise LayoutError(
                f"{what}={number} does not divide among tp={size} ranks; {_fitting(fitting, size)}"
            )
    for what, heads in shared.items():
        if not _shareable(heads, size):
            several = [heads * factor for factor in range(2, size // heads + 2)]
            degrees = divisors(math.gcd(*divided.values())) if divided else [*divisors(heads), *several]
            fitting = [degree for degree in degrees if fits(degree)]
            raise LayoutError(
                f"{what}={heads} neither divides among tp={size} ranks nor divides them; "
                f"{_fitting(fitting, size)}"
            )


def _shareable(heads: int, degree: int) -> bool:
    return not (heads % degree and degree % heads)


def divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def _fitting(degrees: Sequence[int], asked: int) -> str:
    """Name the degrees nearest to the one asked for: "tp=2 or tp=4 would fit"."""
    below = [degree for degree in degrees if degree < asked][-2:]
    above = [degree for degree in degrees if degree > asked][:1]
    return " or ".join(f"tp={degree}" for degree in below + above) + " would fit"


def padded_length(length: int, size: int) -> int:
    """Round up to a multiple of `size`."""
    return math.ceil(length / size) * size


# --- parameters that carry their split ------------------------------------------------------------


def place(
    parameter: nn.Parameter, split: Split, comm: Communicator, *, distinct: Communicator | None = None
) -> None:
    """Note on a parameter that it is this rank's shard of a whole one over `comm`.

    distinct   if several ranks hold the same part: a communicator of one rank for each part, for norms
    """
    note(parameter, split=split, comm=comm)
    if split.is_divided:
        note_split_over(parameter, comm if distinct is None else distinct)


def split_of(parameter: Tensor) -> Split | None:
    """Split of a parameter; None in a layer that is not parallel."""
    found: Split | None = info_of(parameter).split
    return found


def comm_of(parameter: Tensor) -> Communicator | None:
    """Communicator over which a parameter is split."""
    return info_of(parameter).comm


class Divided(nn.Module):
    """Layer whose parameters carry their split, and so do parameters that replace them.

    Replacements come from `copy.deepcopy` (also of torch's AveragedModel), from `to_empty` of a meta model,
    from `load_state_dict(…, assign=True)`, and from assignment of a parameter of the same shape.

    `load_state_dict` takes whole parameters, of which each rank keeps its shard, or this rank's shards.
    `state_dict` is refused: it would save one rank's shards as if they were the model.

    shards   compares the weights of the ranks, which hold different parts
    """

    tp: TensorParallel
    weight: nn.Parameter
    shards: Sameness

    def require_own_shard(self) -> None:
        """Refuse a weight that is not the parameter which was divided, and one that each rank drew alike.

        errors   LayoutError on every rank; collective at first
        """
        is_made = "parametrizations" in self._modules or {"weight_g", "weight_orig"} & self._parameters.keys()
        weight = self.weight
        if is_made or (isinstance(weight, nn.Parameter) and self.tp.size > 1 and split_of(weight) is None):
            raise LayoutError(
                f"the weight of a {type(self).__name__} is made of other parameters (weight norm, spectral "
                f"norm, pruning), or another came in its place (torch's FSDP), of which norms and "
                f"checkpoints would not know; leave this layer out of these, and shard parameters by "
                f"hpcpar.DistributedOptimizer(…, zero_stage=…) or hpcpar.fully_shard"
            )
        self.shards.require_shards(weight)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        # With keep_vars the values are the parameters themselves, which carry their split.
        for name, parameter in self.named_parameters(recurse=False):
            if keep_vars or _SHARDS_ASKED.get():
                break
            if split_over_of(parameter) and (comm := comm_of(parameter)) is not None:
                raise ShardedParameterError(
                    f"the state_dict() of a model was asked for of whose {prefix}{name} this is one of "
                    f"{comm.size} shards, over {comm.name!r}; call whole_state_dict(model) on all ranks and "
                    f"save that on one (save_pretrained takes it as state_dict=), or save checkpoints by "
                    f"hpcpar.checkpoint.save; shard_state_dict(model) gives this rank's shards alone"
                )
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        for name, parameter in self.named_parameters(recurse=False):
            given, split = state_dict.get(prefix + name), split_of(parameter)
            if split is None or not isinstance(given, Tensor) or given.shape == parameter.shape:
                continue
            if given.shape == split.whole_shape(parameter.shape):
                state_dict[prefix + name] = own_shard(parameter, given)
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = memo[id(self)] = object.__new__(type(self))
        copied.__setstate__(copy.deepcopy(vars(self), memo))  # type: ignore[no-untyped-call]
        for name, parameter in self._parameters.items():
            _note_again(parameter, copied._parameters[name])
        return copied

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        before = self._parameters.get(name)
        super().register_parameter(name, param)
        _note_again(before, param)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        before = dict(self._parameters)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, parameter in self._parameters.items():
            _note_again(before[name], parameter)
        return self


def _note_again(before: nn.Parameter | None, now: nn.Parameter | None) -> None:
    if before is None or now is None or before.shape != now.shape or split_of(now) is not None:
        return
    note(now, split=split_of(before), comm=comm_of(before), replicas=info_of(before).replicas)
    note_split_over(now, *split_over_of(before))


_SHARDS_ASKED: ContextVar[bool] = ContextVar("shards asked for", default=False)


def shard_state_dict(module: nn.Module) -> dict[str, Any]:
    """Return this rank's shards of parallel layers, and everything else, for its own `load_state_dict`.

    It fits this rank of this number of ranks only; `hpcpar.checkpoint.save` writes what any number can load.
    """
    token = _SHARDS_ASKED.set(True)
    try:
        return module.state_dict()
    finally:
        _SHARDS_ASKED.reset(token)


def split_over(module: nn.Module) -> dict[str, tuple[Communicator, ...]]:
    """Communicators over which parameters are split, by name, without those that are not."""
    return {name: over for name, parameter in module.named_parameters() if (over := split_over_of(parameter))}


def own_shard(parameter: Tensor, whole: Tensor) -> Tensor:
    """Cut this rank's shard from a whole parameter; all of it if the parameter is not split."""
    split, comm = split_of(parameter), comm_of(parameter)
    return whole if split is None or comm is None else split.shard(whole, comm.rank)


@torch.no_grad()
def draw_shard(parameter: Tensor, fill: Callable[[Tensor], object]) -> None:
    """Fill a whole tensor, equal for any number of ranks, and keep this rank's shard of it.

    fill   such as torch.nn.init.xavier_uniform_: of a shard it would know neither its values nor its fans
    """
    split, comm = split_of(parameter), comm_of(parameter)
    assert split is not None, "a parallel layer's parameters carry their split"
    assert comm is not None, "and their communicator"
    whole = torch.empty(split.whole_shape(parameter.shape), dtype=parameter.dtype)
    fill(whole)
    parameter.copy_(split.shard(whole, comm.rank))


@torch.no_grad()
def gather_whole(parameter: Tensor, values: Tensor | None = None) -> Tensor:
    """Gather a parameter, or values of its shape (its gradient), whole on every rank. Collective."""
    split, comm = split_of(parameter), comm_of(parameter)
    values = parameter.detach() if values is None else values
    if split is None or comm is None or comm.size == 1:
        return values.clone()
    lengths = [split.shard_length(rank) for rank in range(comm.size)]
    shape = values.shape
    rest = math.prod(shape[: split.dim]) * math.prod(shape[split.dim + 1 :])
    # A copy: memory of a fully sharded parameter that is being sent could not be freed.
    own = values.clone(memory_format=torch.contiguous_format)
    counts = [length * rest for length in lengths]
    pieces = torch.split(comm.allgather(own, counts=counts), counts)
    return split.whole(
        [
            piece.view(*shape[: split.dim], length, *shape[split.dim + 1 :])
            for piece, length in zip(pieces, lengths, strict=True)
        ]
    )


class ModulesOfRanks(nn.ModuleList):
    """Modules of which each rank of `comm` has some, as experts, under names that are all different.

    `whole_state_dict` gathers those of the other ranks.
    """

    def __init__(self, comm: Communicator) -> None:
        super().__init__()
        self.comm = comm if comm.size > 1 else None


@torch.no_grad()
def whole_state_dict(module: nn.Module) -> dict[str, Any]:
    """Gather the serial module's state_dict() on every rank; tied weights stay tied. Collective.

    Experts that other ranks have come from these, one tensor after the other. Of a pipeline's stage it is the
    state of this stage.
    """
    state: dict[str, Any] = module.state_dict(keep_vars=True)
    wholes: dict[int, Tensor] = {}
    for name, value in state.items():
        if isinstance(value, Tensor):  # and not a module's extra state
            if id(value) not in wholes:
                wholes[id(value)] = gather_whole(value)
            state[name] = wholes[id(value)]
    prefixes: dict[Communicator, list[str]] = {}
    for name, each in module.named_modules():
        if isinstance(each, ModulesOfRanks) and each.comm is not None:
            prefixes.setdefault(each.comm, []).append(f"{name}." if name else "")
    for comm, several in prefixes.items():
        state = _with_those_of_others(state, tuple(several), comm)
    return state


def _with_those_of_others(
    state: dict[str, Any], prefixes: tuple[str, ...], comm: Communicator
) -> dict[str, Any]:
    """Return the state with the tensors of all ranks, in the serial module's order. Collective.

    prefixes   of names that one rank alone has; all others are the same, in the same order, on all ranks
    """
    told = [(name, name.startswith(prefixes), value) for name, value in state.items()]
    everyone: list[list[tuple[str, tuple[Any, ...] | None]]] = comm.allgather_object(
        [
            (name, (value.shape, value.dtype, value.device.type) if is_own else None)
            for name, is_own, value in told
        ]
    )
    whole: dict[str, Any] = {}
    readers = [iter(names) for names in everyone]
    for common in [*(name for name, is_own, _ in told if not is_own), None]:
        for rank, names in enumerate(readers):
            for name, form in names:
                if form is None:
                    assert name == common, "ranks that divide experts have the same layers"
                    break
                shape, dtype, device = form
                is_here = rank == comm.rank
                value = (
                    state[name].contiguous() if is_here else torch.empty(shape, dtype=dtype, device=device)
                )
                whole[name] = comm.broadcast(value, rank)
        if common is not None:
            whole[common] = state[common]
    return whole
