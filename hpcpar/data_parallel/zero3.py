"""ZeRO-3: every rank keeps a shard of each unit's parameters, and the whole only while it is used.

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
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from hpcpar.autograd.fused_layers import adding_in_place
from hpcpar.autograd.scripted import refuse_scripted
from hpcpar.data_parallel.bucket_shards import pieces_between
from hpcpar.data_parallel.buckets import Bucket
from hpcpar.data_parallel.fsdp_unit import FsdpUnit, UnitParamGroup, UnshardStats, octets
from hpcpar.data_parallel.guards import refuse_tied_memory, refuse_unshareable
from hpcpar.data_parallel.initial_values import InitialValues, Values
from hpcpar.data_parallel.parameter_allgather import wait_for_new
from hpcpar.data_parallel.parameters import Layout, Named, OwnPiece, layout_of
from hpcpar.data_parallel.precision import Precision
from hpcpar.data_parallel.replica_comms import ReplicaComms
from hpcpar.data_parallel.replicas import refuse_renormalized
from hpcpar.data_parallel.running_statistics import warn_of_local_batches
from hpcpar.data_parallel.shared_parameters import NodeSharedParameters
from hpcpar.data_parallel.unit_plan import Policy, UnitPlan, plan_stages
from hpcpar.data_parallel.unit_sharding import shard_unit
from hpcpar.data_parallel.unshard_schedule import UnshardSchedule
from hpcpar.data_parallel.zero2 import ShardedGradients
from hpcpar.errors import MismatchError, OperationError, ShardedParameterError
from hpcpar.parameter_info import info_of, note
from hpcpar.planner.traffic import collective_nbytes, dtype_of

if TYPE_CHECKING:
    from hpcpar.comm import Communicator


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
        self._call_when_done(unit_of)
        self._in_place = ExitStack()
        self._in_place.enter_context(adding_in_place([of_stage[0].module for of_stage in stages]))
        for unit in units:
            for parameter in unit.parameters:
                note(parameter, unit_name=unit.name, sharding=_StateOf(self))

    def _call_when_done(self, unit_of: Mapping[Bucket, FsdpUnit]) -> None:
        """Let each bucket tell the schedule of its unit that its gradients have been taken."""
        schedule_of = {unit: schedule for schedule in self._schedules for unit in schedule.units}
        of_bucket = {bucket: schedule_of[unit] for bucket, unit in unit_of.items()}
        self.gradients.on_bucket_done = lambda bucket: of_bucket[bucket].on_bucket_done(bucket)

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

    def expected_traffic(
        self, steps: int, backwards: int, forwards: int
    ) -> dict[tuple[Communicator, str], int]:
        """Bytes that all ranks of a communicator send to gather parameters.

        backwards   in each step, each with its forward
        forwards    without a backward, in all

        Every unit is gathered in forward, and again in backward unless it is kept; or once a step.
        """
        if self.node_shared is not None:
            return {}
        total: Counter[tuple[Communicator, str]] = Counter()
        for unit in self.units:
            in_step = 1 if self.until_step else backwards * (1 if unit.keeps else 2)
            times = forwards + steps * in_step
            for group in unit.groups:
                bucket = group.block.bucket
                comm = self.comms.shard_comm(bucket.replicas)
                total[comm, "allgather"] += times * collective_nbytes(
                    comm, "allgather", bucket.nbytes, dtype=dtype_of(bucket)
                )
        return total


class _StateOf(weakref.ref[FullyShardedState]):
    """A parameter's weak reference to the state of its model; refuses to be pickled with the parameter."""

    def __reduce__(self) -> Any:
        state = self()
        return (type(None), ()) if state is None else state.__reduce__()


