"""The collectives as a table: how each one's arguments become spaces, chunks, and actions before and after.

A new collective is one binder here, one algorithm file, and a pair of methods of `Communicator`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcpar import partition
from hpcpar.comm.blocks import Action
from hpcpar.comm.compiled import Result
from hpcpar.comm.half_precision import Factors, Rescaling, decoding, encoding, wire_buffer
from hpcpar.comm.plan import Offsets
from hpcpar.comm.reductions import require_op, scaling
from hpcpar.comm.request import PLAIN, Request, is_used_in_place, typed
from hpcpar.comm.spaces import Spaces, copying
from hpcpar.errors import BufferTypeError, OperationError
from hpcpar.transport.buffers import Binding, HostBuffer, bind, empty_like, flat
from hpcpar.transport.gpu.memory import DeviceBuffer, Queue, bind_device, is_on_device

if TYPE_CHECKING:
    from hpcpar.comm.calls import Calls

ROOTED = tuple(
    each + kind for each in ("broadcast", "reduce", "gather", "scatter") for kind in ("", "_object")
)
"""Calls that need a root: None is no rank."""


@dataclass(frozen=True, slots=True)
class Kept:
    """The caller's data must stay as they are; what is received goes elsewhere.

    target   what gets this rank's own share of the result; None: no result is wanted
    """

    target: HostBuffer | None = None


@dataclass
class Arguments:
    """A request bound to memory, before an algorithm is chosen.

    described     what all ranks must agree on, beside the collective's name, root and algorithm
    spaces        memory by space
    offsets       where the chunks of each space start; None: as the algorithm cuts the data
    own           elements of the data that are this rank's share of a reduce-scatter or an all-gather
    lent          holds the same as `own` will once `first` is done, and may be read instead
    uneven        the ranks' pieces differ in size
    same_everywhere   every rank passes the same offsets
    first, last   actions before and after; `at_end` come after the division of an average
    averaged      what is divided by the number of ranks, or multiplied by `factor`, at the end
    kept          the data are only read
    written       the caller's array that receives the result; None: it is a new one, or not on this rank
    result        of the caller's arrays; None: out, or buffer where there is no out
    """

    described: str = ""
    spaces: Spaces = field(default_factory=dict)
    offsets: Offsets | None = None
    op: str = "sum"
    root: int | None = None
    own: tuple[int, int] = (0, 0)
    lent: HostBuffer | None = None
    uneven: bool = False
    same_everywhere: bool = True
    first: list[Action] = field(default_factory=list)
    last: list[Action] = field(default_factory=list)
    at_end: list[Action] = field(default_factory=list)
    averaged: HostBuffer | None = None
    factor: float = 1.0
    kept: Kept | None = None
    written: Any = None
    result: Result | None = None
    is_cacheable: bool = True
    combines: bool = False

    def table(self, ranks: Sequence[int]) -> list[int]:
        """(first element, count) of what this rank sends to each of `ranks` in an uneven exchange."""
        edges = dict(self.offsets or ())["input"]
        return [number for rank in ranks for number in (edges[rank], edges[rank + 1] - edges[rank])]


Binder = Callable[["Calls", Request, "int | None", Any, Any], Arguments]


# Arrays ----------------------------------------------------------------------------------------------------


def view(
    calls: Calls, array: Any, *, writable: bool, what: str = "buffer", beside: HostBuffer | None = None
) -> Binding:
    """See an array as flat memory, on its GPU where the ranks can reach each other's.

    beside   the call's other memory: both must be on one kind of device, and share a queue
    errors   as `bind`
    """
    devices = calls.runtime.devices
    if devices is None or not is_on_device(array):
        binding = bind(array, writable=writable, what=what)
        if is_used_in_place(array):
            # A compiled collective that is kept holds no reference to the caller's memory.
            binding = Binding(array, binding.host.unowned(), binding.write_back)
    elif isinstance(beside, DeviceBuffer):
        binding = bind_device(array, partial(_queue_beside, beside, what), writable=writable, what=what)
    else:
        devices.cuda.use(devices.ordinal)  # a thread that has used none could not even ask where it lies
        binding = bind_device(array, devices.queue, writable=writable, what=what)
    if beside is not None and isinstance(binding.host, DeviceBuffer) != isinstance(beside, DeviceBuffer):
        here, there = ("a GPU", "the host") if isinstance(beside, DeviceBuffer) else ("the host", "a GPU")
        raise BufferTypeError(
            f"{what} is in the memory of {there}, the other array of the call in that of {here}: move "
            f"one of them, so that both are in one place"
        )
    return binding


def _queue_beside(beside: DeviceBuffer, what: str, ordinal: int | None) -> Queue:
    """The queue of a call, for another array of it; BufferTypeError if that is on another GPU."""
    if ordinal not in (None, beside.queue.ordinal):
        raise BufferTypeError(
            f"{what} is on GPU {ordinal}, the other array of the call on GPU {beside.queue.ordinal}: move "
            f"one of them, so that both are in one place"
        )
    return beside.queue


def _view_out(calls: Calls, out: Any, count: int, beside: HostBuffer) -> Binding:
    """An `out` argument: it must be writable and have the result's length and element type."""
    binding = view(calls, out, writable=True, what="out", beside=beside)
    if binding.host.count != count or binding.host.dtype != beside.dtype:
        raise OperationError(
            f"out has {binding.host.count} elements of {binding.host.dtype}; "
            f"the result has {count} of {beside.dtype}: give an array of that length and type"
        )
    return binding


