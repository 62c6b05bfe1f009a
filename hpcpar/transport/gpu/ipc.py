"""Device memory and events of one process opened in another of its node: CUDA IPC, each opened once.

A handle stands for a whole allocation, out of which a caching allocator hands many tensors. So what travels
is a descriptor of one fixed size: the process, the allocation's id, where it lies there, its handle, and
the place inside it. The driver never gives an id twice in the life of a process, so an allocation that was
freed and another one at its address are told apart.

The owner must keep its memory while a peer reads it. What it frees all the same stays mapped at the peer
until the peer hears of something new in the same place, has too much open, or closes all; CUDA calls the
use of such a mapping undefined, closing it is safe.
"""

from __future__ import annotations

import itertools
import os
import struct
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from hpcpar.errors import CudaError
from hpcpar.units import format_nbytes

if TYPE_CHECKING:
    from hpcpar.transport.gpu.cuda_driver import CudaDriver

MOST_OPEN = 256
"""Mappings that stay open; more only while more are in use."""
MOST_EVENTS_OPEN = 4096
"""They cost little, and a peer's are used in turn, where to keep some of them is to keep none."""
MOST_REMEMBERED = 1024
"""Allocations whose handles an exporter caches."""

_LAYOUT = struct.Struct("<16s5Q64s")
DESCRIPTOR_NBYTES = _LAYOUT.size
_KEY_NBYTES = 40
_OFFSET = slice(40, 48)

_TOKEN = os.urandom(12)
_process = b""
_serials = itertools.count(1)


class _Descriptor(NamedTuple):
    """The first four fields, 40 bytes, are the key: they say what is opened.

    number          the driver's id of the allocation; a serial number of the event
    base, extent    where the allocation lies in its process, and its bytes; the event, and 0
    offset, nbytes  the part of it that is meant
    """

    process: bytes
    number: int
    base: int
    extent: int
    offset: int
    nbytes: int
    handle: bytes


_NOTHING = _LAYOUT.pack(b"", 0, 0, 0, 0, 0, b"")
"""Describes no bytes at all, which have no address."""
_NOBODY = bytes(16)


def this_process() -> bytes:
    """16 bytes that no other process of any node has; those of a forked child differ from its parent's."""
    return _process


def _name_this_process() -> None:
    global _process
    _process = _TOKEN + os.getpid().to_bytes(4, "little")


_name_this_process()
os.register_at_fork(after_in_child=_name_this_process)  # to ask the system in each call takes it 2 µs


def _pid(process: bytes) -> int:
    return int.from_bytes(process[12:], "little")


def _require_own(process: bytes) -> None:
    if process != this_process():
        raise CudaError(
            f"process {os.getpid()} was forked from {_pid(process)}, whose device memory and events it "
            f"cannot use, as CUDA does not survive a fork: start it by spawn, or before a device is used"
        )


class Exports:
    """Descriptors of this process's device memory; the handle of an allocation is asked for once."""

    def __init__(self, driver: CudaDriver) -> None:
        self._driver = driver
        self._process = this_process()
        self._lock = threading.Lock()
        self._allocations: dict[int, tuple[int, int, bytes]] = {}

    def export(self, address: int, nbytes: int) -> bytes:
        """The descriptor by which another process opens these bytes.

        errors   CudaError for memory that is not exportable, and for bytes beyond its end
        """
        _require_own(self._process)
        if not nbytes:
            return _NOTHING
        number = self._driver.buffer_id(address)
        with self._lock:
            found = self._allocations.get(number)
            if found is None:
                found = self._allocations[number] = self._exported(address, nbytes)
                if len(self._allocations) > MOST_REMEMBERED:
                    del self._allocations[next(iter(self._allocations))]
        base, extent, handle = found
        if address + nbytes > base + extent:
            raise CudaError(
                f"{nbytes} bytes at {address:#x} are to be shared, but the allocation there has only "
                f"{base + extent - address} from that address on"
            )
        return _LAYOUT.pack(self._process, number, base, extent, address - base, nbytes, handle)

    def _exported(self, address: int, nbytes: int) -> tuple[int, int, bytes]:
        if not self._driver.is_exportable(address):
            raise CudaError(
                f"{format_nbytes(nbytes)} at {address:#x} cannot be shared with other processes: only device "
                f"memory of cudaMalloc can, neither that of cudaMallocAsync nor an expandable segment. Leave "
                f"expandable_segments:True and backend:cudaMallocAsync out of PYTORCH_CUDA_ALLOC_CONF and "
                f"PYTORCH_ALLOC_CONF; in CuPy use its MemoryPool, not MemoryAsyncPool"
            )
        base, extent = self._driver.range_of(address)
        return base, extent, self._driver.export_memory(base)


