"""Which rank works on which matrix: whole matrices for each rank, balanced by their cost. Pure integers.

costs    9 7 6 5 4 4       two ranks, dearest first, each to the rank with least so far
rank 0   9     5 4         18
rank 1     7 6     4       17
rounds   9 | 5 | 4         the k-th dearest of every rank are worked on at the same time
         7 | 6 | 4
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapreplace

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


def most_owned(costs: Sequence[int], weights: Sequence[int], size: int) -> int:
    """Return the most weight of one owner, of matrices that are balanced by cost."""
    owned = [0] * size
    for weight, owner in zip(weights, balanced_owners(costs, size), strict=True):
        owned[owner] += weight
    return max(owned)


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
