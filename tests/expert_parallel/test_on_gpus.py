"""Experts on GPUs, compared with one process on the same GPU.

One process: ranks are threads that share the GPU. With ranks of their own, which share it as well:
`hpcpar run -n 2 -- -m pytest --with-mpi -m "gpu and mpi" tests/expert_parallel`.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from hpcpar.comm import Communicator, run_loopback
from hpcpar.expert_parallel import ExpertParallel
from hpcpar.launch.binding import gpu_for
from hpcpar.partition import bounds

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

TOKENS, COUNT, SLOTS, HIDDEN = 203, 6, 2, 64
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float64: 1e-12}
NODES = [0, 0, 1, 1]


def tensors(dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Tokens, experts, weights, the experts' matrices and the gradient of the output, on the GPU."""
    generator = torch.Generator().manual_seed(0)
    hidden, gradient = (torch.randn(TOKENS, HIDDEN, generator=generator) for _ in range(2))
    experts = torch.rand(TOKENS, COUNT, generator=generator).topk(SLOTS).indices
    weights = torch.rand(TOKENS, SLOTS, generator=generator)
    matrices = torch.randn(COUNT, HIDDEN, HIDDEN, generator=generator) / 8
    return hidden.to(dtype).cuda(), experts.cuda(), weights.cuda(), matrices.to(dtype).cuda(), gradient.cuda()


def own_part(comm: Communicator, dtype: torch.dtype, **options: object) -> list[Tensor]:
    """Output and gradients of this rank's tokens, and of its experts."""
    hidden, experts, weights, matrices, gradient = tensors(dtype)
    ep = ExpertParallel(comm, COUNT, **options)  # type: ignore[arg-type]
    mine = slice(*bounds(TOKENS, comm.size)[comm.rank])
    matrices = matrices[ep.own.start : ep.own.stop].clone().requires_grad_()
    hidden, weights = (each[mine].clone().requires_grad_() for each in (hidden, weights))
    kept = (experts[mine] + torch.arange(TOKENS, device="cuda")[mine, None]) % 5 > 0

    def compute(rows: Tensor, counts: list[int]) -> Tensor:
        return torch.cat([silu(part @ one) for part, one in zip(rows.split(counts), matrices, strict=True)])

    positions = torch.arange(TOKENS, device="cuda")[mine]
    # In this thread: ranks that are threads would otherwise share one for the GPU, and wait for each other.
    with torch.autograd.set_multithreading_enabled(False):
        out = ep.mix(hidden, experts[mine], weights, compute, kept=kept, positions=positions)
        found = torch.autograd.grad(out, (hidden, weights, matrices), gradient[mine].to(dtype))
    return [out.detach().cpu(), *(each.cpu() for each in found)]


def require_close(of_ranks: list[list[Tensor]], alone: list[Tensor], dtype: torch.dtype) -> None:
    for parts, whole in zip(zip(*of_ranks, strict=True), alone, strict=True):
        found, true = torch.cat(parts).double(), whole.double()
        assert float((found - true).norm() / true.norm()) <= ROUNDING[dtype]


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("options", [{"stages": 1}, {"stages": 2}, {"sum_on_node": True}, {"halves": True}])
def test_output_and_gradients_are_those_of_one_process(
    options: dict[str, object], dtype: torch.dtype
) -> None:
    (alone,) = run_loopback(1, lambda comm: own_part(comm, dtype))
    found = run_loopback(4, lambda comm: own_part(comm, dtype, **options), nodes=NODES)
    require_close(found, alone, dtype)


@pytest.mark.mpi
@pytest.mark.parametrize("halves", [False, True])
def test_ranks_that_share_a_gpu_compute_what_one_process_does(world: Communicator, halves: bool) -> None:
    here = [rank for rank, node in enumerate(world.nodes) if node == world.nodes[world.rank]]
    torch.cuda.set_device(gpu_for(here.index(world.rank), torch.cuda.device_count(), len(here)))
    alone = own_part(Communicator.alone(), torch.float32)
    of_ranks = world.allgather_object(own_part(world, torch.float32, halves=halves))
    require_close(of_ranks, alone, torch.float32)
