"""Closed forms: what each algorithm's docstring multiplies α, Sβ and Sγ by, for n ranks and k segments.

A `Bill` is for a uniform network; `Levels` are for N nodes of g consecutive ranks each, n = Ng, with one
kind of link within nodes and another, not faster, between them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from hpcpar.algorithms.doubling import fold_chunks
from hpcpar.algorithms.powers import doublings, largest_power


class Bill(NamedTuple):
    """The critical path of a collective on equal chunks; `sent` and `combined` in whole vectors."""

    messages: float
    sent: float = 0.0
    combined: float = 0.0

    def plus(self, other: Bill) -> Bill:
        """Both, one after the other."""
        return Bill(self.messages + other.messages, self.sent + other.sent, self.combined + other.combined)

    def minus(self, other: Bill) -> Bill:
        """What is left when the other is a part of this one."""
        return self.plus(other.times(-1))

    def of_part(self, part: float) -> Bill:
        """The same messages for a part of the vector."""
        return Bill(self.messages, self.sent * part, self.combined * part)

    def times(self, factor: float) -> Bill:
        """All of it, so many times over."""
        return Bill(self.messages * factor, self.sent * factor, self.combined * factor)


class Levels(NamedTuple):
    """The critical path on a network of nodes: what of it runs within nodes, and what between them."""

    inside: Bill
    between: Bill


Form = Callable[[int, int], Bill]
"""(ranks, segments) -> bill"""

LevelsForm = Callable[[int, int, int], Levels]
"""(nodes, ranks per node, segments) -> levels"""


# One chunk to or from each of the other ranks, one after another.


def every_chunk(n: int, k: int) -> Bill:
    return Bill(n - 1, _others(n))


def every_chunk_combined(n: int, k: int) -> Bill:
    return Bill(n - 1, _others(n), _others(n))


def every_chunk_twice(n: int, k: int) -> Bill:
    return every_chunk_combined(n, k).plus(every_chunk(n, k))


def scattered_and_gathered(n: int, k: int) -> Bill:
    """One rank deals a vector out, and all show each other what they got."""
    return every_chunk(n, k).plus(every_chunk(n, k))


# The whole vector to or from each of the other ranks, one after another.


def every_vector(n: int, k: int) -> Bill:
    return Bill(n - 1, n - 1)


def every_vector_combined(n: int, k: int) -> Bill:
    return Bill(n - 1, n - 1, n - 1)


# In rounds: whole vectors, or ever more or fewer chunks.


def rounds_of_vectors(n: int, k: int) -> Bill:
    return Bill(_rounds(n), _rounds(n))


def rounds_of_vectors_combined(n: int, k: int) -> Bill:
    return Bill(_rounds(n), _rounds(n), _rounds(n))


def rounds_of_vectors_twice(n: int, k: int) -> Bill:
    return rounds_of_vectors_combined(n, k).plus(rounds_of_vectors(n, k))


def rounds_of_chunks(n: int, k: int) -> Bill:
    return Bill(_rounds(n), _others(n))


def rounds_of_half(n: int, k: int) -> Bill:
    """Bruck's all-to-all: a chunk that travels j ranks is sent once for each bit of j."""
    return Bill(_rounds(n), sum(distance.bit_count() for distance in range(n)) / n)


def rounds_of_nothing(n: int, k: int) -> Bill:
    return Bill(_rounds(n))


# Recursive doubling and halving, with the fold.


def recursive_doubling_allreduce(n: int, k: int) -> Bill:
    return rounds_of_vectors_combined(largest_power(n), k).plus(_fold(n, 2, 1))


def rabenseifner(n: int, k: int) -> Bill:
    m = largest_power(n)
    return Bill(2 * _rounds(m), 2 * _others(m), _others(m)).plus(_fold(n, 2, 1))


def recursive_halving(n: int, k: int) -> Bill:
    runs = _member_runs(n)
    return Bill(_rounds(largest_power(n)), runs, runs).plus(_fold(n, 1 + 1 / n, 1))


def recursive_doubling_allgather(n: int, k: int) -> Bill:
    return Bill(_rounds(largest_power(n)), _member_runs(n)).plus(_fold(n, 1, 0))


# Pipelined.


def chain(n: int, k: int) -> Bill:
    slots = n - 2 + k if n > 1 else 0
    return Bill(slots, slots / k)


def chain_combined(n: int, k: int) -> Bill:
    slots = n - 2 + k
    return Bill(slots, slots / k, slots / k)


def double_binary(n: int, k: int) -> Bill:
    """Exact for n = 2, and for k = 1 where n is a power of two; otherwise within a third."""
    height, crossings = _rounds(n), 2 if n == 2 else 4
    messages = 4 * height - 2 + crossings * (k - 1)
    return Bill(messages, messages / (2 * k), messages / (4 * k))


# On nodes: the bills by level. The flat algorithms that walk through powers of two have theirs exactly
# where nodes, and ranks on each, are powers of two; elsewhere a round of which any message leaves a node
# is billed between the nodes.


