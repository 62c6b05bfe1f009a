"""Data parallelism: every rank holds the whole model and sees its own part of each batch."""

from __future__ import annotations

from hpcpar.data_parallel.batch_norm import SyncBatchNorm
from hpcpar.data_parallel.broadcast import broadcast_parameters, expected_broadcast_nbytes
from hpcpar.data_parallel.combined_optimizer import CombinedOptimizer
from hpcpar.data_parallel.distributed_optimizer import DistributedOptimizer
from hpcpar.data_parallel.memory_measurement import memory_report
from hpcpar.data_parallel.precision import Precision
from hpcpar.data_parallel.rank_memory import MemoryReport
from hpcpar.data_parallel.reducer import Reducer
from hpcpar.data_parallel.running_statistics import average_running_statistics
from hpcpar.data_parallel.saved_activations import watch_activations
from hpcpar.data_parallel.shard_model import fully_shard, summon_full_parameters
from hpcpar.planner.traffic import allreduce_nbytes, expected_nbytes

__all__ = [
    "CombinedOptimizer",
    "DistributedOptimizer",
    "MemoryReport",
    "Precision",
    "Reducer",
    "SyncBatchNorm",
    "allreduce_nbytes",
    "average_running_statistics",
    "broadcast_parameters",
    "expected_broadcast_nbytes",
    "expected_nbytes",
    "fully_shard",
    "memory_report",
    "summon_full_parameters",
    "watch_activations",
]
