"""Small messages between hosts about device memory: "these bytes are ready" and "I have read them".

A token names an interprocess event and, if bytes are offered, where they lie; the GPU waits for the event,
no host waits for a GPU. Between two ranks tokens of both kinds travel under the tag of their call, and are
told apart on arrival: the k-th that is offered meets the k-th that is asked for.
"""

from __future__ import annotations

import struct
from collections import deque
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from hpcpar.errors import MismatchError
from hpcpar.transport.device_ipc import DESCRIPTOR_NBYTES
from hpcpar.transport.interface import Exchange, Octets, Transport


class Kind(IntEnum):
    READY = 0x52
    READ = 0x44


@dataclass(frozen=True, slots=True)
class Token:
    """What one host tells another.

    nbytes   how many bytes are offered
    memory   where they lie, for `Imports.open`
    event    after which they may be read, or have been, for `EventImports.open`
    """

    kind: Kind
    nbytes: int = 0
    memory: bytes = b""
    event: bytes = b""

    def packed(self) -> Octets:
        memory, event = self.memory, self.event
        octets = _FORM.pack(_MAGIC, self.kind, self.nbytes, len(memory), memory, len(event), event)
        return np.frombuffer(octets, dtype=np.uint8)

    @classmethod
    def unpacked(cls, octets: Octets, peer: int) -> Token:
        """MismatchError for what is no token."""
        magic, kind, nbytes, memory_length, memory, event_length, event = _FORM.unpack(octets.tobytes())
        if magic != _MAGIC:
            raise MismatchError(
                f"rank {peer} sent from host memory what this rank receives into device memory; both sides "
                f"must pass arrays on the same kind of device. HPCPAR_CHECK=1 names the calls of both"
            )
        return cls(Kind(kind), nbytes, memory[:memory_length], event[:event_length])


_MAGIC = b"hpcpar token"
_FORM = struct.Struct(f"={len(_MAGIC)}sBQH{DESCRIPTOR_NBYTES}sH{DESCRIPTOR_NBYTES}s")


class Ticket:
    """A token that was asked for; None until it is here."""

    __slots__ = ("token",)

    def __init__(self) -> None:
        self.token: Token | None = None


class _Box:
    """Tokens from one peer under one tag: those asked for, and those that came before they were."""

    def __init__(self) -> None:
        self.asked: dict[Kind, deque[Ticket]] = {kind: deque() for kind in Kind}
        self.early: dict[Kind, deque[Token]] = {kind: deque() for kind in Kind}
        self.landing = np.empty(_FORM.size, dtype=np.uint8)
        self.receive: Exchange | None = None


class Mailroom:
    """The tokens of one communicator."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._boxes: dict[tuple[int, int], _Box] = {}
        self._leaving: list[tuple[Exchange, Octets]] = []

    def send(self, peer: int, tag: int, token: Token) -> None:
        """Give a token to a peer, without waiting."""
        octets = token.packed()
        exchange = self._transport.start([(octets, peer)], [], tag)
        if not exchange.test():
            self._leaving.append((exchange, octets))

    def ask(self, peer: int, tag: int, kind: Kind) -> Ticket:
        """The next token of this kind from a peer, in the order of the asking."""
        box = self._boxes.setdefault((peer, tag), _Box())
        ticket = Ticket()
        if box.early[kind]:
            ticket.token = box.early[kind].popleft()
        else:
            box.asked[kind].append(ticket)
        return ticket

    def poll(self) -> None:
        """Receive what has come; never waits.

        errors   MismatchError for a peer whose array is not on a device
        """
        self._leaving = [(exchange, octets) for exchange, octets in self._leaving if not exchange.test()]
        for (peer, tag), box in list(self._boxes.items()):
            while any(box.asked.values()):
                if box.receive is None:
                    box.receive = self._transport.start([], [(box.landing, peer)], tag)
                if not box.receive.test():
                    break
                box.receive = None
                token = Token.unpacked(box.landing, peer)
                if box.asked[token.kind]:
                    box.asked[token.kind].popleft().token = token
                else:
                    box.early[token.kind].append(token)
            if not any(box.asked.values()) and not any(box.early.values()):
                del self._boxes[peer, tag]
