"""One step of data-parallel training: hpcpar beside torch, Horovod, DeepSpeed, and one process.

    mpiexec -n 2 python benchmarks/training.py [--model 5m] [--dtype bfloat16] [--peers …] [--json FILE]

The peers train the same Llama on the same tokens on the same ranks, strictly in turn: in every round
each takes some steps while nothing else runs, so a noisy machine touches all of them.

    hpcpar 0         DistributedOptimizer over MPI; "hpcpar" for short
    hpcpar 1, 2, 3   the same, with optimizer states, gradients, parameters sharded
    ddp              torch DistributedDataParallel over gloo
    zero redundancy  torch ZeroRedundancyOptimizer around DDP: optimizer states sharded
    fsdp2            torch fully_shard over gloo: all sharded
    horovod          where it is installed
    deepspeed 1 … 3  where it is installed; as hpcpar's stages
    one process      rank 0 alone on the whole global batch, with as many threads as a rank; the others wait
    one rank alone   rank 0 alone on its own share: what a step would take if communication were free

A turn is some steps in a row: forward, backward, averaging, optimizer, and at its end whatever is still on
its way. A step's time is that of a turn by its steps, from a barrier on, on the slowest rank. Processor
time is that of all threads of a process, the mean of the ranks that work; waiting that spins is in it.
Efficiency is the time of one rank alone over the peer's.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import math
import platform
import random
import re
import socket
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from string import ascii_lowercase
from typing import Any, NoReturn

import torch
from torch import Tensor
from training_peers import PEERS, PHASES, Peer, Recipe, Task, absent, build, join_gloo

import hpcpar
from hpcpar.comm import Communicator
from hpcpar.launch import binding
from hpcpar.models import PRESETS, LlamaConfig
from hpcpar.units import MiB, format_nbytes

ALIASES = {"hpcpar": "hpcpar 0"}
ADAMW = Recipe(torch.optim.AdamW, {"lr": 1e-3, "fused": True})
# For the check: Adam would hide gradients of the wrong scale.
SGD = Recipe(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9})
TOLERANCES = {"float64": 1e-10, "float32": 1e-4, "bfloat16": 0.1}
"""Of the check. Gradients not averaged, or of twice their size, make a difference of about 1."""
IN_BFLOAT16 = (
    "hpcpar, deepspeed: bfloat16 parameters and gradients, float32 masters; "
    "fsdp2: MixedPrecisionPolicy, parameters and averages in bfloat16, float32 shards; "
    "others: torch.autocast on a float32 model; checked against one process in float32"
)


@dataclass(frozen=True)
class Turn:
    """What one rank's turn took.

    step_s, cpu_s   by its steps
    exposed_s       that its program stood still for hpcpar's communication, by its steps
    phases_s        of each step
    """

    step_s: float
    cpu_s: float
    exposed_s: float
    phases_s: list[list[float]]
    loss: float


@dataclass
class Result:
    """Figures of one peer; the JSON line.

    step_s         in each turn, of the slowest rank
    cpu_s          in each turn, processor time of all threads for a step, mean of the ranks that work
    exposed_s      median over turns of what the slowest rank stood still in a step for communication that
                   computation did not hide; None for whom hpcpar does not carry it
    phases_s       medians over all steps of rank 0
    peak_nbytes    most resident memory of any rank during steps, above what it held without the peer
    shared_nbytes  the same with pages that ranks share divided among them, the most at the ends of phases
    difference     what `check` found; None for a peer that trains on another batch

    None where the system does not say.
    """

    peer: str
    step_s: list[float]
    cpu_s: list[float]
    exposed_s: float | None
    phases_s: dict[str, float]
    tokens_per_step: int
    peak_nbytes: int | None
    shared_nbytes: int | None
    loss: float
    difference: float | None

    @property
    def median_s(self) -> float:
        return statistics.median(self.step_s)

    @property
    def median_cpu_s(self) -> float:
        return statistics.median(self.cpu_s)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens_per_step / self.median_s

    def quartiles_s(self) -> tuple[float, float]:
        if len(self.step_s) == 1:
            return self.step_s[0], self.step_s[0]
        first, _, third = statistics.quantiles(self.step_s, n=4, method="inclusive")
        return first, third


def ratio(mine: Sequence[float], others: Sequence[float]) -> float:
    """How many times as much: median over turns, each beside the other's in time."""
    return statistics.median(a / b for a, b in zip(mine, others, strict=True))


