"""Process groups and communicators, device meshes and meshes: from one to the other."""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh

from hpcpar.comm import Communicator
from hpcpar.errors import LayoutError, OperationError
from hpcpar.mesh import AXES, Mesh
from hpcpar.torch_backend.creation import create_over, default_group
from hpcpar.torch_backend.process_group import ProcessGroup
from hpcpar.torch_backend.registration import NAME


def communicator_of(group: Any = None) -> Communicator:
    """Return the communicator of a process group; of the default one without an argument.

    errors   OperationError for a group of another backend
    """
    found = group if group is not None else distributed.group.WORLD
    if not isinstance(found, ProcessGroup):
        raise OperationError(
            f"the communicator of {found!r} was asked for, which is no process group over hpcpar: make it by "
            f"init_process_group({NAME!r}), or new_group() after that"
        )
    return found.comm


def process_group_of(comm: Communicator) -> Any:
    """Make a process group over a communicator, which stays the caller's. Collective over its ranks.

    errors   OperationError unless the default group is over hpcpar, and for ranks in another order than the
             job's, which torch would sort
    """
    if default_group() is None:
        raise OperationError(
            f"a process group over {comm!r} was asked for before init_process_group({NAME!r}): call that "
            f"first"
        )
    ranks = list(comm.world_ranks)
    if ranks != sorted(ranks):
        raise OperationError(
            f"a process group over {comm!r} was asked for, whose ranks of the job are {ranks}: torch sorts "
            f"them; make it of a communicator that has them in ascending order"
        )
    return create_over(
        comm,
        lambda: distributed.new_group(
            ranks, backend=NAME, use_local_synchronization=True, group_desc=comm.name
        ),
    )


def device_mesh_of(mesh: Mesh, device_type: str = "cpu") -> DeviceMesh:
    """Make torch's mesh with the same axes, and groups over the same communicators. Collective.

    Its dimensions are pp, dp, cp and tp, as many as have a degree above 1; dp where all are 1.
    """
    axes = [axis for axis in AXES if mesh.layout.degree(axis) > 1] or ["dp"]
    ranks = torch.tensor(mesh.world.world_ranks).view([mesh.layout.degree(axis) for axis in axes])
    groups = [process_group_of(mesh.comm(axis)) for axis in axes]
    if len(axes) == 1:
        return DeviceMesh.from_group(groups[0], device_type, mesh_dim_names=(axes[0],))
    return DeviceMesh.from_group(groups, device_type, mesh=ranks, mesh_dim_names=tuple(axes))


def mesh_of(device_mesh: DeviceMesh) -> Mesh:
    """Make a mesh with the dimensions of torch's, named pp, dp, cp and tp, in this order. Collective.

    errors   LayoutError for other names, another order, and ranks that are placed otherwise
    """
    names = device_mesh.mesh_dim_names or ()
    ordered = tuple(axis for axis in AXES if axis in names)
    if not names or tuple(names) != ordered:
        raise LayoutError(
            f"a mesh of a DeviceMesh with the dimensions {names or 'without names'} was asked for: name them "
            f"{', '.join(AXES)}, as many as there are, in this order"
        )
    world = communicator_of()
    order = device_mesh.mesh.flatten().tolist()
    comm = world.group(order, name="device mesh") if order != list(range(world.size)) else world
    mesh = Mesh(comm, {axis: device_mesh.size(at) for at, axis in enumerate(names)})
    if any(mesh.coordinate(axis) != device_mesh.get_local_rank(axis) for axis in names):
        raise LayoutError(
            f"{device_mesh} places ranks otherwise than hpcpar does, which keeps tp within a node: start as "
            f"many ranks on every node"
        )
    return mesh
