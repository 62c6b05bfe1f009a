"""One step of data-parallel training: hpcpar beside torch DistributedDataParallel, and one process.

    mpiexec -n 2 python benchmarks/training.py [--model 5m] [--json FILE]

The peers train the same Llama on the same tokens on the same ranks, strictly in turn: in every round
each takes some steps while nothing else runs, so a noisy machine touches all of them.

    hpcpar        DistributedOptimizer over MPI
    ddp           torch DistributedDataParallel over gloo
    one process   rank 0 alone on the whole global batch, with as many threads as a rank; the others wait

A step's time is that of its slowest rank, from a barrier on: forward, backward, averaging, optimizer.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import platform
import random
import re
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn

import hpcpar
from hpcpar.comm import Communicator
from hpcpar.data_parallel import DistributedOptimizer, broadcast_parameters
from hpcpar.data_parallel.buckets import BUCKET_BYTES, FIRST_BUCKET_BYTES
from hpcpar.launch import binding
from hpcpar.models import PRESETS, Llama, LlamaConfig, next_token_loss
from hpcpar.units import MiB, format_nbytes

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
PHASES = ("forward", "backward", "synchronize", "optimizer")
PEERS = ("hpcpar", "ddp", "one process")


@dataclass
class Peer:
    """A model in training: what it computes, and who averages its gradients.

    share          the part of the global batch that this rank works on; None: it only waits
    synchronize    what is left to do between backward and optimizer
    """

    name: str
    module: nn.Module
    optimizer: torch.optim.Optimizer
    share: tuple[Tensor, Tensor] | None
    synchronize: Callable[[], None] = lambda: None

    def step(self) -> tuple[float, dict[str, float]]:
        """One step; the loss, and seconds by phase."""
        if self.share is None:
            return 0.0, dict.fromkeys(PHASES, 0.0)
        inputs, targets = self.share
        marks = [time.perf_counter()]
        loss = next_token_loss(self.module(inputs), targets)
        marks.append(time.perf_counter())
        loss.backward()  # type: ignore[no-untyped-call]
        marks.append(time.perf_counter())
        self.synchronize()
        marks.append(time.perf_counter())
        self.optimizer.step()
        self.optimizer.zero_grad()
        marks.append(time.perf_counter())
        seconds = (stop - start for start, stop in pairwise(marks))
        return loss.item(), dict(zip(PHASES, seconds, strict=True))


@dataclass
class Result:
    """Figures of one peer; the JSON line.

    step_s        of each timed step, the slowest rank's
    phases_s      medians of rank 0
    peak_nbytes   most resident memory of any rank above what it held before the peer was built;
                  None where the system does not say
    """

    peer: str
    step_s: list[float]
    phases_s: dict[str, float]
    tokens_per_step: int
    peak_nbytes: int | None
    loss: float

    @property
    def median_s(self) -> float:
        return statistics.median(self.step_s)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens_per_step / self.median_s

    def ratio_to(self, other: Result, steps_per_turn: int) -> float:
        """How many times as long a step takes: median over turns, each beside the other's in time."""
        turns = range(0, len(self.step_s), steps_per_turn)
        return statistics.median(
            statistics.median(self.step_s[start : start + steps_per_turn])
            / statistics.median(other.step_s[start : start + steps_per_turn])
            for start in turns
        )

    def quartiles_s(self) -> tuple[float, float]:
        first, _, third = statistics.quantiles(self.step_s, n=4, method="inclusive")
        return first, third


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="One step of data-parallel training, in turn with its peers."
    )
    parser.add_argument("--model", default="5m", choices=PRESETS, help="size of the Llama (default: 5m)")
    parser.add_argument("--sequence", type=int, default=128, help="tokens of a sequence (default: 128)")
    parser.add_argument("--batch", type=int, default=4, help="sequences per rank (default: 4)")
    parser.add_argument("--dtype", default="float32", choices=("float32", "float64", "bfloat16"))
    parser.add_argument("--rounds", type=int, default=20, help="turns of each peer (default: 20)")
    parser.add_argument(
        "--steps", type=int, default=2, help="timed steps in a turn, after an untimed one (default: 2)"
    )
    parser.add_argument(
        "--threads", type=int, default=0, help="torch threads per rank (default: cores / ranks here)"
    )
    parser.add_argument("--bucket-mib", type=float, default=BUCKET_BYTES / MiB, help="of hpcpar and ddp")
    parser.add_argument("--peers", nargs="+", default=list(PEERS), choices=PEERS)
    parser.add_argument("--json", type=Path, help="append one JSON line for each peer to this file")
    return parser.parse_args()


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, fused=True)


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """For the check: Adam would hide gradients of the wrong scale."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


class Bench:
    """The model, the tokens, and the peers that train on them."""

    def __init__(self, world: Communicator, options: argparse.Namespace) -> None:
        self.world = world
        self.options = options
        self.config = LlamaConfig.preset(options.model)
        self.dtype = getattr(torch, options.dtype)
        self.bucket_bytes = round(options.bucket_mib * MiB)
        self.global_batch = options.batch * world.size
        generator = torch.Generator().manual_seed(0)
        shape = (self.global_batch, options.sequence + 1)
        self.tokens = torch.randint(self.config.vocab_size, shape, generator=generator)

    def share(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        part = self.tokens[start:stop]
        return part[:, :-1].contiguous(), part[:, 1:].contiguous()

    def own_share(self) -> tuple[Tensor, Tensor]:
        start = self.world.rank * self.options.batch
        return self.share(start, start + self.options.batch)

    def peer(self, name: str, make: MakeOptimizer) -> Peer:
        """Build one peer; collective."""
        model = Llama(self.config, seed=0).to(self.dtype)
        optimizer = make(model.parameters())
        if name == "one process":
            return Peer(
                name, model, optimizer, self.share(0, self.global_batch) if self.world.rank == 0 else None
            )
        if name == "ddp":
            wrapped = nn.parallel.DistributedDataParallel(
                model, bucket_cap_mb=self.options.bucket_mib, gradient_as_bucket_view=True
            )
            return Peer(name, wrapped, optimizer, self.own_share())
        broadcast_parameters(model, self.world)
        distributed = DistributedOptimizer(
            optimizer,
            model.named_parameters(),
            self.world,
            bucket_bytes=self.bucket_bytes,
            first_bucket_bytes=min(FIRST_BUCKET_BYTES, self.bucket_bytes),
        )
        return Peer(name, model, distributed, self.own_share(), distributed.synchronize)


def check(bench: Bench) -> dict[str, float]:
    """Untimed: three steps of each peer from the same start; the largest difference from one process.

    Of parameters, relative to the largest of them.
    """
    ends: dict[str, Tensor] = {}
    for name in dict.fromkeys(["one process", *bench.options.peers]):
        peer = bench.peer(name, sgd)
        for _ in range(3):
            peer.step()
        ends[name] = torch.cat([p.detach().double().reshape(-1) for p in peer.module.parameters()])
        del peer
        bench.world.barrier()
    reference = ends["one process"]
    bench.world.broadcast(reference)
    scale = reference.abs().max().item()
    differences = {name: (end - reference).abs().max().item() / scale for name, end in ends.items()}
    everyone = bench.world.allgather_object(differences)
    return {name: max(found[name] for found in everyone) for name in bench.options.peers}


def peak_memory(bench: Bench, name: str) -> int | None:
    """Untimed: the most memory that building this peer and two steps add on any rank, in bytes."""
    gc.collect()
    give_freed_memory_back()
    bench.world.barrier()
    before = resident_nbytes("VmRSS")
    able = reset_peak()
    peer = bench.peer(name, adamw)
    for _ in range(2):
        peer.step()
    added = resident_nbytes("VmHWM") - before if able and before else None
    del peer
    bench.world.barrier()
    everyone: list[int | None] = bench.world.allgather_object(added)
    known = [nbytes for nbytes in everyone if nbytes is not None]
    return max(known) if len(known) == len(everyone) else None


def give_freed_memory_back() -> None:
    """Freed memory that the C library keeps would be counted for nobody, then used by the next peer."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def reset_peak() -> bool:
    """Start the kernel's count of peak resident memory anew (Linux)."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def resident_nbytes(field: str) -> int:
    try:
        found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    except OSError:
        return 0
    return int(found[1]) * 1024 if found else 0


def measure(bench: Bench) -> list[Result]:
    """Timed: the peers in turn, every round in another order."""
    world, options = bench.world, bench.options
    peak = {name: peak_memory(bench, name) for name in options.peers}
    peers = [bench.peer(name, adamw) for name in options.peers]
    seconds: dict[str, list[float]] = {peer.name: [] for peer in peers}
    phases: dict[str, list[dict[str, float]]] = {peer.name: [] for peer in peers}
    losses: dict[str, float] = {}
    order = random.Random(0)
    for _ in range(options.rounds):
        # The same order on all ranks, but never the same peer always after the same other.
        for peer in order.sample(peers, len(peers)):
            peer.step()
            for _ in range(options.steps):
                world.barrier()
                losses[peer.name], spent = peer.step()
                seconds[peer.name].append(sum(spent.values()))
                phases[peer.name].append(spent)
            world.barrier()
    slowest = [
        [
            max(of_ranks)
            for of_ranks in zip(*(rank[name] for rank in world.allgather_object(seconds)), strict=True)
        ]
        for name in options.peers
    ]
    return [
        Result(
            peer=name,
            step_s=times,
            phases_s={phase: statistics.median(step[phase] for step in phases[name]) for phase in PHASES},
            tokens_per_step=bench.global_batch * options.sequence,
            peak_nbytes=peak[name],
            loss=losses[name],
        )
        for name, times in zip(options.peers, slowest, strict=True)
    ]


def header(bench: Bench) -> dict[str, Any]:
    """What the figures are of."""
    from hpcpar.transport.mpi import library_facts

    options, facts = bench.options, library_facts()
    return {
        "ranks": bench.world.size,
        "nodes": len(set(bench.world.nodes)),
        "host": socket.gethostname(),
        "cores": len(binding.affinity()),
        "threads": torch.get_num_threads(),
        "model": options.model,
        "parameters": bench.config.parameters(),
        "sequence": options.sequence,
        "batch_per_rank": options.batch,
        "dtype": options.dtype,
        "bucket_bytes": bench.bucket_bytes,
        "repeats": options.rounds * options.steps,
        "steps_per_turn": options.steps,
        "mpi": facts["vendor"],
        "torch": torch.__version__,
        "hpcpar": hpcpar.__version__,
        "python": platform.python_version(),
    }


def report(about: dict[str, Any], results: list[Result], differences: dict[str, float]) -> None:
    print("# " + "  ".join(f"{key} {value}" for key, value in about.items()))
    agreement = ", ".join(f"{name} {difference:.1e}" for name, difference in differences.items())
    print(f"# checked: largest difference of parameters from one process after 3 steps: {agreement}")
    print(
        "# step: median (quartiles) of the slowest rank; phases: medians of rank 0; times in ms; "
        "/ x: ratio to x, turn by turn"
    )
    titles = ["step", "quartiles", "tokens/s", "memory", *PHASES]
    names = [result.peer for result in results]
    print(
        f"{'peer':<12}"
        + "".join(f"{title:>14}" for title in titles)
        + "".join(f"{'/ ' + n:>14}" for n in names)
    )
    for result in results:
        low, high = result.quartiles_s()
        cells = [
            f"{result.median_s * 1e3:.1f}",
            f"{low * 1e3:.1f}-{high * 1e3:.1f}",
            f"{result.tokens_per_s:,.0f}",
            "n/a" if result.peak_nbytes is None else format_nbytes(result.peak_nbytes),
            *(f"{result.phases_s[phase] * 1e3:.1f}" for phase in PHASES),
            *(f"{result.ratio_to(other, about['steps_per_turn']):.3f}" for other in results),
        ]
        print(f"{result.peer:<12}" + "".join(f"{cell:>14}" for cell in cells))


def write_json(
    path: Path, about: dict[str, Any], results: list[Result], differences: dict[str, float]
) -> None:
    with path.open("a", encoding="utf-8") as file:
        for result in results:
            ratios = {other.peer: result.ratio_to(other, about["steps_per_turn"]) for other in results}
            derived = {"median_s": result.median_s, "tokens_per_s": result.tokens_per_s, "ratio_to": ratios}
            line = {**about, **asdict(result), **derived, "difference": differences[result.peer]}
            file.write(json.dumps(line) + "\n")


def join_gloo(world: Communicator, cleanup: ExitStack) -> None:
    """torch.distributed over gloo for the same ranks; its meeting point travels over our communicator."""
    if len(set(world.nodes)) == 1:
        # On one node a file will do, which only this user can reach; a TCP store listens to anybody.
        folder = cleanup.enter_context(tempfile.TemporaryDirectory()) if world.rank == 0 else None
        path = f"{world.broadcast_object(folder)}/store"
        store: Any = distributed.FileStore(path, world.size)  # type: ignore[attr-defined]
    else:
        store = tcp_store(world)
    distributed.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size)
    cleanup.callback(distributed.destroy_process_group)


def tcp_store(world: Communicator) -> Any:
    """A store that rank 0 serves on a free port."""
    make = distributed.TCPStore  # type: ignore[attr-defined]
    mine = None
    if world.rank == 0:
        mine = make(socket.gethostname(), 0, is_master=True, wait_for_workers=False)
    host, port = world.broadcast_object((mine.host, mine.port) if mine else None)
    return mine or make(host, port, is_master=False)


def main() -> None:
    options = arguments()
    world = hpcpar.init()
    local_size = world.nodes.count(world.nodes[world.rank])
    torch.set_num_threads(options.threads or max(1, len(binding.affinity()) // local_size))
    with ExitStack() as cleanup:
        join_gloo(world, cleanup)
        bench = Bench(world, options)
        differences = check(bench)
        results = measure(bench)
        if world.rank == 0:
            about = header(bench)
            report(about, results, differences)
            if options.json is not None:
                write_json(options.json, about, results, differences)
        world.barrier()


if __name__ == "__main__":
    main()
