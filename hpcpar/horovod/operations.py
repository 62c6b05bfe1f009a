"""Horovod's operations: coroutines that start the collectives of ready requests.

A coroutine yields a handle to wait for before its next collective, or None while the fusion buffer is full.
It returns its last handle and a function that finishes the results once that handle is complete. All ranks
run the same coroutines in the same order, each after the one before it has started its last collective. So
they start the collectives of one communicator in the same order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hpcpar import partition
from hpcpar.horovod.adasum import adasum
from hpcpar.horovod.fusion import FusedLayout, FusionBuffer, copy_all, divide, dtype_called, scale
from hpcpar.horovod.negotiation import TensorRequest

if TYPE_CHECKING:
    from hpcpar.comm import Communicator, Handle

MEMCPY_IN, MEMCPY_OUT = "MEMCPY_IN_FUSION_BUFFER", "MEMCPY_OUT_FUSION_BUFFER"

Coroutine = Generator["Handle | None", None, "tuple[Handle | None, Callable[[], None]]"]
MakeCoroutine = Callable[["EngineContext", "Sequence[ReadyOp]"], Coroutine]


@dataclass(slots=True, eq=False)
class Ticket:
    """An operation that this rank has asked for, until its result is taken.

    tensor     what goes in, without its history
    output     what the result is written to; None: the operation allocates it
    splits     of an all-to-all: rows for each rank
    on_ready   called instead of a collective, once all ranks have asked
    made, finished   on a GPU: events after which its tensor is there, and its result
    result     once it is done
    error      why it failed
    asked_s    when it was submitted, on this rank's clock
    """

    request: TensorRequest
    tensor: Tensor | None = None
    output: Tensor | None = None
    splits: Sequence[int] = ()
    on_ready: Callable[[], None] | None = None
    made: Any = None
    finished: Any = None
    done: bool = False
    result: Any = None
    error: BaseException | None = None
    asked_s: float = 0.0


class ReadyOp(NamedTuple):
    """A ready operation: its request, and this rank's ticket; None on a rank that has joined."""

    request: TensorRequest
    ticket: Ticket | None

    @property
    def given(self) -> Ticket:
        """This rank's ticket, for operations that ranks without data cannot take part in."""
        assert self.ticket is not None, "only all-reduces are carried out for ranks that have joined"
        return self.ticket


@dataclass(frozen=True)
class EngineContext:
    """Communicator, buffers and algorithms that operations use.

    buffer      for tensors that travel together from host memory
    gpu_buffer  returns the buffer on this rank's GPU; allocated at the first call
    show        records what is being done with these operations from now on
    allreduce_algorithm, allgather_algorithm   of the catalogue; None: chosen by size
    """

    comm: Communicator
    buffer: FusionBuffer
    gpu_buffer: Callable[[], FusionBuffer]
    show: Callable[[Sequence[ReadyOp], str], None]
    allreduce_algorithm: str | None = None
    allgather_algorithm: str | None = None

    def buffer_for(self, request: TensorRequest) -> FusionBuffer:
        """Return the buffer in the memory that the request's tensors are sent from."""
        return self.gpu_buffer() if self._moves_on_gpu(request) else self.buffer

    def zeros(self, request: TensorRequest) -> Tensor:
        """Make the zeros that a rank that has joined brings, on the others' kind of device."""
        device = "cuda" if self._moves_on_gpu(request) else "cpu"
        return torch.zeros(request.shape, dtype=travels_as(request), device=device)

    def _moves_on_gpu(self, request: TensorRequest) -> bool:
        return request.device == "GPU" and self.comm.shares_devices


_NARROW = {"uint8", "int8", "int16"}


def travels_as(request: TensorRequest) -> torch.dtype:
    """Return the element type to send: averages of narrow integers are summed in 32 bits."""
    is_narrow = request.op == "average" and request.dtype in _NARROW
    return torch.int32 if is_narrow else dtype_called(request.dtype)


def fused_allreduce(context: EngineContext, items: Sequence[ReadyOp]) -> Coroutine:
    """All-reduce tensors of one type and operation in one message, through the fusion buffer."""
    layout = yield from _take(context, items)
    context.show(items, MEMCPY_IN)
    _pack(layout, items)
    context.show(items, "MPI_ALLREDUCE")
    op = _op_of(items[0].request)
    handle = context.comm.start_allreduce(layout.flat, op, algorithm=context.allreduce_algorithm)

    def finish() -> None:
        context.show(items, MEMCPY_OUT)
        _unpack(context, layout, items)

    return handle, finish


