"""Flat parameters: a block of memory for each bucket, of which this rank updates its shard."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hpcpar.data_parallel.bucket_shards import Shard, shard_of
from hpcpar.data_parallel.buckets import Bucket
from hpcpar.data_parallel.parameters import in_memory_order, layout_of, view_like
from hpcpar.data_parallel.replica_comms import ReplicaComms
from hpcpar.data_parallel.shared_parameters import NodeSharedParameters

if TYPE_CHECKING:
    from hpcpar.comm import Communicator


@dataclass(eq=False)
class Block:
    """One bucket's parameters.

    shard   which elements are this rank's
    own     those, with the padding at their end
    flat    all elements one after another, of which `own` is a view then; None where only shards are kept
    wide    this rank's elements, without padding, as they were before they got a shorter type, until somebody
            takes them for master weights
    """

    bucket: Bucket
    shard: Shard
    own: Tensor
    flat: Tensor | None = None
    wide: Tensor | None = None

    @property
    def held(self) -> Tensor:
        """This rank's elements without padding."""
        return self.own[: self.shard.end]

    def take_wide(self) -> Tensor:
        """The elements without padding in the longest type that they are known in; only once in that.

        As they are now: they may have been written to in their short type since.
        """
        wide, self.wide = self.wide, None
        return self.held if wide is None else following(wide, self.held)


def allocate_flat(numel: int, dtype: torch.dtype, device: torch.device, comm: Communicator) -> Tensor:
    """Return zeros to send; on CPUs in memory that the node's other ranks can read. Collective."""
    if device.type != "cpu":
        return torch.zeros(numel, dtype=dtype, device=device)
    flat: Tensor = comm.allocate_shared(numel, dtype)
    return flat


def following(wide: Tensor, held: Tensor) -> Tensor:
    """Elements in a long type, but where they are not those of a short type, rounded, these."""
    own = held.to(wide.device)
    return torch.where(own != wide.to(held.dtype), own.to(wide.dtype), wide)


@torch.no_grad()
def gather_into_blocks(
    parameters: Sequence[Tensor],
    buckets: Sequence[Bucket],
    comms: ReplicaComms,
    *,
    dtype: torch.dtype | None,
    sharded: bool,
    node_shared: NodeSharedParameters | None,
) -> list[Block]:
    """Move parameters, whose values and identity stay, into flat memory, a bucket at a time.

    dtype     that they get; None: their own
    sharded   each rank owns its shard of a block, else all of it
    node_shared   there is one such memory on each node. Collective then
    """
    blocks = []
    for bucket in buckets:
        first = parameters[bucket.members[0]]
        kind = dtype or first.dtype
        if node_shared is not None:
            flat = node_shared.allocate(bucket.numel, kind)
        else:
            flat = torch.empty(bucket.numel, dtype=kind, device=first.device)
        flat[bucket.edges[-1] :] = 0
        comm = comms.shard_comm(bucket.replicas)
        shard = shard_of(bucket, *((comm.rank, comm.size) if sharded else (0, 1)))
        wide = None
        if kind.itemsize < first.dtype.itemsize:
            wide = torch.empty(shard.end, dtype=first.dtype, device=first.device)
            for piece in shard.pieces:
                values = in_memory_order(parameters[piece.member], layout_of(parameters[piece.member]))
                wide[piece.offset : piece.end] = values[piece.start : piece.stop]
        for member, (start, stop) in bucket.ranges.items():
            parameter = parameters[member]
            view = view_like(flat, start, stop, parameter)
            view.copy_(parameter.detach())
            parameter.data = view
        blocks.append(Block(bucket, shard, flat[shard.start : shard.stop], flat, wide))
    return blocks
