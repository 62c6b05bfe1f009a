from __future__ import annotations

import pytest
import torch
from torch import nn

from hpcpar.comm import Communicator, run_loopback
from hpcpar.data_parallel import broadcast_parameters, expected_broadcast_nbytes


class Assorted(nn.Module):
    """Parameters and buffers of many kinds, all different on each rank."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(rank)
        self.weight = nn.Parameter(torch.randn(5, 3, generator=generator))
        self.tied = self.weight
        self.order = nn.Parameter(torch.randn(3, 4, generator=generator).t())
        self.frozen = nn.Parameter(torch.randn(2, generator=generator), requires_grad=False)
        self.narrow = nn.Parameter(torch.randn(7, generator=generator).bfloat16())
        self.empty = nn.Parameter(torch.zeros(0, 2))
        self.register_buffer("steps", torch.tensor(rank))
        self.register_buffer("mask", torch.tensor([rank == 0, rank == 1]), persistent=False)
        self.norm = nn.BatchNorm1d(2)
        self.norm.running_mean = torch.full((2,), float(rank))


def tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: t.detach().clone() for name, t in [*module.named_parameters(), *module.named_buffers()]}


@pytest.mark.parametrize("bucket_bytes", [1, 64, 1 << 20])
@pytest.mark.parametrize("root", [0, 2])
def test_every_tensor_becomes_the_roots(bucket_bytes: int, root: int) -> None:
    def spread(comm: Communicator) -> tuple[dict[str, torch.Tensor], tuple[int, ...]]:
        module = Assorted(comm.rank)
        broadcast_parameters(module, comm, root=root, bucket_bytes=bucket_bytes)
        assert module.tied is module.weight
        return tensors(module), module.order.stride()

    expected = tensors(Assorted(root))
    for found, strides in run_loopback(3, spread):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        assert strides == Assorted(0).order.stride()


def test_an_expanded_tensor_becomes_the_roots_and_stays_expanded() -> None:
    def spread(comm: Communicator) -> tuple[list[list[float]], tuple[int, ...], int, int]:
        module = nn.Module()
        module.register_buffer("rows", torch.tensor([[1.0], [2.0]]).mul(comm.rank).expand(2, 3))
        module.register_buffer("one", torch.tensor(float(comm.rank)).expand(4, 2))
        broadcast_parameters(module, comm, root=1)
        sent = comm.traffic.nbytes_sent("broadcast")
        assert torch.equal(module.one, torch.ones(4, 2))
        return module.rows.tolist(), module.rows.stride(), sent, expected_broadcast_nbytes(module, comm)[comm]

    found = run_loopback(2, spread)
    assert sum(sent for _, _, sent, _ in found) == found[0][3] == 3 * 4
    assert [each[:2] for each in found] == [([[1.0] * 3, [2.0] * 3], (1, 0))] * 2


def test_many_small_tensors_travel_in_few_messages() -> None:
    def spread(comm: Communicator) -> int:
        broadcast_parameters(nn.ModuleList(nn.Linear(4, 4) for _ in range(50)), comm)
        return sum(row.messages for row in comm.traffic.rows() if row.collective == "broadcast")

    assert sum(run_loopback(2, spread)) <= 4


def test_one_rank_keeps_its_own() -> None:
    module = Assorted(3)
    before = tensors(module)
    broadcast_parameters(module, Communicator.alone())
    assert all(torch.equal(before[name], tensor) for name, tensor in tensors(module).items())