def derived(result: Result, results: Sequence[Result]) -> dict[str, Any]:
    """What follows from the figures of a peer and of the others."""
    steps = {other.peer: ratio(result.step_s, other.step_s) for other in results}
    cpus = {other.peer: ratio(result.cpu_s, other.cpu_s) for other in results}
    alone = None if result.peer == "one process" else steps.get("one rank alone")
    return {
        "median_s": result.median_s,
        "median_cpu_s": result.median_cpu_s,
        "tokens_per_s": result.tokens_per_s,
        "efficiency": 1 / alone if alone else None,
        "ratio_to": steps,
        "cpu_ratio_to": cpus,
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="One step of data-parallel training, in turn with its peers."
    )
    parser.add_argument("--model", default="5m", choices=PRESETS, help="size of the Llama (default: 5m)")
    parser.add_argument("--sequence", type=int, default=128, help="tokens of a sequence (default: 128)")
    parser.add_argument("--batch", type=int, default=4, help="sequences per rank (default: 4)")
    parser.add_argument("--dtype", default="float32", choices=("float32", "float64", "bfloat16"))
    parser.add_argument("--rounds", type=int, default=15, help="turns of each peer (default: 15)")
    parser.add_argument(
        "--steps", type=int, default=4, help="timed steps in a turn, after an untimed one (default: 4)"
    )
    parser.add_argument(
        "--threads", type=int, default=0, help="torch threads per rank (default: cores / ranks here)"
    )
    parser.add_argument(
        "--bucket-mib", type=float, help="of all that have buckets (default: as each has them)"
    )
    parser.add_argument(
        "--shared-parameters", action="store_true", help="hpcpar 1 to 3 hold one copy of them on a node"
    )
    parser.add_argument(
        "--peers", nargs="+", choices=[*PEERS, *ALIASES], help="(default: all that are installed)"
    )
    parser.add_argument("--json", type=Path, help="append one JSON line for each peer to this file")
    return parser.parse_args()


def make_task(world: Communicator, options: argparse.Namespace) -> Task:
    dtype = getattr(torch, options.dtype)
    return Task(
        world=world,
        config=LlamaConfig.preset(options.model),
        dtype=dtype,
        start_dtype=dtype,
        sequence=options.sequence,
        batch=options.batch,
        bucket_bytes=None if options.bucket_mib is None else round(options.bucket_mib * MiB),
        shared_parameters=options.shared_parameters,
    )


def choose(named: list[str] | None, task: Task, cleanup: ExitStack) -> list[str]:
    """The peers that take part: those named, or else all that can. Says which are left out; collective."""
    names = list(dict.fromkeys(ALIASES.get(name, name) for name in named or PEERS))
    missing = absent(names, task)
    lines = [f"{name}: {why}" for name, why in missing.items()]
    if named and missing:
        give_up(task.world, "asked for, but not to be had: " + "; ".join(lines))
    if task.world.rank == 0:
        for line in lines:
            print(f"# left out: {line}")
    names = [name for name in names if name not in missing]
    if any(PEERS[name].needs_gloo for name in names):
        join_gloo(task.world, cleanup)
    return names


def give_up(world: Communicator, why: str) -> NoReturn:
    """End the job, not before rank 0 has said why and all that it printed is out; collective."""
    if world.rank == 0:
        sys.stdout.flush()
        print(f"benchmarks/training.py: {why}", file=sys.stderr, flush=True)
    world.barrier()
    sys.exit(1)


