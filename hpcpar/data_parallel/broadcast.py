"""The common start: every rank's parameters and buffers become those of one rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from hpcpar.data_parallel.buckets import BUCKET_BYTES, Bucket, assign
from hpcpar.data_parallel.parameter_allgather import wait_for_new
from hpcpar.data_parallel.parameters import Named, distinct, extent
from hpcpar.data_parallel.replica_comms import ReplicaComms
from hpcpar.planner.traffic import broadcast_nbytes

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

    Parameters that not every rank has (experts) become those of the first rank with a copy.
    Frozen parameters and buffers that are not saved are included; shared ones travel once. Values
    travel in flat buckets, so that a thousand small tensors are a few messages.
    Raises MismatchError on every rank when the ranks' modules differ in names, shapes or types.
    """
    wait_for_new(module.parameters())
    everything = _everything(module)
    comms = ReplicaComms(comm, [tensor for _, tensor in everything])
    comms.agree_on_parameters(everything, "parameters and buffers")
    for replicas, some in comms.divided(everything).items():
        holders = comms.of(replicas)
        # Ranks with copies of an expert may lie in several communicators with roots of their own.
        first = root if holders is comm else 0
        broadcast_tensors([tensor for _, tensor in some], holders, root=first, bucket_bytes=bucket_bytes)


def broadcast_tensors(
    given: Sequence[Tensor], comm: Communicator, *, root: int = 0, bucket_bytes: int = BUCKET_BYTES
) -> None:
    """Overwrite tensors on every rank, where they are alike, with those of `root`; collective."""
    tensors = [_written_to(tensor).detach() for tensor in given]
    for bucket in _assigned(tensors, bucket_bytes):
        flat = torch.cat([tensors[index].reshape(-1) for index in bucket.members])
        comm.broadcast(flat, root=root)
        if comm.rank != root:
            for index, (start, stop) in bucket.ranges.items():
                tensors[index].copy_(flat[start:stop].view(tensors[index].shape))


def expected_broadcast_nbytes(
    module: nn.Module, comm: Communicator, *, bucket_bytes: int = BUCKET_BYTES
) -> dict[Communicator, int]:
    """Bytes that all ranks of each communicator send in `broadcast_parameters`, by theory."""
    tensors = [_written_to(tensor) for _, tensor in _everything(module)]
    comms = ReplicaComms(comm, tensors)
    total: Counter[Communicator] = Counter()
    for bucket in _assigned(tensors, bucket_bytes):
        total[comms.of(bucket.replicas)] += broadcast_nbytes(comms.of(bucket.replicas), [bucket])
    return total


def _everything(module: nn.Module) -> list[Named]:
    return distinct([*module.named_parameters(), *module.named_buffers()])


def _written_to(tensor: Tensor) -> Tensor:
    """Return what can be written to: a tensor, or the one element that an expanded buffer repeats."""
    for dim, stride in enumerate(() if isinstance(tensor, nn.Parameter) else tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _assigned(tensors: Sequence[Tensor], bucket_bytes: int) -> Sequence[Bucket]:
    extents = [extent(tensor) for tensor in tensors]
    return assign(extents, bucket_bytes=bucket_bytes, first_bucket_bytes=bucket_bytes)
