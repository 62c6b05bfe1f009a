"""Adasum: a sum of gradients that counts what two of them share only once.

    a ⊕ b = (1 - a·b / 2a·a) a + (1 - a·b / 2b·b) b

    orthogonal   a·b = 0: their sum
    parallel     their mean, whatever their lengths
    a zero norm  its factor is 1, so that a ⊕ 0 = a

It is a tree over the ranks, (0 ⊕ 1) ⊕ (2 ⊕ 3) and so on, and every tensor has its own dot products.
On each level partners halve what they both have a vector of, and exchange halves; a dot product of
whole vectors is then in pieces on all ranks of the group, which add it up among themselves:

    p = 4        rank 0    rank 1    rank 2    rank 3
    distance 1   a[0:2]    a[2:4]    b[0:2]    b[2:4]     a = 0 ⊕ 1, b = 2 ⊕ 3; each adds dots with one rank
    distance 2   c[0:1]    c[2:3]    c[1:2]    c[3:4]     c = a ⊕ b; each adds dots with three ranks
    back         c[0:2]    c[2:4]    c[0:2]    c[2:4]     distance 2
                 c         c         c         c          distance 1

source   Maleki et al. 2020, "Scaling Distributed Training with Adaptive Summation", arXiv 2006.02924,
         section 4 and algorithm 1 (vector halving, distance doubling)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from hpcpar import partition
from hpcpar.algorithms.doubling import doublings, largest_power
from hpcpar.comm import Communicator
from hpcpar.errors import OperationError

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

BLOCK_COUNT = 32 * 1024
"""Elements that are worked on at once: as float64, those of both vectors stay in a second-level cache."""

AB, AA, BB = range(3)
"""Columns of a table of dot products."""


@dataclass(frozen=True, slots=True)
class Halving:
    """One level of a rank's walk: with rank XOR distance, which part is kept and which is given."""

    distance: int
    kept: slice
    given: slice


def halvings(rank: int, size: int, count: int) -> list[Halving]:
    """Return the levels of a rank, for a vector of `count` elements; `size` is a power of two.

    halvings(2, 4, 4) == [Halving(1, slice(0, 2), slice(2, 4)), Halving(2, slice(1, 2), slice(0, 1))]
    """
    walk, start, stop = [], 0, count
    for distance in doublings(size):
        middle = start + partition.counts(stop - start, 2)[0]
        lower, upper = slice(start, middle), slice(middle, stop)
        kept, given = (upper, lower) if rank & distance else (lower, upper)
        walk.append(Halving(distance, kept, given))
        start, stop = kept.start, kept.stop
    return walk


def adasum(comm: Communicator, flat: torch.Tensor, edges: Sequence[int]) -> None:
    """Replace every rank's tensors by the Adasum of all ranks', in place. Collective; blocks.

    flat     one dimension, on the CPU, float16, bfloat16, float32 or float64
    edges    tensor i is flat[edges[i]:edges[i + 1]]; the same on every rank. What lies before the first
             edge and after the last is left as it is
    errors   OperationError when the number of ranks is not a power of two, or for other arguments
    cost     S bytes, p = 2^L ranks, T tensors: each rank sends 2S(p - 1)/p in 2L messages, and
             24T bytes of dot products in each of L(L + 1)/2

    All ranks end with identical bits, as each element of a level is computed on one rank. Dot products,
    factors and the combination are float64, rounded to the elements' type once on each level: the factors
    of parallel vectors are as large as the ratio of their lengths, which float32 need not hold. Float64
    elements should keep norms between 1e-140 and 1e150; what underflows is summed, as with a zero norm.
    """
    _require(comm.size, flat, edges)
    data = flat.detach()[edges[0] : edges[-1]]
    tensors = [(start - edges[0], stop - edges[0]) for start, stop in pairwise(edges)]
    comm = comm.unchecked("adasum")
    walk = halvings(comm.rank, comm.size, len(data))
    for level in walk:
        own = data[level.kept]
        theirs = torch.empty_like(own)
        _swap(comm, level.distance, data[level.given], theirs)
        lower, upper = (theirs, own) if comm.rank & level.distance else (own, theirs)
        pieces = [_within(tensor, level.kept) for tensor in tensors]
        dots = torch.zeros(len(tensors), 3, dtype=torch.float64)
        for row, piece in zip(dots, pieces, strict=True):
            _add_dots(row, lower[piece], upper[piece])
        _sum_over_group(comm, 2 * level.distance, dots)
        for piece, (a_factor, b_factor) in zip(pieces, _factors(dots), strict=True):
            _combine(lower[piece], a_factor, upper[piece], b_factor, own[piece])
    for level in reversed(walk):
        _swap(comm, level.distance, data[level.kept], data[level.given])


