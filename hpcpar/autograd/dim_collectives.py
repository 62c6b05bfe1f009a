"""Collectives on tensors along any of their dims: new tensors, inputs left as they are, nothing for autograd.

gather along dim 1      rank 0: [B, S/2, H]     rank 1: [B, S/2, H]     ->  both: [B, S, H]
reduce-scatter          both: [B, S, H]         ->  rank r: its [B, S/2, H] of the sum

Whatever is divided along a dim is so by `partition.counts`. What `start_…` returns is awaited once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hpcpar.autograd import scratch
from hpcpar.errors import MismatchError, OperationError
from hpcpar.partition import counts, offsets
from hpcpar.units import MiB

if TYPE_CHECKING:
    from hpcpar.comm import Communicator
    from hpcpar.comm.compiled import Handle

LARGEST_STAGED_SUM_NBYTES = MiB
"""A sum has to be copied out of its buffer: beyond this size that costs more than the buffer saves."""


@dataclass(frozen=True)
class PendingResult:
    """A collective under way, and how its result becomes the tensor that was asked for."""

    handle: Handle | None
    finish: Callable[[], Tensor]

    def wait(self) -> Tensor:
        """The tensor, when it is complete."""
        if self.handle is not None:
            self.handle.wait()
        return self.finish()


def start_sum(tensor: Tensor, comm: Communicator, *, consume: bool = False, op: str = "sum") -> PendingResult:
    """The sum over all ranks, or what another `op` makes of it.

    consume   the tensor is the caller's to give away, and may hold the result
    """
    if comm.size == 1:
        return PendingResult(None, lambda: tensor)
    source = tensor.detach().contiguous()
    if consume or source.data_ptr() != tensor.data_ptr():
        return PendingResult(comm.start_allreduce(source, op), lambda: source)
    total = torch.empty_like(source)
    return PendingResult(comm.start_allreduce(source, op, out=total), lambda: total)


def summed(tensor: Tensor, comm: Communicator, *, consume: bool = False, op: str = "sum") -> Tensor:
    """`start_sum`, awaited; a small tensor goes through a scratch buffer. Collective."""
    summand = Summand(tensor.shape, tensor, comm)
    if not summand.is_scratch:
        return start_sum(tensor, comm, consume=consume, op=op).wait()
    summand.tensor.copy_(tensor)
    return summand.start(op).wait()


class Summand:
    """A tensor to compute into, and then to be summed over all ranks: `start`, once.

    tensor   of this shape, contiguous, its values unset
    """

    def __init__(self, shape: Sequence[int], like: Tensor, comm: Communicator) -> None:
        self._comm = comm
        self._edges = (0, math.prod(shape))
        self._buffer = scratch.take(comm, "sum", self._edges, like, largest=LARGEST_STAGED_SUM_NBYTES)
        flat = like.new_empty(self._edges[-1]) if self._buffer is None else self._buffer.whole
        self.tensor = flat.view(shape)

    @property
    def is_scratch(self) -> bool:
        """True if the tensor lies in memory that collectives have met before."""
        return self._buffer is not None

    def start(self, op: str = "sum") -> PendingResult:
        buffer = self._buffer
        if buffer is None or self._comm.size == 1:
            return start_sum(self.tensor, self._comm, consume=True, op=op)
        return PendingResult(self._comm.start_allreduce(buffer.whole, op), lambda: self._leave(buffer))

    def _leave(self, buffer: scratch.ScratchBuffer) -> Tensor:
        total = self.tensor.clone()
        scratch.give(self._comm, "sum", self._edges, buffer)
        return total


def start_gather(shard: Tensor, comm: Communicator, dim: int, *, length: int | None = None) -> PendingResult:
    """All ranks' shards one after the other along a dim.

    length   of the whole along it; None: all shards are as long as this one
    """
    dim = checked_dim(shard, dim)
    lengths = _lengths(shard, comm, dim, length)
    if comm.size == 1:
        return PendingResult(None, lambda: shard)
    shape = shard.shape
    pieces = [each * _rest(shape, dim) for each in lengths]
    edges = offsets(pieces)
    is_moved = math.prod(shape[:dim]) != 1
    buffer = scratch.take(comm, "gather", edges, shard) if is_moved else None
    if buffer is None:
        source = shard.detach().contiguous()
        gathered = source.new_empty(edges[-1])
        handle = comm.start_allgather(source, counts=pieces, out=gathered)
        return PendingResult(handle, lambda: _joined(gathered, shape, dim, lengths))
    buffer.own.view(shape).copy_(shard.detach())
    handle = comm.start_allgather(buffer.own, counts=pieces, out=buffer.whole)

    def leave() -> Tensor:
        whole = _joined(buffer.whole, shape, dim, lengths)
        scratch.give(comm, "gather", edges, buffer)
        return whole

    return PendingResult(handle, leave)


def start_sum_scatter(tensor: Tensor, comm: Communicator, dim: int) -> PendingResult:
    """This rank's part, along a dim, of the sum over all ranks."""
    dim = checked_dim(tensor, dim)
    if comm.size == 1:
        return PendingResult(None, lambda: tensor)
    lengths = counts(tensor.shape[dim], comm.size)
    shape = (*tensor.shape[:dim], lengths[comm.rank], *tensor.shape[dim + 1 :])
    pieces = [each * _rest(tensor.shape, dim) for each in lengths]
    edges = offsets(pieces)
    buffer = scratch.take(comm, "sum and scatter", edges, tensor)
    if buffer is None:
        flat = tensor.new_empty(edges[-1])
        _cut(tensor.detach(), dim, lengths, flat)
        handle = comm.start_reduce_scatter(flat, counts=pieces)
        # A copy, so that the whole does not stay as long as the part.
        return PendingResult(handle, lambda: handle.wait().clone().view(shape))
    _cut(tensor.detach(), dim, lengths, buffer.whole)
    handle = comm.start_reduce_scatter(buffer.whole, counts=pieces)

    def leave() -> Tensor:
        own = buffer.own.clone().view(shape)
        scratch.give(comm, "sum and scatter", edges, buffer)
        return own

    return PendingResult(handle, leave)


