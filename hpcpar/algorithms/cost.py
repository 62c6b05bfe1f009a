"""Closed forms: the factors of α, Sβ and Sγ in each algorithm's docstring, for n ranks and k segments.

A `Cost` is for a uniform network. A `TwoLevelCost` is for N nodes of g consecutive ranks each, n = Ng, with
one kind of link within nodes and another, not faster, between them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from hpcpar.algorithms.doubling import doublings, fold_chunks, largest_power


class Cost(NamedTuple):
    """The critical path of a collective on equal chunks; `sent` and `combined` in whole vectors."""

    messages: float
    sent: float = 0.0
    combined: float = 0.0

    def plus(self, other: Cost) -> Cost:
        """The cost of one after the other."""
        return Cost(self.messages + other.messages, self.sent + other.sent, self.combined + other.combined)

    def minus(self, other: Cost) -> Cost:
        """The remainder when the other is a part of this one."""
        return self.plus(other.times(-1))

    def of_part(self, part: float) -> Cost:
        """The cost of as many messages for a part of the vector."""
        return Cost(self.messages, self.sent * part, self.combined * part)

    def times(self, factor: float) -> Cost:
        """The cost of `factor` repetitions."""
        return Cost(self.messages * factor, self.sent * factor, self.combined * factor)


class TwoLevelCost(NamedTuple):
    """The critical path on a network of nodes, by the kind of link."""

    inside: Cost
    between: Cost


CostForm = Callable[[int, int], Cost]
"""(ranks, segments) -> cost"""

OnNodes = Callable[[CostForm, int, int, int], TwoLevelCost]
"""(cost on a uniform network, nodes, ranks per node, segments) -> cost on two levels"""


# One chunk to or from each of the other ranks, one after another.


def every_chunk(n: int, k: int) -> Cost:
    return Cost(n - 1, _others(n))


def every_chunk_combined(n: int, k: int) -> Cost:
    return Cost(n - 1, _others(n), _others(n))


def every_chunk_twice(n: int, k: int) -> Cost:
    return every_chunk_combined(n, k).plus(every_chunk(n, k))


def scattered_and_gathered(n: int, k: int) -> Cost:
    """One rank scatters the vector, then all gather it."""
    return every_chunk(n, k).plus(every_chunk(n, k))


# The whole vector to or from each of the other ranks, one after another.


def every_vector(n: int, k: int) -> Cost:
    return Cost(n - 1, n - 1)


def every_vector_combined(n: int, k: int) -> Cost:
    return Cost(n - 1, n - 1, n - 1)


# In rounds: whole vectors, or ever more or fewer chunks.


def rounds_of_vectors(n: int, k: int) -> Cost:
    return Cost(_rounds(n), _rounds(n))


def rounds_of_vectors_combined(n: int, k: int) -> Cost:
    return Cost(_rounds(n), _rounds(n), _rounds(n))


def rounds_of_vectors_twice(n: int, k: int) -> Cost:
    return rounds_of_vectors_combined(n, k).plus(rounds_of_vectors(n, k))


def rounds_of_chunks(n: int, k: int) -> Cost:
    return Cost(_rounds(n), _others(n))


def rounds_of_half(n: int, k: int) -> Cost:
    """Bruck's all-to-all: a chunk that travels j ranks is sent once for each bit of j."""
    return Cost(_rounds(n), sum(distance.bit_count() for distance in range(n)) / n)


def rounds_of_nothing(n: int, k: int) -> Cost:
    return Cost(_rounds(n))


# Recursive doubling and halving, with the fold.


def recursive_doubling_allreduce(n: int, k: int) -> Cost:
    return rounds_of_vectors_combined(largest_power(n), k).plus(_fold(n, 2, 1))


def rabenseifner(n: int, k: int) -> Cost:
    m = largest_power(n)
    return Cost(2 * _rounds(m), 2 * _others(m), _others(m)).plus(_fold(n, 2, 1))


def recursive_halving(n: int, k: int) -> Cost:
    runs = _member_runs(n)
    return Cost(_rounds(largest_power(n)), runs, runs).plus(_fold(n, 1 + 1 / n, 1))


def recursive_doubling_allgather(n: int, k: int) -> Cost:
    return Cost(_rounds(largest_power(n)), _member_runs(n)).plus(_fold(n, 1, 0))


# Pipelined.


def chain(n: int, k: int) -> Cost:
    slots = n - 2 + k if n > 1 else 0
    return Cost(slots, slots / k)


def chain_combined(n: int, k: int) -> Cost:
    slots = n - 2 + k
    return Cost(slots, slots / k, slots / k)


def double_binary(n: int, k: int) -> Cost:
    """Exact for n = 2, and for k = 1 where n is a power of two; otherwise within a third."""
    height, crossings = _rounds(n), 2 if n == 2 else 4
    messages = 4 * height - 2 + crossings * (k - 1)
    return Cost(messages, messages / (2 * k), messages / (4 * k))


# On two levels. The flat algorithms that walk through powers of two have exact forms only where the nodes,
# and the ranks on each, are powers of two; elsewhere a round counts as between the nodes if any of its
# messages leaves a node.


