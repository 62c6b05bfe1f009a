"""ZeRO-3: every rank keeps a shard of each unit's parameters, and the whole only while it is used.

    shard_model.py        fully_shard and summon_full_parameters
    fsdp_unit.py          one unit: unshard, reshard
    unshard_schedule.py   when, in forward and backward
    unit_sharding.py      how a unit's parameters are cut into shards
    zero2.py              their gradients: reduce-scattered in every backward

A parameter keeps its identity. While it is unsharded its memory is a part of its unit's; otherwise it has
its shape and no values, and to use it is an error.
source   Rajbhandari et al. 2020, ZeRO, arXiv 1910.02054, section 5.3;
         Zhao et al. 2023, PyTorch FSDP, arXiv 2304.11277, sections 3 and 4
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hpcpar.autograd.fused_layers import adding_in_place
from hpcpar.data_parallel.bucket_shards import pieces_between
from hpcpar.data_parallel.fsdp_unit import FsdpUnit, UnitParamGroup, UnshardStats, octets
from hpcpar.data_parallel.parameters import Layout, Named, OwnPiece, layout_of
from hpcpar.data_parallel.precision import Precision
from hpcpar.data_parallel.replica_comms import ReplicaComms
from hpcpar.data_parallel.shared_parameters import NodeSharedParameters
from hpcpar.data_parallel.unshard_schedule import UnshardSchedule
from hpcpar.data_parallel.zero2 import ShardedGradients
from hpcpar.errors import OperationError
from hpcpar.parameter_info import info_of, note


class FullyShardedState:
    """State of a model whose parameters are sharded over `dp_comm`; the model keeps it.

    To an optimizer it is what ParameterAllGather is in stages 1 and 2: `before_step`, `start`, …, `wait`.

    stages          units of each module that is called by itself, as registered, its root first
    blocks          of trainable parameters, in the order in which their gradients leave
    gradients       of these parameters, each rank's shards
    node_shared     memory of parameters that all ranks of a node share; None: each rank has its own
    unshard_stats   how much of the model is unsharded on this rank, now and at most
    writes          times that summoned parameters were written back; the optimizer compares it before a step
    """

    def __init__(
        self,
        stages: list[list[FsdpUnit]],
        comms: ReplicaComms,
        stats: UnshardStats,
        *,
        precision: Precision | None,
        prefetch: int,
        node_shared: NodeSharedParameters | None,
        is_pipelined: bool,
        until_step: bool,
    ) -> None:
        self.units = units = [unit for of_stage in stages for unit in of_stage]
        self.until_step = until_step
        self.dp_comm = comms.dp_comm
        self.comms = comms
        self.precision = precision
        self.node_shared = node_shared
        self.unshard_stats = stats
        self.writes = 0
        self.on_loaded: Callable[[], Callable[[], None] | None] = lambda: None
        """Returns the optimizer's method to call when parameters were loaded; None once it is gone."""
        trainable = [
            (unit, group)
            for unit in reversed(units)
            for group in unit.groups
            if group.parameters[0].requires_grad
        ]
        self.blocks = [group.block for _, group in trainable]
        numbered = {
            number: (parameter, layout_of(view))
            for _, group in trainable
            for number, parameter, view in zip(
                group.block.bucket.members, group.parameters, group.views, strict=True
            )
        }
        self.parameters = [numbered[number][0] for number in range(len(numbered))]
        self.layouts: list[Layout] = [numbered[number][1] for number in range(len(numbered))]
        self.names = [info_of(parameter).name for parameter in self.parameters]
        # A communicator of their own: ranks need not come to a gather and to a gradient in the same order.
        self._loan = comms.lend("gradients")
        self.gradients = ShardedGradients(
            self.names,
            self.parameters,
            [block.bucket for block in self.blocks],
            self._loan,
            dtype=None if precision is None else precision.reduction,
            layouts=self.layouts,
            replicated=False,
        )
        unit_of = {group.block.bucket: unit for unit, group in trainable}
        self._schedules = [
            UnshardSchedule(
                of_stage,
                self.dp_comm,
                self.gradients,
                {bucket: unit for bucket, unit in unit_of.items() if unit in of_stage},
                prefetch=prefetch,
                is_node_shared=node_shared is not None,
                is_stage=is_pipelined,
                until_step=until_step,
            )
            for of_stage in stages
        ]
        of_bucket = {bucket: schedule for schedule in self._schedules for bucket in schedule.unit_of}
        self.gradients.on_bucket_done = lambda bucket: of_bucket[bucket].on_bucket_done(bucket)
        self._in_place = ExitStack()
        self._in_place.enter_context(adding_in_place([of_stage[0].module for of_stage in stages]))
        for unit in units:
            for parameter in unit.parameters:
                note(parameter, unit_name=unit.name, sharding=_StateOf(self))

    def __deepcopy__(self, memo: Any) -> None:
        """Return None: a copy of the model is not sharded."""

    def __reduce__(self) -> Any:
        return self._schedules[0].__reduce__()

    @property
    def gathers(self) -> int:
        """All-gathers of units so far."""
        return sum(schedule.gathers for schedule in self._schedules)

    # --- for the optimizer ------------------------------------------------------------------------

    def release(self) -> None:
        """Reshard all units."""
        for schedule in self._schedules:
            schedule.reshard_all()

    def before_step(self) -> None:
        """Wait until no rank reads the parameters as they are. Collective."""
        for schedule in self._schedules:
            schedule.unpin_all()
        if any(unit.pins for unit in self.units):
            raise OperationError(
                "parameters were to change inside summon_full_parameters(), where what was summoned would be "
                "old; leave it first"
            )
        self.release()
        if self.node_shared is not None:
            for unit in self.units:
                unit.unshard()
            self.dp_comm.barrier()

    def start(self, number: int) -> None:
        """Do nothing: whoever unshards the unit of this block next has its new values."""

    def start_remaining(self) -> None:
        """Start to tell the node's other ranks that all shards are new. Collective."""
        order = [unit for schedule in self._schedules for unit in schedule.order]
        for unit in dict.fromkeys([*order, *self.units]):
            unit.publish_shards()

    def wait(self) -> None:
        """Do nothing: units wait for their own parameters."""

    def close(self) -> None:
        """Do nothing: the model stays sharded."""

    def require_all(self, named: Sequence[Named]) -> None:
        """OperationError unless these are all trainable parameters of the model."""
        held = {id(parameter) for _, parameter in named}
        missing = [name for name, p in zip(self.names, self.parameters, strict=True) if id(p) not in held]
        if missing:
            raise OperationError(
                "the optimizer of a fully sharded model must hold all of its trainable parameters, but "
                f"{missing[0]} and {len(missing) - 1} others are missing; freeze them "
                "(requires_grad_(False)) before fully_shard"
            )

    def every_parameter(self) -> Iterator[nn.Parameter]:
        """Trainable or frozen, each once."""
        return (parameter for unit in self.units for parameter in unit.parameters)

    def own_pieces(self) -> Iterator[tuple[OwnPiece, Tensor]]:
        """This rank's part of every parameter, trainable or frozen, and its values, flat."""
        for unit in self.units:
            for group in unit.groups:
                block = group.block
                places = range(len(group.parameters))
                for piece in pieces_between(places, block.bucket.edges, block.shard.start, block.shard.stop):
                    parameter: Any = group.parameters[piece.member]
                    layout = layout_of(group.views[piece.member])
                    own = OwnPiece(info_of(parameter).name, parameter, layout, piece.start, piece.stop)
                    yield own, block.own[piece.offset : piece.end]

    @torch.no_grad()
    def load(self, values_of: Callable[[OwnPiece], Tensor | None]) -> None:
        """Take values, flat, of this rank's pieces; None: they stay. Master weights follow. Collective."""
        self.before_step()
        with self.dp_comm.together("loading parameters"):
            trained = False
            for piece, own in self.own_pieces():
                values = values_of(piece)
                if values is not None:
                    own.copy_(values)
                    trained |= piece.parameter.requires_grad
            tell = self.on_loaded()
            if trained and tell is not None:
                tell()
        self.start_remaining()

    @contextmanager
    def summoned(self, *, write_back: bool) -> Iterator[None]:
        for unit in self.units:
            unit.unshard()
            unit.pins += 1
        try:
            yield
        finally:
            for unit in self.units:
                unit.pins -= 1
                unit.forget_writes()
            try:
                if write_back:
                    self._write_back()
            finally:
                self.release()

    @torch.no_grad()
    def _write_back(self) -> None:
        """Keep what was written to summoned parameters. Collective; OperationError where ranks differ."""
        groups = [group for unit in self.units for group in unit.groups]
        differing = [name for replicas in self.comms for name in self._differing(groups, replicas)]
        if not self.comms.is_one:  # experts may differ on a few ranks
            differing = [name for names in self.dp_comm.allgather_object(differing) for name in names]
        if differing:
            raise OperationError(
                "inside summon_full_parameters() ranks wrote different values to parameters of which each "
                f"keeps a shard ({', '.join(differing[:3])}{', …' if len(differing) > 3 else ''}); nothing "
                "was kept. Write the same on every rank, or pass write_back=False to write for its own eyes"
            )
        for each in groups:
            own, new = each.block.own, each.flat[each.block.shard.start : each.block.shard.stop]
            if not torch.equal(own, new):
                own.copy_(new)
                self.writes += 1

    def _differing(self, groups: Sequence[UnitParamGroup], replicas: Hashable) -> list[str]:
        """Return the parameters of groups that have other values on some ranks with copies. Collective."""
        shared = [each for each in groups if each.block.bucket.replicas is replicas]
        told = self.comms.of(replicas).allgather_object(
            [zlib.crc32(octets(each.flat.cpu()).data) for each in shared]
        )
        return [
            info_of(parameter).name
            for number, each in enumerate(shared)
            if any(prints[number] != told[0][number] for prints in told)
            for parameter in each.parameters
        ]


class _StateOf(weakref.ref[FullyShardedState]):
    """A parameter's weak reference to the state of its model; refuses to be pickled with the parameter."""

    def __reduce__(self) -> Any:
        state = self()
        return (type(None), ()) if state is None else state.__reduce__()


def sharding_in(model: nn.Module) -> FullyShardedState | None:
    return model.__dict__.get("_hpcpar_sharding")


def sharding_of(parameters: Sequence[Tensor]) -> FullyShardedState | None:
    """Return the sharded model that parameters belong to; None for ordinary ones."""
    found = {reference() for p in parameters if (reference := info_of(p).sharding) is not None}
    if len(found) > 1:
        raise OperationError(
            "the parameters belong to several fully sharded models; give each its own optimizer"
        )
    return next(iter(found), None)
