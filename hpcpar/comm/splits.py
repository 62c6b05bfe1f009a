"""New communicators of some of a communicator's ranks: methods of `Communicator`."""

from __future__ import annotations

import hashlib
import operator
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hpcpar.comm.objects import checked
from hpcpar.comm.request import rank_of
from hpcpar.errors import MismatchError, OperationError
from hpcpar.transport.interface import CALL_TAGS, GROUP_TAGS, Exchange, Transport

if TYPE_CHECKING:
    from hpcpar.comm.communicator import Communicator

LARGEST_KEY = 2**31 - 1
"""Of what MPI splits a communicator by."""

NAMED_RANKS = 8
"""Ranks that the name of a group lists."""


def split(self: Communicator, color: int | None, key: int = 0, name: str = "") -> Communicator | None:
    """New communicators of the ranks that pass the same color, ordered by key, then rank. Collective.

    color    any whole number >= 0; None joins no new communicator, and gets None
    errors   OperationError for a color or a key that MPI cannot take
    """
    with checked(self, "split"):
        color = None if color is None else _whole("split", "color", color, least=0)
        key = _whole("split", "key", key, least=-LARGEST_KEY)
    # In MPI's split nothing moves, and a rank that comes later may still wait for what was begun before.
    self.unchecked(self.label or "split").barrier(name="split")
    transport = self._transport.split(color, key)
    return None if transport is None else _opened(self, transport, name or f"{self.name}.{color}")


def split_by_node(self: Communicator, name: str = "node") -> Communicator:
    """The ranks that share this rank's node. Collective."""
    node = self.split(self.nodes[self.rank], name=name)
    assert node is not None
    return node


def group(self: Communicator, ranks: Sequence[int], name: str = "", tag: int = 0) -> Communicator:
    """Make a communicator of these ranks. Collective over them alone: the others take no part.

    ranks    ranks of this communicator, this rank among them, in the order that the new one has; the same
             on all members
    tag      a whole number >= 0. Members that make two groups in different threads at the same time give
             them tags that differ modulo 256; in one thread, groups need none, but all members that two of
             them have in common make them in the same order
    result   shares memory and GPUs between its members as this one does
    errors   OperationError for a rank that does not exist or comes twice, when this rank is not a member,
             and when MPI has no room for another communicator;
             MismatchError on every member when some pass the same ranks in another order;
             StallError, PeerLeftError when a member does not come
    """
    self._calls.require_usable("group")
    members = _members(self, ranks)
    tag = _whole("group", "tag", tag, least=0, most=None)
    _await_members(self, members, tag)
    transport = self._transport.group(members, tag % GROUP_TAGS)
    return _opened(self, transport, name or f"{self.name}.{_listed(members)}", tag)


def _listed(members: Sequence[int]) -> str:
    """The first ranks of a group, in words."""
    return f"[{', '.join([*map(str, members[:NAMED_RANKS]), *(['…'] * (len(members) > NAMED_RANKS))])}]"


def _opened(parent: Communicator, transport: Transport, name: str, tag: int | None = None) -> Communicator:
    """Make the communicator over a new transport, which shares memory where its parent does."""
    part = type(parent)(transport, parent._runtime, name, tag)
    if parent._runtime.shares_memory:
        part.share_memory(parent._runtime.post_nbytes)
    return part


def _members(comm: Communicator, ranks: Sequence[int]) -> tuple[int, ...]:
    """Validate the ranks of a group."""
    if not isinstance(ranks, Iterable):
        raise OperationError(f"group({ranks!r}) was asked for; give the ranks of its members: group([0, 1])")
    members = tuple(rank_of(rank, comm.size, "a member of the group", comm.name) for rank in ranks)
    twice = [rank for rank, times in Counter(members).items() if times > 1]
    if twice:
        raise OperationError(
            f"group({_listed(members)}) was asked for, which has rank{'s' if len(twice) > 1 else ''} "
            f"{', '.join(map(str, twice))} more than once; name each rank once"
        )
    if comm.rank not in members:
        raise OperationError(
            f"rank {comm.rank} of {comm.name} asked for group({_listed(members)}), which it is not in; only "
            f"the members make a group: call it where `comm.rank in ranks`"
        )
    return members


@dataclass
class _Rendezvous:
    """Wait for the members of a group, as `Watch` looks at it."""

    name: str
    world_ranks: tuple[int, ...]
    exchange: Exchange
    round: int
    rounds: int

    def waiting_for(self) -> tuple[int, ...]:
        return tuple(self.world_ranks[rank] for rank in self.exchange.waiting_for())

    def progress(self) -> str:
        return f"round {self.round + 1} of {self.rounds}"


def _await_members(comm: Communicator, members: tuple[int, ...], tag: int) -> None:
    """Return when all members have come, with the same ranks in the same order. Makes progress meanwhile.

    A dissemination barrier: in round k the i-th lowest of n members tells the (i + 2^k)-th, and hears of the
    (i - 2^k)-th. It carries a digest of the call and its complement, of which a bitwise AND keeps every bit
    only when all are equal (as `agree.require_same`).

    cost     ⌈log₂n⌉ α
    errors   MismatchError on every member; StallError, PeerLeftError
    """
    asked = f"group({_listed(members)}, tag={tag})"
    digest = np.frombuffer(hashlib.blake2b(repr((members, tag)).encode(), digest_size=16).digest(), np.uint8)
    mine = np.concatenate([digest, ~digest])
    common = mine.copy()
    order = sorted(members)
    at, size = order.index(comm.rank), len(order)
    rounds = (size - 1).bit_length()
    for number in range(rounds):
        to, source = order[(at + 2**number) % size], order[(at - 2**number) % size]
        sent, came = common.copy(), np.empty_like(common)
        exchange = comm._transport.start([(sent, to)], [(came, source)], CALL_TAGS + tag % GROUP_TAGS)

        def have_come(exchange: Exchange = exchange) -> bool:
            comm.poke()
            return exchange.test()

        waited = _Rendezvous(f"{asked} of {comm.name}", comm.world_ranks, exchange, number, rounds)
        try:
            comm.wait_until(have_come, waited)
        except BaseException:  # a message may still come to this memory
            comm._calls.abandoned.append((exchange, sent, came))
            raise
        common &= came
    if not np.array_equal(common, mine):
        raise MismatchError(
            f"rank {comm.world_ranks[comm.rank]} called {asked} of {comm.name}, but another of its members "
            f"passed the ranks in another order, or another tag: pass the same on all members"
        )


def _whole(call: str, what: str, number: int, *, least: int, most: int | None = LARGEST_KEY) -> int:
    """A whole number that MPI can take; OperationError for anything else."""
    try:
        found = operator.index(number)
    except TypeError:
        found = least - 1
    if found < least or (most is not None and found > most):
        raise OperationError(
            f"{call} by {what}={number!r} was asked for: give a whole number from {least} "
            f"{'on' if most is None else f'to {most}'}"
        )
    return found
