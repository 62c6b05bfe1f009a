"""How ready operations are carried out: each a course that starts collectives and says when to go on.

A course is a generator. It yields a handle when it has to wait before its next collective, or None when
there is no room in the fusion buffer yet. It returns its last handle, and what to do once that is complete.
All ranks start the collectives of one communicator in the same order, because courses follow each other in
the same order everywhere, each only when the one before it has started its last collective.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hpcpar import partition
from hpcpar.horovod.adasum import adasum
from hpcpar.horovod.fusion import FusionBuffer, Layout, copy_all, divide, dtype_called, scale
from hpcpar.horovod.negotiation import Request

if TYPE_CHECKING:
    from hpcpar.comm import Communicator, Handle

MEMCPY_IN, MEMCPY_OUT = "MEMCPY_IN_FUSION_BUFFER", "MEMCPY_OUT_FUSION_BUFFER"

Course = Generator["Handle | None", None, "tuple[Handle | None, Callable[[], None]]"]


@dataclass(slots=True, eq=False)
class Ticket:
    """An operation that this rank has asked for, until somebody has taken its result.

    tensor     what goes in, without its history
    output     what the result is written to; None: the course makes it
    splits     of an all-to-all: rows for each rank
    on_ready   of a schedule: what is to be done, instead of a collective
    made, finished   on a GPU: events after which its tensor is there, and its result
    result     once it is done
    error      why it failed
    asked_s    when it was submitted, on this rank's clock
    """

    request: Request
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


class Item(NamedTuple):
    """A ready operation: what it is, and this rank's part; None on a rank that has joined."""

    request: Request
    ticket: Ticket | None

    @property
    def given(self) -> Ticket:
        """This rank's part, of an operation in which no rank has joined."""
        assert self.ticket is not None, "only all-reduces are carried out for ranks that have joined"
        return self.ticket


@dataclass(frozen=True)
class Room:
    """What a course works with.

    buffer      for tensors that travel together from host memory
    gpu_buffer  gives the one for those that do from this rank's GPU; made when first asked for
    show        tells the timeline, if there is one, what is being done with these items from now on
    allreduce_algorithm, allgather_algorithm   of the catalogue; None: chosen by size
    """

    comm: Communicator
    buffer: FusionBuffer
    gpu_buffer: Callable[[], FusionBuffer]
    show: Callable[[Sequence[Item], str], None]
    allreduce_algorithm: str | None = None
    allgather_algorithm: str | None = None

    def buffer_for(self, request: Request) -> FusionBuffer:
        """Where tensors of such a request travel from."""
        return self.gpu_buffer() if self._moves_on_gpu(request) else self.buffer

    def zeros(self, request: Request) -> Tensor:
        """What a rank that has joined brings: where the others have theirs."""
        device = "cuda" if self._moves_on_gpu(request) else "cpu"
        return torch.zeros(request.shape, dtype=travels_as(request), device=device)

    def _moves_on_gpu(self, request: Request) -> bool:
        return request.device == "GPU" and self.comm.shares_devices


_NARROW = {"uint8", "int8", "int16"}


def travels_as(request: Request) -> torch.dtype:
    """The type of what is sent: sums that are to be averaged would leave the range of narrow integers."""
    is_narrow = request.op == "average" and request.dtype in _NARROW
    return torch.int32 if is_narrow else dtype_called(request.dtype)


def fused_allreduce(room: Room, items: Sequence[Item]) -> Course:
    """Several tensors of one type and operation as one, through the fusion buffer."""
    layout = yield from _take(room, items)
    room.show(items, MEMCPY_IN)
    _pack(layout, items)
    room.show(items, "MPI_ALLREDUCE")
    op = _op_of(items[0].request)
    handle = room.comm.start_allreduce(layout.flat, op, algorithm=room.allreduce_algorithm)

    def finish() -> None:
        room.show(items, MEMCPY_OUT)
        _unpack(room, layout, items)

    return handle, finish


def allreduce_at_once(room: Room, item: Item) -> bool:
    """A small tensor's all-reduce without anything else under way; False if there is no room for it."""
    request = item.request
    layout = room.buffer_for(request).take(travels_as(request), (request.shape,))
    if layout is None:
        return False
    _pack(layout, (item,))
    room.comm.allreduce(layout.flat, _op_of(request), algorithm=room.allreduce_algorithm)
    _unpack(room, layout, (item,))
    return True


def _pack(layout: Layout, items: Sequence[Item]) -> None:
    tensors = [_given(item.ticket) for item in items if item.ticket is not None]
    if tensors:
        copy_all(layout.views, tensors)
        scale(layout.flat, items[0].request.prescale)
    else:
        layout.flat.zero_()


def _unpack(room: Room, layout: Layout, items: Sequence[Item]) -> None:
    outputs = [_output_of(item.ticket) for item in items if item.ticket is not None]
    if outputs:
        _conclude(items[0].request, layout.flat, room.comm.size)
        copy_all(outputs, layout.views)
    room.buffer_for(items[0].request).give_back(layout)


