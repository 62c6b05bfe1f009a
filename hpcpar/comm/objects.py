"""Collectives of Python objects, by pickle: for set-up and metadata, not for tensors."""

from __future__ import annotations

import copy
import pickle
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np

from hpcpar import partition
from hpcpar.comm.caller import Call
from hpcpar.comm.collectives import Collectives
from hpcpar.comm.point_to_point import PointToPoint
from hpcpar.errors import OperationError
from hpcpar.transport.interface import Octets

T = TypeVar("T")
SelfT = TypeVar("SelfT", bound="Objects")


class Objects(Collectives, PointToPoint):
    """Any object that pickle can carry. Counted as 'objects'.

    Each call first moves the length and then the bytes, so it costs at least twice the latency of
    the collective that it is named after.
    """

    def unchecked(self: SelfT, label: str | None) -> SelfT:
        """This communicator, without agreeing on each call.

        label   under which it counts; None: each collective under its own name
        """
        view = copy.copy(self)
        view._checked = False
        view._label = label
        view._seen = defaultdict(dict)
        return view

    def broadcast_object(self, value: Any = None, root: int = 0) -> Any:
        """The root's object, on every rank; what other ranks pass is ignored."""
        with self._asking(Call("broadcast_object", root=root)):
            payload = _pickled(value) if self.rank == root else None
        inner = self._inner()
        length = np.array([0 if payload is None else payload.size], dtype=np.int64)
        inner.broadcast(length, root)
        if payload is None:
            payload = np.empty(int(length[0]), dtype=np.uint8)
        inner.broadcast(payload, root)
        return value if self.rank == root else _unpickled(payload)

    def allgather_object(self, value: T) -> list[T]:
        """All ranks' objects, by rank, on every rank."""
        with self._asking(Call("allgather_object")):
            payload = _pickled(value)
        inner = self._inner()
        lengths = inner.allgather(np.array([payload.size], dtype=np.int64)).tolist()
        return _unpickled_pieces(inner.allgather(payload, counts=lengths), lengths)

    def gather_object(self, value: T, root: int = 0) -> list[T] | None:
        """All ranks' objects, by rank, on the root; None elsewhere."""
        with self._asking(Call("gather_object", root=root)):
            payload = _pickled(value)
        inner = self._inner()
        lengths = inner.allgather(np.array([payload.size], dtype=np.int64)).tolist()
        gathered = inner.gather(payload, root, counts=lengths)
        return None if gathered is None else _unpickled_pieces(gathered, lengths)

    def scatter_object(self, values: Sequence[T] | None = None, root: int = 0) -> T:
        """The root's r-th object, on rank r; what other ranks pass is ignored."""
        with self._asking(Call("scatter_object", root=root)):
            if self.rank == root and (values is None or len(values) != self.size):
                raise OperationError(
                    f"scatter_object needs one object for each of the {self.size} ranks on the root, "
                    f"not {'none' if values is None else len(values)}"
                )
            payloads = [_pickled(value) for value in values or ()] if self.rank == root else []
        inner = self._inner()
        lengths = np.array([payload.size for payload in payloads] or [0] * self.size, dtype=np.int64)
        inner.broadcast(lengths, root)
        own = np.empty(int(lengths[self.rank]), dtype=np.uint8)
        whole = np.concatenate(payloads) if payloads else None
        result: T = _unpickled(inner.scatter(whole, root, counts=lengths.tolist(), out=own))
        return result

    def send_object(self, value: Any, to: int, tag: int = 0) -> None:
        """Send an object; meets `recv_object` only. Under the tag go two messages."""
        inner = self._inner()
        payload = _pickled(value)
        inner.send(np.array([payload.size], dtype=np.int64), to, tag)
        inner.send(payload, to, tag)

    def recv_object(self, source: int, tag: int = 0) -> Any:
        """Receive an object that `send_object` sent."""
        inner = self._inner()
        length = inner.recv(np.empty(1, dtype=np.int64), source, tag)
        return _unpickled(inner.recv(np.empty(int(length[0]), dtype=np.uint8), source, tag))

    def _inner(self: SelfT) -> SelfT:
        return self.unchecked(self._label or "objects")

    def _received_counts(self, sent: tuple[int, ...], expected: tuple[int, ...] | None) -> tuple[int, ...]:
        if expected is not None and not self._checked:
            return expected
        received = tuple(self._inner().alltoall(np.array(sent, dtype=np.int64)).tolist())
        if self._checked:
            # The rank is named, so that those who are wrong alike do not agree.
            self._require_same(
                "alltoall with receive_counts that fit"
                if expected in (None, received)
                else f"alltoall with receive_counts={list(expected or ())}, but the ranks send "
                f"{list(received)} to rank {self.rank}"
            )
        return received


def _pickled(value: Any) -> Octets:
    return np.frombuffer(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL), dtype=np.uint8)


def _unpickled(payload: Octets) -> Any:
    return pickle.loads(payload.data)


def _unpickled_pieces(gathered: Octets, lengths: Sequence[int]) -> list[Any]:
    edges = partition.offsets(lengths)
    return [_unpickled(gathered[start:stop]) for start, stop in pairwise(edges)]