def allreduce_blocking(context: EngineContext, item: ReadyOp) -> None:
    """All-reduce a small tensor through the fusion buffer, which nothing else uses."""
    request = item.request
    layout = context.buffer_for(request).take(travels_as(request), (request.shape,))
    assert layout is not None, "a small tensor fits into an empty buffer"
    context.show([item], MEMCPY_IN)
    _pack(layout, [item])
    context.show([item], "MPI_ALLREDUCE")
    context.comm.allreduce(layout.flat, _op_of(request), algorithm=context.allreduce_algorithm)
    context.show([item], MEMCPY_OUT)
    _unpack(context, layout, [item])


def _pack(layout: FusedLayout, items: Sequence[ReadyOp]) -> None:
    tensors = [_given(item.ticket) for item in items if item.ticket is not None]
    if tensors:
        copy_all(layout.views, tensors)
        scale(layout.flat, items[0].request.prescale)
    else:
        layout.flat.zero_()


def _unpack(context: EngineContext, layout: FusedLayout, items: Sequence[ReadyOp]) -> None:
    outputs = [_output_of(item.ticket) for item in items if item.ticket is not None]
    if outputs:
        _conclude(items[0].request, layout.flat, context.comm.size)
        copy_all(outputs, layout.views)
    context.buffer_for(items[0].request).give_back(layout)


def allreduce(context: EngineContext, items: Sequence[ReadyOp]) -> Coroutine:
    """All-reduce one large tensor from where it lies."""
    yield from ()
    (item,) = items
    request, ticket = item.request, item.ticket
    if ticket is None:
        source = target = context.zeros(request)
    else:
        source, target = _given(ticket), _output_of(ticket)
    if source.dtype is not travels_as(request):
        source = target = source.to(travels_as(request)).contiguous()
    elif not target.is_contiguous() or not source.is_contiguous():
        work = source.contiguous()
        source = target = work.clone() if work is source else work
    elif request.prescale != 1.0 and source is not target:
        source = target.copy_(source)
    scale(source, request.prescale)
    out = None if source is target else target
    handle = context.comm.start_allreduce(
        source, _op_of(request), out=out, algorithm=context.allreduce_algorithm
    )

    def finish() -> None:
        if ticket is not None:
            _conclude(request, target, context.comm.size)
            if ticket.result is not target:
                ticket.result.copy_(target)

    return handle, finish


def adasum_allreduce(context: EngineContext, items: Sequence[ReadyOp]) -> Coroutine:
    """Combine each tensor by Adasum; those of one type are sent together. Blocks."""
    yield from ()
    tickets = [item.given for item in items]
    parts = [_given(ticket).reshape(-1) for ticket in tickets]
    flat = torch.cat(parts).cpu() if parts[0].is_cuda else torch.cat(parts)
    scale(flat, items[0].request.prescale)
    counts = [part.numel() for part in parts]
    adasum(context.comm, flat, partition.offsets(counts))
    scale(flat, items[0].request.postscale)
    for ticket, part in zip(tickets, torch.split(flat, counts), strict=True):
        output = _output_of(ticket)
        output.copy_(part.view(output.shape))
    return None, _nothing


def fused_broadcast(context: EngineContext, items: Sequence[ReadyOp]) -> Coroutine:
    """Broadcast tensors of one type and root in one message, through the fusion buffer."""
    tickets = [item.given for item in items]
    root = items[0].request.root
    layout = yield from _take(context, items)
    if context.comm.rank == root:
        context.show(items, MEMCPY_IN)
        copy_all(layout.views, [_given(ticket) for ticket in tickets])
    context.show(items, "MPI_BCAST")
    handle = context.comm.start_broadcast(layout.flat, root)

    def finish() -> None:
        context.show(items, MEMCPY_OUT)
        copy_all([_output_of(ticket) for ticket in tickets], layout.views)
        context.buffer_for(items[0].request).give_back(layout)

    return handle, finish


def broadcast(context: EngineContext, items: Sequence[ReadyOp]) -> Coroutine:
    """Broadcast one large tensor from where it lies."""
    yield from ()
    (item,) = items
    ticket, root = item.given, item.request.root
    output = _output_of(ticket)
    if output is not ticket.tensor and context.comm.rank == root:
        output.copy_(_given(ticket))
    work = output.contiguous()
    handle = context.comm.start_broadcast(work, root)

    def finish() -> None:
        if work is not output:
            output.copy_(work)

    return handle, finish


