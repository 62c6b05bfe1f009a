"""Tensor parallelism by DTensor over MPI: each layer's weights divided among the ranks.

srun python examples/torch_tensor_parallel.py                                 in an allocation of Slurm
mpiexec -n 2 python examples/torch_tensor_parallel.py                         or hpcpar run -n 2 …
BACKEND=gloo torchrun --nproc-per-node 2 examples/torch_tensor_parallel.py    the same over gloo, to compare
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import mse_loss

dist.init_process_group(os.environ.get("BACKEND", "hpcpar"))
mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))

torch.manual_seed(0)
inputs = torch.randn(96, 32)  # the same on all ranks, which share the layers
targets = inputs.sum(1, keepdim=True).sin()
model = nn.Sequential(nn.Linear(32, 96), nn.Tanh(), nn.Linear(96, 1))
parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

for _ in range(20):
    loss = mse_loss(model(inputs), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

if dist.get_rank() == 0:
    print(f"last loss {loss.item():.8f}")
dist.destroy_process_group()
