"""What a transport offers to the floor above: exchanges of bytes, and a thin control channel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Octets = NDArray[np.uint8]

COLLECTIVE_TAGS = 8192
"""Tags 0 to 8191 belong to collectives; a user's tag t travels as 8192 + t.

The lower half goes from call to call, the upper half belongs to compiled schedules (`comm/compiled.py`).
MPI guarantees only 32,767 as its largest tag (MPI 4.1, section 9.1.2), so neither range can be larger.
"""


class Exchange(Protocol):
    """Messages under way: those of one step of a collective, or one of point-to-point."""

    def test(self) -> bool:
        """Make progress; True once every message is complete, and ever after."""

    def waiting_for(self) -> tuple[int, ...]:
        """Ranks whose part of the exchange is still missing."""

    def received_nbytes(self) -> int:
        """Bytes that all receives of a complete exchange brought."""


class Prepared(Exchange, Protocol):
    """An exchange of fixed buffers, peers and tag that can be had again and again, one at a time."""

    def start(self) -> None:
        """Post all messages; not before the last round is complete."""

    def free(self) -> None:
        """Release what the transport holds for it."""


class Transport(Protocol):
    """Point-to-point between the ranks of one communicator."""

    rank: int
    size: int
    world_ranks: tuple[int, ...]
    nodes: tuple[int, ...]
    max_tag: int

    def start(
        self,
        sends: Sequence[tuple[Octets, int]],
        receives: Sequence[tuple[Octets, int]],
        tag: int,
    ) -> Exchange:
        """Post `(bytes, to)` and `(bytes, source)` pairs, all under one tag; returns at once.

        The bytes must neither change nor be read before the exchange is complete. Messages between
        two ranks under one tag arrive in the order in which they were posted.
        """

    def prepare(
        self,
        sends: Sequence[tuple[Octets, int]],
        receives: Sequence[tuple[Octets, int]],
        tag: int,
    ) -> Prepared:
        """As `start`, to be started later and often; the caller keeps the memory alive while it runs."""

    def pause(self, attempt: int) -> None:
        """Called between two fruitless tests: spin, yield the core or sleep, as attempts go up."""

    def split(self, color: int | None, key: int) -> Transport | None:
        """Collective: ranks of one color form a new communicator, ordered by key, then by rank."""

    def free(self) -> None:
        """Release what the transport holds; nothing may be under way."""

    def control_send(self, world_rank: int, message: dict[str, Any]) -> None:
        """Send a small message beside the data, without waiting; lost if the peer never looks."""

    def control_receive(self) -> list[tuple[int, dict[str, Any]]]:
        """All control messages that have come in, with the world ranks that sent them."""

    def abort(self, status: int) -> None:
        """End every rank of the job at once; does not return."""
