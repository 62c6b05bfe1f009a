"""Read another process's memory without its help: one copy by the kernel, where a stage would take two.

Linux calls it cross-memory attach (process_vm_readv(2), since 3.2). It is allowed between processes of one
user; where Yama restricts that to descendants, a process may let others in, which `allow` does.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from hpcpar.errors import PeerFailedError
from hpcpar.transport.interface import Octets

MOST_AT_ONCE_NBYTES = 2**30
"""Bytes of one call; the kernel moves at most 2 GiB."""

Stretch = tuple[int, int]
"""Address and bytes of a piece of memory."""

_PR_SET_PTRACER = 0x59616D61
_PR_SET_PTRACER_ANY = ctypes.c_ulong(-1)


class _Range(ctypes.Structure):
    """`struct iovec`: where memory begins, and its bytes."""

    _fields_ = (("address", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


_libc = ctypes.CDLL(None, use_errno=True)
_read: Any = getattr(_libc, "process_vm_readv", None)
"""None where there is no Linux."""
if _read is not None:
    _ranges = (ctypes.POINTER(_Range), ctypes.c_ulong)
    _read.restype = ctypes.c_ssize_t
    _read.argtypes = [ctypes.c_int, *_ranges, *_ranges, ctypes.c_ulong]


def _require_all(found: int, function: Any, arguments: tuple[Any, ...]) -> int:
    pid, here = arguments[0], arguments[1]
    if found != here.nbytes:
        reason = os.strerror(ctypes.get_errno()) if found < 0 else f"only {found} were there"
        raise PeerFailedError(
            f"{here.nbytes} bytes could not be read from process {pid} of this node: {reason}"
        )
    return found


_fill: Any = None
"""The same, but anything less than all bytes is an error. No signal handler runs inside of a call of C."""
if _read is not None:
    _fill = ctypes.CDLL(None, use_errno=True)["process_vm_readv"]
    _fill.restype, _fill.argtypes, _fill.errcheck = _read.restype, _read.argtypes, _require_all


def allow() -> None:
    """Let other processes of this user read this one's memory, where that needs to be said."""
    if _read is not None:
        _libc.prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY, 0, 0, 0)


def can_read(pid: int, address: int, expected: bytes) -> bool:
    """True if reading there gives these bytes."""
    if _read is None:
        return False
    found = ctypes.create_string_buffer(len(expected))
    here = _Range(ctypes.addressof(found), len(expected))
    there = _Range(address, len(expected))
    return _read(pid, here, 1, there, 1, 0) == len(expected) and found.raw == expected


def reading(pid: int, stretches: Sequence[Stretch], targets: Sequence[Octets]) -> list[Callable[[], None]]:
    """Calls that fill the targets in order from stretches of another process's memory in order.

    Both are of the same number of bytes together.
    errors   PeerFailedError, when called, if the memory or the process is not there
    """
    calls: list[Callable[[], None]] = []
    left = list(reversed(stretches))
    for target in targets:
        at, size = stretch_of(target)
        end = at + size
        while at < end:
            address, nbytes = left.pop()
            taken = min(nbytes, end - at, MOST_AT_ONCE_NBYTES)
            calls.append(partial(_fill, pid, _Range(at, taken), 1, _Range(address, taken), 1, 0))
            at += taken
            if taken < nbytes:
                left.append((address + taken, nbytes - taken))
    return calls


def stretch_of(octets: Octets) -> Stretch:
    """Address and bytes of an array."""
    return octets.__array_interface__["data"][0], octets.size
