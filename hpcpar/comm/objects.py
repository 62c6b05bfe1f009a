"""Collectives of Python objects, by pickle: for set-up and metadata, not for tensors. Counted as 'objects'.

Each call first moves the length and then the bytes, so it costs at least twice the latency of the collective
that it is named after.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence, Sized
from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from hpcpar import partition
from hpcpar.comm.request import rank_of
from hpcpar.errors import OperationError
from hpcpar.transport.interface import Octets

if TYPE_CHECKING:
    from hpcpar.comm.communicator import Communicator

T = TypeVar("T")
NO_ROOT = -1


@contextmanager
def checked(comm: Communicator, collective: str, root: Any = NO_ROOT) -> Iterator[None]:
    """Look at the arguments inside; in checked mode all ranks agree on them before data moves."""
    calls = comm._calls
    calls.require_usable(collective)
    try:
        if root is not NO_ROOT:
            rank_of(root, comm.size, f"the root of {collective}", comm.name)
        yield
    except Exception as error:
        if calls.checked:
            calls.require_same(f"{collective}, and failed: {error or type(error).__name__}")
        raise
    if calls.checked:
        calls.require_same(f"{collective}({'' if root is NO_ROOT else f'root={root}'})")


def broadcast_object(comm: Communicator, value: Any = None, root: int = 0) -> Any:
    """The root's object, on every rank; what other ranks pass is ignored."""
    with checked(comm, "broadcast_object", root):
        payload = _pickled(value) if comm.rank == root else None
    inner = _inner(comm)
    length = np.array([0 if payload is None else payload.size], dtype=np.int64)
    inner.broadcast(length, root, name="broadcast_object")
    if payload is None:
        payload = np.empty(int(length[0]), dtype=np.uint8)
    inner.broadcast(payload, root, name="broadcast_object")
    return value if comm.rank == root else _unpickled(payload)


def allgather_object(comm: Communicator, value: T) -> list[T]:
    """All ranks' objects, by rank, on every rank."""
    with checked(comm, "allgather_object"):
        payload = _pickled(value)
    return _gathered(_inner(comm), payload, "allgather_object")


def gathered(comm: Communicator, value: T, label: str, name: str) -> list[T]:
    """`allgather_object` for calls of hpcpar's own.

    label   under which it counts
    name    what it is for: ranks of which one is there, and another in other calls, get a MismatchError
    """
    return _gathered(comm.unchecked(label), _pickled(value), name)


def _gathered(inner: Communicator, payload: Octets, name: str) -> list[Any]:
    lengths = inner.allgather(np.array([payload.size], dtype=np.int64), name=name).tolist()
    return _unpickled_pieces(inner.allgather(payload, counts=lengths, name=name), lengths)


def gather_object(comm: Communicator, value: T, root: int = 0) -> list[T] | None:
    """All ranks' objects, by rank, on the root; None elsewhere."""
    with checked(comm, "gather_object", root):
        payload = _pickled(value)
    inner = _inner(comm)
    name = "gather_object"
    lengths = inner.allgather(np.array([payload.size], dtype=np.int64), name=name).tolist()
    found = inner.gather(payload, root, counts=lengths, name=name)
    return None if found is None else _unpickled_pieces(found, lengths)


def scatter_object(comm: Communicator, values: Sequence[T] | None = None, root: int = 0) -> T:
    """The root's r-th object, on rank r; what other ranks pass is ignored."""
    with checked(comm, "scatter_object", root):
        if not isinstance(values, Sized | None):
            raise OperationError(
                f"scatter_object was asked for with a {type(values).__name__}; give a sequence with one "
                f"object for each of the {comm.size} ranks: list(values)"
            )
        if comm.rank == root and (values is None or len(values) != comm.size):
            raise OperationError(
                f"scatter_object needs one object for each of the {comm.size} ranks on the root, "
                f"not {'none' if values is None else len(values)}"
            )
        payloads = [_pickled(value) for value in values or ()] if comm.rank == root else []
    inner = _inner(comm)
    lengths = np.array([payload.size for payload in payloads] or [0] * comm.size, dtype=np.int64)
    name = "scatter_object"
    inner.broadcast(lengths, root, name=name)
    own = np.empty(int(lengths[comm.rank]), dtype=np.uint8)
    whole = np.concatenate(payloads) if payloads else None
    result: T = _unpickled(inner.scatter(whole, root, counts=lengths.tolist(), out=own, name=name))
    return result


def send_object(comm: Communicator, value: Any, to: int, tag: int = 0) -> None:
    """Send an object; meets `recv_object` only. Under the tag go two messages."""
    inner = _inner(comm)
    payload = _pickled(value)
    inner.send(np.array([payload.size], dtype=np.int64), to, tag)
    inner.send(payload, to, tag)


def recv_object(comm: Communicator, source: int, tag: int = 0) -> Any:
    """Receive an object that `send_object` sent."""
    inner = _inner(comm)
    length = inner.recv(np.empty(1, dtype=np.int64), source, tag)
    return _unpickled(inner.recv(np.empty(int(length[0]), dtype=np.uint8), source, tag))


def _inner(comm: Communicator) -> Communicator:
    return comm.unchecked(comm.label or "objects")


def _pickled(value: Any) -> Octets:
    return np.frombuffer(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL), dtype=np.uint8)


def _unpickled(payload: Octets) -> Any:
    return pickle.loads(payload.data)


def _unpickled_pieces(gathered: Octets, lengths: Sequence[int]) -> list[Any]:
    edges = partition.offsets(lengths)
    return [_unpickled(gathered[start:stop]) for start, stop in pairwise(edges)]
