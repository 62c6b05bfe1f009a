"""Which rank writes what: of all that have the same elements, one, known without asking.

    rank of tp=2 x dp=2             0      1      2      3
    tp rank, dp rank                0 0    1 0    0 1    1 1
    split, and sharded by ZeRO      x      x      x      x       each its own piece
    split                           x      x                     the first dp rank of each part
    a replica, sharded by ZeRO      x             x              each its piece, of the first tp rank's
    a replica                       x

A replica over tp is what is not split, and what a split gives to several ranks, such as shared heads.
In a pipeline each position has such a grid of its own, for what it alone has or is the first to have.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.optim import Optimizer

from hpcpar.data_parallel import DistributedOptimizer
from hpcpar.data_parallel.zero3 import sharding_of
from hpcpar.errors import CheckpointError
from hpcpar.tensor_parallel.split import comm_of, split_of

if TYPE_CHECKING:
    from hpcpar.comm import Communicator


@dataclass(frozen=True)
class Coordinates:
    """A rank's place among those that its parameters are split over, and those that ZeRO shards over.

    tp_rank, tp_size   0 of 1 for a model that is not split
    dp_rank, dp_size   0 of 1 where nothing is sharded: then dp replicas have the same coordinates
    tp, dp             names of the communicators, "" where there is none
    position           in the pipeline, whose other positions have other parameters
    """

    tp_rank: int = 0
    tp_size: int = 1
    dp_rank: int = 0
    dp_size: int = 1
    tp: str = ""
    dp: str = ""
    position: int = 0

    @classmethod
    def of(cls, model: nn.Module, optimizer: Optimizer | None, position: int = 0) -> Coordinates:
        """This rank's; CheckpointError for a model that is split over several communicators."""
        tp_comm, dp_comm = _split_over(model), _sharded_over(model, optimizer)
        tp_rank, tp_size, tp = _place_in(tp_comm)
        dp_rank, dp_size, dp = _place_in(dp_comm)
        return cls(tp_rank, tp_size, dp_rank, dp_size, tp, dp, position)

    @property
    def place(self) -> tuple[int, int, int]:
        return self.position, self.tp_rank, self.dp_rank


class Writer:
    """What this rank writes.

    coordinates   of all ranks that save together; of those in the same place all but the first write nothing
    elsewhere     tensors, by id, that are written under another name or in another position
    errors        CheckpointError, on every rank, when some of those are missing that have the other parts
    """

    def __init__(
        self, coordinates: Sequence[Coordinates], comm: Communicator, elsewhere: Container[int] = ()
    ) -> None:
        _require_all(coordinates, comm)
        self._own = coordinates[comm.rank]
        self._elsewhere = elsewhere
        self._is_first = self._own.place not in [other.place for other in coordinates[: comm.rank]]

    def writes(self, tensor: Tensor, *, sharded: bool) -> bool:
        """Whether it writes what it has of a tensor, or of a state of that.

        sharded   by ZeRO, so that every dp rank has a piece of its own
        """
        if id(tensor) in self._elsewhere:
            return False
        split = split_of(tensor)
        own = self._own
        replica = own.tp_rank if split is None or split.size != own.tp_size else split.replicas[own.tp_rank]
        return self._is_first and replica == 0 and (sharded or own.dp_rank == 0)

    @property
    def writes_common(self) -> bool:
        """Whether it writes what is whole in the files that every checkpoint has: one rank does.

        Whoever else `writes` what is whole, in another position, does so in files of its own.
        """
        return self._is_first and self._own.place == (0, 0, 0)

    @property
    def has_first_part(self) -> bool:
        """Whether its part of what is split is the first."""
        return self._own.tp_rank == 0


def _place_in(comm: Communicator | None) -> tuple[int, int, str]:
    return (0, 1, "") if comm is None else (comm.rank, comm.size, comm.name)


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


def _sharded_over(model: nn.Module, optimizer: Optimizer | None) -> Communicator | None:
    sharding = sharding_of(list(model.parameters()))
    if sharding is not None:
        return sharding.dp_comm
    if isinstance(optimizer, DistributedOptimizer) and optimizer.zero_stage:
        return optimizer.dp_comm
    return None


def _require_all(coordinates: Sequence[Coordinates], comm: Communicator) -> None:
    own = coordinates[comm.rank]
    wanted = [(tp, dp) for tp in range(own.tp_size) for dp in range(own.dp_size)]
    found = sorted((each.tp_rank, each.dp_rank) for each in coordinates if each.position == own.position)
    # Replicas may be any number; but of what is sharded each piece is to be there once.
    if found == wanted or (not own.dp and sorted(set(found)) == wanted):
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
