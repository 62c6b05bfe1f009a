"""DeepSpeed over MPI, with stage 1 of ZeRO or another one.

srun python examples/torch_deepspeed.py                                 in an allocation of Slurm
mpiexec -n 2 python examples/torch_deepspeed.py 3                       or hpcpar run -n 2 …; by stage 3
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
torch.manual_seed(0)
inputs = torch.randn(96, 32)[dist.get_rank() :: dist.get_world_size()]
targets = inputs.sum(1, keepdim=True).sin()
model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1))
config = {
    "train_batch_size": 96,
    "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}},
    "zero_optimization": {"stage": int(sys.argv[1]) if sys.argv[1:] else 1},
}
engine, *_ = deepspeed.initialize(model=model, config=config)

for _ in range(20):
    loss = mse_loss(engine(inputs), targets)
    engine.backward(loss)
    engine.step()

mean = loss.detach() / dist.get_world_size()
dist.all_reduce(mean)
if dist.get_rank() == 0:
    print(f"last loss {mean.item():.8f}")
dist.destroy_process_group()