def fully_shard(
    model: nn.Module,
    dp_comm: Communicator,
    *,
    policy: Policy | None = None,
    precision: Precision | str | torch.dtype | None = None,
    prefetch: int = 1,
    shared_parameters: bool = False,
    shard_ranks: int | None = None,
    stages: Sequence[nn.Module] | None = None,
    reshard: Literal["unit", "step"] = "unit",
    values: Values | None = None,
    device: torch.device | str | None = None,
) -> nn.Module:
    """Shard a model's parameters over `dp_comm`, in place; returns it. Collective.

        model = Llama(config, seed=None)                     # under torch.device("meta") if it is large
        hpcpar.fully_shard(model, comm, values=lambda name, p: initial_value(config, name, seed=0))
        optimizer = hpcpar.DistributedOptimizer(AdamW(model.parameters()), model.named_parameters(), comm)

    policy             (name, module) -> is it a unit; None: every layer, a member of an outermost ModuleList
    precision          as of DistributedOptimizer: type of parameters and gradients
    prefetch           units that are gathered ahead
    shared_parameters  on CPUs: the parameters exist once on each node, for all of its ranks; only between
                       nodes are they gathered, once after a step
    shard_ranks        neighbours of dp_comm over which parameters are sharded and gathered, as those of a
                       node; shards of gradients are averaged over the other groups once a step (HSDP).
                       None: all ranks
    stages             of a pipeline: the modules that it calls, of this rank, which have all of the model's
                       parameters; each gathers its own units. None: the model is called as a whole
    reshard            when gathered parameters are freed: "unit": after their unit's forward, and again after
                       its backward, so that k microbatches cost 3kΦ of traffic; "step": when the optimizer
                       steps, with memory for all of them until then, and (k + 1)Φ
    values             (name, tensor) -> whole initial value, the same on all ranks, asked for one parameter
                       at a time, and for buffers of the meta device, of which it may know none (KeyError);
                       None: rank 0's parameters and buffers, or, on the meta device, what the modules'
                       reset_parameters draws
    device             where parameters are to be; None: where they are; the CPU for those of the meta device

    Calls of the model, backwards, and what follows from them are collective from now on; every rank must call
    the units in the same order, in the same number of forwards and backwards: MismatchError on every rank
    where a forward does not, as with experts that only some ranks call. A `policy` that makes the layer
    around them the unit is the way then. Which parameters of a unit get
    a gradient may differ, as experts do, and so may whose outputs a loss is made of.

    A forward may not write to its parameters, as torch.nn.Embedding's max_norm makes it: that would go with
    the gathered values, and the shards would not hear of it.

    A backward with create_graph=True, as for a gradient penalty, gathers the whole model and keeps it until
    the end of the next one without, or the step: differentiate the sum of all penalties, once.
    errors   OperationError for a model that is sharded already, a layer with max_norm, or a policy that makes
             no sense; MismatchError on every rank when models differ
    """
    _require_shardable(model, prefetch, reshard)
    warn_of_local_batches(model, dp_comm)
    precision = Precision.of(precision)
    planned = plan_stages(model, policy, stages)
    plans = [plan for of_stage in planned for plan in of_stage]
    comms = ReplicaComms(dp_comm, model.parameters(), shard_ranks)
    refuse_unshareable(comms, shared_parameters=shared_parameters)
    named = [(name, p) for plan in plans for name, p, _ in plan.parameters]
    comms.agree_on_parameters(named)
    refuse_tied_memory(named)
    _agree_on_units(plans, f"prefetch={prefetch}; precision={precision}; reshard={reshard}", dp_comm)
    source = InitialValues(model, comms, values)
    numbers = {
        id(parameter): number
        for number, parameter in enumerate(
            p for plan in plans for _, p, _ in plan.parameters if p.requires_grad
        )
    }
    node_shared = NodeSharedParameters(dp_comm) if shared_parameters else None
    stats = UnshardStats()

    def unit_of(plan: UnitPlan) -> FsdpUnit:
        groups = shard_unit(plan, numbers, comms, source, precision, device, node_shared)
        return FsdpUnit(plan, groups, comms, stats, node_shared=node_shared)

    units = [[unit_of(plan) for plan in of_stage] for of_stage in planned]
    source.fill_buffers(device)
    for of_stage in units:
        for unit in of_stage:
            unit.publish_shards()
    sharding = FullyShardedState(
        units,
        comms,
        stats,
        precision=precision,
        prefetch=prefetch,
        node_shared=node_shared,
        is_pipelined=stages is not None,
        until_step=reshard == "step",
    )
    model.__dict__["_hpcpar_sharding"] = sharding
    model.register_state_dict_pre_hook(_refuse_state_dict)  # type: ignore[no-untyped-call]
    return model


def _require_shardable(model: nn.Module, prefetch: int, reshard: str) -> None:
    if prefetch < 0:
        raise OperationError(f"prefetch={prefetch}; give 0 or more units")
    if reshard not in ("unit", "step"):
        raise OperationError(f'reshard={reshard!r}; give "unit" or "step"')
    if any(info_of(parameter).sharding is not None for parameter in model.parameters()):
        raise OperationError("the model is fully sharded already")
    refuse_scripted(model, "take zero_stage=2 without model=")
    refuse_renormalized(model)


@contextmanager
def summon_full_parameters(model: nn.Module, *, write_back: bool = True) -> Iterator[None]:
    """Unshard all parameters of a fully sharded model inside, for evaluation or export. Collective.

    write_back   keep what has been written to them, on all ranks alike (OperationError on every rank where
                 not); in master weights, too, from the next step on. False: forget it, so that averages may
                 stand in for an evaluation; and do without a look at all values when leaving

    A copy.deepcopy of the model, made here, is an ordinary one that stays whole. Of a model that is not
    sharded, new parameters that are still under way (overlap_allgather) are awaited.
    """
    sharding = sharding_in(model)
    if sharding is None:
        wait_for_new(model.parameters())
        yield
        return
    with sharding.summoned(write_back=write_back):
        yield


def _agree_on_units(plans: Sequence[UnitPlan], options: str, dp_comm: Communicator) -> None:
    units = ", ".join(plan.name or "the model" for plan in plans)
    asked = dp_comm.allgather_object(f"units {units}; {options}")
    other = next((rank for rank, told in enumerate(asked) if told != asked[0]), None)
    if other is not None:
        raise MismatchError(
            f"rank {other} shards another way than rank 0: {asked[other]}, where rank 0 has {asked[0]}. Give "
            "the same policy, prefetch, precision and reshard on every rank"
        )


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


def _refuse_state_dict(model: nn.Module, prefix: str, keep_vars: bool) -> None:
    sharding = sharding_in(model)
    if keep_vars:
        return  # the parameters themselves, which refuse by themselves to be used
    if sharding is not None and not all(unit.is_unsharded for unit in sharding.units):
        raise ShardedParameterError(
            "the state_dict() of a fully sharded model was asked for, of which this rank has shards only; do "
            "it inside `with hpcpar.summon_full_parameters(model):`, or save it by hpcpar.checkpoint.save"
        )
