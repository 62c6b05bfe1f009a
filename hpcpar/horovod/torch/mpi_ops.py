"""Horovod's collectives of torch tensors, in their synchronous, asynchronous and in-place forms.

*   Operations are matched by `name`; without one, by the order of calls.
*   Several threads may ask and wait at once, under names, also beside a DistributedOptimizer's steps.
*   `x_async` returns a handle for `poll` and `synchronize`; `x(...)` is both, and knows its gradient.
*   `process_set` is a ProcessSet; roots of broadcasts are ranks of the whole job.
*   Errors in this rank's own arguments are raised by the call. What ranks do not agree on is a
    HorovodInternalError on every one of them, at `synchronize`.
"""

from __future__ import annotations

import itertools
import math
import operator
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hpcpar.horovod import adasum, basics
from hpcpar.horovod.basics import (
    HorovodBasics,
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    rocm_built,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
)
from hpcpar.horovod.engine import Engine
from hpcpar.horovod.exceptions import HorovodInternalError
from hpcpar.horovod.negotiation import Request
from hpcpar.horovod.process_sets import (
    ProcessSet,
    add_process_set,
    global_process_set,
    remove_process_set,
)
from hpcpar.horovod.responses import Ticket
from hpcpar.horovod.torch.compression import Compression
from hpcpar.horovod.util import get_average_backwards_compatibility_fun, num_rank_is_power_2
from hpcpar.uncompiled import uncompiled

__all__ = [
    "Adasum",
    "Average",
    "Max",
    "Min",
    "Product",
    "Sum",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "start_timeline",
    "stop_timeline",
    "synchronize",
]

_basics = HorovodBasics()
Average, Sum, Adasum, Min, Max, Product = range(6)
handle_average_backwards_compatibility = get_average_backwards_compatibility_fun(_basics)
_OPS = ("average", "sum", "adasum", "min", "max", "product")
_REDUCIBLE = {
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
}
_MOVABLE = _REDUCIBLE | {torch.bool, torch.complex64, torch.complex128}
_DTYPE_NAMES = {dtype: str(dtype).removeprefix("torch.") for dtype in _MOVABLE}

MOST_ASKED = 8192
"""All-reduces by name that are remembered; then all are forgotten."""

_How = tuple["int | None", tuple[float, float], bool]
"""Of an all-reduce: operation, factors, whether in place."""

_Asked = tuple["weakref.ref[Tensor]", _How, torch.dtype, Request]
"""What is remembered of one: its tensor, how it was asked for, its element type, what the ranks heard."""

_Outstanding = tuple[Engine, list[Ticket], Callable[[list[Any]], Any], "list[Tensor] | None"]
_outstanding: dict[int, _Outstanding] = {}
_numbers = itertools.count()


def _one(results: list[Any]) -> Any:
    return results[0]


def _all(results: list[Any]) -> Any:
    return results


@uncompiled
def poll(handle: int) -> bool:
    """Whether an operation is done, so that `synchronize` will not wait. Makes progress, and never blocks.

    errors   ValueError for a handle that is unknown or was synchronized before
    """
    found = _outstanding.get(handle)
    if found is None:
        raise ValueError(f"handle {handle!r} was not created, or has been synchronized")
    engine, tickets, *_ = found
    done = [engine.poll(ticket) for ticket in tickets]
    return all(done)


@uncompiled
def synchronize(handle: int) -> Any:
    """Wait for an operation; its result. None for a handle that is unknown or was synchronized before.

    errors   HorovodInternalError: ranks that disagree, on all of them; a lost peer; a stall; a shutdown.
             ValueError: what cannot be done although all ranks ask for the same
    """
    found = _outstanding.pop(handle, None)
    if found is None:
        return None
    engine, tickets, shape, given = found
    results, errors = [], []
    for ticket in tickets:
        try:
            results.append(engine.wait(ticket))
        except (HorovodInternalError, ValueError) as error:  # the others of its group are waited for as well
            errors.append(error)
    if errors:
        raise errors[0]
    return shape(results if given is None else given)


