"""Nodes: which ranks share one, which rank speaks for which lane to the other nodes, and what links cost.

A *lane* is one local rank of every node: ring by ring, or tree by tree, the lanes join the nodes side
by side. There are as many lanes as the largest node has ranks; on a smaller node a rank serves several.

    nodes (0,0,0, 1,1,1)    lane 0   0 ─ 3           nodes (0,0,0, 1)    lane 0   0 ─ 3
                            lane 1   1 ─ 4                               lane 1   1 ─ 3
                            lane 2   2 ─ 5                               lane 2   2 ─ 3
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from hpcpar.errors import OperationError

Nodes = tuple[int, ...]
"""A number for each rank, equal for the ranks of one node."""


@dataclass(frozen=True, slots=True)
class NodeMap:
    """Ranks on nodes, both numbered from 0; `members[node]` are the ranks of a node in rising order."""

    members: tuple[tuple[int, ...], ...]
    node_of: tuple[int, ...]

    @property
    def nodes(self) -> int:
        return len(self.members)

    @property
    def lanes(self) -> int:
        return max(map(len, self.members))

    def neighbours(self, rank: int) -> tuple[int, ...]:
        """All ranks of this rank's node, including itself."""
        return self.members[self.node_of[rank]]

    def local_rank(self, rank: int) -> int:
        return self.neighbours(rank).index(rank)

    def lane(self, lane: int) -> tuple[int, ...]:
        """The rank of every node that serves a lane."""
        return tuple(members[lane % len(members)] for members in self.members)

    def lanes_of(self, rank: int) -> range:
        """The lanes that a rank serves: every g-th one from its local rank, on a node of g ranks."""
        return range(self.local_rank(rank), self.lanes, len(self.neighbours(rank)))


@lru_cache(maxsize=64)
def map_nodes(size: int, nodes: Nodes | None) -> NodeMap:
    """Group ranks by node, nodes in order of first appearance; None: every rank has a node of its own.

    errors   OperationError unless there is one number for each rank
    """
    named = tuple(range(size)) if nodes is None else nodes
    if len(named) != size:
        raise OperationError(
            f"asked to place {size} ranks, but nodes names the node of {len(named)}: {list(named)}; "
            f"give one number for each rank"
        )
    members: dict[int, list[int]] = {}
    for rank, node in enumerate(named):
        members.setdefault(node, []).append(rank)
    number = {node: index for index, node in enumerate(members)}
    return NodeMap(tuple(map(tuple, members.values())), tuple(number[node] for node in named))


@dataclass(frozen=True)
class MessageCost:
    """The cost of a message between two ranks: α + β a byte."""

    alpha_s: float
    beta_s_per_byte: float

    def seconds(self, nbytes: float) -> float:
        return self.alpha_s + self.beta_s_per_byte * nbytes


@dataclass(frozen=True)
class Topology:
    """Nodes of equally many consecutive ranks, one kind of link within them and one between them."""

    ranks_per_node: int
    intra: MessageCost
    inter: MessageCost
    gamma_s_per_byte: float = 0.0

    @classmethod
    def uniform(cls, alpha_s: float, beta_s_per_byte: float, gamma_s_per_byte: float = 0.0) -> Topology:
        """Put every rank on a node of its own, with equal links."""
        link = MessageCost(alpha_s, beta_s_per_byte)
        return cls(1, link, link, gamma_s_per_byte)

    def same_node(self, rank: int, other: int) -> bool:
        return rank // self.ranks_per_node == other // self.ranks_per_node

    def nodes(self, size: int) -> Nodes:
        """The node of each of `size` ranks."""
        return tuple(rank // self.ranks_per_node for rank in range(size))

    def link(self, rank: int, other: int) -> MessageCost:
        return self.intra if self.same_node(rank, other) else self.inter
