"""The collectives as a table: how each one's arguments become spaces, chunks, and actions before and after.

A new collective is one binder here, one algorithm file, and a pair of methods of `Communicator`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcpar import partition
from hpcpar.comm.arguments import (
    Arguments,
    Kept,
    copy_to,
    counted,
    is_same,
    overlap,
    pieces_of,
    sent_counts,
    shards_of,
    view,
    view_out,
    written_back,
)
from hpcpar.comm.blocks import Action
from hpcpar.comm.compiled import AtEnd, Result
from hpcpar.comm.half_precision import Factors, Rescaling, decoding, encoding, wire_buffer
from hpcpar.comm.reductions import require_op, scaling
from hpcpar.comm.request import PLAIN, Request, typed
from hpcpar.errors import OperationError
from hpcpar.transport.buffers import Binding, HostBuffer, empty_like, flat
from hpcpar.transport.gpu.device_buffer import DeviceBuffer

if TYPE_CHECKING:
    from hpcpar.comm.calls import Calls

ROOTED = tuple(
    each + kind for each in ("broadcast", "reduce", "gather", "scatter") for kind in ("", "_object")
)
"""Calls that need a root: None is no rank."""

MESSAGES = ("send", "recv")
"""Point-to-point messages, which have no binder."""


Binder = Callable[["Calls", Request, "int | None", Any, Any], Arguments]


def _uneven(pieces: tuple[int, ...]) -> bool:
    return min(pieces) != max(pieces)


def _allreduce(calls: Calls, request: Request, root: int | None, buffer: Any, out: Any) -> Arguments:
    op = request.op
    source = view(calls, buffer, writable=out is None)
    target = source if out is None else view_out(calls, out, source.host.count, source.host)
    rescaling, factors = _factors(request, source.host)
    found = Arguments(f"{typed(buffer, source.host)}, op={op}{rescaling}", op=op, combines=True)
    found.written = buffer if out is None else out
    if rescaling.compression is not None and calls.size > 1:
        return _compressed(calls, found, source.host, target, rescaling.compression, factors)
    found.spaces = {"data": target.host}
    found.first = copy_to(target.host, source.host) + _prescaled(target.host, factors)
    found.reads_input = True
    if factors.before == 1.0 and not overlap(source.host, target.host):
        found.lent = source.host
    found.averaged, found.factor = target.host, factors.after
    found.at_end = written_back(target)
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
    found.at_end += [*written_back(target), ending]
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
    pieces = pieces_of(calls, request.counts, source.host.count)
    edges = partition.offsets(pieces)
    own = edges[calls.rank], edges[calls.rank + 1]
    target = None if out is None else view_out(calls, out, pieces[calls.rank], source.host)
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
        if source.write_back is not None:  # the flat array may be a copy
            found.result = AtEnd(found.result)
        found.at_end = written_back(source)
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
    found.at_end = written_back(target)
    return found


def _allgather(calls: Calls, request: Request, root: int | None, shard: Any, out: Any) -> Arguments:
    source = view(calls, shard, writable=False, what="shard")
    pieces = shards_of(calls, request.counts, source.host)
    edges = partition.offsets(pieces)
    gathered = empty_like(shard, edges[-1]) if out is None else out
    target = view_out(calls, gathered, edges[-1], source.host)
    own = edges[calls.rank], edges[calls.rank + 1]
    return Arguments(
        f"{source.host.dtype}, counts={list(pieces)}",
        {"data": target.host},
        (("data", edges),),
        own=own,
        lent=None if overlap(source.host, target.host) else source.host,
        uneven=_uneven(pieces),
        first=copy_to(target.host.part(*own), source.host),
        at_end=written_back(target),
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
        at_end=[] if is_root else written_back(target),
        written=None if is_root else buffer,
    )


def _reduce(calls: Calls, request: Request, root: int | None, buffer: Any, out: Any) -> Arguments:
    op, is_root = request.op, calls.rank == root
    source = view(calls, buffer, writable=is_root and out is None)
    target = source if not is_root or out is None else view_out(calls, out, source.host.count, source.host)
    require_op(op, source.host.dtype)
    found = Arguments(f"{typed(buffer, source.host)}, op={op}", {"data": target.host}, op=op, combines=True)
    found.reads_input = True
    if not is_root or not overlap(source.host, target.host):
        found.lent = source.host
    if is_root:
        found.first = copy_to(target.host, source.host)
        found.averaged = target.host
        found.at_end = written_back(target)
        found.written = buffer if out is None else out
    else:
        found.kept = Kept()
        found.result = _always(None)
    return found


def _gather(calls: Calls, request: Request, root: int | None, shard: Any, out: Any) -> Arguments:
    is_root = calls.rank == root
    source = view(calls, shard, writable=False, what="shard")
    pieces = shards_of(calls, request.counts, source.host)
    edges = partition.offsets(pieces)
    gathered = empty_like(shard, edges[-1]) if is_root and out is None else out
    target = view_out(calls, gathered, edges[-1], source.host) if is_root else None
    data = source.host.scratch(edges[-1]) if target is None else target.host
    return Arguments(
        f"{source.host.dtype}, counts={list(pieces)}",
        {"data": data},
        (("data", edges),),
        uneven=_uneven(pieces),
        first=copy_to(data.part(edges[calls.rank], edges[calls.rank + 1]), source.host),
        at_end=[] if target is None else written_back(target),
        written=out if is_root else None,
        result=_always(gathered if is_root else None) if out is None or not is_root else None,
        is_cacheable=False,
    )


def _scatter(calls: Calls, request: Request, root: int | None, buffer: Any, out: Any) -> Arguments:
    target = view(calls, out, writable=True, what="out")
    pieces = shards_of(calls, request.counts, target.host)
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
        at_end=written_back(target),
        written=out,
        is_cacheable=False,
    )


def _alltoall(calls: Calls, request: Request, root: int | None, buffer: Any, out: Any) -> Arguments:
    source = view(calls, buffer, writable=False)
    asked, awaited = request.counts or (None, None)
    sent = sent_counts(calls, asked, source.host.count)
    is_even = asked is None
    expected = None if awaited is None else counted(calls, awaited)
    if is_even and expected not in (None, sent):
        raise OperationError(
            f"receive_counts={list(expected or ())}, but without send_counts every rank sends {sent[0]} "
            "elements to each: give both, or neither"
        )
    refused = ""
    if expected is not None and expected[calls.rank] != sent[calls.rank]:
        refused = (
            f"rank {calls.transport.world_ranks[calls.rank]} sends itself {sent[calls.rank]} elements in "
            f"alltoall, but has receive_counts={list(expected)}: send_counts and receive_counts must fit"
        )
    described = f"{source.host.dtype}, {f'equal pieces of {sent[0]}' if is_even else 'uneven pieces'}"
    received = sent if is_even else _received_counts(calls, sent, expected, described)
    total = sum(received)
    exchanged = empty_like(buffer, total) if out is None else out
    target = view_out(calls, exchanged, total, source.host)
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
        at_end=written_back(target),
        written=out,
        result=None if out is not None else _always(exchanged),
        is_cacheable=out is not None and is_even,
        refused=refused,
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
