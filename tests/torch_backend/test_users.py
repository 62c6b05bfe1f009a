"""What torch builds on its process groups trains to the same numbers over hpcpar as over gloo.

W  width of the layers, a multiple of 2, 3 and 4 ranks
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives as functional
import torch.distributed.checkpoint as dcp
from torch import Tensor, distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from hpcpar.comm import Communicator

pytestmark = [pytest.mark.mpi, pytest.mark.usefixtures("one_thread")]

W = 24
STEPS = 3
Trained = list[Tensor]


class Block(nn.Module):
    """Two layers, a norm and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(W, 2 * W)
        self.down = nn.Linear(2 * W, W)
        self.norm = nn.LayerNorm(W)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def network(blocks: int = 2) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[Block() for _ in range(blocks)])


def batch(seed: int) -> Tensor:
    return torch.randn(6, W, generator=torch.Generator().manual_seed(seed))


def train(
    model: nn.Module,
    group: Any,
    optimizer: Any = None,
    *,
    data_parallel: bool = True,
) -> Trained:
    """Losses of a few steps, and the parameters after them, whole."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.05)
    found = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(batch(10 * step + (group.rank() if data_parallel else 0))).square().mean()
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
    return [whole(each) for each in (*found, *model.state_dict().values())]


def whole(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


def assert_as_gloo(ours: Any, gloo: Any, run: Callable[[Any], Trained], *, rtol: float = 1e-5) -> None:
    found, expected = run(ours), run(gloo)
    assert len(found) == len(expected) > 0
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=rtol, atol=1e-6)


def mesh_of(group: Any, name: str = "dp") -> DeviceMesh:
    return DeviceMesh.from_group(group, "cpu", mesh_dim_names=(name,))


# DistributedDataParallel -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_as_bucket_view": True},
        {"static_graph": True},
        {"find_unused_parameters": True},
        {"broadcast_buffers": False},
        {"bucket_cap_mb": 0.01},
    ],
    ids=lambda options: " ".join(options),
)
def test_ddp(ours, gloo, options) -> None:
    def run(group: Any) -> Trained:
        model = nn.Sequential(network(), nn.BatchNorm1d(W))
        return train(DistributedDataParallel(model, process_group=group, **options), group)

    assert_as_gloo(ours, gloo, run)


class Unused(nn.Module):
    """Uses one of two layers, another on each rank."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(W, W) for _ in range(3)])
        self.rank = rank

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[self.rank % 2](x)


def test_ddp_with_parameters_that_a_rank_does_not_use(ours, gloo) -> None:
    def run(group: Any) -> Trained:
        model = DistributedDataParallel(
            Unused(group.rank()), process_group=group, find_unused_parameters=True
        )
        return train(model, group)

    assert_as_gloo(ours, gloo, run)


def test_ddp_with_gradients_sent_in_half_precision(ours, gloo) -> None:
    def run(group: Any) -> Trained:
        model = DistributedDataParallel(network(), process_group=group, bucket_cap_mb=0.01)
        model.register_comm_hook(group, default_hooks.fp16_compress_hook)
        return train(model, group)

    assert_as_gloo(ours, gloo, run, rtol=1e-2)


def test_ddp_accumulates_and_joins_uneven_inputs(ours, gloo) -> None:
    def run(group: Any) -> Trained:
        model = DistributedDataParallel(network(), process_group=group)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        with model.no_sync():
            model(batch(group.rank())).square().mean().backward()
        with Join([model]):
            for step in range(2 + group.rank()):
                model(batch(step)).square().mean().backward()
                optimizer.step()
        return [whole(each) for each in model.parameters()]

    assert_as_gloo(ours, gloo, run)


def test_zero_redundancy_optimizer(ours, gloo) -> None:
    def run(group: Any) -> Trained:
        model = DistributedDataParallel(network(), process_group=group)
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.Adam, process_group=group, lr=0.01
        )
        return train(model, group, optimizer)

    assert_as_gloo(ours, gloo, run)


# Fully sharded -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_fsdp2(ours, gloo, reshard, dtype) -> None:
    def run(group: Any) -> Trained:
        model = network()
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        for block in (*model, model):
            fully_shard(block, mesh=mesh_of(group), reshard_after_forward=reshard, mp_policy=policy)
        return train(model, group)

    assert_as_gloo(ours, gloo, run)