def is_same(target: HostBuffer, source: HostBuffer) -> bool:
    """True if both are the same memory; they are of one length."""
    return target is source or not target.octets.size or target.address == source.address


def overlap(a: HostBuffer, b: HostBuffer) -> bool:
    """True if two buffers have memory in common."""
    return a.address < b.address + b.octets.size and b.address < a.address + a.octets.size


def copy_to(target: HostBuffer, source: HostBuffer) -> list[Action]:
    """Copy one buffer to another; nothing where they are the same memory."""
    return [] if is_same(target, source) else [copying(target.octets, source.octets)]


def _written_back(binding: Binding) -> list[Action]:
    return [] if binding.write_back is None else [binding.write_back]


# Counts ----------------------------------------------------------------------------------------------------


def _pieces(calls: Calls, counts: Sequence[int] | None, total: int) -> tuple[int, ...]:
    """Sizes of the pieces that a whole of `total` elements is cut into."""
    if counts is None:
        return partition.counts(total, calls.size)
    pieces = counted(calls, counts)
    if sum(pieces) != total:
        raise OperationError(
            f"counts {list(pieces)} add up to {sum(pieces)}, but the buffer has {total} elements"
        )
    return pieces


def _shards(calls: Calls, counts: Sequence[int] | None, own: HostBuffer) -> tuple[int, ...]:
    """Sizes of all ranks' shards, of which this rank holds `own`."""
    pieces = (own.count,) * calls.size if counts is None else counted(calls, counts)
    if pieces[calls.rank] != own.count:
        raise OperationError(
            f"counts says {pieces[calls.rank]} elements for rank {calls.rank}, which has {own.count}"
        )
    return pieces


def counted(calls: Calls, counts: Sequence[int]) -> tuple[int, ...]:
    """Counts as whole numbers, one for each rank."""
    try:
        pieces = tuple(map(operator.index, counts))
    except TypeError:
        pieces = ()
    if len(pieces) != calls.size or min(pieces) < 0:
        raise OperationError(
            f"counts must be one whole number >= 0 for each of the {calls.size} ranks, not {counts!r}"
        )
    return pieces


