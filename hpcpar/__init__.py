"""hpcpar: train PyTorch models across the nodes of a supercomputer over plain MPI.

    import hpcpar

    world = hpcpar.init()                       # a communicator over all ranks
    optimizer = hpcpar.DistributedOptimizer(torch.optim.AdamW(model.parameters()),
                                            model.named_parameters(), world)

Importing the package starts nothing: MPI begins in `init()`, torch is imported when first needed.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpcpar.comm import Communicator, run_loopback
    from hpcpar.comm.preemption import Preemption
    from hpcpar.comm.world import init
    from hpcpar.data_parallel import (
        CombinedOptimizer,
        DistributedOptimizer,
        Precision,
        SyncBatchNorm,
        average_running_statistics,
        broadcast_parameters,
        fully_shard,
        memory_report,
        summon_full_parameters,
        watch_activations,
    )
    from hpcpar.mesh import Layout, Mesh
    from hpcpar.torch_backend import communicator_of, process_group_of
    from hpcpar.training.parallelize import parallelize_llama

__version__ = "0.1.0"

_HOME = {
    "init": "hpcpar.comm.world",
    "Communicator": "hpcpar.comm",
    "run_loopback": "hpcpar.comm",
    "Preemption": "hpcpar.comm.preemption",
    "CombinedOptimizer": "hpcpar.data_parallel",
    "DistributedOptimizer": "hpcpar.data_parallel",
    "Precision": "hpcpar.data_parallel",
    "SyncBatchNorm": "hpcpar.data_parallel",
    "average_running_statistics": "hpcpar.data_parallel",
    "broadcast_parameters": "hpcpar.data_parallel",
    "fully_shard": "hpcpar.data_parallel",
    "memory_report": "hpcpar.data_parallel",
    "summon_full_parameters": "hpcpar.data_parallel",
    "watch_activations": "hpcpar.data_parallel",
    "communicator_of": "hpcpar.torch_backend",
    "process_group_of": "hpcpar.torch_backend",
    "Layout": "hpcpar.mesh",
    "Mesh": "hpcpar.mesh",
    "parallelize_llama": "hpcpar.training.parallelize",
}

__all__ = [
    "CombinedOptimizer",
    "Communicator",
    "DistributedOptimizer",
    "Layout",
    "Mesh",
    "Precision",
    "Preemption",
    "SyncBatchNorm",
    "__version__",
    "average_running_statistics",
    "broadcast_parameters",
    "communicator_of",
    "fully_shard",
    "init",
    "memory_report",
    "parallelize_llama",
    "process_group_of",
    "run_loopback",
    "summon_full_parameters",
    "watch_activations",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'hpcpar' has no attribute {name!r}")
    from hpcpar.errors import naming_extras

    with naming_extras():
        return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
