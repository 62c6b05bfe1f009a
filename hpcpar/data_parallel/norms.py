"""The norm of a gradient of which every rank has a part.

Parts of parameters that are split over further axes count as `hpcpar.autograd.split_norms` says.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from hpcpar.autograd.dim_collectives import summed
from hpcpar.autograd.split_norms import (
    Spread,
    in_common_order,
    norm_of_parts,
    require_norm_type,
    split_over_of,
    wide,
)
from hpcpar.data_parallel.bucket_shards import shard_of
from hpcpar.data_parallel.buckets import Bucket
from hpcpar.data_parallel.nonfinite import is_finite
from hpcpar.data_parallel.replica_comms import ReplicaComms
from hpcpar.parameter_info import info_of

if TYPE_CHECKING:
    from hpcpar.comm import Communicator

T = TypeVar("T")


class GradientNorm:
    """Norms of gradients that lie flat, a tensor for each bucket.

    parameters   as numbered in the buckets; each notes over whose ranks it is split
    comms        ranks with copies of the parameters
    sharded      each of these has its shard of every bucket, else the whole of it
    elsewhere    those that count on another rank, which has a copy
    others       those that get no gradient here, as they are frozen: ranks over which they are split may get
                 one for theirs, and then wait for this one
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        buckets: Sequence[Bucket],
        comms: Communicator | ReplicaComms,
        *,
        sharded: bool,
        elsewhere: Collection[Tensor] = (),
        others: Sequence[Tensor] = (),
    ) -> None:
        self._parameters, self._others = parameters, others
        self._elsewhere = set(map(id, elsewhere))
        self._buckets = buckets
        self._comms = ReplicaComms.given(comms, parameters)
        self._sharded = sharded

    @cached_property
    def _spreads(self) -> list[Spread]:
        """Ways in which gradients are spread over ranks, each once; those over the optimizer's ranks first.

        First looked at when a norm is taken: a pipeline may be made of parameters after their optimizer.
        """
        split = [parameter for parameter in self._others if split_over_of(parameter)]
        found = dict.fromkeys(map(self._spread_of, [*self._parameters, *split]))
        return sorted(
            found, key=lambda spread: spread.shards_over not in (None, self._comms.shard_comm(None))
        )

    def _spread_of(self, parameter: Tensor) -> Spread:
        comm = self._comms.shard_comm(info_of(parameter).replicas) if self._sharded else None
        return Spread(split_over_of(parameter), comm)

    @cached_property
    def _places(self) -> list[list[tuple[int, int, int]]]:
        return [
            [
                (piece.member, piece.offset, piece.end)
                for piece in shard_of(bucket, *self._shard(bucket)).pieces
                if id(self._parameters[piece.member]) not in self._elsewhere
            ]
            for bucket in self._buckets
        ]

    def _shard(self, bucket: Bucket) -> tuple[int, int]:
        comm = self._comms.shard_comm(bucket.replicas)
        return (comm.rank, comm.size) if self._sharded else (0, 1)

    def of(
        self, flats: Sequence[Tensor], norm_type: float = 2.0, members: Collection[int] | None = None
    ) -> Tensor:
        """The norm of all gradients; the same bits on every rank. Collective. In float32, or as they are.

        members   numbers of the parameters that count, the same on every rank; None: all
        """
        require_norm_type(norm_type)
        if not self._spreads:
            return torch.zeros(())
        result = norm_of_parts(self._parts(flats, members), self._spreads, norm_type)
        if not flats:
            return result.to(torch.get_default_dtype())
        return result.to(
            device=flats[0].device, dtype=flats[0].abs().dtype if flats[0].is_complex() else wide(flats[0])
        )

    def is_finite(self, flats: Sequence[Tensor]) -> bool:
        """Return whether all gradients on all ranks are finite; all ranks agree. Collective."""
        broken = torch.tensor([sum(not is_finite(flat) for flat in flats)], dtype=torch.float64)
        sharded_over = dict.fromkeys(spread.shards_over for spread in self._spreads if spread.shards_over)
        for comm in [*sharded_over, *self._split_over]:
            broken = summed(broken, comm, consume=True)
        return not broken.item()

    def gathered(self, value: T) -> set[T]:
        """Return the values of all ranks with a copy or a part of these parameters. Collective."""
        found = {value}
        for comm in [self._comms.dp_comm, *self._split_over]:
            found = set().union(*comm.allgather_object(found))
        return found

    @property
    def _split_over(self) -> list[Communicator]:
        return in_common_order([spread.kind for spread in self._spreads])

    def _parts(self, flats: Sequence[Tensor], members: Collection[int] | None) -> list[tuple[Spread, Tensor]]:
        if len(self._spreads) == 1 and not self._elsewhere and members is None:
            return [(self._spreads[0], flat) for flat in flats]
        return [
            (self._spread_of(self._parameters[member]), flat[start:stop])
            for flat, places in zip(flats, self._places, strict=True)
            for member, start, stop in places
            if members is None or member in members
        ]
