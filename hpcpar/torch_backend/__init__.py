"""torch.distributed over hpcpar's communicators: `init_process_group("hpcpar")`, without a port.

    import torch.distributed as dist

    dist.init_process_group("hpcpar")       # ranks from srun, mpiexec, `hpcpar run` or torchrun

torch itself calls `register` when it is imported (its entry points for backends), so no import is needed.
`python -m hpcpar.torch_backend script.py` runs an unchanged program over it, whatever backend that names.

    communicator_of(group)      the communicator of a process group, for hpcpar's layers and checkpoints
    process_group_of(comm)      a process group over a communicator, for torch's
    device_mesh_of(mesh)        torch's DeviceMesh with the axes of a `Mesh`, and
    mesh_of(device_mesh)        the other way
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpcpar.torch_backend.interop import communicator_of, device_mesh_of, mesh_of, process_group_of
    from hpcpar.torch_backend.registration import register

__all__ = ["communicator_of", "device_mesh_of", "mesh_of", "process_group_of", "register"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'hpcpar.torch_backend' has no attribute {name!r}")
    home = "registration" if name == "register" else "interop"
    return getattr(import_module(f"hpcpar.torch_backend.{home}"), name)