def test_a_step_of_fsdp2_moves_three_times_the_parameters(ours) -> None:
    """Gathered in forward and in backward, and a reduce-scatter that is one: each n-1 of n parts."""
    model = nn.Sequential(*[nn.Linear(24, 24, bias=False) for _ in range(4)])
    nbytes = sum(4 * parameter.numel() for parameter in model.parameters())
    for layer in (*model, model):
        fully_shard(layer, mesh=mesh_of(ours))

    def sent() -> dict[str, int]:
        return {row.collective: row.nbytes_sent for row in ours.comm.traffic.rows()}

    found = []
    for _ in range(2):  # the first step sets up
        before = sent()
        model(torch.randn(3, 24)).sum().backward()
        found.append({name: count - before.get(name, 0) for name, count in sent().items()})
    part = nbytes * (ours.size() - 1) // ours.size()
    assert [found[1].get(name, 0) for name in ("allgather", "reduce_scatter")] == [2 * part, part]


def test_fsdp1(ours, gloo) -> None:
    def run(group: Any) -> Trained:
        model = FullyShardedDataParallel(
            network(), process_group=group, device_id=torch.device("cpu"), use_orig_params=True
        )
        found = train(model, group)[:STEPS]
        norm = model.clip_grad_norm_(0.1)
        with FullyShardedDataParallel.summon_full_params(model):
            return [*found, norm, *[whole(each) for each in model.parameters()]]

    assert_as_gloo(ours, gloo, run)


# DTensor and tensor parallelism ----------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(W, W), (7, 5), (1, 3)], ids=str)
def test_dtensor_from_every_placement_to_every_other(ours, gloo, shape) -> None:
    def run(group: Any) -> Trained:
        mesh = mesh_of(group)
        tensor = torch.arange(shape[0] * shape[1], dtype=torch.float32).view(shape)
        found = []
        for before in (Shard(0), Shard(1), Replicate(), Partial()):
            start = (
                DTensor.from_local(tensor * (group.rank() + 1), mesh, [before])
                if isinstance(before, Partial)
                else distribute_tensor(tensor, mesh, [before])
            )
            for after in (Shard(0), Shard(1), Replicate()):
                moved = start.redistribute(mesh, [after])
                found += [moved.to_local().clone(), moved.full_tensor()]
        return found

    assert_as_gloo(ours, gloo, run)


def test_tensor_parallel_layers_and_loss(ours, gloo) -> None:
    def run(group: Any) -> Trained:
        mesh = mesh_of(group, "tp")
        model = network()
        plan: dict[str, Any] = {
            "norm": SequenceParallel(sequence_dim=0),
            "up": ColwiseParallel(input_layouts=Shard(0)),
            "down": RowwiseParallel(output_layouts=Shard(0)),
        }
        for block in model:
            parallelize_module(block, mesh, plan)
        head = parallelize_module(
            nn.Linear(W, 4 * W), mesh, ColwiseParallel(input_layouts=Shard(0), use_local_output=False)
        )
        x = torch.randn(2 * W, W, generator=torch.Generator().manual_seed(1))
        found = []
        for _ in range(2):
            logits = head(model(distribute_tensor(x, mesh, [Shard(0)]).to_local()))
            with loss_parallel():
                loss = nn.functional.cross_entropy(logits, torch.arange(2 * W))
                loss.backward()
            found.append(whole(loss))
        gradients = [each.grad for each in (*model.parameters(), *head.parameters())]
        return [*found, *[whole(each) for each in gradients if each is not None]]

    assert_as_gloo(ours, gloo, run)


