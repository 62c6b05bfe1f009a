"""DistributedDataParallel over MPI: an ordinary program of PyTorch, with another backend's name.

srun python examples/torch_ddp.py                                      in an allocation of Slurm
mpiexec -n 2 python examples/torch_ddp.py                              or hpcpar run -n 2 …
BACKEND=gloo torchrun --nproc-per-node 2 examples/torch_ddp.py         the same over gloo, to compare
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group(os.environ.get("BACKEND", "hpcpar"))
rank, size = dist.get_rank(), dist.get_world_size()

torch.manual_seed(0)
inputs = torch.randn(96, 32)
targets = inputs.sum(1, keepdim=True).sin()
model = DistributedDataParallel(nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

for _ in range(20):
    loss = mse_loss(model(inputs[rank::size]), targets[rank::size])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    mean = loss.detach() / size
    dist.all_reduce(mean)
    if rank == 0:
        print(f"loss {mean.item():.8f}", flush=True)

if rank == 0:
    print(f"last loss {mean.item():.8f}")
dist.destroy_process_group()
