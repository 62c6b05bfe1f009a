"""Distributed checkpoint over MPI: save with FSDP2, and go on with another number of ranks.

srun -n 2 python examples/torch_checkpoint.py runs/dcp                 20 steps, and saves them
srun -n 3 python examples/torch_checkpoint.py runs/dcp                 loads them, and makes 20 more
BACKEND=gloo torchrun --nproc-per-node 2 examples/torch_checkpoint.py runs/dcp-gloo      the same over gloo
"""

import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import load, save
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

dist.init_process_group(os.environ.get("BACKEND", "hpcpar"))
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
fully_shard(model, mesh=dist.init_device_mesh("cpu", (dist.get_world_size(),)))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
if os.path.exists(sys.argv[1]):
    parameters, moments = get_state_dict(model, optimizer)
    load({"model": parameters, "optimizer": moments}, checkpoint_id=sys.argv[1])
    set_state_dict(model, optimizer, model_state_dict=parameters, optim_state_dict=moments)

rows = torch.randn(96, 32)[dist.get_rank() :: dist.get_world_size()]
for _ in range(20):
    loss = (model(rows) - rows.sum(1, keepdim=True).sin()).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

parameters, moments = get_state_dict(model, optimizer)
save({"model": parameters, "optimizer": moments}, checkpoint_id=sys.argv[1])
dist.all_reduce(mean := loss.detach() / dist.get_world_size())
if dist.get_rank() == 0:
    print(f"last loss {mean.item():.8f}")
dist.destroy_process_group()
