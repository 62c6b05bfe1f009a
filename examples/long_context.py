"""Train a small transformer of plain torch on long sequences of Python's own sources, which --cp ranks share.

mpiexec -n 4 python examples/long_context.py             one long sequence on each rank: too large
mpiexec -n 4 python examples/long_context.py --cp 4      all ranks share it, and all of its activations

The limit is on what a rank asks for beyond what it has before the model is built (RLIMIT_DATA, Linux).
"""

import argparse
import ctypes
import resource
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, layer_norm

import hpcpar
from hpcpar.context_parallel import METHODS, ContextParallel, Mask
from hpcpar.data import Dataset, Sampler, prepare
from hpcpar.mesh import Mesh

VOCABULARY, WIDTH, HEADS, LAYERS = 256, 128, 4, 4


class Layer(nn.Module):
    def __init__(self, cp: ContextParallel) -> None:
        super().__init__()
        self.cp = cp
        self.project, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:  # [B, N, H], this rank's tokens
        heads = self.project(layer_norm(x, (WIDTH,))).unflatten(-1, (3, HEADS, -1))
        queries, keys, values = heads.permute(2, 0, 3, 1, 4)  # [B, A, N, D]
        positions = self.cp.positions()  # in the whole sequence
        out = self.cp.attention(rotated(queries, positions), rotated(keys, positions), values)
        x = x + self.out(out.transpose(1, 2).flatten(2))
        return x + self.down(gelu(self.up(layer_norm(x, (WIDTH,)))))


def rotated(x: Tensor, positions: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    angles = positions[:, None] * 10000.0 ** (-torch.arange(half) / half)
    (first, second), cos, sin = x.split(half, -1), angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def limit_memory(gib: float) -> None:
    ctypes.CDLL(None).mallopt(-3, 1 << 16)  # M_MMAP_THRESHOLD: what is freed is given back at once
    status = Path("/proc/self/status").read_text().splitlines()
    (kib,) = (line.split()[1] for line in status if line.startswith("VmData"))
    resource.setrlimit(resource.RLIMIT_DATA, (1024 * int(kib) + int(gib * 2**30), resource.RLIM_INFINITY))


def train(options: argparse.Namespace) -> None:
    mesh = Mesh(hpcpar.init(), cp=options.cp)
    text = prepare(mesh.world, cache_directory="runs/cache").shards.train
    dataset, sampler = Dataset(text, options.sequence), Sampler(len(text), options.sequence, mesh.dp.size)
    if options.memory_limit_gib:
        limit_memory(options.memory_limit_gib)
    torch.manual_seed(0)
    cp = ContextParallel(mesh.cp, options.method)
    layers = [Layer(cp) for _ in range(LAYERS)]
    model = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), *layers, nn.Linear(WIDTH, VOCABULARY))
    adam = torch.optim.AdamW(model.parameters(), lr=1e-3)
    optimizer = hpcpar.DistributedOptimizer(adam, model.named_parameters(), mesh.replicas)  # dp x cp
    for step in range(options.steps):
        tokens, targets = dataset.batch(sampler.shard(step, mesh.dp.rank, mesh.dp.size))  # [1, S]
        with cp.using(Mask(options.sequence)):  # causal; around the backward, too
            own = cp.shard(targets).flatten()
            factor = optimizer.loss_factor(len(own))  # of sums, for the mean over all ranks
            logits = model(cp.shard(tokens)).flatten(0, 1)
            loss = cross_entropy(logits, own, reduction="sum") * factor
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = mesh.world.allreduce(loss.detach().reshape(1), "average")
        if mesh.rank == 0:
            print(f"step {step + 1}  loss {mean.item():.4f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="A long sequence on several ranks.")
    parser.add_argument("--cp", type=int, default=1, help="ranks that share each sequence")
    parser.add_argument("--method", choices=METHODS, default="exchange")
    parser.add_argument("--sequence", type=int, default=4096, help="tokens")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--memory-limit-gib", type=float, default=0.2, help="of a rank; 0: none")
    options = parser.parse_args()
    torch.set_num_threads(1)
    try:
        train(options)
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "can't allocate memory" not in str(error):
            raise
        found = f"--sequence={options.sequence} on --cp={options.cp} ranks needs more"
        raise MemoryError(
            f"{found} than --memory-limit-gib={options.memory_limit_gib}; try a larger --cp"
        ) from None


if __name__ == "__main__":
    main()
