"""One message between two ranks: a header of type and length, which the receiver compares, and the elements.

    short   one message: header | elements, copied on both sides
    long    two messages under one tag: the header, then the elements where they lie

    sender    start both ──────────────────────────────────────> done
    receiver  its turn ──> header ── compare ── the same ──> elements ──> done
                                        └────── another ──> receive the rest aside ──> MismatchError on both

Receives from one rank under one tag take turns, so that a header never meets the receive of elements. A
header's receive has room for any short message: it always learns what was sent.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from hpcpar.comm.blocks import Action
from hpcpar.comm.compiled import Turn
from hpcpar.comm.spaces import copying
from hpcpar.errors import MismatchError
from hpcpar.transport.buffers import HostBuffer
from hpcpar.transport.interface import Octets, PreparedExchange, Transport
from hpcpar.units import KiB

SHORT_NBYTES = 4 * KiB
"""A copy of so much costs less than a second message."""

_MAGIC = b"hpcpar message 1"
_FORM = struct.Struct("=16s16sQQ")
"""(magic, element type, elements, bytes)."""


class PeerMessage:
    """One side of a message, started again and again; from the second time on by persistent requests.

    turn     of receives from this rank under this tag; None for a send
    refuse   of a receive: called with "float32[3]" when another message has come than it is for. Tells the
             sender, and makes the error; None for a send
    last     actions when the elements are here
    """

    count, done = 1, 0
    awaited = None

    def __init__(
        self,
        transport: Transport,
        peer: int,
        tag: int,
        host: HostBuffer,
        *,
        turn: Turn | None = None,
        refuse: Callable[[str], MismatchError] | None = None,
        last: Sequence[Action] = (),
    ) -> None:
        self._transport = transport
        self._peer, self._tag = peer, tag
        self._turn, self._refuse = turn, refuse
        self._host = host  # keeps a copy of what is not contiguous alive
        elements = host.octets
        self._form = _FORM.pack(_MAGIC, host.dtype.encode(), host.count, elements.size)
        self.is_short = elements.size <= SHORT_NBYTES
        room = SHORT_NBYTES if refuse is not None else elements.size if self.is_short else 0
        staged = np.empty(_FORM.size + room, dtype=np.uint8)
        self.nbytes: int = staged.size
        self._header = staged[: _FORM.size].data
        self._parts = [staged] if self.is_short else [staged, elements]
        self._first: Sequence[Action] = ()
        self._last = last
        if refuse is None:
            self._header[:] = self._form
        if self.is_short:
            beside = staged[_FORM.size : _FORM.size + elements.size]
            if refuse is None:
                self._first = [copying(beside, elements)]
            else:
                self._last = [copying(elements, beside), *last]
        self._exchanges: list[PreparedExchange] = []
        self._is_persistent = False
        self._open: Sequence[PreparedExchange] = ()
        self._actions: Iterator[Action] = iter(())
        self._last_actions: Iterator[Action] = iter(())
        self._is_compared = False
        self._other: str | None = None

    def begin(self, number: int) -> Turn | None:
        if self._is_persistent:
            for exchange in self._exchanges:
                exchange.rewind()
        else:
            self._is_persistent = bool(self._exchanges)
            self._exchanges = [self._prepared(octets) for octets in self._parts]
        # A receive begins with the header alone.
        self._open = self._exchanges if self._refuse is None else self._exchanges[:1]
        self._actions = iter([*self._first, *(exchange.start for exchange in self._open)])
        self._last_actions = iter(self._last)
        self._is_compared = self._refuse is None
        self._other = None
        return self._turn

    def _prepared(self, octets: Octets, *, once: bool = False) -> PreparedExchange:
        message = [(octets, self._peer)]
        messages = (message, []) if self._refuse is None else ([], message)
        return self._transport.prepare(*messages, self._tag, persistent=self._is_persistent and not once)

    def advance(self, looks: int) -> bool:
        while True:
            for action in self._actions:
                action()
            for exchange in self._open:
                if not exchange.test():
                    return False
            if self._is_compared:
                break
            self._compare()
        if self._other is not None:
            assert self._refuse is not None, "only receives compare"
            raise self._refuse(self._other)
        for action in self._last_actions:
            action()
        return True

    def _compare(self) -> None:
        """Go on with the elements; or note what has come instead, and receive the rest of it aside."""
        following: Sequence[PreparedExchange] = self._exchanges[1:]
        other = None
        if self._header != self._form:
            magic, dtype, count, nbytes = _FORM.unpack(self._header)
            if magic != _MAGIC:
                following, other = (), "something else than an array of host memory"
            else:
                other = f"{dtype.rstrip(bytes(1)).decode()}[{count}]"
                aside = nbytes > SHORT_NBYTES
                following = [self._prepared(np.empty(nbytes, np.uint8), once=True)] if aside else ()
        actions = iter([exchange.start for exchange in following])
        # From here on no call of a function, so that no signal handler runs in between: what has not been
        # started must not be tested.
        self._other = other
        self._open = following
        self._actions = actions
        self._is_compared = True

    def waiting_for(self) -> tuple[int, ...]:
        return tuple({rank for exchange in self._open for rank in exchange.waiting_for()})

    def received_nbytes(self) -> int:
        raise AssertionError("the header tells")

    def free(self) -> None:
        if self._is_persistent:
            for exchange in self._exchanges:
                exchange.free()