def allreduce(room: Room, items: Sequence[Item]) -> Course:
    """One large tensor, where it lies."""
    yield from ()
    (item,) = items
    request, ticket = item.request, item.ticket
    if ticket is None:
        source = target = room.zeros(request)
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
    handle = room.comm.start_allreduce(source, _op_of(request), out=out, algorithm=room.allreduce_algorithm)

    def finish() -> None:
        if ticket is not None:
            _conclude(request, target, room.comm.size)
            if ticket.result is not target:
                ticket.result.copy_(target)

    return handle, finish


def adasum_allreduce(room: Room, items: Sequence[Item]) -> Course:
    """Adasum of each tensor by itself; those of one type travel together. It waits here."""
    yield from ()
    tickets = [item.given for item in items]
    parts = [_given(ticket).reshape(-1) for ticket in tickets]
    flat = torch.cat(parts).cpu() if parts[0].is_cuda else torch.cat(parts)
    scale(flat, items[0].request.prescale)
    counts = [part.numel() for part in parts]
    adasum(room.comm, flat, partition.offsets(counts))
    scale(flat, items[0].request.postscale)
    for ticket, part in zip(tickets, torch.split(flat, counts), strict=True):
        output = _output_of(ticket)
        output.copy_(part.view(output.shape))
    return None, _nothing


def fused_broadcast(room: Room, items: Sequence[Item]) -> Course:
    """Several tensors of one type and root as one, through the fusion buffer."""
    tickets = [item.given for item in items]
    root = items[0].request.root
    layout = yield from _take(room, items)
    if room.comm.rank == root:
        room.show(items, MEMCPY_IN)
        copy_all(layout.views, [_given(ticket) for ticket in tickets])
    room.show(items, "MPI_BCAST")
    handle = room.comm.start_broadcast(layout.flat, root)

    def finish() -> None:
        room.show(items, MEMCPY_OUT)
        copy_all([_output_of(ticket) for ticket in tickets], layout.views)
        room.buffer_for(items[0].request).give_back(layout)

    return handle, finish


def broadcast(room: Room, items: Sequence[Item]) -> Course:
    """One large tensor, where it lies."""
    yield from ()
    (item,) = items
    ticket, root = item.given, item.request.root
    output = _output_of(ticket)
    if output is not ticket.tensor and room.comm.rank == root:
        output.copy_(_given(ticket))
    work = output.contiguous()
    handle = room.comm.start_broadcast(work, root)

    def finish() -> None:
        if work is not output:
            output.copy_(work)

    return handle, finish


def allgather(room: Room, items: Sequence[Item]) -> Course:
    """Rows of all ranks, one rank's after the other's; first the numbers of rows, of all tensors at once."""
    comm = room.comm
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
                algorithm=room.allgather_algorithm,
            )
        )
    yield from handles[:-1]
    return handles[-1], _nothing


def reducescatter(room: Room, items: Sequence[Item]) -> Course:
    """Each rank gets its rows of the reduction; the first ranks get one more where they do not divide."""
    comm = room.comm
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


def alltoall(room: Room, items: Sequence[Item]) -> Course:
    """Rows for each rank; first the numbers of rows."""
    comm, (item,) = room.comm, items
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


def barrier(room: Room, items: Sequence[Item]) -> Course:
    """All ranks are here: that is what it took to be ready."""
    yield from ()
    return None, _nothing


def _take(room: Room, items: Sequence[Item]) -> Generator[None, None, Layout]:
    """Room in the buffer for these tensors, as soon as there is some."""
    request = items[0].request
    dtype = travels_as(request)
    shapes = tuple(item.request.shape for item in items)
    while (layout := room.buffer_for(request).take(dtype, shapes)) is None:
        yield None
    return layout


def _op_of(request: Request) -> str:
    """How a communicator calls it; it divides at the end, unless that must wait for the postscale factor."""
    if request.op != "average":
        return request.op
    is_plain = request.postscale == 1.0 and dtype_called(request.dtype).is_floating_point
    return "average" if is_plain else "sum"


def _conclude(request: Request, total: Tensor, size: int) -> None:
    """What is left to do with a reduction: × postscale, ÷ ranks."""
    scale(total, request.postscale)
    if request.op == "average" and _op_of(request) == "sum":
        divide(total, size)


def _given(ticket: Ticket) -> Tensor:
    assert ticket.tensor is not None, "every operation but a barrier and a schedule has a tensor"
    return ticket.tensor


def _output_of(ticket: Ticket) -> Tensor:
    """Where the result goes: what the caller gave, or a new tensor."""
    if ticket.result is None:
        tensor = _given(ticket)
        ticket.result = ticket.output if ticket.output is not None else torch.empty_like(tensor)
    result: Tensor = ticket.result
    return result


def _width(tensor: Tensor) -> int:
    """Elements of a row."""
    width = 1
    for length in tensor.shape[1:]:
        width *= length
    return width


def _nothing() -> None:
    """All has been done already."""
