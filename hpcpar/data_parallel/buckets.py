"""Buckets: which parameters' values share one flat buffer, so that few large messages travel.

Backward meets the parameters roughly in reverse order of registration, so buckets are filled in
that order: bucket 0 is complete first and travels while backward goes on.

    parameters   embed  q0  k0  v0  q1  k1  v1  head        backward  <---
    buckets      [   2       ][    1         ][  0 ]

Pure integers; `kind` is whatever must be the same within one flat buffer (element type, device).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from hpcpar.errors import OperationError
from hpcpar.partition import offsets
from hpcpar.planner.matrix_owners import balanced_owners
from hpcpar.units import MiB

BUCKET_BYTES = 25 * MiB
"""Large enough for bandwidth, small enough that several leave during backward (as in torch's DDP)."""

FIRST_BUCKET_BYTES = 1 * MiB
"""The first bucket is small, so that communication begins early in backward."""


@dataclass(frozen=True, slots=True)
class Extent:
    """Size of one parameter: `numel` elements of `itemsize` bytes, of one kind.

    replicas   ranks that have a copy, as the parameter notes them; None: all
    cost       of the step on a matrix that one rank is to own whole; 0: it may be cut anywhere
    """

    numel: int
    itemsize: int
    kind: Hashable
    replicas: Hashable = None
    cost: int = 0


@dataclass(frozen=True, slots=True)
class Bucket:
    """Parameters that lie one after another in a flat buffer.

    members   their indices, in the order in which they lie
    edges     where each starts, in elements, and at last where the last one ends
    padding   elements after it, so that the buffer can be cut into equal shards
    replicas  ranks that have a copy of all of it, as `Extent`
    counts    elements of each rank's shard, in which its matrices are whole; None: equal shards
    """

    members: tuple[int, ...]
    edges: tuple[int, ...]
    itemsize: int
    kind: Hashable
    padding: int = 0
    replicas: Hashable = None
    counts: tuple[int, ...] | None = None

    @property
    def numel(self) -> int:
        return self.edges[-1] + self.padding

    @property
    def ranges(self) -> dict[int, tuple[int, int]]:
        """By member, where it starts and stops, in elements."""
        return dict(zip(self.members, pairwise(self.edges), strict=True))

    @property
    def nbytes(self) -> int:
        return self.numel * self.itemsize

    def shard_range(self, rank: int, size: int) -> tuple[int, int]:
        """First element of a rank's shard of `size`, and the one after its last."""
        if self.counts is not None and size > 1:
            return sum(self.counts[:rank]), sum(self.counts[: rank + 1])
        length = self.numel // size
        return rank * length, (rank + 1) * length


def assign(
    extents: Sequence[Extent],
    *,
    bucket_bytes: int = BUCKET_BYTES,
    first_bucket_bytes: int = FIRST_BUCKET_BYTES,
    groups: Sequence[Sequence[int]] = (),
    shards: Callable[[Hashable], int] | None = None,
) -> tuple[Bucket, ...]:
    """Put every parameter into one bucket, last registered first.

    groups   parameters that are to share a bucket, whatever its size, as far as they are of one kind
    shards   (replicas) -> into how many equal ones a bucket is to be cut: it is padded to a multiple of that;
             None: 1

    Matrices that one rank is to own whole (`Extent.cost`) have buckets of their own where there are shards,
    and lie there by their owners, which `balanced_owners` gives for all matrices of the same replicas.

    A bucket holds one kind of the same replicas, and at most `bucket_bytes` (the first of each kind
    `first_bucket_bytes`), except that a parameter larger than that has a bucket of its own. Buckets are
    numbered in the order in which backward completes them: by their member that was registered first.
    """
    for name, limit in (("bucket_bytes", bucket_bytes), ("first_bucket_bytes", first_bucket_bytes)):
        if limit < 1:
            raise OperationError(f"{name}={limit}: a bucket holds at least 1 byte (default {MiB} and more)")
    filling: dict[Hashable, list[int]] = {}
    opened: set[Hashable] = set()
    full: list[list[int]] = []
    grouped = {index: number for number, group in enumerate(groups) for index in group}
    together: dict[Hashable, list[int]] = {}
    owners = {} if shards is None else _owners(extents, shards)
    for index in reversed(range(len(extents))):
        extent = extents[index]
        if index in grouped:
            key = grouped[index], extent.kind, extent.replicas, index in owners
            together.setdefault(key, []).append(index)
            continue
        kind = extent.kind, extent.replicas, index in owners
        members = filling.setdefault(kind, [])
        limit = bucket_bytes if kind in opened else first_bucket_bytes
        held = sum(extents[member].numel * extent.itemsize for member in members)
        if members and held + extent.numel * extent.itemsize > limit:
            full.append(members)
            opened.add(kind)
            members = filling[kind] = []
        members.append(index)
    full += [*filling.values(), *together.values()]
    return tuple(
        bucket_of(members, extents, shards, owners) for members in sorted(full, key=min, reverse=True)
    )


def _owners(extents: Sequence[Extent], shards: Callable[[Hashable], int]) -> dict[int, int]:
    """Return the owners of the matrices among the parameters, balanced over the ranks with copies."""
    found: dict[int, int] = {}
    for replicas in dict.fromkeys(extent.replicas for extent in extents):
        members = [n for n, extent in enumerate(extents) if extent.cost and extent.replicas is replicas]
        costs = [extents[member].cost for member in members]
        found |= zip(members, balanced_owners(costs, shards(replicas)), strict=True)
    return found


def bucket_of(
    members: Sequence[int],
    extents: Sequence[Extent],
    shards: Callable[[Hashable], int] | None = None,
    owners: Mapping[int, int] | None = None,
) -> Bucket:
    """Return the bucket of these members.

    owners   ranks that own matrices whole, by member: of all members or of none
    """
    first, counts = extents[members[0]], None
    size = 1 if shards is None else shards(first.replicas)
    if owners and members[0] in owners:
        members = sorted(members, key=lambda member: owners[member])
        counts = tuple(
            sum(extents[member].numel for member in members if owners[member] == rank) for rank in range(size)
        )
    edges = offsets([extents[member].numel for member in members])
    padding = 0 if counts else -edges[-1] % size
    return Bucket(tuple(members), edges, first.itemsize, first.kind, padding, first.replicas, counts)