def check(names: Sequence[str], task: Task) -> dict[str, float | None]:
    """Untimed: three steps of each peer from the same start, beside one process in full precision.

    The norm of the difference of what the steps changed, relative to the norm of that; the largest of
    any rank. None for a peer that trains on another batch.
    """
    truth = trained("one process", replace(task, dtype=task.wide_dtype)).parameters()
    for parameter in truth.values():
        task.world.broadcast(parameter)
    change = distance(dict(task.model().named_parameters()), truth)
    found: dict[str, float | None] = {}
    for name in names:
        peer = trained(name, task)
        mine = distance(peer.parameters(), truth) / change if peer.share is not None else 0.0
        del peer
        everyone = task.world.allgather_object(mine)
        # What is not a number is further from the truth than any number.
        worst = max(everyone, key=lambda difference: (math.isnan(difference), difference))
        found[name] = worst if name != "one rank alone" else None
    return found


def trained(name: str, task: Task) -> Peer:
    """A peer after three steps; collective."""
    peer = build(name, task, SGD)
    if peer.share is not None:
        for _ in range(3):
            peer.step()
    return peer


@torch.no_grad()
def distance(mine: dict[str, Tensor], truth: dict[str, Tensor]) -> float:
    """Euclidean, from the truth as near as the type of mine can hold it."""
    assert mine.keys() == truth.keys()
    nearest = {name: value.to(mine[name].dtype) for name, value in truth.items()}
    return math.sqrt(
        sum((mine[name].double() - nearest[name].double()).square().sum().item() for name in truth)
    )


def peak_memory(name: str, task: Task) -> list[int | None]:
    """Untimed: the most memory that two steps of this peer need on any rank, in bytes.

    Resident, and with pages that several processes map divided among them. Not while it is built, when
    each rank has the whole model once. Above what the process held before or holds afterwards, whichever
    is less: a peer may let go what another has left behind.
    """
    before = held_nbytes(task.world)
    peer = build(name, task, ADAMW)
    give_freed_memory_back()
    able = reset_peak()
    shared = [proportional_nbytes()]
    if peer.share is not None:
        for _ in range(2):
            shared += peer.step(proportional_nbytes)[1]
        peer.settle()
    peaks = kernel_nbytes("status", "VmHWM") if able else 0, max(shared)
    del peer
    after = held_nbytes(task.world)
    added = [
        round(peak) - min(around) if peak and min(around) else None
        for peak, *around in zip(peaks, before, after, strict=True)
    ]
    return [largest(of_ranks) for of_ranks in zip(*task.world.allgather_object(added), strict=True)]


def held_nbytes(world: Communicator) -> tuple[int, int]:
    """Resident, and with shared pages divided, when all ranks have let go what they no longer need."""
    give_freed_memory_back()
    world.barrier()
    return kernel_nbytes("status", "VmRSS"), proportional_nbytes()


def largest(of_ranks: Sequence[int | None]) -> int | None:
    known = [nbytes for nbytes in of_ranks if nbytes is not None]
    return max(known) if len(known) == len(of_ranks) else None


def give_freed_memory_back() -> None:
    """Freed memory that the C library keeps would be counted for nobody, then used by the next peer."""
    gc.collect()
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


def proportional_nbytes() -> int:
    """Without pages of files: how many map the libraries is other jobs' doing too."""
    return kernel_nbytes("smaps_rollup", "Pss_Anon") + kernel_nbytes("smaps_rollup", "Pss_Shmem")


def kernel_nbytes(file: str, field: str) -> int:
    """What Linux says of this process; 0 where it does not."""
    try:
        found = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self", file).read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(found[1]) * 1024 if found else 0


