"""Dispatch as a value: who sends the rows of which tokens to whom, in one stage or in two. Integers only.

    rank 0 (node 0)    a token of experts 1, 2, 3; expert e is on rank e, ranks 2 and 3 are on node 1

    one stage     0 -> 1 (expert 1)   0 -> 2 (expert 2)   0 -> 3 (expert 3)         3 rows, 2 between nodes
    two stages    0 -> 2 (experts 2, 3); 0 -> 1 (expert 1)   2 -> 3 (expert 3)      3 rows, 1 between nodes

In two stages a token goes once to each node, to the rank there in the sender's place, which passes it on to
its experts. Outputs come home the same way: each by itself, or those of one node as their sum.
source   Shazeer et al. 2017, arXiv 1701.06538; DeepSeek-AI 2024, DeepSeek-V3, arXiv 2412.19437, section 3.2.2
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from hpcpar.algorithms.topology import MessageCost, NodeMap, map_nodes
from hpcpar.errors import LayoutError
from hpcpar.partition import bounds

DROPPED = -1
"""In place of an expert: the token does not go there, for want of capacity."""


def owners(count: int, size: int) -> tuple[int, ...]:
    """Return the rank of each expert: owners(5, 2) == (0, 0, 0, 1, 1)."""
    return tuple(rank for rank, (start, stop) in enumerate(bounds(count, size)) for _ in range(start, stop))


def gateways(nodes: NodeMap, rank: int) -> tuple[int, ...]:
    """Return the rank of each node that gets what `rank` sends there; on its own node itself."""
    place = nodes.local_rank(rank)
    return tuple(members[place % len(members)] for members in nodes.members)


class TokenRow(NamedTuple):
    """A token for some of its slots; on the way home the sum of their outputs.

    rank, token   whose it is, and its number there
    slots         places in the token's list of experts
    """

    rank: int
    token: int
    slots: tuple[int, ...]


class RowMessage(NamedTuple):
    """Rows from one rank to another, or to itself; those of one step travel at once."""

    step: int
    sender: int
    receiver: int
    rows: tuple[TokenRow, ...]


@dataclass(frozen=True)
class Dispatch:
    """Tokens of all ranks, and the way to their experts.

    routing   experts of each token, routing[rank][token][slot]; DROPPED for a slot that has none
    count     experts on all ranks, as `partition.bounds` divides them
    nodes     node of each rank
    stages    1, or 2: a token goes once to each node
    errors    LayoutError for an expert that there is not
    """

    routing: tuple[tuple[tuple[int, ...], ...], ...]
    count: int
    nodes: tuple[int, ...]
    stages: int = 1
    node_map: NodeMap = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if len(self.routing) != len(self.nodes) or self.stages not in (1, 2):
            raise LayoutError(
                f"tokens of {len(self.routing)} ranks on {len(self.nodes)} places, in {self.stages} stages; "
                "give one place for each rank, and 1 or 2 stages"
            )
        named = {expert for tokens in self.routing for experts in tokens for expert in experts}
        wrong = sorted(named - {DROPPED, *range(self.count)})
        if wrong:
            raise LayoutError(f"a token is for expert {wrong[0]}, but they are 0 to {self.count - 1}")
        object.__setattr__(self, "node_map", map_nodes(self.size, self.nodes))

    @property
    def size(self) -> int:
        return len(self.routing)

    @cached_property
    def owners(self) -> tuple[int, ...]:
        """Rank of each expert."""
        return owners(self.count, self.size)

    @cached_property
    def counts(self) -> tuple[tuple[int, ...], ...]:
        """Rows of each rank for each expert, [w][E]."""
        found = [[0] * self.count for _ in self.routing]
        for rank, tokens in enumerate(self.routing):
            for experts in tokens:
                for expert in experts:
                    if expert != DROPPED:
                        found[rank][expert] += 1
        return tuple(map(tuple, found))

    @property
    def loads(self) -> tuple[int, ...]:
        """Rows for each expert, of all ranks."""
        return tuple(map(sum, zip(*self.counts, strict=True)))

    @cached_property
    def messages(self) -> tuple[RowMessage, ...]:
        """Messages by which tokens reach their experts, and by which gradients of outputs do."""
        if self.stages == 1:
            return self._grouped((0, row.rank, owner, row) for row, owner in self._kept())
        first: dict[tuple[int, int, int], list[int]] = defaultdict(list)
        for row, owner in self._kept():
            gateway = gateways(self.node_map, row.rank)[self.node_map.node_of[owner]]
            first[row.rank, gateway, row.token] += row.slots
        there = (
            (0, rank, gateway, TokenRow(rank, token, tuple(slots)))
            for (rank, gateway, token), slots in first.items()
        )
        onward = (
            (1, gateways(self.node_map, row.rank)[self.node_map.node_of[owner]], owner, row)
            for row, owner in self._kept()
        )
        return self._grouped([*there, *onward])

    def returns(self, *, sum_on_node: bool = False) -> tuple[RowMessage, ...]:
        """Return the messages by which outputs come home, and by which gradients of tokens do.

        sum_on_node   those of one node travel to another as their sum; else each by itself
        """
        last = self.stages - 1
        home = []
        for step, sender, receiver, rows in self.messages:
            apart = [row._replace(slots=(slot,)) for row in rows for slot in row.slots]
            back = list(rows) if step or sum_on_node else apart
            home += [(last - step, receiver, sender, row) for row in back]
        return self._grouped(home)

    def _kept(self) -> list[tuple[TokenRow, int]]:
        """List each slot that has an expert, and that expert's rank."""
        return [
            (TokenRow(rank, number, (slot,)), self.owners[expert])
            for rank, tokens in enumerate(self.routing)
            for number, experts in enumerate(tokens)
            for slot, expert in enumerate(experts)
            if expert != DROPPED
        ]

    @staticmethod
    def _grouped(rows: Iterable[tuple[int, int, int, TokenRow]]) -> tuple[RowMessage, ...]:
        found: dict[tuple[int, int, int], list[TokenRow]] = defaultdict(list)
        for step, sender, receiver, row in rows:
            found[step, sender, receiver].append(row)
        return tuple(RowMessage(*pair, tuple(sorted(found[pair]))) for pair in sorted(found))