class EventExports:
    """Descriptors of this process's interprocess events."""

    def __init__(self, driver: CudaDriver) -> None:
        self._driver = driver
        self._process = this_process()
        self._known: dict[int, bytes] = {}

    def export(self, event: int) -> bytes:
        """The descriptor by which another process opens the event; equal each time."""
        _require_own(self._process)
        if event not in self._known:
            handle = self._driver.export_event(event)
            self._known[event] = _LAYOUT.pack(self._process, next(_serials), event, 0, 0, 0, handle)
        return self._known[event]

    def forget(self, event: int) -> None:
        """To be called before the event is destroyed: a later one at its address is another one."""
        self._known.pop(event, None)


@dataclass(slots=True)
class _Opened:
    """An open handle, its users, and whether its owner has freed it."""

    value: int
    users: int = 0
    stale: bool = False


class _Imports:
    """Open handles of other processes, the least recently used first.

    One for each device of a process, to be used while that is the thread's device.
    """

    def __init__(
        self, what: str, open_handle: Callable[[bytes], int], close: Callable[[int], None], limit: int
    ) -> None:
        self._what = what
        self._open_handle = open_handle
        self._close = close
        self._limit = limit
        self._process = this_process()
        self._lock = threading.Lock()
        self._opened: OrderedDict[bytes, _Opened] = OrderedDict()

    def __len__(self) -> int:
        """The number of open handles."""
        return len(self._opened)

    def is_open(self, descriptor: bytes) -> bool:
        """True if it is open, in use or not."""
        return descriptor[:_KEY_NBYTES] in self._opened

    def open(self, descriptor: bytes) -> int:
        """The address (or event) in this process, to be released once for each time it was opened.

        What this very process exported is what it was there. No bytes are at address 0.

        errors   CudaError if the driver cannot open it, or in a forked child
        """
        _require_own(self._process)
        key = descriptor[:_KEY_NBYTES]
        with self._lock:
            opened = self._opened.get(key)
            if opened is None:
                found = _Descriptor(*_LAYOUT.unpack(descriptor))
                if found.process in (self._process, _NOBODY):
                    return found.base + found.offset
                opened = self._first(key, found)
            self._opened.move_to_end(key)
            opened.users += 1
            return opened.value + int.from_bytes(descriptor[_OFFSET], sys.byteorder)

    def release(self, descriptor: bytes) -> None:
        """It is no longer in use: not even by work on a stream. What `close` has closed is passed over."""
        if self._process != this_process():
            return
        with self._lock:
            opened = self._opened.get(descriptor[:_KEY_NBYTES])
            if opened is None:
                return
            if not opened.users:
                raise CudaError(f"{self._what} of another process was released more often than opened")
            opened.users -= 1
            if opened.stale or len(self._opened) > self._limit:
                self._trim(self._limit)

    def close(self) -> None:
        """Close all, in use or not; a forked child only forgets them."""
        if self._process != this_process():
            self._opened.clear()
            return
        with self._lock:
            while self._opened:
                self._close(self._opened.popitem()[1].value)

    def _first(self, key: bytes, found: _Descriptor) -> _Opened:
        # An allocation of the same process that would overlap this one has been freed. The driver
        # may refuse to map both, so the older one goes first, unless it is still in use.
        for other, opened in self._opened.items():
            process, _, base, extent = struct.unpack_from("<16s3Q", other)
            overlap = base < found.base + found.extent and found.base < base + extent
            opened.stale |= process == found.process and overlap
        self._trim(self._limit - 1)
        try:
            value = self._open_handle(found.handle)
        except CudaError as error:
            raise CudaError(
                f"{self._what} of process {_pid(found.process)} cannot be opened in process {os.getpid()}: "
                f"{error}. It must be alive, on the same node and in the same container, and have freed "
                f"nothing that is in use here"
            ) from error
        opened = self._opened[key] = _Opened(value)
        return opened

    def _trim(self, most: int) -> None:
        """Close what is idle and either stale or, from the least recently used on, beyond the number."""
        for key in [key for key, opened in self._opened.items() if not opened.users]:
            if self._opened[key].stale or len(self._opened) > most:
                self._close(self._opened.pop(key).value)


class Imports(_Imports):
    """Memory of other processes: addresses here, one mapping for each of their allocations."""

    def __init__(self, driver: CudaDriver, limit: int = MOST_OPEN) -> None:
        super().__init__("device memory", driver.open_memory, driver.close_memory, limit)


class EventImports(_Imports):
    """Events of other processes."""

    def __init__(self, driver: CudaDriver, limit: int = MOST_EVENTS_OPEN) -> None:
        super().__init__("an event", driver.open_event, driver.destroy_event, limit)
