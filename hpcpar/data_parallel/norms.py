"""The norm of a gradient of which every rank has a part.

A parameter that is split over several axes counts once for each of its parts, one that is the same on
several ranks counts once: sums of powers are added over the ranks that a parameter is split over, and over
no others.

    parameters split over     tp, pp   ─ sum over tp ─┐
                              pp       ───────────────┴ sum over pp ─┐
                              nothing  ──────────────────────────────┴ norm

So every communicator is used once, also where its ranks hold parameters that are split in other ways, as
those of a pipeline do.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hpcpar.data_parallel.buckets import Bucket
from hpcpar.data_parallel.shards import shard_of
from hpcpar.errors import OperationError

if TYPE_CHECKING:
    from hpcpar.comm import Communicator


class GradientNorm:
    """Norms of gradients that lie flat, a tensor for each bucket.

    names        of the parameters, as numbered in the buckets
    sharded      each rank has its shard of every bucket, else the whole of it
    split_over   by name, further communicators over whose ranks a parameter is split; in the same order for
                 all parameters, and last those whose ranks hold different parameters
    elsewhere    names of parameters that count on another rank, which has a copy
    others       names of parameters that get no gradient here, as they are frozen: ranks over which they are
                 split may get one for theirs, and then wait for this one
    """

    def __init__(
        self,
        names: Sequence[str],
        buckets: Sequence[Bucket],
        dp_comm: Communicator,
        *,
        sharded: bool,
        split_over: Mapping[str, Sequence[Communicator]],
        elsewhere: Collection[str] = (),
        others: Collection[str] = (),
    ) -> None:
        unknown = sorted(set(split_over) - set(names) - set(others))
        if unknown:
            raise OperationError(
                f"split_over names {unknown[0]!r}, which is none of the optimizer's {len(names)} parameters"
            )
        self._dp_comm = dp_comm if sharded else None
        known = [*names, *(name for name in others if name in split_over)]
        self._comms = list(dict.fromkeys(tuple(split_over.get(name, ())) for name in known))
        self._is_one_sum = len(self._comms) == 1 and not elsewhere
        self._order = _in_common_order(self._comms)
        kinds = {name: self._comms.index(tuple(split_over.get(name, ()))) for name in names}
        rank, size = (dp_comm.rank, dp_comm.size) if sharded else (0, 1)
        self._places = [
            [
                (kinds[names[piece.member]], piece.offset, piece.end)
                for piece in shard_of(bucket, rank, size).pieces
                if names[piece.member] not in elsewhere
            ]
            for bucket in buckets
        ]

    def of(self, flats: Sequence[Tensor], norm_type: float = 2.0) -> Tensor:
        """The norm of all gradients; the same bits on every rank. Collective. In float32, or as they are."""
        if norm_type <= 0:
            raise OperationError(f"norm_type={norm_type}; give a number above 0, or inf")
        if not self._comms:
            return torch.zeros(())
        largest = math.isinf(norm_type)
        add = torch.maximum if largest else torch.add
        sums = [torch.zeros((), dtype=torch.float64) for _ in self._comms]
        for number, part in self._parts(flats):
            if part.numel():
                norm = torch.linalg.vector_norm(part, norm_type, dtype=wide(part)).cpu().double()
                sums[number] = add(sums[number], norm if largest else norm**norm_type)
        stacked = torch.stack(sums)
        if self._dp_comm is not None:
            stacked = _combined(stacked, self._dp_comm, largest)
        # Each sum beside the communicators that it is still to be added up over.
        open_sums: dict[tuple[Communicator, ...], Tensor] = dict(zip(self._comms, stacked, strict=True))
        for comm in self._order:
            due = [kind for kind in open_sums if kind and kind[0] is comm]
            combined = _combined(torch.stack([open_sums.pop(kind) for kind in due]), comm, largest)
            for kind, total in zip(due, combined, strict=True):
                rest = kind[1:]
                open_sums[rest] = add(open_sums[rest], total) if rest in open_sums else total
        (total,) = open_sums.values()
        result = total if largest else total ** (1 / norm_type)
        if not flats:
            return result.to(torch.get_default_dtype())
        return result.to(
            device=flats[0].device, dtype=flats[0].abs().dtype if flats[0].is_complex() else wide(flats[0])
        )

    def is_finite(self, flats: Sequence[Tensor]) -> bool:
        """Whether all gradients on all ranks are finite; all ranks agree. Collective."""
        broken = torch.zeros(1, dtype=torch.float64)
        for flat in flats:
            # A sum keeps every NaN and infinity, and is cheaper than looking at each element.
            if not flat.sum(dtype=torch.promote_types(flat.dtype, torch.float64)).isfinite():
                broken += 1
        for comm in [*([] if self._dp_comm is None else [self._dp_comm]), *self._order]:
            comm.allreduce(broken)
        return not broken.item()

    def _parts(self, flats: Sequence[Tensor]) -> list[tuple[int, Tensor]]:
        if self._is_one_sum:
            return [(0, flat) for flat in flats]
        return [
            (kind, flat[start:stop])
            for flat, places in zip(flats, self._places, strict=True)
            for kind, start, stop in places
        ]


def _in_common_order(kinds: Sequence[Sequence[Communicator]]) -> list[Communicator]:
    """All communicators of these lists in one list that is in the order of each of them."""
    after: dict[Communicator, dict[Communicator, None]] = {}  # and not sets, whose order is any
    for kind in kinds:
        for number, comm in enumerate(kind):
            after.setdefault(comm, {}).update(dict.fromkeys(kind[:number]))
    try:
        return list(TopologicalSorter(after).static_order())
    except CycleError as error:
        names = ", ".join(comm.name for comm in error.args[1][1:])
        raise OperationError(
            f"split_over lists the communicators {names} in other orders for other parameters; use one"
        ) from error


def _combined(values: Tensor, comm: Communicator, largest: bool) -> Tensor:
    if not largest:
        return comm.allreduce(values.clone())  # type: ignore[no-any-return]
    # A maximum over ranks may lose a NaN, a sum never does.
    lost = comm.allreduce(values.isnan().double())
    found = comm.allreduce(values.nan_to_num(nan=0.0, posinf=math.inf), "max")
    return torch.where(lost > 0, math.nan, found)


def wide(flat: Tensor) -> torch.dtype:
    """The type in which a norm is accumulated: at least single precision."""
    return flat.dtype if flat.is_complex() else torch.promote_types(flat.dtype, torch.float32)
