"""DeepSpeed's ZeRO over MPI: with stage 1 the optimizer's state is divided among the ranks, 2 and 3 more of it.

srun python examples/torch_deepspeed.py                                 in an allocation of Slurm
mpiexec -n 2 python examples/torch_deepspeed.py 3                       or hpcpar run -n 2 …
BACKEND=gloo torchrun --nproc-per-node 2 examples/torch_deepspeed.py    the same over gloo, to compare
"""

import os
import sys

import deepspeed
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

dist.init_process_group(os.environ.get("BACKEND", "hpcpar"))  # first: DeepSpeed takes a group that it finds
rank, size = dist.get_rank(), dist.get_world_size()

torch.manual_seed(0)
inputs = torch.randn(96, 32)
targets = inputs.sum(1, keepdim=True).sin()
model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1))
config = {
    "train_batch_size": 96,
    "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}},
    "zero_optimization": {"stage": int(sys.argv[1]) if len(sys.argv) > 1 else 1},
}
engine, *_ = deepspeed.initialize(model=model, config=config)

for _ in range(20):
    loss = mse_loss(engine(inputs[rank::size]), targets[rank::size])
    engine.backward(loss)
    engine.step()

mean = loss.detach() / size
dist.all_reduce(mean)
if rank == 0:
    print(f"last loss {mean.item():.8f}")
dist.destroy_process_group()
