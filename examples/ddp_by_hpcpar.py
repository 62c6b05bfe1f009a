"""The program of torch_ddp.py with hpcpar's DistributedOptimizer in the place of DistributedDataParallel.

srun python examples/ddp_by_hpcpar.py                  in an allocation of Slurm
hpcpar run -n 2 python examples/ddp_by_hpcpar.py       or mpiexec -n 2 python …; alone: one rank
"""

import torch
from torch import nn
from torch.nn.functional import mse_loss

import hpcpar

world = hpcpar.init()
rank, size = world.rank, world.size

torch.manual_seed(0)
inputs = torch.randn(96, 32)
targets = inputs.sum(1, keepdim=True).sin()
model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1))
hpcpar.broadcast_parameters(model, world)
optimizer = hpcpar.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), world
)

for _ in range(20):
    loss = mse_loss(model(inputs[rank::size]), targets[rank::size])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    mean = world.allreduce(loss.detach().reshape(1), "average")
    if rank == 0:
        print(f"loss {mean.item():.8f}", flush=True)

if rank == 0:
    print(f"last loss {mean.item():.8f}")
