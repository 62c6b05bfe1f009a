"""Protocols of transports: exchanges of bytes, MPI's own collectives, and a thin control channel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from hpcpar.transport.buffers import HostBuffer

Octets = NDArray[np.uint8]

CALL_TAGS = 8192
"""Tags 0 to 8191: collectives. The lower half goes from call to call, the upper half belongs to compiled
schedules (`comm/compiling.py`)."""

GROUP_TAGS = 256
"""The next tags: the members of a new group find each other (`comm/splits.py`)."""

COLLECTIVE_TAGS = CALL_TAGS + GROUP_TAGS
"""Tags below belong to hpcpar; a user's tag t travels as COLLECTIVE_TAGS + t.

MPI guarantees only 32,767 as its largest tag (MPI 4.1, section 9.1.2), so none of the ranges can be much
larger.
"""


class Exchange(Protocol):
    """Messages under way: those of one step of a collective, or one of point-to-point."""

    def test(self) -> bool:
        """Make progress; True once every message is complete, and ever after."""

    def waiting_for(self) -> tuple[int, ...]:
        """Ranks whose part of the exchange is still missing."""

    def received_nbytes(self) -> int:
        """Bytes that all receives of a complete exchange brought."""


class PreparedExchange(Exchange, Protocol):
    """An exchange that has yet to be started; a persistent one again and again, one at a time."""

    def start(self) -> object:
        """Post all messages; not before the last round is complete.

        Over MPI no Python code runs in between: a signal handler finds all of them posted, or none.
        """

    def rewind(self) -> None:
        """Make ready for the next start."""

    def free(self) -> None:
        """Release what the transport holds for it."""


@dataclass(frozen=True, slots=True)
class NativeCall:
    """A collective that a library below does as a whole, on memory of ours.

    source          what this rank brings; None: it is already where it belongs in target
    target          where the result goes; it overlaps the source nowhere
    op              of a reduction; an average is a sum here
    source_counts   elements of each rank's piece of the source (reduce_scatter, alltoall)
    target_counts   elements of each rank's piece of the target (allgather, alltoall)
    even            every piece on every rank has as many elements, and all ranks know it
    """

    collective: str
    source: HostBuffer | None
    target: HostBuffer
    op: str = "sum"
    root: int = 0
    source_counts: tuple[int, ...] = ()
    target_counts: tuple[int, ...] = ()
    even: bool = True


class Natives(Protocol):
    """Collectives that the library below has of its own, between the ranks of one communicator."""

    def obstacle(self, collective: str, op: str, dtype: str, nbytes: int | None) -> str | None:
        """Why it cannot do such a call, in words; None: it can. The same on every rank.

        nbytes   of the whole array; None where the ranks do not know it of each other
        """

    def start(self, call: NativeCall) -> Exchange:
        """Begin it, without waiting; all ranks begin theirs in the same order.

        What the exchange waits for is all other ranks: the library does not say whose part is missing.
        """


class Transport(Protocol):
    """Point-to-point between the ranks of one communicator.

    natives   the collectives of the library below; None where there is none
    """

    rank: int
    size: int
    world_ranks: tuple[int, ...]
    nodes: tuple[int, ...]
    max_tag: int
    natives: Natives | None

    def start(
        self, sends: Sequence[tuple[Octets, int]], receives: Sequence[tuple[Octets, int]], tag: int
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
        *,
        persistent: bool,
        keep_lengths: bool = False,
    ) -> PreparedExchange:
        """Set up an exchange to be started later, and often if it is persistent.

        The caller keeps the memory alive meanwhile.
        keep_lengths   `received_nbytes` will be asked for
        """

    def probe(self, tag: int, source: int | None = None) -> int | None:
        """Return a rank of which a message under this tag has come and no receive has taken it; else None.

        source   look for a message of this rank only
        """

    def memory_fence(self) -> Callable[[], None]:
        """A call that orders this rank's earlier memory accesses before its later ones."""

    def pause(self, attempt: int, *, drives_messages: bool = True) -> None:
        """Called between two fruitless tests: spin, yield the core or sleep, as attempts go up.

        drives_messages   the tests bring messages forward; False: they only look whether a peer has come
        """

    def split(self, color: int | None, key: int) -> Transport | None:
        """Collective: ranks of one color form a new communicator, ordered by key, then by rank."""

    def group(self, members: Sequence[int], tag: int) -> Transport:
        """Make a transport of these ranks, in this order. Called by them alone, once all of them have come.

        tag   from 0 to GROUP_TAGS - 1; tells apart groups that members make at the same time
        """

    def free(self) -> None:
        """Release what the transport holds; nothing may be under way."""

    def control_send(self, world_rank: int, message: dict[str, Any]) -> None:
        """Send a small message beside the data, without waiting; lost if the peer never looks."""

    def control_receive(self) -> list[tuple[int, dict[str, Any]]]:
        """All control messages that have come in, with the world ranks that sent them."""

    def abort(self, status: int) -> None:
        """End every rank of the job at once; does not return."""
