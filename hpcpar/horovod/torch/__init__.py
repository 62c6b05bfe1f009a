"""Horovod's API for PyTorch, over hpcpar: `import hpcpar.horovod.torch as hvd`.

hvd.init()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * hvd.size())
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
"""

from __future__ import annotations

from hpcpar.horovod.exceptions import HorovodInternalError
from hpcpar.horovod.process_sets import ProcessSet, global_process_set
from hpcpar.horovod.torch import elastic, mpi_ops
from hpcpar.horovod.torch.compression import Compression
from hpcpar.horovod.torch.functions import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from hpcpar.horovod.torch.mpi_ops import *  # noqa: F403  its __all__ is the list of collectives
from hpcpar.horovod.torch.optimizer import DistributedOptimizer
from hpcpar.horovod.torch.sync_batch_norm import SyncBatchNorm

__all__ = [
    *mpi_ops.__all__,
    "Compression",
    "DistributedOptimizer",
    "HorovodInternalError",
    "ProcessSet",
    "SyncBatchNorm",
    "allgather_object",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "elastic",
    "global_process_set",
]
