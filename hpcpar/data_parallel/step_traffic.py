"""Bytes that all ranks of an optimizer send, by communicator and collective, in theory."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from hpcpar.data_parallel.zero3 import FullyShardedState
from hpcpar.planner.traffic import (
    StepCounts,
    collective_nbytes,
    data_parallel_nbytes,
    dtype_of,
    maps_nbytes,
    replicas_nbytes,
)

if TYPE_CHECKING:
    from hpcpar.comm import Communicator
    from hpcpar.data_parallel.builder import OptimizerOptions, Parts

Traffic = Counter[tuple["Communicator", str]]


def step_traffic(parts: Parts, options: OptimizerOptions, counts: StepCounts, forwards: int) -> Traffic:
    """Count the bytes of gradients, parameters and matrices; `forwards` are those without a backward."""
    total, comms, dtype = Traffic(), parts.comms, options.reduction_dtype
    for replicas in comms:
        buckets = [bucket for bucket in parts.reducer.buckets if bucket.replicas is replicas]
        comm, within, across = comms.of(replicas), comms.shard_comm(replicas), comms.across(replicas)
        nbytes = data_parallel_nbytes(
            within,
            buckets,
            counts,
            stage=options.zero_stage,
            algorithm=options.algorithm,
            dtype=dtype,
            gathered=not options.shared_parameters,
            maps=across is None,
        )
        total.update({(within, collective): sent for collective, sent in nbytes.items()})
        if across is not None:
            ranges = [bucket.shard_range(within.rank, within.size) for bucket in buckets]
            lengths = [stop - start for start, stop in ranges]
            total[across, "allreduce"] += counts.steps * replicas_nbytes(across, buckets, lengths, dtype)
            total[comm, "allreduce"] += counts.steps * maps_nbytes(comm, buckets)
    if parts.update is not None:
        for comm, exchanged in parts.update.exchange.nbytes_by_comm().items():
            total[comm, "alltoall"] += counts.steps * exchanged
    if isinstance(parts.allgather, FullyShardedState) and parts.allgather.node_shared is None:
        total.update(_unshard_traffic(parts.allgather, counts, forwards))
    return total


def _unshard_traffic(sharding: FullyShardedState, counts: StepCounts, forwards: int) -> Traffic:
    """Count every unit in forward, and again in backward unless it is kept; or once a step."""
    total = Traffic()
    for unit in sharding.units:
        in_step = 1 if sharding.until_step else counts.backwards * (1 if unit.keeps else 2)
        times = forwards + counts.steps * in_step
        for group in unit.groups:
            bucket = group.block.bucket
            comm = sharding.comms.shard_comm(bucket.replicas)
            total[comm, "allgather"] += times * collective_nbytes(
                comm, "allgather", bucket.nbytes, dtype=dtype_of(bucket)
            )
    return total
