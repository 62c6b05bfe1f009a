"""Collectives with their backward: where activations enter and leave what a group of ranks computes together.

    region                          forward            backward           of whom it is the conjugate
    copy_to              f          nothing            sum                reduce_from
    reduce_from          g          sum                nothing            copy_to
    scatter_to                      own part           gather             gather_from
    gather_from                     gather             own part           scatter_to
    gather_from(…, "partial")  g    gather             sum, own part      reduce_scatter_to
    reduce_scatter_to    ḡ          sum, own part      gather             gather_from(…, "partial")
    all_to_all                      exchange           exchange back      itself

The first four speak of tensors that are the same on all ranks: such a tensor's gradient is so too, and
counts once. Two of the next differ on every rank and their gradients add up. Each region is linear and its
backward is its conjugate, so gradients may be differentiated again, any number of times. A communicator of
one rank does nothing. Inputs are never written to. Forward and backward are collective.
source   Shoeybi et al. 2019, Megatron-LM, arXiv 1909.08053, section 3 (f, g); Korthikanti et al. 2022,
         arXiv 2205.05198, section 4.2.2 (g, ḡ)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor
from torch.autograd import Function

from hpcpar.autograd.dim_collectives import (
    checked_dim,
    exchanged,
    own_part,
    start_gather,
    start_sum_scatter,
    summed,
)
from hpcpar.autograd.own_functions import no_view
from hpcpar.errors import OperationError
from hpcpar.uncompiled import uncompiled

if TYPE_CHECKING:
    from hpcpar.comm import Communicator

Gradients = Literal["same", "partial"]
"""What a gathered tensor's gradients are on the ranks: the same on all, or parts of a sum."""


@uncompiled
def copy_to(tensor: Tensor, comm: Communicator) -> Tensor:
    """The tensor, the same on all ranks, for work that differs among them: gradients are summed."""
    return tensor if comm.size == 1 else _CopyTo.apply(tensor, comm)  # type: ignore[no-untyped-call]


@uncompiled
def reduce_from(tensor: Tensor, comm: Communicator) -> Tensor:
    """The sum of all ranks' tensors of one shape, on all of them."""
    return tensor if comm.size == 1 else _ReduceFrom.apply(tensor, comm)  # type: ignore[no-untyped-call]


@uncompiled
def scatter_to(tensor: Tensor, comm: Communicator, dim: int = -1) -> Tensor:
    """This rank's part, along a dim, of a tensor that is the same on all ranks.

    The parts are as `hpcpar.partition.counts` cuts; errors: OperationError for a dim that is not there.
    """
    dim = checked_dim(tensor, dim)
    return tensor if comm.size == 1 else _ScatterTo.apply(tensor, comm, dim)  # type: ignore[no-untyped-call]


@uncompiled
def gather_from(
    shard: Tensor,
    comm: Communicator,
    dim: int = -1,
    gradients: Gradients = "same",
    *,
    length: int | None = None,
) -> Tensor:
    """All ranks' shards one after the other along a dim, on every rank.

    gradients   "same": what follows is the same on all ranks. "partial": each does something else with the
                result (a column-parallel layer, under sequence parallelism), and its gradients are summed
    length      of the result along `dim`, for shards as `hpcpar.partition.counts` cuts; None: all shards
                are as long as this one
    errors      OperationError for a dim that is not there; MismatchError for a shard of another length
    """
    if gradients not in ("same", "partial"):
        raise OperationError(f'gather_from: gradients={gradients!r}; give "same" or "partial"')
    dim = checked_dim(shard, dim)
    if comm.size == 1:
        return shard
    return _GatherFrom.apply(shard, comm, dim, gradients, length)  # type: ignore[no-any-return, no-untyped-call]


@uncompiled
def reduce_scatter_to(tensor: Tensor, comm: Communicator, dim: int = -1) -> Tensor:
    """This rank's part, along a dim, of the sum of all ranks' tensors."""
    dim = checked_dim(tensor, dim)
    return tensor if comm.size == 1 else _ReduceScatterTo.apply(tensor, comm, dim)  # type: ignore[no-untyped-call]


@uncompiled
def all_to_all(tensor: Tensor, comm: Communicator, split_dim: int, join_dim: int) -> Tensor:
    """Rank r's part of each rank's tensor along `split_dim`, joined along `join_dim` in rank order.

    [B, S/p, A, D] -> [B, S, A/p, D] by split_dim=2, join_dim=1
    errors   MismatchError where `split_dim` does not divide; OperationError for dims that make no sense
    """
    split_dim, join_dim = checked_dim(tensor, split_dim), checked_dim(tensor, join_dim)
    return _AllToAll.apply(tensor, comm, split_dim, join_dim)  # type: ignore[no-any-return, no-untyped-call]


class _CopyTo(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, comm: Communicator) -> Tensor:
        ctx.comm = comm
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return reduce_from(gradient, ctx.comm), None


class _ReduceFrom(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, comm: Communicator) -> Tensor:
        ctx.comm = comm
        return summed(tensor, comm)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return copy_to(gradient, ctx.comm), None


class _ScatterTo(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, comm: Communicator, dim: int) -> Tensor:
        ctx.comm, ctx.dim, ctx.length = comm, dim, tensor.shape[dim]
        return own_part(tensor, comm, dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gather_from(gradient, ctx.comm, ctx.dim, length=ctx.length), None, None


class _GatherFrom(Function):
    @staticmethod
    def forward(
        ctx: Any, shard: Tensor, comm: Communicator, dim: int, gradients: Gradients, length: int | None
    ) -> Tensor:
        ctx.comm, ctx.dim, ctx.gradients = comm, dim, gradients
        return no_view(start_gather(shard, comm, dim, length=length).wait())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        back = scatter_to if ctx.gradients == "same" else reduce_scatter_to
        return back(gradient, ctx.comm, ctx.dim), None, None, None, None


class _ReduceScatterTo(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, comm: Communicator, dim: int) -> Tensor:
        ctx.comm, ctx.dim, ctx.length = comm, dim, tensor.shape[dim]
        return no_view(start_sum_scatter(tensor, comm, dim).wait())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gather_from(gradient, ctx.comm, ctx.dim, "partial", length=ctx.length), None, None


class _AllToAll(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, comm: Communicator, split_dim: int, join_dim: int) -> Tensor:
        ctx.comm, ctx.split_dim, ctx.join_dim = comm, split_dim, join_dim
        return exchanged(tensor, comm, split_dim, join_dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return all_to_all(gradient, ctx.comm, ctx.join_dim, ctx.split_dim), None, None, None
