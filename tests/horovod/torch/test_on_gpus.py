"""Horovod's calls on CUDA tensors (`hpcpar run -n 2 -- -m pytest --with-mpi -m gpu tests/horovod`)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from hpcpar.launch.binding import gpu_for

pytestmark = [pytest.mark.mpi, pytest.mark.gpu, pytest.mark.timeout(300)]

A_SECOND = 2_000_000_000
"""Cycles of a GPU, about."""
SHAPES = [(), (0,), (3,), (17, 17), (5000,), (40_000,), (700_000,)]


@pytest.fixture
def gpu(hvd) -> torch.device:
    device = torch.device("cuda", gpu_for(hvd.local_rank(), torch.cuda.device_count(), hvd.local_size()))
    torch.cuda.set_device(device)
    return device


def brought(rank: int, shape: tuple[int, ...], salt: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * salt + rank)
    return torch.randint(1, 4, shape, generator=generator).float()


def total(size: int, shape: tuple[int, ...], salt: int = 0) -> Tensor:
    return sum((brought(rank, shape, salt) for rank in range(size)), torch.zeros(shape))


def test_many_tensors_at_once_of_both_kinds_of_memory(hvd, gpu) -> None:
    for turn in range(3):
        handles = []
        for salt, shape in enumerate(SHAPES * 4):
            tensor = brought(hvd.rank(), shape, salt)
            if salt % 3:
                tensor = tensor.to(gpu)
            handles.append((hvd.allreduce_async(tensor, op=hvd.Sum, name=f"{turn}.{salt}"), salt, shape))
        for handle, salt, shape in handles:
            result = hvd.synchronize(handle)
            assert result.is_cuda == bool(salt % 3)
            torch.testing.assert_close(result.cpu(), total(hvd.size(), shape, salt))


def test_every_call_leaves_its_result_on_the_gpu(hvd, gpu) -> None:
    size, rank = hvd.size(), hvd.rank()
    mine = brought(rank, (2 * size, 3)).to(gpu)
    whole = torch.stack([brought(r, (2 * size, 3)) for r in range(size)])
    own = slice(2 * rank, 2 * rank + 2)
    found = {
        "allgather": (hvd.allgather(mine), whole.flatten(0, 1)),
        "broadcast": (hvd.broadcast(mine, 0), whole[0]),
        "reducescatter": (hvd.reducescatter(mine, op=hvd.Sum), whole.sum(0)[own]),
        "alltoall": (hvd.alltoall(mine), whole[:, own].flatten(0, 1)),
        "average": (hvd.allreduce(mine), whole.mean(0)),
        "grouped": (hvd.grouped_allreduce([mine, 2 * mine], op=hvd.Sum)[1], 2 * whole.sum(0)),
        "fp16": (hvd.allreduce(mine, op=hvd.Sum, compression=hvd.Compression.fp16), whole.sum(0)),
    }
    for name, (result, expected) in found.items():
        assert result.is_cuda, name
        torch.testing.assert_close(result.cpu(), expected, msg=name)


@pytest.mark.parametrize("count", [1000, 700_000])
def test_work_of_any_stream_before_and_after_is_in_order(hvd, gpu, count) -> None:
    makes, uses = torch.cuda.Stream(), torch.cuda.Stream()
    for turn in range(3):
        with torch.cuda.stream(makes):
            tensor = torch.zeros(count, device=gpu)
            torch.cuda._sleep(A_SECOND // 10)
            tensor += hvd.rank() + 1
            handle = hvd.allreduce_async_(tensor, op=hvd.Sum, name=f"{count}.{turn}")
        with torch.cuda.stream(uses):
            result = 2 * hvd.synchronize(handle)
        uses.synchronize()
        expected = 2.0 * sum(range(1, hvd.size() + 1))
        torch.testing.assert_close(result.cpu(), torch.full((count,), expected))


def test_zeros_of_ranks_that_have_joined_are_where_the_others_tensors_are(hvd, gpu) -> None:
    steps = hvd.rank() + 1
    for step in range(steps):
        for count in (5, 700_000):
            found = hvd.allreduce(torch.ones(count, device=gpu), op=hvd.Sum, name=f"joined.{count}")
            with_data = sum(1 for rank in range(hvd.size()) if rank + 1 > step)
            torch.testing.assert_close(found.cpu(), torch.full((count,), float(with_data)))
    hvd.join()


@pytest.mark.parametrize("is_kept", [True, False])
def test_ranks_that_have_joined_take_part_in_the_steps_of_others(hvd, gpu, is_kept) -> None:
    """Also where the rank that has joined has let go of its optimizer before the first step."""
    model = nn.Linear(40, 40, bias=False, device=gpu)
    nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), op=hvd.Sum)
    steps = hvd.rank()
    for _ in range(steps):
        optimizer.zero_grad()
        model.weight.sum().backward()
        optimizer.step()
    if not is_kept:
        del optimizer
    hvd.join()
    with_data = [sum(1 for rank in range(hvd.size()) if rank > step) for step in range(steps)]
    torch.testing.assert_close(model.weight.detach().cpu(), torch.full((40, 40), 1.0 - sum(with_data)))


def test_ranks_train_what_one_does(hvd, gpu) -> None:
    def network() -> nn.Module:
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(12, 40), nn.Tanh(), nn.Linear(40, 3))
        return layers.to(device=gpu, dtype=torch.float64)

    torch.manual_seed(1)
    inputs = torch.randn(5, 12 * hvd.size(), 12, dtype=torch.float64).to(gpu)
    alone, shared = network(), network()
    plain = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    optimizer = torch.optim.SGD(shared.parameters(), lr=0.1, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=shared.named_parameters())
    own = slice(12 * hvd.rank(), 12 * hvd.rank() + 12)
    for batch in inputs:
        for model, its, rows in ((alone, plain, slice(None)), (shared, optimizer, own)):
            its.zero_grad()
            functional.mse_loss(model(batch[rows]), batch[rows, :3].sin()).backward()
            its.step()
    for found, expected in zip(shared.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
