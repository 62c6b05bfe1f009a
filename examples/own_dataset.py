"""Train on a dataset of your own by torch's DataLoader, and go on in the middle of an epoch, on any ranks.

srun python examples/own_dataset.py                                in an allocation of Slurm
hpcpar run -n 2 python examples/own_dataset.py --until 20          on two ranks; stops in the second epoch
hpcpar run -n 3 python examples/own_dataset.py                     goes on behind it
python examples/own_dataset.py --directory runs/alone              on one rank: the same losses
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, Dataset

import hpcpar
from hpcpar import checkpoint
from hpcpar.data import DistributedBatchSampler


class Waves(Dataset[tuple[Tensor, Tensor]]):
    """Stands for yours: a length, and a sample by its index."""

    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        place = torch.tensor([index / 400])
        return torch.cat([place, place**2]), torch.sin(8 * place)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--until", type=int, help="stop after this step; by default at the end")
    parser.add_argument("--batch", type=int, default=24, help="samples of a step, over all ranks")
    parser.add_argument("--workers", type=int, default=1, help="processes of each rank that read ahead")
    parser.add_argument("--directory", type=Path, default=Path("runs/own_dataset"))
    return parser.parse_args()


def main() -> None:
    args = arguments()
    world = hpcpar.init()
    torch.manual_seed(0)
    dataset = Waves()
    sampler = DistributedBatchSampler(len(dataset), args.batch, world)
    # With a generator of its own the loader takes none of the random numbers that dropout goes by.
    loader = DataLoader(dataset, batch_sampler=sampler, num_workers=args.workers, generator=torch.Generator())
    model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1))
    hpcpar.broadcast_parameters(model, world)
    optimizer = hpcpar.DistributedOptimizer(
        torch.optim.Adam(model.parameters(), lr=0.01), model.named_parameters(), world
    )
    step = 0
    if args.directory.exists():
        loaded = checkpoint.load(args.directory, model=model, optimizer=optimizer, comm=world)
        step = loaded.step
        sampler.load_state_dict(loaded.extra["data"])

    while sampler.epoch < args.epochs and step != args.until:
        for inputs, targets in loader:
            # Each rank may have another number of samples: a sum, divided by the mean number.
            loss = mse_loss(model(inputs), targets, reduction="sum") * optimizer.loss_factor(len(inputs))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            sampler.advance()  # here, not in workers, which are ahead
            mean = world.allreduce(loss.detach().reshape(1), "average")
            if world.rank == 0:
                print(f"step {step}  epoch {sampler.epoch}  loss {mean.item():.6f}", flush=True)
            if step == args.until:
                break
    extra = {"data": sampler.state_dict()}
    checkpoint.save(args.directory, step=step, model=model, optimizer=optimizer, extra=extra, comm=world)


if __name__ == "__main__":
    main()
