"""Which part of a bucket a rank owns, and which parts of which parameters that are. Pure integers.

    bucket      | w 0 … 5 | b 0 … 2 | v 0 … 5 | padding |      cut into equal shards, one for each rank
    rank 0      | w 0 … 5   b 0, 1 |
    rank 1                        | b 2   v 0 … 5  .  |

    bucket      | w 0 … 5 | v 0 … 3 | u 0 … 7 |            matrices that are owned whole: cut between them
    rank 0      | w 0 … 5   v 0 … 3 |
    rank 1                          | u 0 … 7 |

A rank's part of one parameter is a *piece*; a parameter is in as many pieces as there are ranks whose shards
it touches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from hpcpar.data_parallel.buckets import Bucket


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements of one parameter, in the order in which they lie in memory, that one rank owns.

    member        number of the parameter
    start, stop   the elements
    offset        where the first of them lies in the rank's shard
    """

    member: int
    start: int
    stop: int
    offset: int

    @property
    def numel(self) -> int:
        return self.stop - self.start

    @property
    def end(self) -> int:
        """End of the piece in the shard."""
        return self.offset + self.numel


@dataclass(frozen=True, slots=True)
class Shard:
    """The elements start … stop - 1 of a bucket that one rank owns, and the pieces in them."""

    start: int
    stop: int
    pieces: tuple[Piece, ...]

    @property
    def end(self) -> int:
        """End of the last piece; the rest of the shard is padding."""
        return self.pieces[-1].end if self.pieces else 0


def shard_of(bucket: Bucket, rank: int, size: int) -> Shard:
    """The rank's of `size` shards of a bucket: equal ones, or those of its counts."""
    start, stop = bucket.shard_range(rank, size)
    return Shard(start, stop, tuple(pieces_between(bucket.members, bucket.edges, start, stop)))


def pieces_between(members: Sequence[int], edges: Sequence[int], start: int, stop: int) -> list[Piece]:
    """The pieces in elements start … stop - 1 of members that lie one after another."""
    found = []
    for member, (first, end) in zip(members, pairwise(edges), strict=True):
        low, high = max(first, start), min(end, stop)
        if low < high:
            found.append(Piece(member, low - first, high - first, low - start))
    return found
