"""Values that experts' ranks send each other, by theory: dispatch and combine, forward and backward.

T tokens of a rank, k experts of a token, E experts, w ranks of `ep`, h hidden, N nodes; counts[r][e] are the
rows of rank r for expert e.

    a layer, each rank, balanced        4·T·k·h·(w - 1)/w values
    a layer, each rank, measured        2h·(its rows for others' experts + others' rows for its own)
    a layer, all ranks                  4h·(rows for experts of another rank)
    recomputed in backward              half as much again
    two stages, between nodes           tokens, and gradients of outputs: h for each other node of a token,
                                        not for each expert there; home likewise, if outputs are summed

source   DeepSeek-AI 2024, DeepSeek-V3, arXiv 2412.19437, section 3.2.2 (a token once for each node)
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from hpcpar.partition import bounds

Counts = Sequence[Sequence[int]]
"""Rows of each rank for each expert, [w][E]."""


def balanced_values(tokens: int, per_token: int, hidden: int, size: int) -> float:
    """Return the values that each rank sends for a layer's forward and backward, at perfect balance."""
    return 4 * tokens * per_token * hidden * (size - 1) / size


def sent_values(counts: Counts, hidden: int, *, recomputed: bool = False) -> tuple[int, ...]:
    """Return the values that each rank sends for a layer's forward and backward, in one stage.

    recomputed   forward runs a second time, for backward
    """
    size = len(counts)
    found = []
    for rank, (start, stop) in enumerate(bounds(len(counts[0]), size)):
        there = sum(counts[rank]) - sum(counts[rank][start:stop])
        back = sum(sum(counts[other][start:stop]) for other in range(size) if other != rank)
        found.append((3 if recomputed else 2) * (there + back) * hidden)
    return tuple(found)


def nodes_of_token(count: int, per_token: int, nodes: int) -> float:
    """Return how many nodes have an expert of a token on average, if each k experts are as likely.

    N·(1 - C(E - E/N, k)/C(E, k)), for experts that divide evenly among nodes.
    """
    elsewhere = count - count // nodes
    return nodes * (1 - math.comb(elsewhere, per_token) / math.comb(count, per_token))


def values_between_nodes(
    tokens: int,
    per_token: int,
    hidden: int,
    count: int,
    nodes: int,
    *,
    stages: int,
    sum_on_node: bool = False,
) -> float:
    """Return the values of a rank's tokens between nodes, for a layer's forward and backward on average.

    tokens       of this rank
    stages       1: a row for each expert on another node; 2: one for each other node
    sum_on_node  in two stages, outputs and gradients of rows come home as one sum for each node
    """
    others = (nodes - 1) / nodes
    rows = per_token * others
    once = nodes_of_token(count, per_token, nodes) * others
    there = once if stages == 2 else rows
    back = once if stages == 2 and sum_on_node else rows
    return 2 * tokens * hidden * (there + back)
