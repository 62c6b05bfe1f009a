"""Train several small language models at once with Ray, each of them on several MPI ranks.

    python examples/ray_models.py                     three packages of the standard library, on this machine
    python examples/ray_models.py ~/letters ~/code    a model for each of these directories
    sbatch jobscripts/ray-models.sh                   on all nodes of a Slurm job

Ray says where and when: one task cleans a directory's text, and another trains its model as soon as a node
has --ranks cores free. Inside of that task `horovod.run` starts the model's ranks, on those cores. A training
that fails is named and leaves the others alone; the status is 1 then. `pip install '.[ray]'`.
"""

from __future__ import annotations

import argparse
import socket
import sys
import sysconfig
from pathlib import Path
from typing import Any

import ray
import torch
from ray.exceptions import RayError

import hpcpar.horovod.torch as hvd
from hpcpar import horovod
from hpcpar.models import Llama, LlamaConfig, next_token_loss

ENDINGS = (".txt", ".md", ".rst", ".py")
PACKAGES = ("asyncio", "email", "unittest")
SEQUENCE, BATCH = 64, 8  # sequences of this many bytes, on each rank


@ray.remote
def preprocess(directory: Path) -> bytes:
    """Join the directory's texts, each of them once and without trailing blanks."""
    files = sorted(path for path in directory.rglob("*") if path.suffix in ENDINGS and path.is_file())
    if not files:
        raise FileNotFoundError(f"no file in {directory} ends in {' '.join(ENDINGS)}")
    texts = (path.read_text(encoding="utf-8", errors="replace") for path in files)
    cleaned = ("\n".join(line.rstrip() for line in text.splitlines()) for text in texts)
    return "\n\n".join(dict.fromkeys(cleaned)).encode()


@ray.remote(scheduling_strategy="SPREAD")
def train(text: bytes, ranks: int, steps: int) -> dict[str, Any]:
    """Train a model on so many ranks, on the node of this task; what `fit` returns on rank 0."""
    return horovod.run(fit, args=(text, steps), num_proc=ranks)[0]


def fit(text: bytes, steps: int) -> dict[str, Any]:
    """Train a model of the text's bytes; every rank calls this.

    Returns the host, each step's loss (the mean over ranks), the loss on the text's last tenth, the weights.
    """
    hvd.init()
    tokens = torch.tensor(list(text))
    learnt, held_out = tokens.split([len(text) - len(text) // 10, len(text) // 10])
    if len(held_out) <= SEQUENCE:
        raise ValueError(f"the text has {len(text)} bytes: it takes at least {10 * (SEQUENCE + 1)}")
    torch.manual_seed(0)
    model = Llama(LlamaConfig.preset("tiny"))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=2e-3), named_parameters=model.named_parameters()
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    def loss_of_batch(source: torch.Tensor, seed: int) -> torch.Tensor:
        chance = torch.Generator().manual_seed(seed)
        starts = torch.randint(len(source) - SEQUENCE, (hvd.size(), BATCH, 1), generator=chance)
        batch = source[starts[hvd.rank()] + torch.arange(SEQUENCE + 1)]
        return next_token_loss(model(batch[:, :-1]), batch[:, 1:])

    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of_batch(learnt, step)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    with torch.no_grad():
        losses.append(loss_of_batch(held_out, 0))
    *means, mean = hvd.allreduce(torch.stack(losses), name="losses").tolist()
    return {"host": socket.gethostname(), "losses": means, "held_out": mean, "weights": model.state_dict()}


def arguments() -> argparse.Namespace:
    standard_library = Path(sysconfig.get_paths()["stdlib"])
    parser = argparse.ArgumentParser(description="Train a language model for each directory, with Ray.")
    parser.add_argument(
        "directories", nargs="*", type=Path, default=[standard_library / name for name in PACKAGES]
    )
    parser.add_argument("--ranks", type=int, default=2, help="of each model (default: 2)")
    parser.add_argument("--steps", type=int, default=100, help="(default: 100)")
    parser.add_argument("--cpus", type=int, help="cores that a Ray started here has (default: all)")
    parser.add_argument("--output", type=Path, default=Path("runs/ray-models"), help="for weights: NAME.pt")
    options = parser.parse_args()
    names = [directory.name for directory in options.directories]
    if len(set(names)) < len(names):
        parser.error(f"two directories have one name, as their models would: {' '.join(sorted(names))}")
    return options


def main() -> None:
    options = arguments()
    # Joins the cluster that RAY_ADDRESS names, or starts one here.
    ray.init(num_cpus=options.cpus, logging_level="error", log_to_driver=False)
    most = max(int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"])
    if options.ranks > most:
        raise SystemExit(
            f"--ranks {options.ranks}, but no node has more than {most} cores for Ray: give fewer"
        )

    names = [directory.name for directory in options.directories]
    cleaned = [preprocess.remote(directory.absolute()) for directory in options.directories]
    on_ranks = train.options(num_cpus=options.ranks)
    trained = [on_ranks.remote(text, options.ranks, options.steps) for text in cleaned]

    options.output.mkdir(parents=True, exist_ok=True)
    failed = []
    for name, result in zip(names, trained, strict=True):
        try:
            found = ray.get(result)
        except RayError as error:
            print(f"{name} failed: {getattr(error, 'cause', None) or error}", file=sys.stderr, flush=True)
            failed.append(name)
            continue
        torch.save(found["weights"], options.output / f"{name}.pt")
        first, last = found["losses"][0], found["losses"][-1]
        print(
            f"{name} on {found['host']}: loss {first:.4f} to {last:.4f}, on held-out text "
            f"{found['held_out']:.4f}",
            flush=True,
        )
    if failed:
        raise SystemExit(f"{len(failed)} of {len(names)} models failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
