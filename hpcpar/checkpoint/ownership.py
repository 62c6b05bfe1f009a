"""Ownership: each rank's position in the pipeline, and the one rank that writes each element.

Ranks with the same tensor names, but for experts, share a position in the pipeline. Nobody passes the
pipeline's degree or schedule, and they do not matter: all positions together are the whole model.

    rank                 0           1           2           3
    layers               0 1 6 7     2 3 4 5     0 1 6 7     2 3 4 5      pp=2 x dp=2, a V
    position             0           1           0           1

Within a position the coordinates decide, without a message:

    rank of tp=2 x dp=2             0      1      2      3
    tp rank, dp rank                0 0    1 0    0 1    1 1
    split, and sharded by ZeRO      x      x      x      x       each its own piece
    split                           x      x                     the first dp rank of each shard
    a replica, sharded by ZeRO      x             x              each its piece, of the first tp rank's
    a replica                       x

Ranks of one position have the same layers and may have different experts: these are written by the first of
the ranks with copies, or by each its piece where they are sharded.

A replica over tp is a tensor that is not split, or a section that several ranks share, such as key heads.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.optim import Optimizer

from hpcpar.checkpoint.model_state import TensorNames
from hpcpar.data_parallel import DistributedOptimizer
from hpcpar.data_parallel.replica_comms import ReplicaComms
from hpcpar.data_parallel.zero3 import sharding_of
from hpcpar.errors import CheckpointError
from hpcpar.parameter_info import info_of
from hpcpar.tensor_parallel.split import comm_of, split_of

if TYPE_CHECKING:
    from hpcpar.comm import Communicator

Groups = Sequence[Sequence[str]]
"""Parameter names of each group of an optimizer."""


@dataclass(frozen=True)
class RankContents:
    """Tensor names of one rank, and those in its optimizer's groups; None without an optimizer.

    experts   names of parameters of which other ranks with the same layers have others
    """

    names: TensorNames
    groups: Groups | None
    experts: frozenset[str] = frozenset()

    @property
    def optimizer(self) -> str:
        return "no optimizer" if self.groups is None else f"an optimizer with {len(self.groups)} groups"


@dataclass(frozen=True)
class PipelinePositions:
    """Positions of all ranks, and the model that they make together.

    of_ranks   position of each rank; positions are numbered in the order of their first ranks
    digests    of each rank's names, experts included
    contents   of the first rank with each of these
    places     position of each of `contents`
    """

    of_ranks: tuple[int, ...]
    digests: tuple[str, ...]
    contents: tuple[RankContents, ...]
    places: tuple[int, ...]

    @classmethod
    def agree(cls, own: RankContents, comm: Communicator, doing: str) -> PipelinePositions:
        """Find the positions of all ranks. Collective.

        errors   CheckpointError unless their names and groups make one model and one optimizer; of several
                 ranks, PeerFailedError on every one, with that text
        """
        # Thousands of ranks exchange a digest each; only the first of each position sends its names.
        without_experts = own.names.digest_without(own.experts)
        digests, layers, optimizers = zip(
            *comm.allgather_object((own.names.digest, without_experts, own.optimizer)), strict=True
        )
        order = list(dict.fromkeys(digests))
        contents = [own]
        if len(order) > 1:
            is_first = digests.index(own.names.digest) == comm.rank
            told = comm.allgather_object(own if is_first else None)
            contents = [each for each in told if each is not None]
        numbers = {digest: number for number, digest in enumerate(dict.fromkeys(layers))}
        of_ranks = tuple(numbers[digest] for digest in layers)
        places = tuple(of_ranks[digests.index(digest)] for digest in order)
        positions = cls(of_ranks, digests, tuple(contents), places)
        with comm.together(doing):
            positions._require_disjoint()
            positions._require_same_ties()
            positions._require_one_optimizer(optimizers)
            positions._require_groups_of(own)
        return positions

    def first_rank(self, number: int) -> int:
        """Return the first rank with these contents."""
        return self.digests.index(self.contents[number].names.digest)

    def writes(self, position: int, name: str) -> bool:
        """Tell whether this position writes the tensor of a first name.

        The first position that has it under this name does, else the first that has a tied equal.
        """
        # Rank order decides between equals, so all ranks come to the same answer without a message.
        return position == next(number for holders in self._holders for number in holders.get(name, ()))

    @cached_property
    def aliases(self) -> dict[str, str]:
        """Further name -> first name, of all tensors that some rank has."""
        held = frozenset().union(*(each.names.all for each in self.contents))
        return {
            name: first
            for each in self.contents
            for name, first in each.names.aliases.items()
            if name in held or first in held
        }

    @cached_property
    def names(self) -> list[str]:
        """All names of the whole model."""
        names = [n for each in self.contents for n in (*each.names.parameters, *each.names.buffers)]
        return list(dict.fromkeys([*names, *self.aliases, *self.aliases.values()]))

    @cached_property
    def groups(self) -> list[list[str]] | None:
        """The whole optimizer's groups, of first names."""
        if self.contents[0].groups is None:
            return None
        return [
            list(dict.fromkeys(name for part in parts for name in part))
            for parts in zip(*(each.groups or () for each in self.contents), strict=True)
        ]

    @cached_property
    def _holders(self) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
        """Positions by first name: those that use this very name, and those that use any."""
        by_itself: dict[str, list[int]] = {}
        by_any: dict[str, list[int]] = {}
        for position, each in zip(self.places, self.contents, strict=True):
            for name in each.names.all:
                by_itself.setdefault(name, []).append(position)
                by_any.setdefault(each.names.first(name), []).append(position)
        return by_itself, by_any

    def _require_disjoint(self) -> None:
        """Positions may share buffers, and of parameters only tied ones."""
        tied = {name for each in self.contents for tie in each.names.tied.items() for name in tie}
        holder: dict[str, int] = {}
        for number, each in enumerate(self.contents):
            for name in each.names.parameters:
                other = holder.setdefault(name, number)
                is_shared = self.places[other] == self.places[number] and name not in each.experts
                if other != number and not is_shared and each.names.first(name) not in tied:
                    raise CheckpointError(self._not_disjoint(other, number, name))

    def _not_disjoint(self, one: int, other: int, name: str) -> str:
        here, there = self.first_rank(one), self.first_rank(other)
        mine, theirs = self.contents[one].names.all, self.contents[other].names.all
        only = f"{here} has {min(mine - theirs)}" if mine - theirs else f"{there} has {min(theirs - mine)}"
        return (
            f"ranks {here} and {there} both have {name}, but only rank {only}; ranks of one position in a "
            "pipeline need all the same names, and those of different ones share no parameters but what the "
            "model's tied_names tells"
        )

    def _require_same_ties(self) -> None:
        firsts: dict[str, str] = {}
        for each in self.contents:
            for name in each.names.all | each.names.tied.keys():
                first = each.names.first(name)
                if firsts.setdefault(name, first) != first:
                    raise CheckpointError(
                        f"{name} is the same as {firsts[name]} on some ranks, as {first} on others; give the "
                        "model on every rank the same tied_names"
                    )

    def _require_one_optimizer(self, of_ranks: Sequence[str]) -> None:
        if len(set(of_ranks)) > 1:
            told = ", ".join(f"rank {of_ranks.index(each)} has {each}" for each in dict.fromkeys(of_ranks))
            raise CheckpointError(
                f"{told}; give all one, with the same number of groups, empty ones too, in the same order"
            )
        group_of: dict[str, int] = {}
        for number, names in enumerate(self.groups or ()):
            for name in names:
                if group_of.setdefault(name, number) != number:
                    raise CheckpointError(
                        f"{name} is in group {group_of[name]} of the optimizer on some ranks, in group "
                        f"{number} on others; give each rank's optimizer the same groups in the same order"
                    )

    def _require_groups_of(self, own: RankContents) -> None:
        number = [each.names.digest for each in self.contents].index(own.names.digest)
        first = self.contents[number]
        if [set(names) for names in own.groups or ()] != [set(names) for names in first.groups or ()]:
            raise CheckpointError(
                f"this rank's optimizer has other groups than that of rank {self.first_rank(number)}, "
                "which has the same parameters; make them alike on both"
            )