def in_segments(cost: CostForm) -> CostForm:
    """Pipelined in k segments: k times the messages for the same bytes."""
    return lambda n, k: cost(n, k)._replace(messages=k * cost(n, k).messages)


def whole_inside(inside: CostForm) -> OnNodes:
    """Whole vectors within the nodes, then between them, or the other way round."""
    return lambda between, nodes, per_node, k: TwoLevelCost(inside(per_node, k), between(nodes, k))


def long_inside(inside: CostForm) -> OnNodes:
    """Hierarchical: between the nodes each rank exchanges only its lane's part of the vector."""
    return lambda between, nodes, per_node, k: TwoLevelCost(
        inside(per_node, k), between(nodes, k).of_part(1 / per_node)
    )


def overlapped(inside: CostForm) -> OnNodes:
    """Hierarchical in k segments: one is inside while another is between the nodes, except the first."""

    def on_nodes(between: CostForm, nodes: int, per_node: int, k: int) -> TwoLevelCost:
        if nodes == 1:  # nothing to overlap with: one segment after the other
            return TwoLevelCost(in_segments(inside)(per_node, k), between(nodes, k))
        return TwoLevelCost(inside(per_node, k).of_part(1 / k), between(nodes, k).of_part(1 / per_node))

    return on_nodes


def tree_of_nodes(cost: CostForm, nodes: int, per_node: int, k: int) -> TwoLevelCost:
    """Large distances first: a tree among the nodes, and one in each node."""
    return _powers_of_two(cost, nodes, per_node, k, part_inside=1)


def chunk_tree_of_nodes(cost: CostForm, nodes: int, per_node: int, k: int) -> TwoLevelCost:
    """A tree of nodes in which only the node's own part of the vector crosses within it."""
    return _powers_of_two(cost, nodes, per_node, k, part_inside=1 / nodes)


def exchange_of_nodes(cost: CostForm, nodes: int, per_node: int, k: int) -> TwoLevelCost:
    """Doubling by whole vectors: small distances stay in the node, large ones leave it."""
    return _powers_of_two(cost, nodes, per_node, k, part_inside=1, folds=True)


def chunk_exchange_of_nodes(cost: CostForm, nodes: int, per_node: int, k: int) -> TwoLevelCost:
    """Halving and doubling: the messages at large distances, between the nodes, are long."""
    return _powers_of_two(cost, nodes, per_node, k, part_inside=1 / nodes, folds=True)


def one_port(cost: CostForm, nodes: int, per_node: int, k: int) -> TwoLevelCost:
    """One rank's messages to all others in turn, including those of its node.

    Exact for one root; where every rank speaks to all, ports that wait for each other cost a little more.
    """
    whole, near = cost(nodes * per_node, k), (per_node - 1) / (nodes * per_node - 1)
    return TwoLevelCost(whole.times(near), whole.times(1 - near))


def chain_of_nodes(cost: CostForm, nodes: int, per_node: int, k: int) -> TwoLevelCost:
    """The first segment takes every edge, the others follow at the pace of the edges between nodes."""
    return TwoLevelCost(cost(nodes * per_node, k).minus(cost(nodes, k)), cost(nodes, k))


def double_binary_of_nodes(cost: CostForm, nodes: int, per_node: int, k: int) -> TwoLevelCost:
    """Within a half: the lowest ⌊log₂g⌋ - 1 of all levels of the trees stay within nodes."""
    height, low = _rounds(nodes * per_node), max(0, per_node.bit_length() - 2)
    walk = 4 * height - 2
    near, far = walk * low / height, walk * (height - low) / height
    far += (3 if nodes == 2 else 4) * (k - 1)
    return TwoLevelCost(Cost(near, near / (2 * k), near / (4 * k)), Cost(far, far / (2 * k), far / (4 * k)))


def _powers_of_two(
    cost: CostForm, nodes: int, per_node: int, k: int, *, part_inside: float, folds: bool = False
) -> TwoLevelCost:
    """Distances below g stay inside the nodes, the others leave them.

    part_inside   part of the vector that is exchanged inside
    folds         ranks are folded onto a power of two of members
    """
    if per_node != largest_power(per_node):  # no distance is sure to stay inside
        return TwoLevelCost(Cost(0), cost(nodes * per_node, k))
    if folds and largest_power(nodes) != nodes:
        # The fold pairs ranks of one node. After it only half of a folded node's ranks are members, so one
        # more distance leaves the nodes.
        between = cost(2 * largest_power(nodes), k)
        return TwoLevelCost(cost(nodes * per_node, k).minus(between), between)
    return TwoLevelCost(cost(per_node, k).of_part(part_inside), cost(nodes, k))


def _rounds(n: int) -> int:
    """⌈log₂n⌉."""
    return len(doublings(n))


def _others(n: int) -> float:
    """The part of a vector that belongs to the other ranks."""
    return (n - 1) / n


def _fold(n: int, sent: float, combined: float) -> Cost:
    """The cost of folding and unfolding; nothing for a power of two."""
    return Cost(0) if n == largest_power(n) else Cost(2, sent, combined)


def _member_runs(n: int) -> float:
    """Vectors that member 0, which stands for two ranks if any does, exchanges in all rounds."""
    first_chunks = fold_chunks(n)
    return sum(first_chunks[distance] for distance in doublings(largest_power(n))) / n
