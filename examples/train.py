"""Train a small language model on Python's own sources, over however many ranks it is started on.

srun python examples/train.py              in a Slurm allocation
mpirun -n 2 python examples/train.py       on a laptop
python examples/train.py                   on one rank
"""

from __future__ import annotations

import sys

import torch

import hpcpar
from hpcpar.data import Dataset, Sampler, prepare
from hpcpar.models import Llama, LlamaConfig, next_token_loss

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 100
SEQUENCE, BATCH = 128, 8  # sequences of this many tokens, on each rank


def main() -> None:
    """Every rank runs this; they meet in `prepare`, in the optimizer, and in the losses' sum."""
    world = hpcpar.init()
    torch.set_num_threads(1)

    text = prepare(world, cache_directory="runs/cache").shards.train
    dataset = Dataset(text, SEQUENCE)
    sampler = Sampler(len(text), SEQUENCE, global_batch=BATCH * world.size)

    model = Llama(LlamaConfig.preset("tiny"))
    hpcpar.broadcast_parameters(model, world)
    # Without a name, the algorithm is the one that is fastest where the ranks are. One that is named adds
    # in the same order everywhere: on one node or many, the parameters are the same to the last bit.
    optimizer = hpcpar.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=2e-3), model.named_parameters(), world, algorithm="ring"
    )

    for step in range(STEPS):
        tokens, targets = dataset.batch(sampler.shard(step, world.rank, world.size))
        loss = next_token_loss(model(tokens), targets)  # of as many tokens on every rank
        loss.backward()  # each bucket of gradients leaves as soon as it is full
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % 10 == 0:
            mean = world.allreduce(loss.detach().reshape(1), "average")
            if world.rank == 0:
                print(f"step {step + 1:4d}  loss {mean.item():.3f}", flush=True)

    if world.rank == 0:
        print(f"rank 0 sent {world.traffic.nbytes_sent('allreduce') / 1e6:.1f} MB in all-reduces")


if __name__ == "__main__":
    main()