def allgather(context: EngineContext, items: Sequence[ReadyOp]) -> Coroutine:
    """Gather all ranks' rows, in rank order; first the numbers of rows, for all tensors at once."""
    comm = context.comm
    tickets = [item.given for item in items]
    rows = np.array([_given(ticket).shape[0] for ticket in tickets], dtype=np.int64)
    everyones = np.empty(comm.size * len(rows), dtype=np.int64)
    yield comm.start_allgather(rows, out=everyones)
    handles = []
    for ticket, of_ranks in zip(tickets, everyones.reshape(comm.size, -1).T.tolist(), strict=True):
        tensor = _given(ticket)
        width = _width(tensor)
        output = ticket.result = tensor.new_empty((sum(of_ranks), *tensor.shape[1:]))
        counts = [count * width for count in of_ranks]
        handles.append(
            comm.start_allgather(
                tensor.contiguous().view(-1),
                counts=None if len(set(counts)) == 1 else counts,
                out=output.view(-1),
                algorithm=context.allgather_algorithm,
            )
        )
    yield from handles[:-1]
    return handles[-1], _nothing


def reducescatter(context: EngineContext, items: Sequence[ReadyOp]) -> Coroutine:
    """Leave each rank its rows of the reduction; the first ranks have one more."""
    comm = context.comm
    handles, outputs = [], []
    for item in items:
        request, tensor = item.request, _given(item.given)
        spans = partition.bounds(tensor.shape[0], comm.size)
        rows = [stop - start for start, stop in spans]
        source = tensor.contiguous().to(travels_as(request))
        if request.prescale != 1.0:
            source = source.clone() if source is tensor else source
            scale(source, request.prescale)
        output = source.new_empty((rows[comm.rank], *tensor.shape[1:]))
        counts = [count * _width(tensor) for count in rows]
        handles.append(comm.start_reduce_scatter(source, _op_of(request), counts=counts, out=output.view(-1)))
        outputs.append((item, output))
    yield from handles[:-1]

    def finish() -> None:
        for item, output in outputs:
            _conclude(item.request, output, comm.size)
            item.given.result = output.to(dtype_called(item.request.dtype))

    return handles[-1], finish


def alltoall(context: EngineContext, items: Sequence[ReadyOp]) -> Coroutine:
    """Exchange rows with each rank; first the numbers of rows."""
    comm, (item,) = context.comm, items
    ticket, tensor = item.given, _given(item.given)
    splits = np.array(ticket.splits, dtype=np.int64)
    received = np.empty_like(splits)
    yield comm.start_alltoall(splits, out=received)
    width = _width(tensor)
    output = tensor.new_empty((int(received.sum()), *tensor.shape[1:]))
    ticket.result = output, torch.from_numpy(received.astype(np.int32))
    handle = comm.start_alltoall(
        tensor[: sum(ticket.splits)].contiguous().view(-1),  # rows that nobody asked for stay at home
        out=output.view(-1),
        send_counts=[count * width for count in ticket.splits],
        receive_counts=[count * width for count in received.tolist()],
    )
    return handle, _nothing


def barrier(context: EngineContext, items: Sequence[ReadyOp]) -> Coroutine:
    """Do nothing: all ranks are here once the operation is ready."""
    yield from ()
    return None, _nothing


def _take(context: EngineContext, items: Sequence[ReadyOp]) -> Generator[None, None, FusedLayout]:
    """Allocate space in the fusion buffer for these tensors; yield None until there is some."""
    request = items[0].request
    dtype = travels_as(request)
    shapes = tuple(item.request.shape for item in items)
    while (layout := context.buffer_for(request).take(dtype, shapes)) is None:
        yield None
    return layout


def _op_of(request: TensorRequest) -> str:
    """Return the communicator's name of the operation; "sum" where this module divides after postscale."""
    if request.op != "average":
        return request.op
    is_plain = request.postscale == 1.0 and dtype_called(request.dtype).is_floating_point
    return "average" if is_plain else "sum"


def _conclude(request: TensorRequest, total: Tensor, size: int) -> None:
    """Multiply a total by the postscale factor, and divide by the ranks for an average."""
    scale(total, request.postscale)
    if request.op == "average" and _op_of(request) == "sum":
        divide(total, size)


def _given(ticket: Ticket) -> Tensor:
    assert ticket.tensor is not None, "every operation but a barrier and a schedule has a tensor"
    return ticket.tensor


def _output_of(ticket: Ticket) -> Tensor:
    """Return the tensor for the result: the caller's, or a new one."""
    if ticket.result is None:
        tensor = _given(ticket)
        ticket.result = ticket.output if ticket.output is not None else torch.empty_like(tensor)
    result: Tensor = ticket.result
    return result


def _width(tensor: Tensor) -> int:
    """Return the number of elements in a row."""
    return math.prod(tensor.shape[1:])


def _nothing() -> None:
    """Finish an operation that left nothing to do."""
