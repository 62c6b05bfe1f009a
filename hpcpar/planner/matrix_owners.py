"""Which rank works on which matrix: whole matrices for each rank, balanced by their cost. Pure integers.

costs    9 7 6 5 4 4       two ranks, dearest first, each to the rank with least so far
rank 0   9     5 4         18
rank 1     7 6     4       17
rounds   9 | 5 | 4         the k-th dearest of every rank are worked on at the same time
         7 | 6 | 4
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from heapq import heapreplace
from typing import NamedTuple

from hpcpar.planner.muon import orthogonalization_flops


def balanced_owners(costs: Sequence[int], size: int) -> list[int]:
    """Return each matrix's owner: dearest first, to the rank with the least so far, the lowest of equals.

    The longest rank has at most 4/3 - 1/(3 size) of the least possible, and at most a matrix more than the
    mean.
    source   Graham 1969, Bounds on multiprocessing timing anomalies (longest processing time first)
    """
    loads, owners = [(0, rank) for rank in range(size)], [0] * len(costs)
    for number in sorted(range(len(costs)), key=lambda number: (-costs[number], number)):
        load, owner = loads[0]
        owners[number] = owner
        heapreplace(loads, (load + costs[number], owner))
    return owners


class OwnMatrix(NamedTuple):
    """A rank's matrix, or its part of one.

    cost       of the step on the whole matrix, by which owners are balanced
    elements   that the rank has
    """

    cost: int
    elements: int
    is_divided: bool


Matrices = tuple[tuple[OwnMatrix, int], ...]
"""How many there are of each."""


@lru_cache(maxsize=4096)
def most_owned(matrices: Matrices, size: int) -> tuple[int, int]:
    """Return the highest cost and the most elements of one of `size` owners."""
    each = [matrix for matrix, count in matrices for _ in range(count)]
    costs, elements = [0] * size, [0] * size
    for matrix, owner in zip(each, balanced_owners([one.cost for one in each], size), strict=True):
        costs[owner] += matrix.cost
        elements[owner] += matrix.elements
    return max(costs), max(elements)


def rounds_of(costs: Sequence[int], owners: Sequence[int], size: int) -> list[list[int]]:
    """Return the matrices of each round, at most one for each rank: every rank's k-th dearest in round k."""
    queues: list[list[int]] = [[] for _ in range(size)]
    for number in sorted(range(len(costs)), key=lambda number: (-costs[number], number)):
        queues[owners[number]].append(number)
    longest = max(map(len, queues), default=0)
    return [[queue[turn] for queue in queues if turn < len(queue)] for turn in range(longest)]


def matrix_cost(shape: Sequence[int]) -> int:
    """Return the cost by which a matrix of this shape is balanced: FLOPs of an iteration, at least 1."""
    rows, columns = shape
    return max(1, orthogonalization_flops(rows, columns, 1))
