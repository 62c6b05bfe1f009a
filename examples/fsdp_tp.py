"""Train a Llama whose parameters are sharded (ZeRO-3, as FSDP does) and whose layers --tp ranks share.

mpiexec -n 4 python examples/fsdp_tp.py                       one long sequence on each rank: too large
mpiexec -n 4 python examples/fsdp_tp.py --tp 2                two ranks share it, and all of its activations
mpiexec -n 4 python examples/fsdp_tp.py --tp 4
mpiexec -n 4 python examples/fsdp_tp.py --tp 2 --n-layers 8 --memory-limit-gib 0         without a limit

ZeRO-3 divides parameters, gradients and optimizer state among all ranks, whatever --tp is. What it does not
divide are the activations of a sequence, and of each layer in use its gathered weights: these are shared
by the ranks of tp, and beyond one sequence for each of them there is nothing left to cut.

The limit is on what this program asks for beyond what it has before the model is built (RLIMIT_DATA, Linux).
"""

from __future__ import annotations

import argparse
import ctypes
import json
import resource
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import hpcpar
from hpcpar.data import Dataset, Sampler, prepare
from hpcpar.data_parallel.process_memory import process_memory
from hpcpar.launch.binding import affinity
from hpcpar.mesh import Mesh
from hpcpar.models import Llama, LlamaConfig, parallel_layers
from hpcpar.models.initialise import initial_value
from hpcpar.tensor_parallel import TensorParallel, own_shard
from hpcpar.units import GiB, KiB, format_nbytes

VOCABULARY, HEAD_SIZE = 256, 32

M_MMAP_THRESHOLD = -3
"""As glibc's malloc.h numbers it."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="ZeRO-3 (FSDP) together with tensor parallelism.")
    parser.add_argument("--tp", type=int, default=1, help="ranks that share each layer (default: 1)")
    parser.add_argument("--n-layers", type=int, default=16, help="(default: 16)")
    parser.add_argument("--hidden", type=int, default=256, help="a multiple of 32 (default: 256)")
    parser.add_argument("--sequence", type=int, default=1024, help="tokens of a sequence (default: 1024)")
    parser.add_argument("--batch", type=int, default=1, help="sequences of the ranks that share (default: 1)")
    parser.add_argument("--steps", type=int, default=5, help="(default: 5)")
    parser.add_argument(
        "--dataset", choices=("random", "text"), default="random", help="tokens to learn (default: random)"
    )
    parser.add_argument(
        "--sequence-parallel",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="the ranks of tp share the sequence between the layers, too (default: they do)",
    )
    parser.add_argument(
        "--memory-limit-gib", type=float, default=0.3, help="of a rank; 0: none (default: 0.3)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="append a line with all figures")
    options = parser.parse_args()
    if options.steps < 1:
        parser.error(f"--steps {options.steps}: it takes at least 1")
    return options


def batches(options: argparse.Namespace, mesh: Mesh) -> Iterator[tuple[Tensor, Tensor]]:
    """(tokens, targets) for each step: the same on the ranks of tp, others along dp."""
    dp, sequences = mesh.dp, options.batch * mesh.dp.size
    if options.dataset == "text":
        text = prepare(mesh.world, cache_directory="runs/cache").shards.train
        dataset, sampler = Dataset(text, options.sequence), Sampler(len(text), options.sequence, sequences)
        for step in range(options.steps):
            yield dataset.batch(sampler.shard(step, dp.rank, dp.size))
        return
    generator = torch.Generator().manual_seed(dp.rank)
    for _ in range(options.steps):
        tokens = torch.randint(VOCABULARY, (options.batch, options.sequence + 1), generator=generator)
        yield tokens[:, :-1], tokens[:, 1:]


def build(options: argparse.Namespace, mesh: Mesh) -> tuple[Llama, hpcpar.DistributedOptimizer]:
    """A model that no rank ever holds as a whole, and its optimizer."""
    heads = options.hidden // HEAD_SIZE
    config = LlamaConfig(
        VOCABULARY, options.hidden, options.n_layers, heads, max_sequence=options.sequence, initial_std=0.03
    )
    tp = TensorParallel(mesh.tp, sequence_parallel=options.sequence_parallel)
    with torch.device("meta"):
        model = Llama(config, parallel_layers(config, tp), seed=None)
    hpcpar.fully_shard(
        model, mesh.dp, values=lambda name, p: own_shard(p, initial_value(config, name, seed=0))
    )
    optimizer = hpcpar.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True),
        model.named_parameters(),
        mesh.dp,
    )
    return model, optimizer


def train(options: argparse.Namespace, mesh: Mesh) -> dict[str, Any]:
    """All steps; what this rank measured."""
    world = mesh.world
    before = process_memory().resident_nbytes or 0
    with memory_limit(options, mesh):
        model, optimizer = build(options, mesh)
        losses, seconds, activations = [], [], 0
        for step, (tokens, targets) in enumerate(batches(options, mesh)):
            world.barrier()
            start_s = time.perf_counter()
            with hpcpar.watch_activations(model) as watched:
                loss = model.loss(model(tokens), targets)
                loss.backward()
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            taken_s = torch.tensor([time.perf_counter() - start_s], dtype=torch.float64)
            seconds.append(world.allreduce(taken_s, "max").item())  # the slowest rank is the time
            losses.append(mesh.dp.allreduce(loss.detach().reshape(1), "average").item())
            activations = watched.peak_nbytes
            if world.rank == 0:
                print(f"step {step + 1}  loss {losses[-1]:.3f}  {seconds[-1]:.3f} s", flush=True)
    peak = process_memory().peak_resident_nbytes or 0
    return {
        "step_s": seconds,
        "losses": losses,
        "activations_nbytes": activations,
        "peak_nbytes": peak,
        "added_nbytes": peak - before,
    }


@contextmanager
def memory_limit(options: argparse.Namespace, mesh: Mesh) -> Iterator[None]:
    """Inside, this process may have so much more memory, and one that needs more is told what to do."""
    if not options.memory_limit_gib or not sys.platform.startswith("linux"):
        yield
        return
    give_memory_back_at_once()
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = data_nbytes() + int(options.memory_limit_gib * GiB)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "can't allocate memory" not in str(error):
            raise
        raise MemoryError(advice(options, mesh)) from None
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def advice(options: argparse.Namespace, mesh: Mesh) -> str:
    larger = [tp for tp in range(mesh.tp.size + 1, mesh.size + 1) if mesh.size % tp == 0]
    fitting = [f"--tp={tp}" for tp in larger if options.hidden // HEAD_SIZE % tp == 0]
    cure = " or ".join(fitting) or "a smaller --sequence or --n-layers, or more ranks and a larger --tp"
    return (
        f"rank {mesh.rank} of {mesh.size} needs more than --memory-limit-gib={options.memory_limit_gib:g} "
        f"for --sequence={options.sequence} in {options.n_layers} layers on tp={mesh.tp.size}; try {cure}"
    )


def give_memory_back_at_once() -> None:
    """What is freed counts no more: the C library keeps small blocks, and these are small here."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(M_MMAP_THRESHOLD, 64 * KiB)


