"""Train a small mixture of experts in plain torch on Python's own sources; --ep ranks divide the experts.

mpiexec -n 2 python examples/mixture.py             each rank has all experts
mpiexec -n 2 python examples/mixture.py --ep 2      half of them, and the tokens of both ranks for these

Both print the same losses.
"""

import argparse

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, layer_norm, scaled_dot_product_attention

import hpcpar
from hpcpar.data import Dataset, Sampler, prepare
from hpcpar.expert_parallel import ExpertParallel
from hpcpar.mesh import Mesh
from hpcpar.parameter_info import note

VOCABULARY, WIDTH, HEADS, LAYERS, PER_TOKEN = 256, 128, 4, 2, 2


class Layer(nn.Module):
    def __init__(self, ep: ExpertParallel, mesh: Mesh) -> None:
        super().__init__()
        self.ep = ep
        self.project, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.router = nn.Linear(WIDTH, ep.count, bias=False)
        experts = [expert() for _ in range(ep.count)]  # drawn alike on all ranks
        self.experts = nn.ModuleDict({str(number): experts[number] for number in ep.own})
        for parameter in self.experts.parameters():
            # The ranks with copies of these experts, and those with the others.
            note(parameter, replicas=mesh.edp, split_over=(mesh.ep,))

    def forward(self, x: Tensor) -> Tensor:  # [B, S, H]
        heads = self.project(layer_norm(x, (WIDTH,))).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))
        tokens = layer_norm(x, (WIDTH,)).flatten(0, 1)  # [T, H]
        weights, experts = self.router(tokens).softmax(-1).topk(PER_TOKEN)  # [T, k]
        return x + self.ep.mix(tokens, experts, weights, self.compute).view_as(x)

    def compute(self, rows: Tensor, counts: list[int]) -> Tensor:  # rows [R, H], sorted by expert
        parts = zip(self.experts.values(), rows.split(counts), strict=True)
        return torch.cat([expert(part) for expert, part in parts])


def expert() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))


def main() -> None:
    parser = argparse.ArgumentParser(description="Experts on several ranks.")
    parser.add_argument("--ep", type=int, default=1, help="ranks that divide the experts")
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    torch.set_num_threads(1)
    mesh = Mesh(hpcpar.init(), ep=options.ep)
    text = prepare(mesh.world, cache_directory="runs/cache").shards.train
    dataset, sampler = Dataset(text, 128), Sampler(len(text), 128, 4 * mesh.dp.size)
    torch.manual_seed(0)
    ep = ExpertParallel(mesh.ep, options.experts)
    layers = [Layer(ep, mesh) for _ in range(LAYERS)]
    model = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), *layers, nn.Linear(WIDTH, VOCABULARY))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = hpcpar.DistributedOptimizer(sgd, model.named_parameters(), mesh.dp)
    for step in range(options.steps):
        inputs, targets = dataset.batch(sampler.shard(step, mesh.dp.rank, mesh.dp.size))  # [4, S]
        loss = cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = mesh.world.allreduce(loss.detach().reshape(1), "average")
        if mesh.rank == 0:
            print(f"step {step + 1}  loss {mean.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
