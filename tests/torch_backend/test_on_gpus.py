"""torch.distributed on CUDA tensors.

`hpcpar run -n 2 -- -m pytest --with-mpi -m gpu tests/torch_backend`; any number of ranks may share a GPU.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from hpcpar.launch.binding import gpu_for

pytestmark = [pytest.mark.mpi, pytest.mark.gpu, pytest.mark.timeout(300)]

WIDTH = 256


@pytest.fixture
def gpu(ours, world) -> torch.device:
    here = [rank for rank, node in enumerate(world.nodes) if node == world.nodes[world.rank]]
    device = torch.device("cuda", gpu_for(here.index(world.rank), torch.cuda.device_count(), len(here)))
    torch.cuda.set_device(device)
    return device


def network(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(6)]).to(device)


def train(model: nn.Module, inputs: Tensor, steps: int = 3) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(steps):
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()


def samples(size: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(4 * size, WIDTH, generator=generator, dtype=torch.float64).to(device)


def test_calls_on_cuda_tensors(ours, gpu) -> None:
    rank, size = ours.rank(), ours.size()
    for is_async in (False, True):
        tensor = torch.full((1000,), float(rank + 1), device=gpu)
        work = distributed.all_reduce(tensor, async_op=is_async)
        if work is not None:
            work.wait()
        assert tensor.tolist() == [size * (size + 1) / 2] * 1000
    whole = torch.zeros(3 * size, device=gpu)
    distributed.all_gather_into_tensor(whole, torch.full((3,), float(rank), device=gpu))
    assert whole.tolist() == [float(r) for r in range(size) for _ in range(3)]
    part = torch.zeros(3, device=gpu)
    distributed.reduce_scatter_tensor(part, torch.arange(3.0 * size, device=gpu), distributed.ReduceOp.AVG)
    assert part.tolist() == [3.0 * rank + at for at in range(3)]
    received = torch.zeros(size, device=gpu)
    distributed.all_to_all_single(received, torch.arange(float(size), device=gpu) + 10 * rank)
    assert received.tolist() == [rank + 10.0 * r for r in range(size)]
    objects: list[object] = [None] * size
    distributed.all_gather_object(objects, rank)
    assert objects == list(range(size))


@pytest.mark.parametrize("options", [{}, {"static_graph": True}, {"gradient_as_bucket_view": True}])
def test_ddp_trains_what_one_process_does(ours, gpu, options) -> None:
    inputs = samples(ours.size(), gpu)
    alone = network(gpu)
    train(alone, inputs)
    model = DistributedDataParallel(network(gpu), device_ids=[gpu.index], bucket_cap_mb=0.6, **options)
    train(model, inputs[4 * ours.rank() : 4 * ours.rank() + 4])
    for found, expected in zip(model.module.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


def test_fsdp2_trains_what_one_process_does(ours, gpu) -> None:
    inputs = samples(ours.size(), gpu)
    alone = network(gpu)
    train(alone, inputs)
    mesh = DeviceMesh.from_group(ours, "cuda")
    model = network(gpu)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    train(model, inputs[4 * ours.rank() : 4 * ours.rank() + 4])
    for found, expected in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(found.full_tensor(), expected, rtol=1e-9, atol=1e-11)
