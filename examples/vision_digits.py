"""Recognise handwritten digits with a small convolutional network, its batch normalisation over all ranks.

srun python examples/vision_digits.py                              in an allocation of Slurm
hpcpar run -n 2 python examples/vision_digits.py --zero-stage 2    optimizer state and gradients divided
python examples/vision_digits.py                                   on one rank: the same losses, to rounding

Started again it goes on from its checkpoint, on any number of ranks with any stage of ZeRO. The images are
scikit-learn's digits, which come with the package (`pip install hpcpar[examples]`).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import hpcpar
from hpcpar import checkpoint
from hpcpar.data import DistributedBatchSampler

parser = argparse.ArgumentParser(description="Digits on any number of ranks.")
parser.add_argument("--epochs", type=int, default=6)
parser.add_argument("--batch", type=int, default=48, help="images of a step, over all ranks")
parser.add_argument("--zero-stage", type=int, default=0, choices=(0, 1, 2, 3))
parser.add_argument("--directory", type=Path, default=Path("runs/vision_digits"))
args = parser.parse_args()


def block(before: int, after: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU())


world = hpcpar.init()
torch.manual_seed(0)
digits = load_digits()
images, labels = torch.tensor(digits.images).float().unsqueeze(1) / 16, torch.tensor(digits.target)
held_out = torch.arange(len(labels)) % 5 == 0
training = TensorDataset(images[~held_out], labels[~held_out])
sampler = DistributedBatchSampler(len(training), args.batch, world)
loader = DataLoader(training, batch_sampler=sampler, generator=torch.Generator())

model = nn.Sequential(block(1, 16), block(16, 32), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(512, 10))
# Without this line each rank normalizes by its own part of the batch, as with torch's DDP.
model = hpcpar.SyncBatchNorm.convert_sync_batchnorm(model, world)
hpcpar.broadcast_parameters(model, world)
if args.zero_stage == 3:
    hpcpar.fully_shard(model, world)
optimizer = hpcpar.DistributedOptimizer(
    torch.optim.AdamW(model.parameters(), lr=2e-3),
    model.named_parameters(),
    world,
    zero_stage=args.zero_stage,
    model=model,
)
step = 0
if args.directory.exists():
    loaded = checkpoint.load(args.directory, model=model, optimizer=optimizer, comm=world)
    step = loaded.step
    sampler.load_state_dict(loaded.extra["data"])

while sampler.epoch < args.epochs:
    model.train()
    losses = []
    for inputs, targets in loader:
        factor = optimizer.loss_factor(len(targets))  # 1 / len(targets) where ranks have equally many
        loss = cross_entropy(model(inputs), targets, reduction="sum") * factor
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        step += 1
        sampler.advance()
    model.eval()
    own = held_out.nonzero().flatten()[world.rank :: world.size]
    with torch.no_grad():
        right = (model(images[own]).argmax(dim=1) == labels[own]).sum()
    found = world.allreduce(torch.stack([torch.stack(losses).sum(), right.float()]))
    if world.rank == 0:
        mean, accuracy = found[0] / len(losses) / world.size, found[1] / held_out.sum()
        print(f"epoch {sampler.epoch}  loss {mean:.6f}  held-out accuracy {accuracy:.4f}", flush=True)
    extra = {"data": sampler.state_dict()}
    checkpoint.save(args.directory, step=step, model=model, optimizer=optimizer, extra=extra, comm=world)
