"""Compare what replicas hold, bit for bit: parameters, moments, master weights.

A flipped bit, or a step that one rank took in another way, lets replicas drift apart without a word. A sum of
the bits of each tensor tells that, and with three replicas or more which rank is the odd one out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING
from zlib import crc32

from torch import Tensor

from hpcpar.data_parallel.replicas import sum_of_bits
from hpcpar.errors import DivergenceError
from hpcpar.parameter_info import info_of

if TYPE_CHECKING:
    from hpcpar.comm import Communicator
    from hpcpar.data_parallel.norms import GradientNorm
    from hpcpar.data_parallel.parameters import Named, OwnPiece
    from hpcpar.data_parallel.replica_comms import ReplicaComms
    from hpcpar.data_parallel.sharded_step import State
    from hpcpar.data_parallel.zero3 import FullyShardedState

Held = Iterable[tuple["Communicator", str, Tensor]]
"""(ranks with a replica, name, this rank's), in an order that these ranks share."""


@dataclass(frozen=True, order=True)
class Difference:
    """A tensor of which not all replicas are the same.

    what    "layers.0.wq.weight", or "exp_avg of layers.0.wq.weight"
    ranks   of the job, whose bits are not those of most replicas; all that have one where none is most
    """

    what: str
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.what} on rank{'s' * (len(self.ranks) > 1)} {', '.join(map(str, self.ranks))}"


def require_same(held: Held, norm: GradientNorm) -> None:
    """DivergenceError on every rank where ranks of any communicator hold different bits. Collective.

    norm   knows over which ranks parameters are split, which hear of it, too
    """
    told = norm.gathered(tuple(_differences(held)))
    found = sorted({each for of_rank in told for each in of_rank})
    if found:
        more = f"; and {len(found) - 4} more" if len(found) > 4 else ""
        raise DivergenceError(
            f"replicas are not the same any more: {'; '.join(map(str, found[:4]))}{more}. A bit has flipped "
            "there, or these ranks have stepped in another way than the rest; load an earlier checkpoint"
        )


def replicated(
    named: Iterable[Named],
    sharding: FullyShardedState | None,
    states: Iterable[tuple[OwnPiece, State]],
    comms: ReplicaComms,
    *,
    shards_states: bool,
) -> Iterator[tuple[Communicator, str, Tensor]]:
    """Yield what this rank has and others, too, as `Held` says.

    sharding        of the parameters, in stage 3
    states          of the optimizer, by what this rank steps on
    shards_states   each rank has its own; then only ranks with the same shard have copies
    """

    def sharers(parameter: Tensor, *, is_sharded: bool) -> Communicator | None:
        replicas = info_of(parameter).replicas
        return comms.across(replicas) if is_sharded else comms.of(replicas)

    own: Iterable[tuple[str, Tensor, Tensor]] = ((name, p, p) for name, p in named)
    if sharding is not None:
        own = ((piece.name, piece.parameter, values) for piece, values in sharding.own_pieces())
    for name, parameter, values in own:
        comm = sharers(parameter, is_sharded=sharding is not None)
        if comm is not None:
            yield comm, name, values
    for piece, state in states:
        comm = sharers(piece.parameter, is_sharded=shards_states)
        for key, value in state.items():
            if comm is not None and isinstance(value, Tensor):
                yield comm, f"{key} of {piece.name}", value


def _differences(held: Held) -> list[Difference]:
    """Return what differs between the ranks of each communicator; the same on these. Collective."""
    sums: dict[Communicator, dict[str, int]] = {}
    for comm, what, values in held:
        if comm.size > 1:
            sums.setdefault(comm, {})[what] = int(sum_of_bits(values))
    found = []
    for comm, own in sums.items():
        if len(set(comm.allgather_object(crc32(repr(own).encode())))) == 1:
            continue
        of_ranks = comm.allgather_object(own)
        for what in own:
            votes = Counter(of_rank[what] for of_rank in of_ranks)
            most, number = votes.most_common(1)[0]
            if number < comm.size:
                has_most = 2 * number > comm.size
                odd = [rank for rank, each in enumerate(of_ranks) if not has_most or each[what] != most]
                found.append(Difference(what, tuple(comm.world_ranks[rank] for rank in odd)))
    return found
