"""Buckets: which parameters' values share one flat buffer, so that few large messages travel.

Backward meets the parameters roughly in reverse order of registration, so buckets are filled in
that order: bucket 0 is complete first and travels while backward goes on.

    parameters   embed  q0  k0  v0  q1  k1  v1  head        backward  <---
    buckets      [   2       ][    1         ][  0 ]

Pure integers; `kind` is whatever must be the same within one flat buffer (element type, device).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
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
    """Size of one parameter: `numel` elements of `itemsize` bytes, of one kind."""

    numel: int
    itemsize: int
    kind: Hashable


@dataclass(frozen=True, slots=True)
class Bucket:
    """Parameters that lie one after another in a flat buffer.

    members   their indices, in the order in which they lie
    edges     where each starts, in elements, and at last where the last one ends
    padding   elements after it, so that the buffer can be cut into equal shards
    """

    members: tuple[int, ...]
    edges: tuple[int, ...]
    itemsize: int
    kind: Hashable
    padding: int = 0

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
    shards: int = 1,
) -> tuple[Bucket, ...]:
    """Put every parameter into one bucket, last registered first.

    groups   parameters that are to share a bucket, whatever its size, as far as they are of one kind
    shards   into how many equal ones a bucket is to be cut: it is padded to a multiple of that

    A bucket holds one kind and at most `bucket_bytes` (the first of each kind `first_bucket_bytes`),
    except that a parameter larger than that has a bucket of its own. Buckets are numbered in the
    order in which backward completes them: by their member that was registered first.
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
            together.setdefault((grouped[index], extent.kind), []).append(index)
            continue
        members = filling.setdefault(extent.kind, [])
        limit = bucket_bytes if extent.kind in opened else first_bucket_bytes
        held = sum(extents[member].numel * extent.itemsize for member in members)
        if members and held + extent.numel * extent.itemsize > limit:
            full.append(members)
            opened.add(extent.kind)
            members = filling[extent.kind] = []
        members.append(index)
    full += [*filling.values(), *together.values()]
    return tuple(bucket_of(members, extents, shards) for members in sorted(full, key=min, reverse=True))


def bucket_of(members: Sequence[int], extents: Sequence[Extent], shards: int = 1) -> Bucket:
    first = extents[members[0]]
    edges = offsets([extents[member].numel for member in members])
    return Bucket(tuple(members), edges, first.itemsize, first.kind, -edges[-1] % shards)
