"""Hugging Face's Accelerate over MPI.

srun python examples/torch_accelerate.py                                 in an allocation of Slurm
mpiexec -n 2 python examples/torch_accelerate.py                         or hpcpar run -n 2 …
BACKEND=gloo torchrun --nproc-per-node 2 examples/torch_accelerate.py    the same over gloo, to compare
"""

import os

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

dist.init_process_group(os.environ.get("BACKEND", "hpcpar"))  # first: Accelerate takes a group that it finds
accelerator = Accelerator(cpu=True)

torch.manual_seed(0)
inputs = torch.randn(96, 32)
model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1))
data = TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())
batches = DataLoader(data, batch_size=96 // accelerator.num_processes)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, batches = accelerator.prepare(model, optimizer, batches)

for _ in range(20):
    for rows, targets in batches:
        loss = mse_loss(model(rows), targets)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()

mean = accelerator.reduce(loss.detach(), "mean")
if accelerator.is_main_process:
    print(f"last loss {mean.item():.8f}")
accelerator.end_training()
