"""Train a small Llama in a loop of one's own, on any mesh: the degrees say which ranks share what.

mpiexec -n 4 python examples/parallel_llama.py --tp 2 --zero-stage 3
mpiexec -n 4 python examples/parallel_llama.py --pp 2 --schedule zb-v --zero-stage 1
mpiexec -n 4 python examples/parallel_llama.py --cp 2

All of them print the same losses.
"""

import argparse

import torch

import hpcpar
from hpcpar.data import Dataset, Sampler, prepare
from hpcpar.models import LlamaConfig
from hpcpar.training import train_step

BATCH, SEQUENCE = 16, 128


def main() -> None:
    parser = argparse.ArgumentParser(description="A Llama on any mesh.")
    for degree in ("pp", "cp", "tp"):
        parser.add_argument(f"--{degree}", type=int, default=1)
    parser.add_argument("--schedule", default="1f1b", help="of the pipeline")
    parser.add_argument("--zero-stage", type=int, default=0)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    torch.set_num_threads(1)
    mesh = hpcpar.Mesh(hpcpar.init(), pp=options.pp, cp=options.cp, tp=options.tp)  # dp: what is left
    settings = {
        "train": {"global_batch": BATCH, "microbatch": 2, "sequence": SEQUENCE},
        "optimizer": {"zero_stage": options.zero_stage},
        "pipeline": {"schedule": options.schedule},
    }
    parallel = hpcpar.parallelize_llama(LlamaConfig.preset("tiny"), mesh, settings)
    worker = parallel.worker(torch.optim.AdamW(parallel.model.parameters(), lr=2e-3))
    text = prepare(mesh.world, cache_directory="runs/cache").shards.train
    dataset, sampler = Dataset(text, SEQUENCE), Sampler(len(text), SEQUENCE, BATCH)
    with_losses = mesh.comm("pp", "dp", "cp")
    for step in range(options.steps):
        tokens, targets = dataset.batch(sampler.shard(step, mesh.dp.rank, mesh.dp.size))  # [B, S] each
        result = train_step(worker, tokens, targets, clip_norm=1.0)
        loss = with_losses.allreduce(result.loss_share.reshape(1)).item()
        if mesh.rank == 0:
            print(f"step {step + 1}  loss {loss:.4f}", flush=True)


if __name__ == "__main__":
    main()
