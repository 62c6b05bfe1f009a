"""Shard a model for ZeRO-3 in place, and unshard it for a while."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

import torch
from torch import nn

from hpcpar.autograd.scripted import refuse_scripted
from hpcpar.data_parallel.fsdp_unit import FsdpUnit, UnshardStats
from hpcpar.data_parallel.guards import refuse_tied_memory, refuse_unshareable
from hpcpar.data_parallel.initial_values import InitialValues, Values
from hpcpar.data_parallel.parameter_allgather import wait_for_new
from hpcpar.data_parallel.precision import Precision
from hpcpar.data_parallel.replica_comms import ReplicaComms
from hpcpar.data_parallel.replicas import refuse_renormalized
from hpcpar.data_parallel.running_statistics import warn_of_local_batches
from hpcpar.data_parallel.shared_parameters import NodeSharedParameters
from hpcpar.data_parallel.unit_plan import Policy, UnitPlan, plan_stages
from hpcpar.data_parallel.unit_sharding import shard_unit
from hpcpar.data_parallel.zero3 import FullyShardedState, sharding_in
from hpcpar.errors import MismatchError, OperationError, ShardedParameterError
from hpcpar.parameter_info import info_of

if TYPE_CHECKING:
    from hpcpar.comm import Communicator


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


def _agree_on_units(plans: Sequence[UnitPlan], options: str, dp_comm: Communicator) -> None:
    units = ", ".join(plan.name or "the model" for plan in plans)
    asked = dp_comm.allgather_object(f"units {units}; {options}")
    other = next((rank for rank, told in enumerate(asked) if told != asked[0]), None)
    if other is not None:
        raise MismatchError(
            f"rank {other} shards another way than rank 0: {asked[other]}, where rank 0 has {asked[0]}. Give "
            "the same policy, prefetch, precision and reshard on every rank"
        )


def _refuse_state_dict(model: nn.Module, prefix: str, keep_vars: bool) -> None:
    sharding = sharding_in(model)
    if keep_vars:
        return  # the parameters themselves, which refuse by themselves to be used
    if sharding is not None and not all(unit.is_unsharded for unit in sharding.units):
        raise ShardedParameterError(
            "the state_dict() of a fully sharded model was asked for, of which this rank has shards only; do "
            "it inside `with hpcpar.summon_full_parameters(model):`, or save it by hpcpar.checkpoint.save"
        )


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
