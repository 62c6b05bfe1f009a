"""Buckets: which parameters' values share one flat buffer, so that few large messages travel.

Backward meets the parameters roughly in reverse order of registration, so buckets are filled in
that order: bucket 0 is complete first and travels while backward goes on.

    parameters   embed  q0  k0  v0  q1  k1  v1  head        backward  <---
    buckets      [   2       ][    1         ][  0 ]

Pure integers; `kind` is whatever must be the same within one flat buffer (element type, device).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from hpcpar.errors import OperationError
from hpcpar.partition import offsets
from hpcpar.units import MiB

BUCKET_BYTES = 25 * MiB
"""Large enough for bandwidth, small enough that several leave during backward (as in torch's DDP)."""

FIRST_BUCKET_BYTES = 1 * MiB
"""The first bucket is small, so that communication begins early in backward."""


@dataclass(frozen=True, slots=True)
class Extent:
    """Size of one parameter: `numel` elements of `itemsize` bytes, of one kind.

    replicas   ranks that have a copy, as the parameter notes them; None: all
    """

    numel: int
    itemsize: int
    kind: Hashable
    replicas: Hashable = None


@dataclass(frozen=True, slots=True)
class Bucket:
    """Parameters that lie one after another in a flat buffer.

    members   their indices, in the order in which they lie
    edges     where each starts, in elements, and at last where the last one ends
    padding   elements after it, so that the buffer can be cut into equal shards
    replicas  ranks that have a copy of all of it, as `Extent`
    """

    members: tuple[int, ...]
    edges: tuple[int, ...]
    itemsize: int
    kind: Hashable
    padding: int = 0
    replicas: Hashable = None

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
    for index in reversed(range(len(extents))):
        extent = extents[index]
        if index in grouped:
            together.setdefault((grouped[index], extent.kind, extent.replicas), []).append(index)
            continue
        kind = extent.kind, extent.replicas
        members = filling.setdefault(kind, [])
        limit = bucket_bytes if kind in opened else first_bucket_bytes
        held = sum(extents[member].numel * extent.itemsize for member in members)
        if members and held + extent.numel * extent.itemsize > limit:
            full.append(members)
            opened.add(kind)
            members = filling[kind] = []
        members.append(index)
    full += [*filling.values(), *together.values()]
    return tuple(bucket_of(members, extents, shards) for members in sorted(full, key=min, reverse=True))


def bucket_of(
    members: Sequence[int], extents: Sequence[Extent], shards: Callable[[Hashable], int] | None = None
) -> Bucket:
    first = extents[members[0]]
    edges = offsets([extents[member].numel for member in members])
    padding = 0 if shards is None else -edges[-1] % shards(first.replicas)
    return Bucket(tuple(members), edges, first.itemsize, first.kind, padding, first.replicas)