@dataclass(frozen=True)
class RankCoordinates:
    """Position of a rank in the pipeline, in tensor parallelism, and among the ranks that ZeRO shards over.

    tp_rank, tp_size   0 of 1 if the model is not split
    dp_rank, dp_size   0 of 1 if nothing is sharded: dp replicas then have the same coordinates
    shard_replicas     ranks with the same shard (HSDP)
    tp, dp             names of the communicators, "" if there is none
    """

    tp_rank: int = 0
    tp_size: int = 1
    dp_rank: int = 0
    dp_size: int = 1
    tp: str = ""
    dp: str = ""
    position: int = 0
    shard_replicas: int = 1

    @classmethod
    def of(cls, model: nn.Module, optimizer: Optimizer | None, position: int = 0) -> RankCoordinates:
        """Find this rank's; CheckpointError for a model that is split over several communicators."""
        tp_comm, comms = _split_over(model), _sharded_over(model, optimizer)
        dp_comm, across = (comms.shard_comm(None), comms.across(None)) if comms else (None, None)
        tp_rank, tp_size, tp = (tp_comm.rank, tp_comm.size, tp_comm.name) if tp_comm else (0, 1, "")
        dp_rank, dp_size, dp = (dp_comm.rank, dp_comm.size, dp_comm.name) if dp_comm else (0, 1, "")
        replicas = 1 if across is None else across.size
        return cls(tp_rank, tp_size, dp_rank, dp_size, tp, dp, position, replicas)

    @property
    def key(self) -> tuple[int, int, int]:
        return self.position, self.tp_rank, self.dp_rank


