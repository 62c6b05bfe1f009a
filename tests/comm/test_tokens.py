"""Tokens find who asked for them, in the order of the asking, whatever they overtake."""

from __future__ import annotations

import numpy as np
import pytest

from hpcpar.comm.tokens import Kind, Mailroom, Token, TokenTicket
from hpcpar.errors import MismatchError
from hpcpar.transport import loopback
from hpcpar.transport.loopback import LoopbackTransport


def until(mailroom: Mailroom, transport: LoopbackTransport, *tickets: TokenTicket) -> list[Token]:
    for attempt in range(2000):
        mailroom.poll()
        if all(ticket.token is not None for ticket in tickets):
            return [ticket.token for ticket in tickets if ticket.token is not None]
        transport.pause(attempt)
    raise AssertionError("no token came")


def test_a_token_is_the_same_on_arrival() -> None:
    token = Token(Kind.READY, 2**40 + 3, b"\0memory\0", b"event" * 20, 2**33)
    assert Token.unpacked(token.packed(), 0) == token
    assert Token.unpacked(Token(Kind.READ).packed(), 0) == Token(Kind.READ)


def test_both_kinds_are_told_apart_and_kept_in_order() -> None:
    sent = [
        Token(Kind.READ, event=b"a"),
        *(Token(Kind.READY, n) for n in range(3)),
        Token(Kind.READ, event=b"b"),
    ]

    def body(transport: LoopbackTransport) -> list[Token]:
        mailroom = Mailroom(transport)
        if transport.rank == 0:
            for token in sent:
                mailroom.send(1, 7, token)
            until(mailroom, transport, mailroom.ask(1, 8, Kind.READ))
            return []
        tickets = [mailroom.ask(0, 7, Kind.READY) for _ in range(2)]
        tickets += [mailroom.ask(0, 7, Kind.READ)]
        until(mailroom, transport, *tickets)
        # Those that nobody had asked for yet are there as well.
        tickets += [mailroom.ask(0, 7, Kind.READ), mailroom.ask(0, 7, Kind.READY)]
        found = until(mailroom, transport, *tickets)
        mailroom.send(0, 8, Token(Kind.READ))
        assert not mailroom._boxes
        return found

    found = loopback.run(2, body)[1]
    assert found == [sent[1], sent[2], sent[0], sent[4], sent[3]]


def test_what_has_been_read_is_known_by_its_number() -> None:
    """Whichever of two messages is read first."""

    def body(transport: LoopbackTransport) -> list[bytes]:
        mailroom = Mailroom(transport)
        if transport.rank == 0:
            for number, event in ((4, b"a"), (3, b"b"), (5, b"c")):
                mailroom.send(1, 7, Token(Kind.READ, event=event, number=number))
            until(mailroom, transport, mailroom.ask(1, 8, Kind.READY))
            return []
        tickets = [mailroom.ask(0, 7, Kind.READ, number) for number in (3, 4)]
        until(mailroom, transport, *tickets)
        tickets += [mailroom.ask(0, 7, Kind.READ, 5)]
        found = until(mailroom, transport, *tickets)
        mailroom.send(0, 8, Token(Kind.READY))
        return [token.event for token in found]

    assert loopback.run(2, body)[1] == [b"b", b"a", b"c"]


def test_what_is_no_token_is_named() -> None:
    octets = np.zeros_like(Token(Kind.READ).packed())
    with pytest.raises(MismatchError, match="rank 5 sent from host memory"):
        Token.unpacked(octets, 5)
