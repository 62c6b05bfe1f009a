"""Which ranks share a node, and which of them speaks for which part of the data to the other nodes.

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
"""For every rank, any number that it shares with the ranks of its own node only."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Ranks on nodes, both numbered from 0; `members[node]` are the ranks of a node, rising."""

    members: tuple[tuple[int, ...], ...]
    node_of: tuple[int, ...]

    @property
    def nodes(self) -> int:
        return len(self.members)

    @property
    def lanes(self) -> int:
        return max(map(len, self.members))

    def neighbours(self, rank: int) -> tuple[int, ...]:
        """All ranks of this rank's node, itself too."""
        return self.members[self.node_of[rank]]

    def local_rank(self, rank: int) -> int:
        return self.neighbours(rank).index(rank)

    def lane(self, lane: int) -> tuple[int, ...]:
        """The rank that serves a lane, on every node."""
        return tuple(members[lane % len(members)] for members in self.members)

    def lanes_of(self, rank: int) -> range:
        """The lanes that a rank serves: those that leave its local rank when divided by the node's ranks."""
        return range(self.local_rank(rank), self.lanes, len(self.neighbours(rank)))


@lru_cache(maxsize=64)
def place(size: int, nodes: Nodes | None) -> Placement:
    """The ranks by node, nodes in order of first appearance; None: every rank has a node of its own.

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
    return Placement(tuple(map(tuple, members.values())), tuple(number[node] for node in named))
