"""torch.distributed.pipelining over MPI: each rank has some of the layers, scheduled by 1F1B.

srun python examples/torch_pipeline.py                                 in an allocation of Slurm
mpiexec -n 2 python examples/torch_pipeline.py                         or hpcpar run -n 2 …
BACKEND=gloo torchrun --nproc-per-node 2 examples/torch_pipeline.py    the same over gloo, to compare
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.functional import mse_loss

dist.init_process_group(os.environ.get("BACKEND", "hpcpar"))
rank, size = dist.get_rank(), dist.get_world_size()

torch.manual_seed(0)
inputs = torch.randn(96, 32)
targets = inputs.sum(1, keepdim=True).sin()
layers = [*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(5)), nn.Linear(32, 1)]
mine = nn.Sequential(*layers[6 * rank // size : 6 * (rank + 1) // size])
optimizer = torch.optim.SGD(mine.parameters(), lr=0.1)
stage = PipelineStage(mine, rank, size, torch.device("cpu"))
schedule = Schedule1F1B(stage, n_microbatches=8, loss_fn=mse_loss)

for _ in range(20):
    optimizer.zero_grad()
    losses: list[torch.Tensor] = []
    schedule.step(*([inputs] if rank == 0 else []), target=targets, losses=losses)
    optimizer.step()

if rank == size - 1:
    print(f"last loss {torch.stack(losses).mean().item():.8f}")
dist.destroy_process_group()
