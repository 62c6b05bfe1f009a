"""Lightning Fabric over MPI (Lightning's Trainer: torch_lightning.py).

srun --ntasks-per-node 2 python examples/torch_fabric.py               in an allocation of Slurm
mpiexec -n 2 python examples/torch_fabric.py                           or hpcpar run -n 2 …
BACKEND=gloo torchrun --nproc-per-node 2 examples/torch_fabric.py      the same over gloo, to compare
"""

import os

import lightning
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

dist.init_process_group(os.environ.get("BACKEND", "hpcpar"))  # first: Fabric takes a group that it finds
rank, size, local_size = dist.get_rank(), dist.get_world_size(), int(os.environ["LOCAL_WORLD_SIZE"])
fabric = lightning.Fabric(accelerator="cpu", strategy="ddp", devices=local_size, num_nodes=size // local_size)
fabric.launch()

torch.manual_seed(0)
inputs = torch.randn(96, 32)
targets = inputs.sum(1, keepdim=True).sin()
model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1))
model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))

for _ in range(20):
    loss = mse_loss(model(inputs[rank::size]), targets[rank::size])
    optimizer.zero_grad()
    fabric.backward(loss)
    optimizer.step()

mean = fabric.all_reduce(loss.detach(), reduce_op="mean")
if fabric.is_global_zero:
    print(f"last loss {mean.item():.8f}")
dist.destroy_process_group()
