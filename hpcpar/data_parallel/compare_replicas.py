"""Whether ranks that should hold the same bits do: parameters, moments, master weights.

A flipped bit, or a step that one rank took in another way, lets replicas drift apart without a word. A sum of
the bits of each tensor tells that, and with three replicas or more which rank is the odd one out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING
from zlib import crc32

from torch import Tensor

from hpcpar.data_parallel.replicas import sum_of_bits

if TYPE_CHECKING:
    from hpcpar.comm import Communicator


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


def differences(held: Iterable[tuple[Communicator, str, Tensor]]) -> list[Difference]:
    """Return what differs between the ranks of each communicator; the same on these. Collective.

    held   (ranks with a replica, name, this rank's), in an order that these ranks share
    """
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