def sent_counts(calls: Calls, counts: Sequence[int] | None, total: int) -> tuple[int, ...]:
    """Elements that an all-to-all of `total` elements sends to each rank."""
    if counts is not None:
        return _pieces(calls, counts, total)
    if total % calls.size:
        raise OperationError(
            f"alltoall of {total} elements among {calls.size} ranks leaves {total % calls.size} over; "
            f"pad the buffer, or give send_counts"
        )
    return (total // calls.size,) * calls.size


def _uneven(pieces: tuple[int, ...]) -> bool:
    return min(pieces) != max(pieces)


# Binders ---------------------------------------------------------------------------------------------------


def _allreduce(calls: Calls, request: Request, root: int | None, buffer: Any, out: Any) -> Arguments:
    op = request.op
    source = view(calls, buffer, writable=out is None)
    target = source if out is None else _view_out(calls, out, source.host.count, source.host)
    rescaling, factors = _factors(request, source.host)
    found = Arguments(f"{typed(buffer, source.host)}, op={op}{rescaling}", op=op, combines=True)
    found.written = buffer if out is None else out
    if rescaling.compression is not None and calls.size > 1:
        return _compressed(calls, found, source.host, target, rescaling.compression, factors)
    found.spaces = {"data": target.host}
    found.first = copy_to(target.host, source.host) + _prescaled(target.host, factors)
    found.averaged, found.factor = target.host, factors.after
    found.at_end = _written_back(target)
    return found


def _compressed(
    calls: Calls, found: Arguments, source: HostBuffer, target: Binding, compression: str, factors: Factors
) -> Arguments:
    """Reduce the array's 16-bit form, which is in scratch memory."""
    nbytes = 2 * source.count
    if isinstance(source, DeviceBuffer):
        octets: Any = source.queue.take(nbytes)
        ending = partial(source.queue.afterwards, lambda: (source, target))
    else:
        octets = calls.runtime.scratch.take(nbytes)
        ending = partial(calls.runtime.scratch.give_back, octets)
    encoded = wire_buffer(compression, octets[:nbytes], source)
    found.spaces = {"data": encoded}
    found.first = encoding(source, target.host, encoded, factors.before)
    found.at_end = decoding(encoded, target.host, found.op, calls.size, factors.after)
    found.at_end += [*_written_back(target), ending]
    found.is_cacheable = False
    return found


def _factors(request: Request, host: HostBuffer) -> tuple[Rescaling, Factors]:
    require_op(request.op, host.dtype)
    if request.scaling is PLAIN:
        return Rescaling(), Factors()
    rescaling = Rescaling.of(*request.scaling)
    return rescaling, rescaling.factors(request.op, host.dtype)


def _prescaled(data: HostBuffer, factors: Factors) -> list[Action]:
    return [] if factors.before == 1.0 else scaling(data, factors.before)


def _reduce_scatter(calls: Calls, request: Request, root: int | None, buffer: Any, out: Any) -> Arguments:
    op = request.op
    source = view(calls, buffer, writable=out is None)
    pieces = _pieces(calls, request.counts, source.host.count)
    edges = partition.offsets(pieces)
    own = edges[calls.rank], edges[calls.rank + 1]
    target = None if out is None else _view_out(calls, out, pieces[calls.rank], source.host)
    rescaling, factors = _factors(request, source.host)
    found = Arguments(
        f"{typed(buffer, source.host)}, op={op}{rescaling}, counts={list(pieces)}",
        offsets=(("data", edges),),
        op=op,
        own=own,
        uneven=_uneven(pieces),
        factor=factors.after,
        combines=True,
        written=buffer if out is None else out,
    )
    data = source.host
    if target is None:
        found.spaces = {"data": data}
        found.first = _prescaled(data, factors)
        found.averaged = data.part(*own)
        found.result = lambda buffer, out: flat(buffer)[own[0] : own[1]]
        found.at_end = _written_back(source)
        return found
    is_own_part = is_same(target.host, data.part(*own))
    if factors.before != 1.0 or (overlap(target.host, data) and not is_own_part):
        # The input is to stay as it was, or the result is written over pieces that have yet to be sent.
        work = data.scratch(data.count)
        found.first = copy_to(work, data) + _prescaled(work, factors)
        found.spaces = {"data": work}
        found.last = copy_to(target.host, work.part(*own))
        found.is_cacheable = False
    else:
        found.spaces = {"data": data}
        found.kept = Kept(target.host)
    found.averaged = target.host
    found.at_end = _written_back(target)
    return found


def _allgather(calls: Calls, request: Request, root: int | None, shard: Any, out: Any) -> Arguments:
    source = view(calls, shard, writable=False, what="shard")
    pieces = _shards(calls, request.counts, source.host)
    edges = partition.offsets(pieces)
    gathered = empty_like(shard, edges[-1]) if out is None else out
    target = _view_out(calls, gathered, edges[-1], source.host)
    own = edges[calls.rank], edges[calls.rank + 1]
    return Arguments(
        f"{source.host.dtype}, counts={list(pieces)}",
        {"data": target.host},
        (("data", edges),),
        own=own,
        lent=None if overlap(source.host, target.host) else source.host,
        uneven=_uneven(pieces),
        first=copy_to(target.host.part(*own), source.host),
        at_end=_written_back(target),
        written=out,
        result=None if out is not None else _always(gathered),
        is_cacheable=out is not None,
    )


def _always(value: Any) -> Result:
    return lambda buffer, out: value


def _broadcast(calls: Calls, request: Request, root: int | None, buffer: Any, out: Any) -> Arguments:
    is_root = calls.rank == root
    target = view(calls, buffer, writable=not is_root)
    return Arguments(
        typed(buffer, target.host),
        {"data": target.host},
        at_end=[] if is_root else _written_back(target),
        written=None if is_root else buffer,
    )


def _reduce(calls: Calls, request: Request, root: int | None, buffer: Any, out: Any) -> Arguments:
    op, is_root = request.op, calls.rank == root
    source = view(calls, buffer, writable=is_root and out is None)
    target = source if not is_root or out is None else _view_out(calls, out, source.host.count, source.host)
    require_op(op, source.host.dtype)
    found = Arguments(f"{typed(buffer, source.host)}, op={op}", {"data": target.host}, op=op, combines=True)
    if is_root:
        found.first = copy_to(target.host, source.host)
        found.averaged = target.host
        found.at_end = _written_back(target)
        found.written = buffer if out is None else out
    else:
        found.kept = Kept()
        found.result = _always(None)
    return found


def _gather(calls: Calls, request: Request, root: int | None, shard: Any, out: Any) -> Arguments:
    is_root = calls.rank == root
    source = view(calls, shard, writable=False, what="shard")
    pieces = _shards(calls, request.counts, source.host)
    edges = partition.offsets(pieces)
    gathered = empty_like(shard, edges[-1]) if is_root and out is None else out
    target = _view_out(calls, gathered, edges[-1], source.host) if is_root else None
    data = source.host.scratch(edges[-1]) if target is None else target.host
    return Arguments(
        f"{source.host.dtype}, counts={list(pieces)}",
        {"data": data},
        (("data", edges),),
        uneven=_uneven(pieces),
        first=copy_to(data.part(edges[calls.rank], edges[calls.rank + 1]), source.host),
        at_end=[] if target is None else _written_back(target),
        written=out if is_root else None,
        result=_always(gathered if is_root else None) if out is None or not is_root else None,
        is_cacheable=False,
    )


def _scatter(calls: Calls, request: Request, root: int | None, buffer: Any, out: Any) -> Arguments:
    target = view(calls, out, writable=True, what="out")
    pieces = _shards(calls, request.counts, target.host)
    edges = partition.offsets(pieces)
    if calls.rank == root:
        data = view(calls, buffer, writable=False, beside=target.host).host
        if (data.count, data.dtype) != (edges[-1], target.host.dtype):
            raise OperationError(
                f"scatter has {data.count} elements of {data.dtype} to give, but the pieces are "
                f"{edges[-1]} of {target.host.dtype} together: {list(pieces)}"
            )
    else:
        data = target.host.scratch(edges[-1])
    return Arguments(
        f"{target.host.dtype}, counts={list(pieces)}",
        {"data": data},
        (("data", edges),),
        uneven=_uneven(pieces),
        last=copy_to(target.host, data.part(edges[calls.rank], edges[calls.rank + 1])),
        at_end=_written_back(target),
        written=out,
        is_cacheable=False,
    )


def _alltoall(calls: Calls, request: Request, root: int | None, buffer: Any, out: Any) -> Arguments:
    source = view(calls, buffer, writable=False)
    sent = sent_counts(calls, request.counts, source.host.count)
    is_even = request.counts is None
    expected = None if request.receive_counts is None else counted(calls, request.receive_counts)
    if is_even and expected not in (None, sent):
        raise OperationError(
            f"receive_counts={list(expected or ())}, but without send_counts every rank sends {sent[0]} "
            "elements to each: give both, or neither"
        )
    described = f"{source.host.dtype}, {f'equal pieces of {sent[0]}' if is_even else 'uneven pieces'}"
    received = sent if is_even else _received_counts(calls, sent, expected, described)
    total = sum(received)
    exchanged = empty_like(buffer, total) if out is None else out
    target = _view_out(calls, exchanged, total, source.host)
    given, first = source.host, []
    if overlap(target.host, given):
        # What comes is written over pieces that have yet to be sent.
        given = given.scratch(given.count)
        first = copy_to(given, source.host)
    return Arguments(
        described,
        {"input": given, "output": target.host},
        (("input", partition.offsets(sent)), ("output", partition.offsets(received))),
        # Not _uneven(sent): a rank's own counts may be equal where another's are not.
        uneven=not is_even,
        same_everywhere=is_even,
        first=first,
        at_end=_written_back(target),
        written=out,
        result=None if out is not None else _always(exchanged),
        is_cacheable=out is not None and is_even,
    )


def _received_counts(
    calls: Calls, sent: tuple[int, ...], expected: tuple[int, ...] | None, described: str
) -> tuple[int, ...]:
    """Elements that each rank will send here: asked when unknown, and in checked mode always."""
    if expected is not None and not calls.checked:
        return expected
    if calls.checked:  # before anything is asked: another rank's arguments may be wrong
        calls.require_same(f"alltoall({described})")
    asking = calls.face("objects")
    received = tuple(asking.alltoall(np.array(sent, dtype=np.int64)).tolist())
    if calls.checked:
        # The rank is named, so that those who are wrong alike do not agree.
        calls.require_same(
            "alltoall with receive_counts that fit"
            if expected in (None, received)
            else f"alltoall with receive_counts={list(expected or ())}, but the ranks send "
            f"{list(received)} to rank {calls.rank}"
        )
    return received


def _barrier(calls: Calls, request: Request, root: int | None, buffer: Any, out: Any) -> Arguments:
    return Arguments()


COLLECTIVES: dict[str, Binder] = {
    "allreduce": _allreduce,
    "reduce_scatter": _reduce_scatter,
    "allgather": _allgather,
    "broadcast": _broadcast,
    "reduce": _reduce,
    "gather": _gather,
    "scatter": _scatter,
    "alltoall": _alltoall,
    "barrier": _barrier,
}
