"""Arguments of a collective as memory and counts, checked."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from hpcpar import partition
from hpcpar.comm.blocks import Action
from hpcpar.comm.compiled import Result
from hpcpar.comm.plan import Offsets
from hpcpar.comm.spaces import Spaces, copying
from hpcpar.errors import BufferTypeError, OperationError
from hpcpar.transport.buffers import Binding, HostBuffer, bind
from hpcpar.transport.gpu.device_buffer import DeviceBuffer, bind_device, is_on_device
from hpcpar.transport.gpu.queue import Queue

if TYPE_CHECKING:
    from hpcpar.comm.calls import Calls


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
    reads_input   of the data themselves this holds: the same on every rank
    uneven        the ranks' pieces differ in size
    same_everywhere   every rank passes the same offsets
    first, last   actions before and after; `at_end` come after the division of an average
    averaged      what is divided by the number of ranks, or multiplied by `factor`, at the end
    kept          the data are only read
    written       the caller's array that receives the result; None: it is a new one, or not on this rank
    refused       why the call, which other ranks may have begun, ends with a MismatchError; "": it does not
    result        of the caller's arrays; None: out, or buffer where there is no out
    """

    described: str = ""
    spaces: Spaces = field(default_factory=dict)
    offsets: Offsets | None = None
    op: str = "sum"
    root: int | None = None
    own: tuple[int, int] = (0, 0)
    lent: HostBuffer | None = None
    reads_input: bool = False
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
    refused: str = ""
    combines: bool = False

    def table(self, ranks: Sequence[int]) -> list[int]:
        """(first element, count) of what this rank sends to each of `ranks` in an uneven exchange."""
        edges = dict(self.offsets or ())["input"]
        return [number for rank in ranks for number in (edges[rank], edges[rank + 1] - edges[rank])]


def view(
    calls: Calls, array: Any, *, writable: bool, what: str = "buffer", beside: HostBuffer | None = None
) -> Binding:
    """See an array as flat memory, on its GPU where the ranks can reach each other's.

    beside   the call's other memory: both must be on one kind of device, and share a queue
    errors   as `bind`
    """
    devices = calls.runtime.devices
    if devices is None or not is_on_device(array):
        # A compiled collective that is kept holds no reference to the caller's memory.
        binding = bind(array, writable=writable, what=what, owns=False)
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


def view_out(calls: Calls, out: Any, count: int, beside: HostBuffer) -> Binding:
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


def written_back(binding: Binding) -> list[Action]:
    return [] if binding.write_back is None else [binding.write_back]


def pieces_of(calls: Calls, counts: Sequence[int] | None, total: int) -> tuple[int, ...]:
    """Sizes of the pieces that a whole of `total` elements is cut into."""
    if counts is None:
        return partition.counts(total, calls.size)
    pieces = counted(calls, counts)
    if sum(pieces) != total:
        raise OperationError(
            f"counts {list(pieces)} add up to {sum(pieces)}, but the buffer has {total} elements"
        )
    return pieces


def shards_of(calls: Calls, counts: Sequence[int] | None, own: HostBuffer) -> tuple[int, ...]:
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
        return pieces_of(calls, counts, total)
    if total % calls.size:
        raise OperationError(
            f"alltoall of {total} elements among {calls.size} ranks leaves {total % calls.size} over; "
            f"pad the buffer, or give send_counts"
        )
    return (total // calls.size,) * calls.size
