"""The common start: every rank's parameters and buffers become those of one rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from hpcpar.data_parallel.buckets import BUCKET_BYTES, assign
from hpcpar.data_parallel.parameters import agree_on_parameters, distinct, extent

if TYPE_CHECKING:
    from hpcpar.comm import Communicator


def broadcast_parameters(
    module: nn.Module,
    comm: Communicator,
    *,
    root: int = 0,
    bucket_bytes: int = BUCKET_BYTES,
) -> None:
    """Overwrite parameters and buffers on every rank with those of `root`; collective.

    Frozen parameters and buffers that are not saved are included; shared ones travel once. Values
    travel in flat buckets, so that a thousand small tensors are a few messages.
    Raises MismatchError on every rank when the ranks' modules differ in names, shapes or types.
    """
    named = distinct([*module.named_parameters(), *module.named_buffers()])
    agree_on_parameters(named, comm, "parameters and buffers")
    tensors = [tensor.detach() for _, tensor in named]
    extents = [extent(tensor) for tensor in tensors]
    for bucket in assign(extents, bucket_bytes=bucket_bytes, first_bucket_bytes=bucket_bytes):
        members = [tensors[index] for index in bucket.members]
        flat = torch.cat([member.reshape(-1) for member in members])
        comm.broadcast(flat, root=root)
        if comm.rank != root:
            for member, start, stop in zip(members, bucket.edges[:-1], bucket.edges[1:], strict=True):
                member.copy_(flat[start:stop].view(member.shape))
