"""Process groups and communicators, device meshes and meshes: each from the other."""

from __future__ import annotations

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import hpcpar
from hpcpar.errors import LayoutError, OperationError
from hpcpar.mesh import Mesh
from hpcpar.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from hpcpar.torch_backend import device_mesh_of, mesh_of

pytestmark = pytest.mark.mpi


def test_the_communicator_of_the_default_group_and_of_others(ours, gloo) -> None:
    comm = hpcpar.communicator_of()
    assert (comm.rank, comm.size) == (ours.rank(), ours.size())
    assert hpcpar.communicator_of(distributed.new_group()).size == ours.size()
    with pytest.raises(OperationError, match="is no process group over hpcpar"):
        hpcpar.communicator_of(gloo)


def test_a_process_group_over_a_communicator_of_some_ranks(ours) -> None:
    part = hpcpar.communicator_of().split(ours.rank() % 2, name="odd or even")
    group = hpcpar.process_group_of(part)
    tensor = torch.full((3,), float(ours.rank()))
    distributed.all_reduce(tensor, group=group)
    assert tensor.tolist() == [float(sum(part.world_ranks))] * 3
    assert hpcpar.communicator_of(group) is part
    assert distributed.get_process_group_ranks(group) == list(part.world_ranks)
    distributed.destroy_process_group(group)
    part.barrier()  # it stays the caller's
    part.free()


@pytest.mark.mpi(min_size=2)
def test_ranks_in_another_order_are_refused_and_two_groups_of_the_same_ranks_are_two(ours) -> None:
    comm = hpcpar.communicator_of()
    with comm.split(0, key=-comm.rank) as backwards, pytest.raises(OperationError, match="torch sorts"):
        hpcpar.process_group_of(backwards)
    parts = [comm.split(0, name=name) for name in ("one", "other")]
    groups = [hpcpar.process_group_of(part) for part in parts]
    for group, part in zip(groups, parts, strict=True):
        assert hpcpar.communicator_of(group) is part
        tensor = torch.ones(2)
        distributed.all_reduce(tensor, group=group)
        assert tensor.tolist() == [float(ours.size())] * 2
        distributed.destroy_process_group(group)
        part.free()


@pytest.mark.mpi(min_size=4)
def test_meshes_of_two_axes_have_the_same_ranks_on_each(ours) -> None:
    with Mesh(hpcpar.communicator_of(), dp=2, tp=2) as mesh:
        found = device_mesh_of(mesh)
        assert found.mesh_dim_names == ("dp", "tp")
        for axis in ("dp", "tp"):
            assert found.get_local_rank(axis) == mesh.coordinate(axis)
            assert distributed.get_process_group_ranks(found.get_group(axis)) == list(
                mesh.comm(axis).world_ranks
            )
    back = mesh_of(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")))
    assert (back.coordinate("dp"), back.coordinate("tp")) == divmod(ours.rank(), 2)
    back.free()


def test_a_device_mesh_with_other_names_is_refused(ours) -> None:
    with pytest.raises(
        LayoutError, match=r"the dimensions \('rows',\) was asked for: name them pp, dp, cp, tp"
    ):
        mesh_of(init_device_mesh("cpu", (ours.size(),), mesh_dim_names=("rows",)))


@pytest.mark.mpi(min_size=2)
def test_torchs_wrappers_that_would_lose_how_a_layer_is_divided_are_refused(ours) -> None:
    with Mesh(hpcpar.communicator_of(), tp=ours.size()) as mesh:
        for wrapped in (
            fully_shard(ColumnParallelLinear(8, 24, mesh.tp)),
            DistributedDataParallel(ColumnParallelLinear(8, 24, mesh.tp)),  # of ranks that are not replicas
        ):
            with pytest.raises(LayoutError, match=r"torch's FSDP|process_group=.*mesh\.dp"):
                wrapped(torch.ones(2, 8))


def test_layers_of_torch_and_of_hpcpar_share_one_mesh(ours) -> None:
    """The same MLP, divided by DTensor and by hpcpar's layers over the same communicator."""
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(8, 24), nn.GELU(), nn.Linear(24, 8))
    inputs = torch.randn(5, 8)
    expected = whole(inputs)
    with Mesh(hpcpar.communicator_of(), tp=ours.size()) as mesh:
        column = ColumnParallelLinear(8, 24, mesh.tp)
        row = RowParallelLinear(24, 8, mesh.tp)
        part = slice(24 // ours.size() * ours.rank(), 24 // ours.size() * (ours.rank() + 1))
        with torch.no_grad():
            column.weight.copy_(whole[0].weight[part])
            column.bias.copy_(whole[0].bias[part])
            row.weight.copy_(whole[2].weight[:, part])
            row.bias.copy_(whole[2].bias)
        torch.testing.assert_close(row(nn.functional.gelu(column(inputs))), expected)
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        by_torch = parallelize_module(whole, device_mesh_of(mesh), plan)
        torch.testing.assert_close(by_torch(inputs), expected)
