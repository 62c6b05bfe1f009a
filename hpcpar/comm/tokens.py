"""Small messages between hosts about device memory: "these bytes are ready" and "I have read them".

A token names an interprocess event and, if bytes are offered, where they lie; the GPU waits for the event,
no host waits for a GPU. Between two ranks tokens of both kinds travel under the tag of their call, and are
told apart on arrival. The k-th bytes that are offered meet the k-th that are asked for; that they have been
read is told in any order, and so by their number.
"""

from __future__ import annotations

import itertools
import struct
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from hpcpar.errors import MismatchError
from hpcpar.transport.gpu.ipc import DESCRIPTOR_NBYTES
from hpcpar.transport.interface import Exchange, Octets, Transport


class Kind(IntEnum):
    READY = 0x52
    READ = 0x44


class Token(NamedTuple):
    """Message of one host to another.

    number   of these bytes among all that the one who offers them has offered
    nbytes   how many bytes are offered
    memory   where they lie, for `Imports.open`
    event    after which they may be read, or have been, for `EventImports.open`
    """

    kind: Kind
    nbytes: int = 0
    memory: bytes = b""
    event: bytes = b""
    number: int = 0

    def packed(self) -> Octets:
        memory, event = self.memory, self.event
        words = self.number, self.nbytes, len(memory), memory, len(event), event
        octets = _FORM.pack(_MAGIC, self.kind, *words)
        return np.frombuffer(octets, dtype=np.uint8)

    @classmethod
    def unpacked(cls, octets: Octets, peer: int) -> Token:
        """MismatchError for what is no token."""
        magic, kind, *words = _FORM.unpack(octets.tobytes())
        if magic != _MAGIC:
            raise MismatchError(
                f"rank {peer} sent from host memory what this rank receives into device memory; both sides "
                f"must pass arrays on the same kind of device. HPCPAR_CHECK=1 names the calls of both"
            )
        number, nbytes, memory_length, memory, event_length, event = words
        return cls(Kind(kind), nbytes, memory[:memory_length], event[:event_length], number)


_MAGIC = b"hpcpar token"
_FORM = struct.Struct(f"={len(_MAGIC)}sBQQH{DESCRIPTOR_NBYTES}sH{DESCRIPTOR_NBYTES}s")


class TokenTicket:
    """A token that was asked for, of this kind, and of this number or of any; None until it is here."""

    __slots__ = ("kind", "number", "token")

    def __init__(self, kind: Kind, number: int | None) -> None:
        self.kind = kind
        self.number = number
        self.token: Token | None = None

    def is_for(self, token: Token) -> bool:
        return self.kind == token.kind and self.number in (None, token.number)


class _Box:
    """Tokens from one peer under one tag: those asked for, and those that came before they were."""

    def __init__(self) -> None:
        self.asked: list[TokenTicket] = []
        self.early: list[Token] = []
        self.landing = np.empty(_FORM.size, dtype=np.uint8)
        self.receive: Exchange | None = None


class Mailroom:
    """The tokens of one communicator."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._boxes: dict[tuple[int, int], _Box] = {}
        self._leaving: list[tuple[Exchange, Octets]] = []
        self._numbers = itertools.count()

    def next_number(self) -> int:
        """A new number for bytes that are to be offered."""
        return next(self._numbers)

    def send(self, peer: int, tag: int, token: Token) -> None:
        """Give a token to a peer, without waiting."""
        octets = token.packed()
        exchange = self._transport.start([(octets, peer)], [], tag)
        if not exchange.test():
            self._leaving.append((exchange, octets))

    def ask(self, peer: int, tag: int, kind: Kind, number: int | None = None) -> TokenTicket:
        """The next token of this kind from a peer, in the order of the asking, or the one of this number."""
        box = self._boxes.setdefault((peer, tag), _Box())
        ticket = TokenTicket(kind, number)
        ticket.token = next((token for token in box.early if ticket.is_for(token)), None)
        if ticket.token is None:
            box.asked.append(ticket)
        else:
            box.early.remove(ticket.token)
        return ticket

    def offered(self, tag: int) -> int | None:
        """A peer whose bytes under this tag are ready, and were not asked for; None: there is none."""
        for (peer, its_tag), box in self._boxes.items():
            if its_tag == tag and any(token.kind == Kind.READY for token in box.early):
                return peer
        return None

    def poll(self) -> None:
        """Receive what has come; never waits.

        errors   MismatchError for a peer whose array is not on a device
        """
        self._leaving = [(exchange, octets) for exchange, octets in self._leaving if not exchange.test()]
        for (peer, tag), box in list(self._boxes.items()):
            while box.asked:
                if box.receive is None:
                    box.receive = self._transport.start([], [(box.landing, peer)], tag)
                if not box.receive.test():
                    break
                box.receive = None
                token = Token.unpacked(box.landing, peer)
                ticket = next((ticket for ticket in box.asked if ticket.is_for(token)), None)
                if ticket is None:
                    box.early.append(token)
                else:
                    box.asked.remove(ticket)
                    ticket.token = token
            if not box.asked and not box.early:
                del self._boxes[peer, tag]
