"""Recognise handwritten digits with a small CNN: a script written for Horovod, its import and all.

    python -m hpcpar.horovod examples/horovod_digits.py                  on one rank
    hpcpar run -np 2 --as-horovod examples/horovod_digits.py             on two
    mpirun -n 2 python -m hpcpar.horovod examples/horovod_digits.py      the same
    horovodrun -np 2 python examples/horovod_digits.py                   under Horovod itself

The images are scikit-learn's digits, real scans of 8 x 8 pixels that come with the package
(`pip install hpcpar[examples]`). The batch is the global one, so any number of ranks that divides it
makes the same steps: the parameters differ by rounding alone (1e-6 and less with --double).
"""

from __future__ import annotations

import argparse

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

TRAINING = 1440  # of 1797 images; the rest is held out


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Digits under Horovod.")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=48, help="images of a step, all ranks together")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--double", action="store_true", help="float64, to compare numbers of ranks")
    parser.add_argument("--fp16-allreduce", action="store_true", help="send gradients in half of the bytes")
    parser.add_argument("--save", metavar="FILE", help="rank 0 leaves parameters, losses and accuracy there")
    return parser.parse_args()


def data(dtype: torch.dtype) -> tuple[TensorDataset, TensorDataset]:
    """The images to learn from, and those held out: (1, 8, 8) in [0, 1], and their digits."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=dtype).unsqueeze(1) / 16
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(1))
    images, labels = images[order], torch.tensor(digits.target)[order]
    return (
        TensorDataset(images[:TRAINING], labels[:TRAINING]),
        TensorDataset(images[TRAINING:], labels[TRAINING:]),
    )


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(512, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def train_epoch(model: nn.Module, loader: DataLoader, optimizer: torch.optim.Optimizer) -> float:
    """One pass over this rank's share; the mean loss over all ranks."""
    losses = []
    for images, labels in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)  # of as many images on every rank
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return hvd.allreduce(torch.stack(losses).mean(), name="loss").item()


def accuracy(model: nn.Module, held_out: TensorDataset) -> float:
    """The part of the held-out images that is recognised; each rank looks at its share."""
    images, labels = (tensor[hvd.rank() :: hvd.size()] for tensor in held_out.tensors)
    with torch.no_grad():
        right = (model(images).argmax(dim=1) == labels).sum()
    return hvd.allreduce(right, name="right", op=hvd.Sum).item() / len(held_out)


def main() -> None:
    args = arguments()
    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed + hvd.rank())  # ranks start differently, and are made equal below
    if args.batch_size % hvd.size() or TRAINING % args.batch_size:
        raise SystemExit(f"--batch-size {args.batch_size} must divide {TRAINING}, and {hvd.size()} ranks it")

    dtype = torch.float64 if args.double else torch.float32
    training, held_out = data(dtype)
    sampler = DistributedSampler(training, hvd.size(), hvd.rank(), seed=args.seed)
    loader = DataLoader(training, batch_size=args.batch_size // hvd.size(), sampler=sampler)
    model = network().to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=args.momentum)

    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
    )

    losses = []
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        losses.append(train_epoch(model, loader, optimizer))
        if hvd.rank() == 0:
            print(f"epoch {epoch + 1}  loss {losses[-1]:.6f}", flush=True)
    recognised = accuracy(model, held_out)
    if hvd.rank() == 0:
        print(f"held-out accuracy {recognised:.4f} on {hvd.size()} ranks", flush=True)
        if args.save:
            torch.save({"model": model.state_dict(), "losses": losses, "accuracy": recognised}, args.save)


if __name__ == "__main__":
    main()