@uncompiled
def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begin an all-reduce into a new tensor; returns a handle.

    average   old way to say op=Average or op=Sum
    op        Average (the default), Sum, Adasum, Min, Max, Product. An average divides exactly, unlike a
              product by the reciprocal; integers are summed in 32 bits or more and truncated
    prescale_factor, postscale_factor   what is multiplied before and after; integers in float64, truncated
    errors    ValueError for types that cannot be reduced (by Adasum: all but real floating point), factors
              that make no sense, and a name that is under way
              NotImplementedError for Adasum on a number of ranks that is no power of two, or a process set
    """
    scaling = (prescale_factor, postscale_factor)
    return _allreduce([tensor], average, name, op, scaling, process_set, _NEW, _one)


@uncompiled
def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begin an all-reduce in place; returns a handle, whose result is `tensor`."""
    scaling = (prescale_factor, postscale_factor)
    return _allreduce([tensor], average, name, op, scaling, process_set, _IN_PLACE, _one)


@uncompiled
def grouped_allreduce_async(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begin all-reduces that are done together; returns one handle, whose result is a list."""
    scaling = (prescale_factor, postscale_factor)
    return _allreduce(tensors, average, name, op, scaling, process_set, _NEW, _all)


@uncompiled
def grouped_allreduce_async_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begin all-reduces in place that are done together; returns one handle, whose result is a list."""
    scaling = (prescale_factor, postscale_factor)
    return _allreduce(tensors, average, name, op, scaling, process_set, _IN_PLACE, _all)


@uncompiled
def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """All-reduce into a new tensor; see `allreduce_async`. Its gradient is an all-reduce of the gradients.

    compression   how it travels: Compression.none, .fp16, .bf16, or a Compressor of your own
    """
    packed, context = compression.compress(tensor)
    arguments = (average, name, op, prescale_factor, postscale_factor, process_set)
    if packed is not tensor:
        arguments = _held(packed, tensor, arguments)
    if packed.requires_grad and torch.is_grad_enabled():
        reduced = HorovodAllreduce.apply(packed, *arguments)  # type: ignore[no-untyped-call]
    else:
        reduced = synchronize(allreduce_async(packed, *arguments))
    result: Tensor = compression.decompress(reduced, context)
    return result


@uncompiled
def allreduce_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """All-reduce in place, without a gradient."""
    arguments = (average, name, op, prescale_factor, postscale_factor, process_set)
    result: Tensor = synchronize(allreduce_async_(tensor, *arguments))
    return result


@uncompiled
def grouped_allreduce(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """All-reduces that are done together, into new tensors; see `allreduce`."""
    tensors = list(tensors)
    pairs = [compression.compress(tensor) for tensor in tensors]
    packed = [tensor for tensor, _ in pairs]
    arguments = (average, name, op, prescale_factor, postscale_factor, process_set)
    kinds = {
        (narrow.dtype, given.dtype is torch.float16) for narrow, given in zip(packed, tensors, strict=True)
    }
    if len(kinds) == 1:
        arguments = _held(packed[0], tensors[0], arguments)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in packed):
        reduced = HorovodGroupedAllreduce.apply(*arguments, *packed)  # type: ignore[no-untyped-call]
    else:
        reduced = synchronize(grouped_allreduce_async(packed, *arguments))
    return [
        compression.decompress(tensor, context) for tensor, (_, context) in zip(reduced, pairs, strict=True)
    ]


@uncompiled
def grouped_allreduce_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """All-reduces in place that are done together."""
    arguments = (average, name, op, prescale_factor, postscale_factor, process_set)
    result: list[Tensor] = synchronize(grouped_allreduce_async_(tensors, *arguments))
    return result


@uncompiled
def sparse_allreduce_async(
    tensor: Tensor,
    name: str | None = None,
    op: int | None = Average,
    process_set: ProcessSet = global_process_set,
) -> Callable[[], Tensor]:
    """Begin a sum or average of sparse tensors; returns a function that waits for the result.

    Two all-gathers, of the indices and of the values; what several ranks hold is added up when the
    result is coalesced.
    errors   ValueError for other operations; HorovodInternalError, by the function that waits, on every rank
             where shapes differ
    """
    if op not in (Average, Sum):
        raise ValueError(f"a sparse all-reduce sums or averages; op {op} was asked for")
    tensor = tensor.coalesce() if not tensor.is_coalesced() else tensor
    engine = _engine_of(process_set)
    _require_type("a sparse all-reduce", tensor.values(), _MOVABLE)
    chosen = name if name is not None else engine.unnamed("sparse_allreduce")[0]
    content = f"a sparse tensor of shape {list(tensor.shape)}"
    parts = {"indices": tensor.indices().t().contiguous(), "values": tensor.values()}
    tickets = [
        _ticket(engine, "allgather", part, f"{chosen}.{which}", _NEW, content=content)
        for which, part in parts.items()
    ]
    handle = _submit(engine, tickets, _all)

    def wait() -> Tensor:
        positions, found = synchronize(handle)
        if op == Average:
            found = found / process_set.size()
        return torch.sparse_coo_tensor(positions.t(), found, tensor.shape, check_invariants=False)

    return wait


@uncompiled
def allgather_async(
    tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Begin to gather the rows of all ranks' tensors, whose first dimensions may differ."""
    return _gathering("allgather", [tensor], name, process_set, _one)


@uncompiled
def grouped_allgather_async(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Begin all-gathers that are done together; returns one handle, whose result is a list."""
    return _gathering("allgather", tensors, name, process_set, _all)


@uncompiled
def allgather(
    tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """The rows of all ranks' tensors, one rank's after the other's.

    Its gradient is the average over the ranks of the gradients of this rank's rows (Horovod's convention).
    errors   ValueError for a tensor without dimensions or of a type that cannot be sent
    """
    if tensor.requires_grad and torch.is_grad_enabled():
        result: Tensor = HorovodAllgather.apply(tensor, name, process_set)  # type: ignore[no-untyped-call]
        return result
    found: Tensor = synchronize(allgather_async(tensor, name, process_set))
    return found


@uncompiled
def grouped_allgather(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Tensor]:
    """All-gathers that are done together."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return list(HorovodGroupedAllgather.apply(name, process_set, *tensors))  # type: ignore[no-untyped-call]
    found: list[Tensor] = synchronize(grouped_allgather_async(tensors, name, process_set))
    return found


@uncompiled
def broadcast_async(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begin to send the root's tensor to all ranks, into a new tensor. root_rank: of the whole job."""
    return _broadcast(tensor, root_rank, name, process_set, _NEW)


@uncompiled
def broadcast_async_(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begin to send the root's tensor to all ranks, in place."""
    return _broadcast(tensor, root_rank, name, process_set, _IN_PLACE)


@uncompiled
def broadcast(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """The root's tensor, on every rank.

    Its gradient is the average of the gradients on the root, and zero elsewhere (Horovod's convention).
    errors   ValueError for a root that is not in the process set
    """
    if tensor.requires_grad and torch.is_grad_enabled():
        result: Tensor = HorovodBroadcast.apply(tensor, root_rank, name, process_set)  # type: ignore[no-untyped-call]
        return result
    found: Tensor = synchronize(broadcast_async(tensor, root_rank, name, process_set))
    return found


@uncompiled
def broadcast_(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """The root's tensor, in place, without a gradient."""
    result: Tensor = synchronize(broadcast_async_(tensor, root_rank, name, process_set))
    return result


@uncompiled
def alltoall_async(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begin to send rows to every rank; the handle's result is (rows received, how many from each rank).

    splits   rows for each rank, int32 or int64; None: equal pieces
    errors   ValueError for splits of another type or number, or more rows than there are
    """
    engine = _engine_of(process_set)
    _require_type("an alltoall", tensor, _MOVABLE)
    rows = _splits_of(tensor, splits, engine.size)
    ticket = _ticket(engine, "alltoall", tensor, name, _NEW)
    ticket.splits = rows
    return _submit(engine, [ticket], _one)


@uncompiled
def alltoall(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Rows for every rank against rows from every rank; see `alltoall_async`.

    returns   the rows received, in the order of the ranks; and, where splits are given, how many came
              from each (int32). Its gradient goes the way back
    """
    if tensor.requires_grad and torch.is_grad_enabled():
        output, received = HorovodAlltoall.apply(tensor, splits, name, process_set)  # type: ignore[no-untyped-call]
    else:
        output, received = synchronize(alltoall_async(tensor, splits, name, process_set))
    return output if splits is None else (output, received)


@uncompiled
def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: int | None = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Begin a reduce-scatter: every rank gets its rows of the reduction.

    op        Average or Sum
    result    rows, as equal as can be; the first ranks have one more
    errors    ValueError for a tensor without dimensions, HorovodInternalError for another op
    """
    scaling = (prescale_factor, postscale_factor)
    return _reducescatter([tensor], name, op, process_set, scaling, _one)


@uncompiled
def grouped_reducescatter_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    op: int | None = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Begin reduce-scatters that are done together; returns one handle, whose result is a list."""
    scaling = (prescale_factor, postscale_factor)
    return _reducescatter(tensors, name, op, process_set, scaling, _all)


@uncompiled
def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int | None = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """This rank's rows of the reduction; see `reducescatter_async`. Its gradient is an all-gather."""
    packed, context = compression.compress(tensor)
    arguments = (name, op, process_set, prescale_factor, postscale_factor)
    if packed.requires_grad and torch.is_grad_enabled():
        reduced = HorovodReducescatter.apply(packed, *arguments)  # type: ignore[no-untyped-call]
    else:
        reduced = synchronize(reducescatter_async(packed, *arguments))
    result: Tensor = compression.decompress(reduced, context)
    return result


@uncompiled
def grouped_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None = None,
    compression: Any = Compression.none,
    op: int | None = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """Reduce-scatters that are done together."""
    pairs = [compression.compress(tensor) for tensor in tensors]
    packed = [tensor for tensor, _ in pairs]
    arguments = (name, op, process_set, prescale_factor, postscale_factor)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in packed):
        reduced = HorovodGroupedReducescatter.apply(*arguments, *packed)  # type: ignore[no-untyped-call]
    else:
        reduced = synchronize(grouped_reducescatter_async(packed, *arguments))
    return [
        compression.decompress(tensor, context) for tensor, (_, context) in zip(reduced, pairs, strict=True)
    ]


@uncompiled
def join(device: int = -1) -> int:
    """This rank has no more data: zeros take its place in the others' sums until all ranks have joined.

    device    for compatibility; the zeros are made where they are needed
    returns   the rank that joined last, the same on every rank
    """
    return _engine_of(global_process_set).join()


@uncompiled
def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until all ranks of the process set have come here."""
    engine = _engine_of(process_set)
    name, serial = engine.unnamed("barrier")
    ticket = Ticket(Request(name, "barrier", serial=serial))
    engine.submit([ticket])
    engine.wait(ticket)


_NEW, _IN_PLACE = False, True


def _allreduce(
    tensors: Sequence[Tensor],
    average: bool | None,
    name: str | None,
    op: int | None,
    scaling: tuple[float, float],
    process_set: ProcessSet,
    in_place: bool,
    shape: Callable[[list[Any]], Any],
) -> int:
    engine = _engine_of(process_set)
    given = list(tensors) if in_place else None
    is_group = shape is _all
    how = op, scaling, in_place
    # Mostly the same tensor comes under the same name in every step, and need not be looked at again.
    is_lasting = not is_group and average is None
    known = _asked_before(engine, tensors[0], name, how) if is_lasting else None
    if known is not None:
        return _submit(engine, [_ticket_for(known, tensors[0], in_place)], shape, given)
    chosen = _op(op, average)
    by_adasum = chosen == "adasum"
    what, reducible = ("an Adasum", set(adasum.DTYPES)) if by_adasum else ("an all-reduce", _REDUCIBLE)
    for tensor in tensors:
        _require_type(what, tensor, reducible)
        if in_place:
            _require_own_elements(what, tensor)
    if by_adasum:
        require_adasum(process_set)
    factors = _factors(scaling, tensors)
    tickets = _tickets(
        engine, "allreduce", tensors, name, in_place, is_group=is_group, op=chosen, scaling=factors
    )
    if is_lasting:
        _remember(engine, tensors[0], name, how, tickets[0].request)
    return _submit(engine, tickets, shape, given)


def _asked_before(engine: Engine, tensor: Tensor, name: str | None, how: _How) -> Request | None:
    """What the ranks were asked for this tensor under this name, if all is as it was then."""
    found: _Asked | None = None if name is None else engine.asked.get(name)
    if found is None:
        return None
    tensor_then, how_then, dtype, request = found
    if (
        tensor_then() is tensor
        and how == how_then
        and tensor.dtype is dtype
        and tensor.shape == request.shape
        and tensor.is_cuda == (request.device == "GPU")
        and tensor.is_contiguous()
    ):
        return request
    return None


def _remember(engine: Engine, tensor: Tensor, name: str | None, how: _How, request: Request) -> None:
    if not isinstance(name, str):
        return
    if len(engine.asked) >= MOST_ASKED:
        engine.asked.clear()
    engine.asked[name] = weakref.ref(tensor), how, tensor.dtype, request


def _gathering(
    kind: str,
    tensors: Sequence[Tensor],
    name: str | None,
    process_set: ProcessSet,
    shape: Callable[[list[Any]], Any],
) -> int:
    engine = _engine_of(process_set)
    for tensor in tensors:
        _require_type(f"an {kind}", tensor, _MOVABLE)
    return _submit(engine, _tickets(engine, kind, tensors, name, _NEW, is_group=shape is _all), shape)


def _reducescatter(
    tensors: Sequence[Tensor],
    name: str | None,
    op: int | None,
    process_set: ProcessSet,
    scaling: tuple[float, float],
    shape: Callable[[list[Any]], Any],
) -> int:
    engine = _engine_of(process_set)
    chosen = _op(op, None)
    if chosen not in ("average", "sum"):
        raise HorovodInternalError(f"a reducescatter with op {chosen} was asked for; it does Average and Sum")
    for tensor in tensors:
        _require_type("a reducescatter", tensor, _REDUCIBLE)
    factors = _factors(scaling, tensors)
    is_group = shape is _all
    tickets = _tickets(
        engine, "reducescatter", tensors, name, _NEW, is_group=is_group, op=chosen, scaling=factors
    )
    return _submit(engine, tickets, shape)


def _broadcast(
    tensor: Tensor, root_rank: int, name: str | None, process_set: ProcessSet, in_place: bool
) -> int:
    engine = _engine_of(process_set)
    ranks = process_set.ranks or []
    if root_rank not in ranks:
        raise ValueError(f"root_rank={root_rank} is not among the ranks {ranks} of the process set")
    _require_type("a broadcast", tensor, _MOVABLE)
    if in_place:
        _require_own_elements("a broadcast", tensor)
    ticket = _ticket(engine, "broadcast", tensor, name, in_place, root=ranks.index(root_rank))
    return _submit(engine, [ticket], _one, [tensor] if in_place else None)


def _tickets(
    engine: Engine,
    kind: str,
    tensors: Sequence[Tensor],
    name: str | None,
    in_place: bool,
    *,
    is_group: bool,
    op: str = "",
    scaling: tuple[float, float] = (1.0, 1.0),
) -> list[Ticket]:
    if not is_group:
        (tensor,) = tensors
        return [_ticket(engine, kind, tensor, name, in_place, op, scaling=scaling)]
    if not tensors:
        raise ValueError(f"a grouped {kind} of no tensors was asked for; give at least one")
    devices = {"GPU" if tensor.is_cuda else "CPU" for tensor in tensors}
    if len(devices) > 1:
        raise HorovodInternalError(
            f"a grouped {kind} of tensors on CPU and GPU was asked for; group those of one kind of device"
        )
    count = len(tensors)
    full, serial = engine.unnamed(kind) if name is None else (f"{kind}.{name}", 0)
    base = full.removeprefix(f"{kind}.")
    group = (full, count)
    names = [f"{base}_{number}of{count}" for number in range(1, count + 1)]
    return [
        _ticket(engine, kind, tensor, own, in_place, op, scaling=scaling, group=group, serial=serial)
        for tensor, own in zip(tensors, names, strict=True)
    ]


def _ticket(
    engine: Engine,
    kind: str,
    tensor: Tensor,
    name: str | None,
    in_place: bool,
    op: str = "",
    root: int = -1,
    scaling: tuple[float, float] = (1.0, 1.0),
    group: tuple[str, int] | None = None,
    serial: int = 0,
    content: str = "",
) -> Ticket:
    if name is None:
        full, serial = engine.unnamed(kind)
    else:
        full = f"{kind}.{name}"
    device = "GPU" if tensor.is_cuda else "CPU"
    before, after = scaling
    shape = tuple(tensor.shape)
    # By position: by name it takes three times as long.
    request = Request(
        full, kind, _DTYPE_NAMES[tensor.dtype], shape, device, op, root, before, after, group, content, serial
    )
    return _ticket_for(request, tensor, in_place)


def _ticket_for(request: Request, tensor: Tensor, in_place: bool) -> Ticket:
    if in_place or tensor.requires_grad:
        tensor = tensor.detach()
    return Ticket(request, tensor, tensor if in_place else None)


def _submit(
    engine: Engine,
    tickets: list[Ticket],
    shape: Callable[[list[Any]], Any],
    given: list[Tensor] | None = None,
) -> int:
    """given   what the caller gets back of operations in place: his tensors, not our views of them"""
    engine.submit(tickets)
    handle = next(_numbers)
    _outstanding[handle] = engine, tickets, shape, given
    return handle


def _engine_of(process_set: ProcessSet) -> Engine:
    engine = process_set._engine
    if engine is not None:
        return engine
    if not basics.is_initialized():
        raise HorovodInternalError("Horovod has not been initialized; call hvd.init() first.")
    if process_set.process_set_id is None:
        raise ValueError(
            f"{process_set} is not registered; use hvd.add_process_set or hvd.init(process_sets=…)"
        )
    raise ValueError(f"rank {rank()} does not belong to {process_set}, and cannot communicate in it")


def _op(op: int | None, average: bool | None) -> str:
    if average is None and type(op) is int and 0 <= op < len(_OPS):
        return _OPS[op]
    if average is not None:
        if op is not None:
            raise ValueError("both average and op were given; op says it all")
        warnings.warn("average is deprecated; give op=Average or op=Sum", DeprecationWarning, stacklevel=4)
        op = Average if average else Sum
    if op is None:
        op = Average
    if op not in range(len(_OPS)):
        raise ValueError(f"op {op!r} is not one of Average, Sum, Adasum, Min, Max, Product")
    return _OPS[op]


def require_adasum(process_set: ProcessSet) -> None:
    """Refuse Adasum where it is not defined: NotImplementedError."""
    if process_set is not global_process_set:
        raise NotImplementedError("Adasum is defined over all ranks here; it was asked for on a process set")
    if not num_rank_is_power_2(size()):
        raise NotImplementedError(
            f"Adasum needs a number of ranks that is a power of two; there are {size()}"
        )


def _require_type(what: str, tensor: Tensor, known: set[torch.dtype]) -> None:
    if tensor.dtype not in known:
        raise ValueError(
            f"{what} of {tensor.dtype} was asked for. Tensor type {tensor.type()} is not supported"
        )
    if tensor.layout is not torch.strided:
        raise ValueError(f"{what} of a {tensor.layout} tensor was asked for; use sparse_allreduce_async")
    if tensor.is_meta:
        raise ValueError(
            f"{what} of a tensor on the meta device was asked for, which has no values; give it memory "
            f"before, as by module.to_empty(device='cpu')"
        )


def _factors(scaling: tuple[float, float], tensors: Sequence[Tensor]) -> tuple[float, float]:
    """Both as numbers; ValueError for what is none, and for one that is not finite before integers."""
    before, after = float(scaling[0]), float(scaling[1])
    if not (math.isfinite(before) and math.isfinite(after)):
        for tensor in tensors:
            if not tensor.is_floating_point():
                raise ValueError(
                    f"prescale_factor={before} and postscale_factor={after} were given for {tensor.dtype}; "
                    f"integers take finite factors"
                )
    return before, after


def _require_own_elements(what: str, tensor: Tensor) -> None:
    """Refuse a result that would be written to one place several times."""
    if tensor.is_contiguous():
        return
    strides = tensor.stride()
    if 0 not in strides or tensor.numel() < 2:
        return
    if any(step == 0 and length > 1 for step, length in zip(strides, tensor.shape, strict=True)):
        raise ValueError(
            f"{what} in place of an expanded tensor was asked for (shape {list(tensor.shape)}, strides "
            f"{list(strides)}), whose elements share memory; give its clone()"
        )


def _splits_of(tensor: Tensor, splits: Tensor | Sequence[int] | None, size: int) -> list[int]:
    if not tensor.dim():
        return []  # which is told on every rank
    length = tensor.shape[0]
    if splits is None:
        if length % size:
            raise ValueError(
                f"an alltoall of {length} rows over {size} ranks: they cannot be split evenly; give splits"
            )
        return [length // size] * size
    if isinstance(splits, Tensor) and splits.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"splits are {splits.dtype}; give whole numbers as torch.int32")
    try:
        rows = [operator.index(n) for n in (splits.tolist() if isinstance(splits, Tensor) else splits)]
    except TypeError as error:
        raise ValueError(
            f"splits {splits!r} are no whole numbers; give rows for each of {size} ranks"
        ) from error
    if len(rows) != size or any(count < 0 for count in rows):
        raise ValueError(f"splits {rows} do not give a number of rows for each of {size} ranks")
    if sum(rows) > length:
        raise ValueError(f"splits {rows} ask for {sum(rows)} rows, but the tensor has {length}")
    return rows


_Arguments = tuple["bool | None", "str | None", "int | None", float, float, ProcessSet]


def _held(packed: Tensor, given: Tensor, arguments: _Arguments) -> _Arguments:
    """An average of what was narrowed to float16 divides first: a sum may leave its range."""
    average, name, op, before, after, process_set = arguments
    is_average = op == Average or (op is None and average is not False)
    if packed.dtype is not torch.float16 or given.dtype is torch.float16 or not is_average:
        return arguments
    return None, name, Sum, before / (process_set.size() or 1), after, process_set


class HorovodAllreduce(torch.autograd.Function):
    """Horovod's convention: the gradient is all-reduced by the same operation and factors."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, *arguments: Any) -> Tensor:
        ctx.arguments = arguments
        result: Tensor = synchronize(allreduce_async(tensor, *arguments))
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        average, _, op, prescale, postscale, process_set = ctx.arguments
        reduced = allreduce(
            gradient,
            average,
            op=op,
            prescale_factor=prescale,
            postscale_factor=postscale,
            process_set=process_set,
        )
        return reduced, None, None, None, None, None, None


class HorovodGroupedAllreduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor, ...]:
        ctx.arguments, tensors = given[:6], given[6:]
        return tuple(synchronize(grouped_allreduce_async(tensors, *ctx.arguments)))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        average, _, op, prescale, postscale, process_set = ctx.arguments
        reduced = grouped_allreduce(
            gradients,
            average,
            op=op,
            prescale_factor=prescale,
            postscale_factor=postscale,
            process_set=process_set,
        )
        return (*(None,) * 6, *reduced)


class HorovodAllgather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, name: str | None, process_set: ProcessSet) -> Tensor:
        result: Tensor = synchronize(allgather_async(tensor, name, process_set))
        ctx.rows, ctx.process_set = tensor.shape[0], process_set
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _own_rows(gradient, ctx.rows, ctx.process_set), None, None


class HorovodGroupedAllgather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: str | None, process_set: ProcessSet, *tensors: Tensor) -> tuple[Tensor, ...]:
        results = tuple(synchronize(grouped_allgather_async(tensors, name, process_set)))
        ctx.rows, ctx.process_set = [tensor.shape[0] for tensor in tensors], process_set
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        pairs = zip(gradients, ctx.rows, strict=True)
        return None, None, *(_own_rows(gradient, rows, ctx.process_set) for gradient, rows in pairs)


def _own_rows(gradient: Tensor, rows: int, process_set: ProcessSet) -> Tensor:
    """The average over the ranks of what belongs to the rows that this rank gave."""
    reduced = _averaged(gradient, process_set)
    everyones: list[int] = allgather(torch.tensor([rows]), process_set=process_set).tolist()
    own = process_set.rank()
    assert own is not None, "it took part in the forward"
    return reduced.narrow(0, sum(everyones[:own]), rows)


def _averaged(gradient: Tensor, process_set: ProcessSet) -> Tensor:
    """Its average over the ranks; of a complex one, which moves but is no all-reduce's, by its parts."""
    if gradient.is_complex():
        parts = torch.view_as_real(gradient.resolve_conj())
        return torch.view_as_complex(_averaged(parts, process_set))
    return allreduce(gradient, op=Average, process_set=process_set)


class HorovodBroadcast(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, root_rank: int, name: str | None, process_set: ProcessSet
    ) -> Tensor:
        ctx.root_rank, ctx.process_set = root_rank, process_set
        result: Tensor = synchronize(broadcast_async(tensor, root_rank, name, process_set))
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        reduced = _averaged(gradient, ctx.process_set)
        if rank() != ctx.root_rank:
            # Zeros with a history: a backward through this one is collective, too.
            reduced = reduced.masked_fill(torch.ones_like(reduced, dtype=torch.bool), 0)
        return reduced, None, None, None


class HorovodAlltoall(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, splits: Any, name: str | None, process_set: ProcessSet) -> Any:
        output, received = synchronize(alltoall_async(tensor, splits, name, process_set))
        ctx.received, ctx.process_set, ctx.rows = received, process_set, tensor.shape[0]
        ctx.mark_non_differentiable(received)
        return output, received

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> Any:
        back, _ = alltoall(gradient, ctx.received, process_set=ctx.process_set)
        if back.shape[0] < ctx.rows:  # rows that were sent to nobody
            back = torch.cat([back, back.new_zeros((ctx.rows - back.shape[0], *back.shape[1:]))])
        return back, None, None, None


class HorovodReducescatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, *arguments: Any) -> Tensor:
        ctx.arguments = arguments
        result: Tensor = synchronize(reducescatter_async(tensor, *arguments))
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _scattered_back(ctx.arguments, gradient), None, None, None, None, None


class HorovodGroupedReducescatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor, ...]:
        ctx.arguments, tensors = given[:5], given[5:]
        return tuple(synchronize(grouped_reducescatter_async(tensors, *ctx.arguments)))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        back = (_scattered_back(ctx.arguments, gradient) for gradient in gradients)
        return (*(None,) * 5, *back)


def _scattered_back(arguments: Any, gradient: Tensor) -> Tensor:
    """Horovod's convention: the gradients of all ranks' rows; of a sum, times the number of ranks."""
    _, op, process_set, prescale, postscale = arguments
    factor = prescale * postscale * (process_set.size() if op == Sum else 1)
    return allgather(gradient * factor if factor != 1 else gradient, process_set=process_set)