def take_turn(peer: Peer, task: Task, steps: int) -> Turn | None:
    """An untimed step, then timed ones; None on a rank that only waits. Collective."""
    if peer.share is not None:
        peer.step()
        peer.settle()
    task.world.barrier()
    if peer.share is None:
        return None
    phases_s = []
    waited_s = seconds_waited(task.world)
    cpu_s, start_s = time.process_time(), time.perf_counter()
    for _ in range(steps):
        loss, marks = peer.step()
        phases_s.append([stop - start for start, stop in pairwise(marks)])
    peer.settle()
    step_s, cpu_s = (time.perf_counter() - start_s) / steps, (time.process_time() - cpu_s) / steps
    exposed_s = (seconds_waited(task.world) - waited_s) / steps
    return Turn(step_s, cpu_s, exposed_s, phases_s, loss)


def seconds_waited(world: Communicator) -> float:
    """In all that this rank has communicated through hpcpar."""
    return sum(row.seconds_waited for traffic in world.traffics().values() for row in traffic.rows())


def take_turns(peers: Sequence[Peer], task: Task, rounds: int, steps: int) -> dict[str, list[Turn | None]]:
    """Timed: every round in another order; this rank's turns."""
    taken: dict[str, list[Turn | None]] = {peer.name: [] for peer in peers}
    order = random.Random(0)
    for _ in range(rounds):
        # The same order on all ranks, but never the same peer always after the same other.
        for peer in order.sample(peers, len(peers)):
            taken[peer.name].append(take_turn(peer, task, steps))
            task.world.barrier()
    return taken


def measure(names: Sequence[str], task: Task, options: argparse.Namespace) -> list[Result]:
    """Check, weigh and time the peers; collective."""
    differences = check(names, task)
    memory = {name: peak_memory(name, task) for name in names}
    peers = [build(name, task, ADAMW) for name in names]
    everyone = task.world.allgather_object(take_turns(peers, task, options.rounds, options.steps))
    results = []
    for name in names:
        # By turn, of the ranks that worked, rank 0 first.
        turns = [
            [turn for turn in of_ranks if turn is not None]
            for of_ranks in zip(*(taken[name] for taken in everyone), strict=True)
        ]
        phases = zip(*(step for of_ranks in turns for step in of_ranks[0].phases_s), strict=True)
        sequences = task.batch if name == "one rank alone" else task.global_batch
        results.append(
            Result(
                peer=name,
                step_s=[max(turn.step_s for turn in of_ranks) for of_ranks in turns],
                cpu_s=[statistics.mean(turn.cpu_s for turn in of_ranks) for of_ranks in turns],
                exposed_s=exposed_s(turns) if name.startswith("hpcpar") else None,
                phases_s=dict(zip(PHASES, map(statistics.median, phases), strict=True)),
                tokens_per_step=sequences * task.sequence,
                peak_nbytes=memory[name][0],
                shared_nbytes=memory[name][1],
                loss=turns[-1][0].loss,
                difference=differences[name],
            )
        )
    return results


def exposed_s(turns: Sequence[Sequence[Turn]]) -> float:
    return statistics.median(max(turn.exposed_s for turn in of_ranks) for of_ranks in turns)


def header(task: Task, options: argparse.Namespace) -> dict[str, Any]:
    """What the figures are of."""
    from hpcpar.transport.mpi import library_facts

    facts = library_facts()
    installed = {
        name: getattr(sys.modules[name], "__version__", "?")
        for name in ("horovod", "deepspeed")
        if name in sys.modules
    }
    return {
        "ranks": task.world.size,
        "nodes": len(set(task.world.nodes)),
        "host": socket.gethostname(),
        "cores": len(binding.affinity()),
        "threads": torch.get_num_threads(),
        "model": options.model,
        "parameters": task.config.parameters(),
        "sequence": options.sequence,
        "batch_per_rank": options.batch,
        "dtype": options.dtype,
        "bucket_bytes": task.bucket_bytes,
        "shared_parameters": options.shared_parameters,
        "repeats": options.rounds,
        "steps_per_turn": options.steps,
        "tolerance": TOLERANCES[options.dtype],
        "mpi": facts["vendor"],
        "torch": torch.__version__,
        **installed,
        "hpcpar": hpcpar.__version__,
        "python": platform.python_version(),
    }


