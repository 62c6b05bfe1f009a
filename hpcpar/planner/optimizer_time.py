"""Seconds of the optimizer's step on one rank, and the bytes of Muon's matrices that it sends.

elementwise   reads and writes the state once, in device memory, or where it is offloaded
muon          5 iterations of (4m²n + 2m³) FLOPs on each matrix of the layers, by its one owner, of whom the
              one with most counts; in stage 3,
              and where tp splits the matrix, the update goes to the owner and back (`planner.muon`)
"""

from __future__ import annotations

from collections.abc import Sequence

from hpcpar.planner.cluster import Cluster
from hpcpar.planner.kernel_time import GroupShape, elementwise_s, half_allreduce_s
from hpcpar.planner.matrix_owners import most_owned
from hpcpar.planner.model_shapes import ModelShape
from hpcpar.planner.muon import NEWTON_SCHULZ_STEPS, UPDATE_ITEMSIZE
from hpcpar.planner.software import Software
from hpcpar.planner.stage_memory import OwnParameters, matrices_of, own_parameters, state_widths
from hpcpar.planner.stages import StageLayers
from hpcpar.planner.strategy import Strategy


def optimizer_s(
    model: ModelShape, cluster: Cluster, strategy: Strategy, software: Software, held: Sequence[StageLayers]
) -> float:
    """Return the seconds of the update on a rank with these stages."""
    own = own_parameters(model, strategy, held)
    seconds = software.step_s + software.launches_s(cluster.device, software.step_kernels)
    seconds += _elementwise_s(own, cluster, strategy, software)
    if strategy.optimizer == "muon":
        device = cluster.device
        rate = device.peak("bfloat16") * device.efficiency.matrix
        seconds += _flops(model, strategy, held) / rate + _exchange_s(own, cluster, strategy)
    return seconds


def _elementwise_s(own: OwnParameters, cluster: Cluster, strategy: Strategy, software: Software) -> float:
    of_matrices, of_others = state_widths(strategy.precision, software, strategy.optimizer)
    nbytes = 0.0
    of_layers, of_experts = own.shards or (strategy.shard_ranks, strategy.expert_shards)
    for parameters, widths, shards in (
        (own.matrices, of_matrices, of_layers),
        (own.others, of_others, strategy.shard_ranks),
        (own.experts, of_matrices, of_experts),
    ):
        nbytes += parameters / float(shards) * (2 * widths.optimizer + 3 * (software.gradient_bytes or 2) + 2)
    if strategy.offload is None:
        return elementwise_s(cluster.device, nbytes)
    bandwidth = cluster.host_bandwidth if strategy.offload == "cpu" else cluster.disk_bandwidth
    if strategy.offload != "cpu":
        bandwidth /= cluster.devices_per_node
    return nbytes / bandwidth if bandwidth else float("inf")


def _flops(model: ModelShape, strategy: Strategy, held: Sequence[StageLayers]) -> int:
    """Return the most FLOPs of one rank."""
    dense, experts = matrices_of(model, strategy, held)
    flops = 0
    for matrices, ranks, parts in (
        (dense, strategy.shard_ranks, strategy.layout.tp),
        (experts, strategy.expert_shards, strategy.layout.etp),
    ):
        for is_divided in (False, True):
            family = tuple(each for each in matrices if each[0].is_divided == is_divided)
            cost, _ = most_owned(family, ranks * (parts if is_divided else 1))
            flops += NEWTON_SCHULZ_STEPS * cost
    return flops


def _exchange_s(own: OwnParameters, cluster: Cluster, strategy: Strategy) -> float:
    """Return the seconds in which updates go to the owners of their matrices and back."""
    layout, there_and_back = strategy.layout, 2 * UPDATE_ITEMSIZE
    seconds = half_allreduce_s(
        GroupShape.of(cluster, layout.tp, 1), there_and_back * own.matrices / strategy.shard_ranks
    )
    if strategy.zero_stage == 3:
        group = GroupShape.of(cluster, strategy.shard_ranks, layout.tp)
        seconds += half_allreduce_s(group, there_and_back * own.matrices / strategy.shard_ranks)
        experts = GroupShape.of(cluster, strategy.expert_shards, layout.ep * layout.etp)
        seconds += half_allreduce_s(experts, there_and_back * own.experts / strategy.expert_shards)
    return seconds
