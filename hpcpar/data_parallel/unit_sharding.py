"""Cut a unit's parameters into shards: flat memory, this rank's part of it, and placeholders.

unit     w (float32)   b (float32)   s (bfloat16)      one group per element type and replicas, trainable or
                                                       frozen, tied to another stage or not
group    | w 0 … 5 | b 0 … 2 | padding |               flat; each rank owns an equal shard
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from hpcpar.data_parallel.bucket_shards import shard_of
from hpcpar.data_parallel.buckets import Extent, bucket_of
from hpcpar.data_parallel.flat_parameters import Block, allocate_flat
from hpcpar.data_parallel.fsdp_unit import UnitParamGroup
from hpcpar.data_parallel.initial_values import InitialValues
from hpcpar.data_parallel.parameters import layout_of, view_as
from hpcpar.data_parallel.precision import Precision
from hpcpar.data_parallel.replica_comms import ReplicaComms
from hpcpar.data_parallel.sharded_parameter import ShardedParameter
from hpcpar.data_parallel.shared_parameters import NodeSharedParameters
from hpcpar.data_parallel.unit_plan import Entry, Place, UnitPlan
from hpcpar.parameter_info import info_of, note


def shard_unit(
    plan: UnitPlan,
    numbers: Mapping[int, int],
    comms: ReplicaComms,
    source: InitialValues,
    precision: Precision | None,
    device: torch.device | str | None,
    node_shared: NodeSharedParameters | None,
) -> list[UnitParamGroup]:
    """Return a unit's groups.

    numbers   of trainable parameters, by id, in the reducer of their gradients
    source    their initial values
    device    where they are to be; None: where they are
    """
    kinds: dict[Any, list[Entry]] = {}
    for entry in plan.parameters:
        parameter = entry[1]
        floats = precision is not None and parameter.is_floating_point()
        dtype = precision.parameters if precision is not None and floats else parameter.dtype
        place = torch.device(device or "cpu") if parameter.is_meta else parameter.device
        info = info_of(parameter)
        # A tied copy by itself: the other holders' shards have the same edges.
        kind = dtype, place, info.replicas, parameter.requires_grad, info.is_copy
        kinds.setdefault(kind, []).append(entry)
    return [
        _shard_group(
            entries,
            [numbers.get(id(p), -1) for _, p, _ in entries],
            dtype,
            place,
            comms,
            source,
            node_shared,
        )
        for (dtype, place, *_), entries in kinds.items()
    ]


@torch.no_grad()
def _shard_group(
    entries: list[Entry],
    members: list[int],
    dtype: torch.dtype,
    device: torch.device,
    comms: ReplicaComms,
    source: InitialValues,
    node_shared: NodeSharedParameters | None,
) -> UnitParamGroup:
    layouts = [layout_of(parameter) for _, parameter, _ in entries]
    replicas = info_of(entries[0][1]).replicas
    comm = comms.shard_comm(replicas)
    extents = [Extent(math.prod(shape), dtype.itemsize, (dtype, device), replicas) for shape, _ in layouts]
    bucket = replace(bucket_of(range(len(entries)), extents, comms.shards), members=tuple(members))
    shard = shard_of(bucket, comm.rank, comm.size)
    if node_shared is not None:
        flat = node_shared.allocate(bucket.numel, dtype)
        own = flat[shard.start : shard.stop]
    else:
        flat = torch.empty(bucket.numel, dtype=dtype, device=device)
        own = allocate_flat(shard.stop - shard.start, dtype, device, comm)
    longest = functools.reduce(torch.promote_types, [parameter.dtype for _, parameter, _ in entries])
    values = source.shard(entries, bucket, layouts, shard, longest, device)
    own.copy_(values)
    wide = values[: shard.end].clone() if dtype.itemsize < longest.itemsize else None
    placeholders = [
        torch.full((), math.nan, dtype=dtype, device=device).expand(shape) for shape, _ in layouts
    ]
    views = [
        view_as(flat, start, stop, layout)
        for (start, stop), layout in zip(pairwise(bucket.edges), layouts, strict=True)
    ]
    if node_shared is None:
        flat.untyped_storage().resize_(0)
    parameters = [
        _sharded(name, parameter, owners, value, is_sharded=node_shared is None)
        for (name, parameter, owners), value in zip(
            entries, placeholders if node_shared is None else views, strict=True
        )
    ]
    return UnitParamGroup(Block(bucket, shard, own, wide=wide), parameters, flat, views, placeholders)


def _sharded(
    name: str, parameter: nn.Parameter, owners: list[Place], value: Tensor, *, is_sharded: bool
) -> nn.Parameter:
    """Give the parameter another value; put a new one in the place of one of the meta device."""
    if parameter.is_meta:
        noted = parameter.__dict__  # such as the split of a parallel layer's
        parameter = nn.Parameter(value, requires_grad=parameter.requires_grad)
        parameter.__dict__.update(noted)
        for module, own_name in owners:
            module._parameters[own_name] = parameter
    parameter.data = value
    note(parameter, name=name)
    if is_sharded:
        parameter.__class__ = ShardedParameter
    return parameter
