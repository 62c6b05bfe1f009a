"""Sums over gradients of which ranks hold parts: each part counts once, and so does what is the same.

A parameter notes the communicators over whose ranks it is split, in its record. Sums of powers are
added over those, and over no others:

    parameters split over     tp, pp   ─ sum over tp ─┐
                              pp       ───────────────┴ sum over pp ─┐
                              nothing  ──────────────────────────────┴ norm

So every communicator is used once, also where its ranks hold parameters that are split in other ways, as
those of a pipeline do.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from hpcpar.autograd.dim_collectives import summed
from hpcpar.errors import OperationError
from hpcpar.parameter_info import info_of

if TYPE_CHECKING:
    from hpcpar.comm import Communicator

    Kind = tuple[Communicator, ...]
    """Over whose ranks a parameter is split; last come those whose ranks hold different parameters."""


def split_over_of(parameter: Tensor) -> Kind:
    """The communicators over whose ranks a parameter is split; none for one that every rank has whole."""
    return info_of(parameter).split_over


class Spread(NamedTuple):
    """Ranks over which a gradient is spread.

    kind         of its parameter
    shards_over  ranks that each have a shard of this rank's part; None: this rank has all of it
    """

    kind: Kind
    shards_over: Communicator | None = None


def norm_of_parts(
    parts: Iterable[tuple[Spread, Tensor]], spreads: Iterable[Spread], norm_type: float
) -> Tensor:
    """Return the norm, in float64, of all ranks' parts together; the same bits on every rank. Collective.

    spreads   of all that could have a part here, the same in the same order on the ranks that share them
    """
    require_norm_type(norm_type)
    largest = math.isinf(norm_type)
    add = torch.maximum if largest else torch.add
    sums = {spread: torch.zeros((), dtype=torch.float64) for spread in spreads}
    for spread, part in parts:
        if part.numel():
            sums[spread] = add(sums[spread], powers(part, norm_type))
    by_kind: dict[Kind, Tensor] = {}
    for comm in dict.fromkeys(spread.shards_over for spread in sums):
        over_comm = [spread for spread in sums if spread.shards_over is comm]
        values = torch.stack([sums[spread] for spread in over_comm])
        for spread, value in zip(
            over_comm, values if comm is None else _combined(values, comm, largest=largest), strict=True
        ):
            by_kind[spread.kind] = add(by_kind[spread.kind], value) if spread.kind in by_kind else value
    total = combined_over(by_kind, largest=largest)
    return total if largest else total ** (1 / norm_type)


def combined_over(sums: Mapping[Kind, Tensor], *, largest: bool) -> Tensor:
    """The sum, or the largest, over all ranks and kinds; the same bits on every rank. Collective.

    sums     by kind, this rank's number: a sum of powers, or the largest value
    errors   OperationError for kinds that list communicators in contradictory orders
    """
    add = torch.maximum if largest else torch.add
    open_sums = dict(sums)
    for comm in in_common_order(list(sums)):
        due = [kind for kind in open_sums if kind and kind[0] is comm]
        combined = _combined(torch.stack([open_sums.pop(kind) for kind in due]), comm, largest=largest)
        for kind, total in zip(due, combined, strict=True):
            rest = kind[1:]
            open_sums[rest] = add(open_sums[rest], total) if rest in open_sums else total
    (total,) = open_sums.values()
    return total


def in_common_order(kinds: Sequence[Kind]) -> list[Communicator]:
    """All communicators of these kinds in one list that is in the order of each of them."""
    after: dict[Communicator, dict[Communicator, None]] = {}  # and not sets, whose order is any
    for kind in kinds:
        for number, comm in enumerate(kind):
            after.setdefault(comm, {}).update(dict.fromkeys(kind[:number]))
    try:
        return list(TopologicalSorter(after).static_order())
    except CycleError as error:
        names = ", ".join(comm.name for comm in error.args[1][1:])
        raise OperationError(
            f"parameters are split over the communicators {names}, noted in other orders for other "
            f"parameters; note them in one order, such as tp before pp"
        ) from error


def _combined(values: Tensor, comm: Communicator, *, largest: bool) -> Tensor:
    """The sum, or the largest, of each value over the ranks; a NaN on one rank is one on all. Collective."""
    if not largest:
        return summed(values, comm)
    # A maximum over ranks may lose a NaN, a sum never does.
    lost = summed(values.isnan().double(), comm)
    found = summed(values.nan_to_num(nan=0.0, posinf=math.inf), comm, op="max")
    return torch.where(lost > 0, math.nan, found)


def powers(part: Tensor, norm_type: float) -> Tensor:
    """The sum of the values' powers in float64, or their largest magnitude, on the CPU."""
    norm: Tensor = torch.linalg.vector_norm(part, norm_type, dtype=wide(part)).cpu().double()
    return norm if math.isinf(norm_type) else norm**norm_type


def require_norm_type(norm_type: float) -> None:
    if norm_type <= 0:
        raise OperationError(f"norm_type={norm_type}; give a number above 0, or inf")


def wide(flat: Tensor) -> torch.dtype:
    """The type in which a norm is accumulated: at least single precision."""
    return flat.dtype if flat.is_complex() else torch.promote_types(flat.dtype, torch.float32)