@pytest.mark.mpi(min_size=4)
def test_a_mesh_of_two_dimensions(ours, gloo) -> None:
    found = distributed.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    tensor = torch.full((2,), float(ours.rank()))
    distributed.all_reduce(tensor, group=found.get_group("tp"))
    assert tensor.tolist() == [1.0 + 4.0 * (ours.rank() // 2)] * 2
    model = network()
    for block in model:
        parallelize_module(block, found["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=found["dp"])
    fully_shard(model, mesh=found["dp"])
    losses = train(model, found.get_group("dp"))[:STEPS]

    alone = network()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.05)
    for step, loss in enumerate(losses):
        optimizer.zero_grad()
        each = [alone(batch(10 * step + rank)).square().mean() for rank in range(2)]
        torch.stack(each).mean().backward()
        optimizer.step()
        torch.testing.assert_close(loss, each[found.get_local_rank("dp")].detach(), rtol=1e-4, atol=1e-6)


# Pipelines, checkpoints, groups, functional collectives ----------------------------------------------------


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("schedule", [ScheduleGPipe, Schedule1F1B, ScheduleInterleaved1F1B])
def test_pipelines(ours, gloo, schedule) -> None:
    def run(group: Any) -> Trained:
        rank, size = group.rank(), group.size()
        per_rank = 2 if schedule is ScheduleInterleaved1F1B else 1
        stages = per_rank * size
        blocks = network(stages)
        mine = [
            PipelineStage(blocks[at], at, stages, torch.device("cpu"), group=group)
            for at in range(rank, stages, size)
        ]
        pipeline = schedule(mine if per_rank > 1 else mine[0], 2 * size, loss_fn=nn.functional.mse_loss)
        x = torch.randn(4 * size, W, generator=torch.Generator().manual_seed(1))
        losses: list[Tensor] = []
        given = (x,) if rank == 0 else ()
        target = {"target": torch.zeros_like(x), "losses": losses} if rank == size - 1 else {}
        pipeline.step(*given, **target)
        gradients = [each.grad for stage in mine for each in stage.submod.parameters()]
        return [*[whole(loss) for loss in losses], *gradients]

    assert_as_gloo(ours, gloo, run)


def test_a_checkpoint_is_read_as_it_was_written(ours, world: Communicator, tmp_path: Path) -> None:
    path = world.broadcast_object(str(tmp_path / "checkpoint") if world.rank == 0 else None)
    mesh = distributed.init_device_mesh("cpu", (ours.size(),))
    given = torch.arange(7.0 * W).view(7, W)
    state: dict[str, Any] = {"sharded": distribute_tensor(given, mesh, [Shard(0)]), "whole": given, "step": 3}
    dcp.save(state, checkpoint_id=path)
    found: dict[str, Any] = {
        "sharded": distribute_tensor(torch.zeros(7, W), mesh, [Shard(1)]),
        "whole": torch.zeros(7, W),
        "step": 0,
    }
    dcp.load(found, checkpoint_id=path)
    assert torch.equal(found["sharded"].full_tensor(), given)
    assert torch.equal(found["whole"], given)
    assert found["step"] == 3
    distributed.barrier()


@pytest.mark.mpi(min_size=4)
def test_subgroups_of_equal_size(ours) -> None:
    mine, everyone = distributed.new_subgroups(2)
    assert len(everyone) == 2
    tensor = torch.full((3,), float(ours.rank()))
    distributed.all_reduce(tensor, group=mine)
    assert tensor.tolist() == [1.0 + 4.0 * (ours.rank() // 2)] * 3
    for group in everyone:
        distributed.destroy_process_group(group)


def every_functional_call(x: Tensor, group: Any) -> Trained:
    size = group.size()
    return [
        functional.all_reduce(x, "sum", group),
        functional.all_gather_tensor(x, 0, group),
        functional.reduce_scatter_tensor(x.repeat(size, 1), "sum", 0, group),
        functional.broadcast(x, 0, group),
        functional.all_to_all_single(x.repeat(size, 1), None, None, group),
        *functional.all_reduce_coalesced([x, x + 1], "sum", group),
        *functional.all_gather_into_tensor_coalesced([x, x + 1], group),
    ]


@pytest.mark.parametrize("compiled", [False, True])
def test_functional_collectives(ours, gloo, compiled) -> None:
    def run(group: Any) -> Trained:
        x = batch(group.rank())
        call: Any = every_functional_call
        if compiled:
            call = torch.compile(call, backend="aot_eager", fullgraph=True)
        return [each.clone() for each in call(x, group)]

    assert_as_gloo(ours, gloo, run)


def test_functional_collectives_have_gradients(ours, gloo) -> None:
    def run(group: Any) -> Trained:
        x = batch(group.rank()).requires_grad_()
        gathered = functional.all_gather_tensor_autograd(x, 0, group)
        scattered = functional.reduce_scatter_tensor_autograd(gathered.square(), "sum", 0, group)
        exchanged = functional.all_to_all_single_autograd(
            scattered.repeat(group.size(), 1), [6] * group.size(), [6] * group.size(), group
        )
        exchanged.square().mean().backward()
        return [exchanged.detach().clone(), x.grad]

    assert_as_gloo(ours, gloo, run)