def own_part(tensor: Tensor, comm: Communicator, dim: int) -> Tensor:
    """Copy this rank's part of a tensor that all ranks have."""
    dim = checked_dim(tensor, dim)
    edges = offsets(counts(tensor.shape[dim], comm.size))
    start, stop = edges[comm.rank], edges[comm.rank + 1]
    return tensor.detach().narrow(dim, start, stop - start).clone(memory_format=torch.contiguous_format)


def exchanged(tensor: Tensor, comm: Communicator, split_dim: int, join_dim: int) -> Tensor:
    """Each rank's parts along one dim for the other ranks; theirs for this one, joined along another."""
    split_dim, join_dim = checked_dim(tensor, split_dim), checked_dim(tensor, join_dim)
    if split_dim == join_dim:
        raise OperationError(
            f"all_to_all was to divide and to join along the same dim {split_dim}; give two different ones"
        )
    require_dividing(tensor, comm, split_dim)
    if comm.size == 1:
        return tensor.detach().clone()
    flat = tensor.new_empty(tensor.numel())
    _cut(tensor.detach(), split_dim, counts(tensor.shape[split_dim], comm.size), flat)
    received = comm.alltoall(flat, out=torch.empty_like(flat))
    shape = [*tensor.shape]
    shape[split_dim] //= comm.size
    return torch.cat(list(received.view(comm.size, *shape)), dim=join_dim)


def checked_dim(tensor: Tensor, dim: int) -> int:
    """A dim counted from the front; OperationError when the tensor has none such."""
    if not -tensor.dim() <= dim < tensor.dim():
        raise OperationError(f"dim {dim} was asked for of a tensor of shape {list(tensor.shape)}")
    return dim % tensor.dim()


def require_dividing(tensor: Tensor, comm: Communicator, dim: int, what: str = "") -> None:
    """MismatchError unless ranks have equal parts along a dim; `what` says what that dim is."""
    length = tensor.shape[checked_dim(tensor, dim)]
    if length % comm.size:
        below, above = length // comm.size * comm.size, -(-length // comm.size) * comm.size
        near = f"{below} or {above}" if below else f"{above}"
        raise MismatchError(
            f"{what or f'dim {dim} of a tensor of shape {list(tensor.shape)}'}: {length} elements do not "
            f"divide among the {comm.size} ranks of {comm.name!r}; {near} would"
        )


def _lengths(shard: Tensor, comm: Communicator, dim: int, length: int | None) -> Sequence[int]:
    if length is None:
        return [shard.shape[dim]] * comm.size
    lengths = counts(length, comm.size)
    if lengths[comm.rank] != shard.shape[dim]:
        raise MismatchError(
            f"of {length} elements along dim {dim}, rank {comm.rank} of {comm.size} should have "
            f"{lengths[comm.rank]}, but its shard has shape {list(shard.shape)}"
        )
    return lengths


def _rest(shape: Sequence[int], dim: int) -> int:
    """Elements for each one along a dim."""
    return math.prod(shape[:dim]) * math.prod(shape[dim + 1 :])


def _cut(tensor: Tensor, dim: int, lengths: Sequence[int], flat: Tensor) -> None:
    """The parts along a dim one after the other, into flat memory."""
    parts = torch.split(tensor, list(lengths), dim)
    for part, into in zip(parts, torch.split(flat, [part.numel() for part in parts]), strict=True):
        into.view(part.shape).copy_(part)


def _joined(gathered: Tensor, shape: Sequence[int], dim: int, lengths: Sequence[int]) -> Tensor:
    before, after = shape[:dim], shape[dim + 1 :]
    if math.prod(before) == 1:
        return gathered.view(*before, sum(lengths), *after)
    pieces = torch.split(gathered, [each * _rest(shape, dim) for each in lengths])
    shards = [piece.view(*before, each, *after) for piece, each in zip(pieces, lengths, strict=True)]
    return torch.cat(shards, dim=dim)
