"""Double binary tree: two trees, each for half of the vector, in which inner ranks of one are leaves
of the other, so that every rank sends and receives the same amount.

    tree 0      0                tree 1 (mirrored)       7
                └───────4                        3───────┘
                    ┌───┴───┐                ┌───┴───┐
                    2       6                1       5
                  ┌─┴─┐   ┌─┴─┐            ┌─┴─┐   ┌─┴─┐
                  1   3   5   7            0   2   4   6
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hpcpar.algorithms.doubling import doublings
from hpcpar.algorithms.step import Receive, Send, Step, Steps


def allreduce(rank: int, size: int, *, segments: int = 1) -> Steps:
    """Combine over all ranks; give every rank the total: up and down two trees, in segments.

    Both ends of an edge know the slot in which a segment crosses it, so no two ranks ever wait
    for each other in a ring: with h the height, a rank at depth d passes segment s up in slot
    s + h - d, and receives it finished in slot s + h + d - 1.

    before   every rank: 2 · `segments` chunks of any values; chunk 2s + t is segment s of tree t
    after    every rank: all chunks are totals
    order    at every node: own, then the children, those of even colour first
    cost     for k segments and h = ⌈log₂n⌉, with T = α + S/2k·β and G = S/2k·γ, exactly
             (4h-2)T + (2h-1)G for k = 1 and n a power of two, and 2kT + kG for n = 2; otherwise
             about 4(k-1)T + 2(k-1)G more, within a third: for many segments about 2Sβ + Sγ
    source   Sanders, Speck, Träff 2009, "Two-tree algorithms for full bandwidth broadcast, reduction
             and scan"; NCCL src/graph/trees.cc
    """
    edges = [edge for tree in (0, 1) for edge in _edges_of(rank, size, tree)]
    edges.sort(key=lambda edge: (edge.rises, edge.colour))
    height = (size - 1).bit_length()
    for slot in range(segments + 2 * height - 1):
        busy = [edge for edge in edges if 0 <= slot - edge.first_slot < segments]
        crossing = [(edge, 2 * (slot - edge.first_slot) + edge.tree) for edge in busy]
        sends = tuple(Send(e.peer, (chunk,)) for e, chunk in crossing if e.leaves)
        receives = tuple(Receive(e.peer, (chunk,), combine=e.rises) for e, chunk in crossing if not e.leaves)
        if crossing:
            yield Step(sends, receives)


@dataclass(frozen=True)
class _Edge:
    """One direction of an edge at one of its ends; segment s crosses it in slot `first_slot` + s.

    colour  0 or 1. The edges from a node to its two children differ, and where n is a power of two
            so do a rank's edges to its two parents: listed by colour, messages seldom queue at a port.
    """

    peer: int
    tree: int
    leaves: bool  # sent by this rank, otherwise received
    rises: bool  # towards the root, otherwise away from it
    first_slot: int
    colour: int


def _edges_of(rank: int, size: int, tree: int) -> Iterator[_Edge]:
    """The edges of one rank in one tree, each in both directions."""
    node, height = exchanged(rank, size, tree), (size - 1).bit_length()
    above = [(node, parent_of(node, size), True)] if node > 0 else []
    below = [(child, child, False) for child in children_of(node, size)]
    for child, other, to_parent in (*above, *below):
        peer, depth = restored(other, size, tree), depth_of(child, size)
        colour = (child.bit_count() + tree * (height + 1)) % 2
        yield _Edge(peer, tree, to_parent, True, height - depth, colour)
        yield _Edge(peer, tree, not to_parent, False, height + depth - 1, colour)


def exchanged(rank: int, size: int, tree: int) -> int:
    """The node of a rank: in tree 0 its own number; tree 1 is mirrored, or for odd sizes shifted by one."""
    if tree == 0:
        return rank
    return size - 1 - rank if size % 2 == 0 else (rank - 1) % size


def restored(node: int, size: int, tree: int) -> int:
    """The rank at a node: `exchanged` undone."""
    if tree == 0:
        return node
    return size - 1 - node if size % 2 == 0 else (node + 1) % size


def parent_of(node: int, size: int) -> int:
    """Parent of a node above 0: xx01[0…] and xx11[0…] hang from xx10[0…], or from xx00[0…] beyond the end."""
    lowest = node & -node
    parent = (node ^ lowest) | (lowest << 1)
    return parent if parent < size else node ^ lowest


def children_of(node: int, size: int) -> tuple[int, ...]:
    """The nodes below `node`, the left one first: one for node 0, at most two for even ones, none for odd."""
    near = sorted({node + side * distance for distance in doublings(size) for side in (-1, 1)})
    return tuple(child for child in near if 0 < child < size and parent_of(child, size) == node)


def depth_of(node: int, size: int) -> int:
    """Edges between a node and node 0, the root."""
    return 0 if node == 0 else 1 + depth_of(parent_of(node, size), size)