def report(about: dict[str, Any], results: Sequence[Result]) -> None:
    print("# " + "  ".join(f"{key} {value}" for key, value in about.items()))
    if about["dtype"] == "bfloat16":
        print(f"# {IN_BFLOAT16}")
    agreement = ", ".join(
        f"{result.peer} {result.difference:.1e}" + (" (WRONG)" if wrong(result, about) else "")
        for result in results
        if result.difference is not None
    )
    print(
        "# checked: what 3 steps of SGD changed, beside one process; relative difference, at most "
        f"{about['tolerance']:.0e}: {agreement}"
    )
    print(
        "# step: median (quartiles) of the slowest rank; cpu: median, of all threads, mean of the ranks that "
        "work; phases: medians of rank 0; times in ms"
    )
    print(
        "# efficiency: step of one rank alone / step, turn by turn; memory: peak of two steps, any rank; "
        "shared: with shared pages divided among the ranks that map them"
    )
    print_figures(results)
    print_ratios("step", "ratio_to", results)
    print_ratios("cpu", "cpu_ratio_to", results)


def print_figures(results: Sequence[Result]) -> None:
    titles = ["step", "quartiles", "tokens/s", "cpu", "exposed", "efficiency", "memory", "shared", *PHASES]
    print(f"{'peer':<17}" + "".join(f"{title:>15}" for title in titles))
    for result in results:
        low, high = result.quartiles_s()
        efficiency = derived(result, results)["efficiency"]
        cells = [
            f"{result.median_s * 1e3:.1f}",
            f"{low * 1e3:.1f}-{high * 1e3:.1f}",
            f"{result.tokens_per_s:,.0f}",
            f"{result.median_cpu_s * 1e3:.1f}",
            "-" if result.exposed_s is None else f"{result.exposed_s * 1e3:.1f}",
            "-" if efficiency is None else f"{efficiency:.3f}",
            *("-" if n is None else format_nbytes(n) for n in (result.peak_nbytes, result.shared_nbytes)),
            *(f"{result.phases_s[phase] * 1e3:.1f}" for phase in PHASES),
        ]
        print(f"{result.peer:<17}" + "".join(f"{cell:>15}" for cell in cells))


def print_ratios(title: str, figure: str, results: Sequence[Result]) -> None:
    """A square table, whose columns have letters because the peers' names are long."""
    letters = ascii_lowercase[: len(results)]
    print(f"# {title}, row / column, turn by turn")
    print(f"{'':<19}" + "".join(f"{letter:>8}" for letter in letters))
    for letter, result in zip(letters, results, strict=True):
        ratios = derived(result, results)[figure].values()
        print(f"{letter} {result.peer:<17}" + "".join(f"{value:>8.3f}" for value in ratios))


def wrong(result: Result, about: dict[str, Any]) -> bool:
    # A difference that is not a number is no agreement either.
    return result.difference is not None and not result.difference <= about["tolerance"]


def write_json(path: Path, about: dict[str, Any], results: Sequence[Result]) -> None:
    with path.open("a", encoding="utf-8") as file:
        for result in results:
            line = {**about, **asdict(result), **derived(result, results)}
            file.write(json.dumps(line) + "\n")


def main() -> None:
    options = arguments()
    world = hpcpar.init()
    local_size = world.nodes.count(world.nodes[world.rank])
    torch.set_num_threads(options.threads or max(1, len(binding.affinity()) // local_size))
    task = make_task(world, options)
    with ExitStack() as cleanup:
        names = choose(options.peers, task, cleanup)
        results = measure(names, task, options)
        about = header(task, options)
        if world.rank == 0:
            report(about, results)
            if options.json is not None:
                write_json(options.json, about, results)
    if any(wrong(result, about) for result in results):
        give_up(world, "a peer computes something else than one process: see WRONG above")


if __name__ == "__main__":
    main()
