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

from dataclasses import dataclass

from hpcpar.algorithms.powers import doublings
from hpcpar.algorithms.step import Receive, Send, Step, Steps


def allreduce(rank: int, size: int, *, segments: int = 1) -> Steps:
    """Combine over all ranks; give every rank the total: up and down two trees, in segments.

    Both ends of an edge know the slot in which a segment crosses it, so no two ranks ever wait
    for each other in a ring: with h the height, a rank at depth d passes segment s up in slot
    s + h - d, and receives it finished in slot s + h + d - 1.

    before   every rank: 2 · `segments` chunks of any values; chunk 2s + t is segment s of tree t
    after    every rank: all chunks are totals
    order    at every node: own, left subtree, right subtree
    cost     at most 4(k + 2h - 1)(α + S/2k·β) + (k + 2h - 1)·S/k·γ for k segments, h = ⌈log₂n⌉;
             about 2Sβ for many segments; no rank sends more than 2S
    source   Sanders, Speck, Träff 2009, "Two-tree algorithms for full bandwidth broadcast, reduction
             and scan"; NCCL src/graph/trees.cc
    """
    seats = [seat_of(rank, size, tree) for tree in (0, 1)]
    height = (size - 1).bit_length()
    for slot in range(segments + 2 * height - 1) if size > 1 else ():
        sends: list[Send] = []
        receives: list[Receive] = []
        for tree, seat in enumerate(seats):
            rising, sinking = slot - height + seat.depth, slot - height - seat.depth
            for parent in seat.parent:
                if 0 <= rising < segments:
                    sends.append(Send(parent, (2 * rising + tree,)))
                if 0 <= sinking + 1 < segments:
                    receives.append(Receive(parent, (2 * (sinking + 1) + tree,)))
            for child in seat.children:
                if 0 <= rising + 1 < segments:
                    receives.append(Receive(child, (2 * (rising + 1) + tree,), combine=True))
                if 0 <= sinking < segments:
                    sends.append(Send(child, (2 * sinking + tree,)))
        if sends or receives:
            yield Step(tuple(sends), tuple(receives))


@dataclass(frozen=True)
class Seat:
    """A rank's place in one tree; `parent` is empty for the root and holds one rank otherwise."""

    depth: int
    parent: tuple[int, ...]
    children: tuple[int, ...]


def seat_of(rank: int, size: int, tree: int) -> Seat:
    """Where `rank` sits: in tree 0 at node `rank`; tree 1 is mirrored, or for odd sizes shifted by one."""

    def exchanged(number: int, shift: int) -> int:
        if tree == 0:
            return number
        return size - 1 - number if size % 2 == 0 else (number + shift) % size

    node = exchanged(rank, -1)
    parent = (parent_of(node, size),) if node > 0 else ()
    depth = 0
    above = node
    while above > 0:
        above = parent_of(above, size)
        depth += 1
    return Seat(
        depth,
        tuple(exchanged(number, +1) for number in parent),
        tuple(exchanged(number, +1) for number in children_of(node, size)),
    )


def parent_of(node: int, size: int) -> int:
    """Parent of a node above 0: xx01[0…] and xx11[0…] hang from xx10[0…], or from xx00[0…] beyond the end."""
    lowest = node & -node
    parent = (node ^ lowest) | (lowest << 1)
    return parent if parent < size else node ^ lowest


def children_of(node: int, size: int) -> tuple[int, ...]:
    """The nodes below `node`, the left one first: one for node 0, two for even nodes, none for odd ones."""
    near = sorted({node + side * distance for distance in doublings(size) for side in (-1, 1)})
    return tuple(child for child in near if 0 < child < size and parent_of(child, size) == node)