def data_nbytes() -> int:
    """What the limit is about: this process's own writable memory, now."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmData"))


def warm_up(world: hpcpar.Communicator) -> None:
    """Threads and buffers that any work makes are there before memory is measured."""
    layer = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(layer.parameters(), fused=True)
    layer(torch.ones(8, 64)).sum().backward()
    optimizer.step()
    world.allreduce(torch.ones(1 << 18))


def report(options: argparse.Namespace, mesh: Mesh, of_ranks: list[dict[str, Any]]) -> None:
    """The figures of the run; the first step, in which much is done once, counts only if it is alone."""
    median_s = statistics.median(of_ranks[0]["step_s"][1:] or of_ranks[0]["step_s"])
    tokens_per_s = mesh.dp.size * options.batch * options.sequence / median_s
    print(f"median of steps {median_s:.3f} s, {tokens_per_s:,.0f} tokens/s")
    for rank, found in enumerate(of_ranks):
        print(
            f"rank {rank}: peak memory {format_nbytes(found['peak_nbytes'])}, "
            f"{format_nbytes(found['added_nbytes'])} of it since the start; "
            f"activations {format_nbytes(found['activations_nbytes'])}"
        )
    if options.json is None:
        return
    record = {
        **{key: value for key, value in vars(options).items() if key not in ("json", "tp")},
        "ranks": mesh.size,
        "tp": mesh.tp.size,
        "dp": mesh.dp.size,
        "median_s": median_s,
        "tokens_per_s": tokens_per_s,
        **{key: max(found[key] for found in of_ranks) for key in ("peak_nbytes", "added_nbytes")},
        **{key: of_ranks[0][key] for key in ("activations_nbytes", "step_s", "losses")},
        "dtype": "float32",
        "nodes": len(set(mesh.world.nodes)),
        "cores": len(affinity()),
        "torch": torch.__version__,
        "hpcpar": hpcpar.__version__,
    }
    with options.json.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


def main() -> None:
    options = arguments()
    torch.set_num_threads(1)
    mesh = Mesh(hpcpar.init(), tp=options.tp)
    if mesh.rank == 0:
        print(
            f"{mesh.layout}: {options.n_layers} layers of {options.hidden}, {options.batch} x "
            f"{options.sequence} tokens for every {mesh.tp.size} of {mesh.size} ranks",
            flush=True,
        )
    warm_up(mesh.world)
    of_ranks = mesh.world.allgather_object(train(options, mesh))
    if mesh.rank == 0:
        report(options, mesh, of_ranks)


if __name__ == "__main__":
    main()