def _require(size: int, flat: torch.Tensor, edges: Sequence[int]) -> None:
    if size != largest_power(size):
        raise OperationError(
            f"Adasum among {size} ranks: it pairs ranks level by level, so it takes 1, 2, 4, 8 … of them; "
            f"start that many, or reduce by Average"
        )
    if flat.dim() != 1 or not flat.is_cpu or flat.dtype not in DTYPES:
        raise OperationError(
            f"Adasum of a tensor of shape {list(flat.shape)}, {flat.dtype}, on {flat.device}; it takes one "
            f"dimension of float16, bfloat16, float32 or float64 on the CPU"
        )
    ordered = all(start <= stop for start, stop in pairwise(edges))
    if len(edges) < 2 or not ordered or edges[0] < 0 or edges[-1] > len(flat):
        raise OperationError(
            f"Adasum with edges {list(edges)} in {len(flat)} elements; they must be two or more numbers that "
            f"ascend within 0 and {len(flat)}"
        )


def _swap(comm: Communicator, distance: int, sent: torch.Tensor, received: torch.Tensor) -> None:
    partner = comm.rank ^ distance
    comm.sendrecv(sent, partner, received, partner)


def _sum_over_group(comm: Communicator, group: int, dots: torch.Tensor) -> None:
    """dots = their sum over the aligned run of `group` ranks that holds this one, by recursive doubling."""
    incoming = torch.empty_like(dots)
    for distance in doublings(group):
        _swap(comm, distance, dots, incoming)
        dots += incoming


def _within(tensor: tuple[int, int], part: slice) -> slice:
    """Return a tensor's span inside a part of the whole, relative to the part; it may be empty."""
    start, stop = (min(max(edge, part.start), part.stop) - part.start for edge in tensor)
    return slice(start, stop)


def _blocks(count: int) -> Iterator[slice]:
    for start in range(0, count, BLOCK_COUNT):
        yield slice(start, start + BLOCK_COUNT)


def _add_dots(row: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """row = row + [a·b, a·a, b·b] in float64."""
    for block in _blocks(len(a)):
        x, y = a[block].double(), b[block].double()
        row += torch.stack((x.dot(y), x.dot(x), y.dot(y)))


def _factors(dots: torch.Tensor) -> list[tuple[float, float]]:
    """Return the factors of a and b for each row of dot products."""
    half = dots[:, AB] / 2
    a_factors = torch.where(dots[:, AA] == 0, 1.0, 1 - half / dots[:, AA])
    b_factors = torch.where(dots[:, BB] == 0, 1.0, 1 - half / dots[:, BB])
    return list(zip(a_factors.tolist(), b_factors.tolist(), strict=True))


def _combine(
    a: torch.Tensor, a_factor: float, b: torch.Tensor, b_factor: float, result: torch.Tensor
) -> None:
    """result = a_factor · a + b_factor · b, rounded once; result may be a or b."""
    for block in _blocks(len(result)):
        result[block] = (a[block].double() * a_factor).add_(b[block].double(), alpha=b_factor)