class WritePlan:
    """Decide which tensors this rank writes.

    coordinates   of all ranks that save together; of equal ones only the first rank writes
    elsewhere     ids of tensors that are written under another name or in another position
    errors        CheckpointError, on every rank, if a rank with a part of the tensors is missing
    """

    def __init__(
        self, coordinates: Sequence[RankCoordinates], comm: Communicator, elsewhere: Container[int] = ()
    ) -> None:
        _require_all(coordinates, comm)
        self._own = coordinates[comm.rank]
        self._elsewhere = elsewhere
        self._is_first = self._own.key not in [other.key for other in coordinates[: comm.rank]]

    def writes(self, tensor: Tensor, *, sharded: bool) -> bool:
        """Tell whether this rank writes its part of a tensor, or of that tensor's optimizer state.

        sharded   by ZeRO, so that every dp rank has a piece of its own
        """
        if id(tensor) in self._elsewhere:
            return False
        replicas, own = info_of(tensor).replicas, self._own
        if replicas is not None:
            return self._is_first if sharded else replicas.rank == 0
        split = split_of(tensor)
        # Of several ranks with the same section (shared key heads), the first counts as replica 0.
        replica = own.tp_rank if split is None or split.size != own.tp_size else split.replicas[own.tp_rank]
        return self._is_first and replica == 0 and (sharded or own.dp_rank == 0)

    @property
    def writes_common(self) -> bool:
        """True on the one rank that writes model.safetensors and optimizer.safetensors.

        Other positions write their whole tensors into rank files.
        """
        return self._is_first and self._own.key == (0, 0, 0)

    def has_first_shard(self, tensor: Tensor) -> bool:
        """Tell whether this rank's shard of a tensor is the first, if it is split."""
        return self._own.tp_rank == 0 or split_of(tensor) is None


def _split_over(model: nn.Module) -> Communicator | None:
    found: dict[tuple[int, ...], tuple[str, Communicator]] = {}
    for name, parameter in model.named_parameters():
        comm = comm_of(parameter)
        if comm is not None and comm.size > 1:
            found.setdefault(tuple(comm.world_ranks), (name, comm))
    if len(found) > 1:
        (name, comm), (other_name, other) = list(found.values())[:2]
        raise CheckpointError(
            f"{name} is split over {comm.name!r} and {other_name} over {other.name!r}; a checkpoint can be "
            "of parameters that are split over one communicator"
        )
    return next(iter(found.values()))[1] if found else None


def _sharded_over(model: nn.Module, optimizer: Optimizer | None) -> ReplicaComms | None:
    sharding = sharding_of(list(model.parameters()))
    if sharding is not None:
        return sharding.comms
    if isinstance(optimizer, DistributedOptimizer) and optimizer.zero_stage:
        return optimizer.replica_comms
    return None


def _require_all(coordinates: Sequence[RankCoordinates], comm: Communicator) -> None:
    own = coordinates[comm.rank]
    wanted = [(tp, dp) for tp in range(own.tp_size) for dp in range(own.dp_size)]
    found = sorted((each.tp_rank, each.dp_rank) for each in coordinates if each.position == own.position)
    # Replicas may be any number; but each piece of a sharded tensor must be there as often as it exists.
    if found == sorted(own.shard_replicas * wanted) or (not own.dp and sorted(set(found)) == wanted):
        return
    over = [f"sharded over the {own.dp_size} ranks of {own.dp!r}"] if own.dp else []
    over += [f"split over the {own.tp_size} ranks of {own.tp!r}"] if own.tp else []
    by = f"the {comm.size} of {comm.name!r}"
    if len(found) < comm.size:
        by = f"{len(found)} of {by}, which have the same layers"
    raise CheckpointError(
        f"what is {' and '.join(over) or 'neither sharded nor split'} was to be saved by {by}; pass the "
        f"communicator of all {len(wanted)} that have a part of it"
    )


def require_all_experts(tensors: Iterable[Tensor], comm: Communicator) -> None:
    """CheckpointError unless all ranks that experts are spread over, and have copies, save together."""
    for tensor in tensors:
        info = info_of(tensor)
        for spread in () if info.replicas is None else (info.replicas, *info.split_over):
            if not {*spread.world_ranks} <= {*comm.world_ranks}:
                raise CheckpointError(
                    f"experts are spread over the {spread.size} ranks of {spread.name!r}, but were to be "
                    f"saved by the {comm.size} of {comm.name!r}; pass the communicator of all of the run"
                )