def inside_and_between(inside: Form, between: Form) -> LevelsForm:
    """Whole vectors first within the nodes, then between them, or the other way round."""
    return lambda nodes, per_node, k: Levels(inside(per_node, k), between(nodes, k))


def long_inside(inside: Form, between: Form) -> LevelsForm:
    """Hierarchical: between the nodes each rank has only its lane's part of the vector to exchange."""
    return lambda nodes, per_node, k: Levels(inside(per_node, k), between(nodes, k).of_part(1 / per_node))


def in_segments(bill: Form) -> Form:
    """Pipelined in k segments: k times the messages for the same bytes."""
    return lambda n, k: bill(n, k)._replace(messages=k * bill(n, k).messages)


def overlapped(inside: Form, between: Form) -> LevelsForm:
    """Hierarchical in k segments: one is inside while another is between the nodes, but for the first."""

    def levels(nodes: int, per_node: int, k: int) -> Levels:
        if nodes == 1:  # nothing to overlap with: one segment after the other
            return Levels(in_segments(inside)(per_node, k), between(nodes, k))
        return Levels(
            inside(per_node, k).of_part(1 / k), in_segments(between)(nodes, k).of_part(1 / per_node)
        )

    return levels


def tree_of_nodes(bill: Form) -> LevelsForm:
    """Large distances first: a tree among the nodes, and one in each node."""
    return _by_powers(bill, inside_and_between(bill, bill))


def chunk_tree_of_nodes(bill: Form) -> LevelsForm:
    """As `tree_of_nodes`, where what crosses within a node is the part of that node."""
    return _by_powers(bill, _long_between(bill))


def exchange_of_nodes(bill: Form) -> LevelsForm:
    """Doubling by whole vectors: at small distances with ranks of the node, at large ones with others."""
    return _by_powers(bill, _unfolded(bill, inside_and_between(bill, bill)))


def chunk_exchange_of_nodes(bill: Form) -> LevelsForm:
    """Halving and doubling: at large distances, so between nodes, the messages are long."""
    return _by_powers(bill, _unfolded(bill, _long_between(bill)))


def one_port(bill: Form) -> LevelsForm:
    """One rank's messages to all others in turn, those of its node among them.

    Exact for one root; where every rank speaks to all, ports that wait for each other cost a little more.
    """

    def levels(nodes: int, per_node: int, k: int) -> Levels:
        whole, near = bill(nodes * per_node, k), (per_node - 1) / (nodes * per_node - 1)
        return Levels(whole.times(near), whole.times(1 - near))

    return levels


def chain_of_nodes(bill: Form) -> LevelsForm:
    """The first segment takes every edge, the others follow at the pace of the edges between nodes."""

    def levels(nodes: int, per_node: int, k: int) -> Levels:
        between = bill(nodes, k)
        return Levels(bill(nodes * per_node, k).minus(between), between)

    return levels


def double_binary_of_nodes(nodes: int, per_node: int, k: int) -> Levels:
    """Within a half: the lowest ⌊log₂g⌋ - 1 of all levels of the trees stay within nodes."""
    height, low = _rounds(nodes * per_node), max(0, per_node.bit_length() - 2)
    walk = 4 * height - 2
    near, far = walk * low / height, walk * (height - low) / height
    far += (3 if nodes == 2 else 4) * (k - 1)
    return Levels(Bill(near, near / (2 * k), near / (4 * k)), Bill(far, far / (2 * k), far / (4 * k)))


def _by_powers(bill: Form, levels: LevelsForm) -> LevelsForm:
    """The levels given where nodes hold a power of two of ranks; else no distance surely stays inside."""

    def form(nodes: int, per_node: int, k: int) -> Levels:
        if per_node != largest_power(per_node):
            return Levels(Bill(0), bill(nodes * per_node, k))
        return levels(nodes, per_node, k)

    return form


def _unfolded(bill: Form, levels: LevelsForm) -> LevelsForm:
    """The levels given where the nodes are a power of two; else the fold pairs ranks of one node.

    After it only half of a folded node's ranks are members, so one more distance leaves the nodes.
    """

    def form(nodes: int, per_node: int, k: int) -> Levels:
        if nodes == largest_power(nodes):
            return levels(nodes, per_node, k)
        between = bill(2 * largest_power(nodes), k)
        return Levels(bill(nodes * per_node, k).minus(between), between)

    return form


def _long_between(bill: Form) -> LevelsForm:
    return lambda nodes, per_node, k: Levels(bill(per_node, k).of_part(1 / nodes), bill(nodes, k))


def _rounds(n: int) -> int:
    """⌈log₂n⌉."""
    return len(doublings(n))


def _others(n: int) -> float:
    """The part of a vector that belongs to the other ranks."""
    return (n - 1) / n


def _fold(n: int, sent: float, combined: float) -> Bill:
    """What taking in and handing back adds; nothing for a power of two."""
    return Bill(0) if n == largest_power(n) else Bill(2, sent, combined)


def _member_runs(n: int) -> float:
    """What member 0, which stands for two ranks if any does, exchanges in all rounds, in vectors."""
    first_chunks = fold_chunks(n)
    return sum(first_chunks[distance] for distance in doublings(largest_power(n))) / n