def rows_sent(messages: Sequence[RowMessage], size: int) -> tuple[tuple[int, ...], ...]:
    """Count the rows from each rank to each other; rows_sent(...)[0][1] are those from rank 0 to rank 1."""
    sent = [[0] * size for _ in range(size)]
    for message in messages:
        if message.sender != message.receiver:
            sent[message.sender][message.receiver] += len(message.rows)
    return tuple(map(tuple, sent))


def between_nodes(messages: Sequence[RowMessage], nodes: Sequence[int]) -> int:
    """Count the rows that leave their sender's node."""
    return sum(len(each.rows) for each in messages if nodes[each.sender] != nodes[each.receiver])


def seconds(
    messages: Sequence[RowMessage],
    nodes: Sequence[int],
    row_nbytes: int,
    within: MessageCost,
    between: MessageCost,
) -> float:
    """Price messages by α and β: a rank sends one message after the other, and receives meanwhile.

    result   seconds of the busiest rank in each step, added over steps
    """
    busy: dict[int, dict[tuple[int, str], float]] = defaultdict(lambda: defaultdict(float))
    for step, sender, receiver, rows in messages:
        if sender != receiver:
            link = within if nodes[sender] == nodes[receiver] else between
            busy[step][sender, "sends"] += link.seconds(len(rows) * row_nbytes)
            busy[step][receiver, "receives"] += link.seconds(len(rows) * row_nbytes)
    return sum(max(of_step.values()) for of_step in busy.values())


def prove(dispatch: Dispatch, messages: Sequence[RowMessage], returns: Sequence[RowMessage]) -> None:
    """Prove that each row comes to its expert once, and each output home once, all sent by who has them.

    errors   LayoutError that names the first row that does not
    """
    _prove_there(dispatch, messages)
    _prove_back(dispatch, returns)


def _prove_there(dispatch: Dispatch, messages: Sequence[RowMessage]) -> None:
    wanted = dict(dispatch._kept())
    held: dict[tuple[int, int, int], int] = {}
    arrived: dict[TokenRow, int] = {}
    nodes_reached = set()
    for step, sender, receiver, rows in sorted(messages):
        for row in rows:
            if sender != row.rank and held.get((sender, row.rank, row.token), step) >= step:
                raise LayoutError(f"step {step}: rank {sender} sends {row} to rank {receiver}, without it")
            held.setdefault((receiver, row.rank, row.token), step)
            crossing = dispatch.nodes[receiver], row.rank, row.token
            if dispatch.stages == 2 and dispatch.nodes[sender] != dispatch.nodes[receiver]:
                if crossing in nodes_reached:
                    raise LayoutError(f"{row} comes to node {crossing[0]} a second time")
                nodes_reached.add(crossing)
            if step == dispatch.stages - 1:
                arrived[row] = arrived.get(row, 0) + 1
                if wanted.get(row) != receiver:
                    raise LayoutError(f"{row} comes to rank {receiver}, whose experts it is not for")
    for row, owner in wanted.items():
        if arrived.get(row, 0) != 1:
            raise LayoutError(f"{row} comes to its expert on rank {owner} {arrived.get(row, 0)} times")


def _prove_back(dispatch: Dispatch, returns: Sequence[RowMessage]) -> None:
    """Follow outputs: each is at one rank at a time, and at its token's in the end."""
    place = dict(dispatch._kept())
    for step, sender, receiver, rows in sorted(returns):
        for row in rows:
            for slot in row.slots:
                one = row._replace(slots=(slot,))
                if place.get(one) != sender:
                    raise LayoutError(f"step {step}: rank {sender} sends home {one}, which it does not have")
                place[one] = receiver
    for row, rank in place.items():
        if rank != row.rank:
            raise LayoutError(f"the output of {row} stops at rank {rank}, on its way to rank {row.rank}")
