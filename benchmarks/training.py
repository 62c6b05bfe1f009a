"""One step of parallel training: hpcpar beside torch, Horovod, DeepSpeed, and one process.

    mpiexec -n 2 python benchmarks/training.py [--model 5m] [--dtype bfloat16] [--peers …] [--json FILE]
    mpiexec -n 2 python benchmarks/training.py --tp 2 [--hidden 512] [--layers 6] [--forward-only]
    mpiexec -n 2 python benchmarks/training.py --cp 2 [--sequence 4096] [--batch 1]
    mpiexec -n 2 python benchmarks/training.py --ep 2 [--experts 8] [--per-token 2]

The peers train the same Llama on the same tokens on the same ranks, strictly in turn: in every round
each takes some steps while nothing else runs, so a noisy machine touches all of them.

    hpcpar 0         DistributedOptimizer over MPI; "hpcpar" for short
    hpcpar 1, 2, 3   the same, with optimizer states, gradients, parameters sharded
    hpcpar 0 … 3 fast   with what is asked for by name: overlap_allgather, and no look at whether gradients
                     are finite (nonfinite="step")
    hpcpar 0 … 3 guarded   after each step all ranks are asked whether to stop, too, as `hpcpar train` does
    ddp              torch DistributedDataParallel over gloo
    zero redundancy  torch ZeroRedundancyOptimizer around DDP: optimizer states sharded
    fsdp2            torch fully_shard over gloo: all sharded
    horovod          where it is installed
    deepspeed 1 … 3  where it is installed; as hpcpar's stages
    one process      rank 0 alone on the whole global batch, with as many threads as a rank; the others wait
    one rank alone   rank 0 alone on its own share: what a step would take if communication were free
    no communication the same on every rank at once, which share the machine's memory: the least there is

With --tp the ranks share every layer of one model instead, and the sequences:

    hpcpar tp               parallel layers over MPI; gradients are summed beside products
    hpcpar tp no overlap    the same, each sum awaited first
    hpcpar tp+sp            with sequence parallelism
    hpcpar tp+sp 2 chunks   its gathers and reduce-scatters in two parts, beside products
    dtensor tp, tp+sp       torch parallelize_module over gloo; with sequence parallelism
    one process             rank 0 alone with the whole model
    no communication        every rank with a model as large as its part: if communication were free

With --cp they share every sequence instead, and each has the whole model:

    hpcpar exchange         keys and values that the mask needs go to who needs them
    hpcpar exchange kept    the same, kept for backward and not fetched again
    hpcpar ring, allgather, ulysses
    zigzag ring             ring-flash-attention's algorithm, over gloo
    ulysses                 heads for tokens by torch's all-to-all, over gloo
    deepspeed ulysses       the same by DeepSpeed, where it is installed
    one process             rank 0 alone with whole sequences
    no communication        every rank with its part of them, and its own keys for the others'

With --ep every feed-forward is a mixture of experts, which they share; each rank has its own sequences:

    hpcpar ep               rows of tokens go to their experts and home over MPI
    hpcpar ep halves        the same, in two halves: one travels while the other's experts compute
    ddp                     torch DistributedDataParallel over gloo; all experts on each rank
    megatron ep             Megatron-Core's mixture, where it is installed, over gloo
    deepspeed ep            DeepSpeed's mixture, where it is installed, over gloo
    one process             rank 0 alone with all experts, on the whole global batch
    no communication        every rank with its part of them, and its own rows for the others'

A turn is some steps in a row: forward, backward, averaging, optimizer, and at its end whatever is still on
its way. A step's time is that of a turn by its steps, from a barrier on, on the slowest rank. Processor
time is that of all threads of a process, the mean of the ranks that work; waiting that spins is in it.
Efficiency is the time without communication over the peer's. With --forward-only there are also turns of
forward passes without gradients, in turn with the others.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from activation_memory import activation_nbytes
from common import (
    add_options,
    at_least,
    give_freed_memory_back,
    give_up,
    header,
    in_turn,
    kernel_nbytes,
    proportional_nbytes,
    reset_peak,
)
from context_parallel_peers import CONTEXT_PARALLEL
from expert_parallel_peers import EXPERT_PARALLEL
from tensor_parallel_peers import TENSOR_PARALLEL
from torch import Tensor
from training_peers import ADAMW, DATA_PARALLEL, PHASES, SGD, Peer, Task, absent, build, join_gloo
from training_report import FREE, Result, report, write_json, wrong

import hpcpar
from hpcpar.comm import Communicator
from hpcpar.errors import ConfigError, LayoutError
from hpcpar.launch import binding
from hpcpar.models import PRESETS, LlamaConfig
from hpcpar.planner.experts import Experts
from hpcpar.tensor_parallel.attention import require_heads
from hpcpar.tensor_parallel.split import require_divisible
from hpcpar.units import MiB

PEERS = {"": DATA_PARALLEL, "--tp": TENSOR_PARALLEL, "--cp": CONTEXT_PARALLEL, "--ep": EXPERT_PARALLEL}
"""Who can take part, by the option that says what the ranks share."""

ALIASES = {"hpcpar": "hpcpar 0"}
TOLERANCES = {"float64": 1e-10, "float32": 1e-4, "bfloat16": 0.1}
"""Of the check. Gradients not averaged, or of twice their size, make a difference of about 1."""


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


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="One step of parallel training, in turn with its peers.")
    parser.add_argument(
        "--tp", type=int, help="ranks that share each layer: all of them (default: data-parallel)"
    )
    parser.add_argument("--cp", type=int, help="ranks that share each sequence: all of them")
    parser.add_argument("--ep", type=int, help="ranks that share the experts of each mixture: all of them")
    parser.add_argument("--experts", type=at_least(1), default=8, help="of a mixture (default: 8)")
    parser.add_argument("--per-token", type=at_least(1), default=2, help="experts of a token (default: 2)")
    parser.add_argument("--model", default="5m", choices=PRESETS, help="size of the Llama (default: 5m)")
    parser.add_argument(
        "--hidden",
        type=int,
        help="another hidden size, with heads of 32, twice as many as of keys, and ffn of 3 times it",
    )
    parser.add_argument("--layers", type=int, help="another number of layers")
    parser.add_argument("--dtype", default="float32", choices=("float32", "float64", "bfloat16"))
    add_options(parser, sequence=128, batch=4, rounds=15, steps=4, threads=None, json=None)
    parser.add_argument(
        "--bucket-mib", type=float, help="of all that have buckets (default: as each has them)"
    )
    parser.add_argument(
        "--shared-parameters", action="store_true", help="hpcpar 1 to 3 hold one copy of them on a node"
    )
    parser.add_argument("--forward-only", action="store_true", help="turns of forward passes, too")
    parser.add_argument(
        "--peers",
        nargs="+",
        choices=[*dict.fromkeys([name for peers in PEERS.values() for name in peers] + [*ALIASES])],
        metavar="PEER",
        help="by name, see above (default: all that are installed)",
    )
    return parser.parse_args()


def make_config(options: argparse.Namespace) -> LlamaConfig:
    """Return the sizes of the model; ConfigError where they do not fit."""
    changes = {} if options.layers is None else {"layers": options.layers}
    if options.hidden is not None:
        if options.hidden < 1 or options.hidden % 64:
            raise ConfigError(f"--hidden {options.hidden}; give a multiple of 64, for pairs of heads of 32")
        heads = options.hidden // 32
        changes |= {
            "hidden_size": options.hidden,
            "heads": heads,
            "kv_heads": heads // 2,
            "ffn_size": 3 * options.hidden,
        }
    return LlamaConfig.preset(options.model, **changes)


def shared_by(options: argparse.Namespace) -> str:
    """Return the option that says what the ranks share, "" for whole models; LayoutError for two of them."""
    given = [option for option in ("--tp", "--cp", "--ep") if getattr(options, option[2:]) is not None]
    if len(given) > 1:
        told = " and ".join(f"{option} {getattr(options, option[2:])}" for option in given)
        raise LayoutError(f"{told}; give one of them")
    return given[0] if given else ""


def require_sharing(world: Communicator, option: str, options: argparse.Namespace) -> None:
    """ConfigError or LayoutError unless all ranks share by this option."""
    degree = getattr(options, option[2:])
    what = {"--tp": "one model", "--cp": "each sequence", "--ep": "each mixture"}[option]
    if degree != world.size:
        raise LayoutError(
            f"{option} {degree}, but the job has {world.size} ranks; all share {what} here: "
            f"give {option} {world.size}, or start {degree} ranks"
        )
    if options.dtype == "bfloat16":
        raise ConfigError(f"{option} has no masters for --dtype bfloat16; give float32 or float64")


def require_tensor_parallel(config: LlamaConfig, options: argparse.Namespace) -> None:
    """LayoutError unless all ranks can share this model."""
    require_heads(config.heads, config.key_value_heads, options.tp)
    require_divisible(config.ffn_width, options.tp, "ffn_size")
    require_divisible(options.sequence, options.tp, "--sequence")


def make_task(world: Communicator, options: argparse.Namespace) -> Task:
    """Make the task; end the job for options that make no sense. Collective."""
    dtype = getattr(torch, options.dtype)
    try:
        config, option = make_config(options), shared_by(options)
        if option:
            require_sharing(world, option, options)
        if option == "--tp":
            require_tensor_parallel(config, options)
        elif option == "--cp":
            config = replace(config, max_sequence=max(config.max_sequence, options.sequence))
        elif option == "--ep":
            config = replace(config, experts=Experts(options.experts, options.per_token, config.ffn_width))
    except (ConfigError, LayoutError) as error:
        give_up(world, str(error))
    return Task(
        world=world,
        peers=PEERS[option],
        config=config,
        dtype=dtype,
        start_dtype=dtype,
        sequence=options.sequence,
        batch=options.batch,
        bucket_bytes=None if options.bucket_mib is None else round(options.bucket_mib * MiB),
        shared_parameters=options.shared_parameters,
        tp=options.tp or 1,
        cp=options.cp or 1,
        ep=options.ep or 1,
    )


def choose(named: list[str] | None, task: Task, cleanup: ExitStack) -> list[str]:
    """Return the named peers, or all that can take part; print which are left out. Collective."""
    names = list(dict.fromkeys(ALIASES.get(name, name) for name in named or task.peers))
    elsewhere = [name for name in names if name not in task.peers]
    if elsewhere:
        where = {name: option_of(name) for name in elsewhere}
        told = ", ".join(f"{name}: only {option}" for name, option in where.items())
        give_up(task.world, f"{told}; here there are {', '.join(task.peers)}")
    return those_that_can(names, task, cleanup, were_named=bool(named))


def option_of(peer: str) -> str:
    option = next(option for option, peers in PEERS.items() if peer in peers)
    return f"with {option}" if option else "without --tp, --cp and --ep"


def those_that_can(names: list[str], task: Task, cleanup: ExitStack, *, were_named: bool) -> list[str]:
    """Return the peers that can run, joined by gloo if needed; end the job if a named one cannot."""
    missing = absent(names, task)
    lines = [f"{name}: {why}" for name, why in missing.items()]
    if were_named and missing:
        give_up(task.world, "asked for, but not to be had: " + "; ".join(lines))
    if task.world.rank == 0:
        for line in lines:
            print(f"# left out: {line}")
    names = [name for name in names if name not in missing]
    if any(task.peers[name].needs_gloo for name in names):
        join_gloo(task.world, cleanup)
    return names


def check(names: Sequence[str], task: Task) -> dict[str, float | None]:
    """Untimed: three steps of each peer from the same start, beside one process in full precision.

    The norm of the difference of what the steps changed, relative to the norm of that; the largest of
    any rank. None for a peer that learns something else.
    """
    truth = trained("one process", replace(task, dtype=task.wide_dtype)).parameters()
    for parameter in truth.values():
        task.world.broadcast(parameter)
    change = distance(dict(task.model().named_parameters()), truth)
    found: dict[str, float | None] = dict.fromkeys(names)
    for name in names:
        if name in FREE:
            continue
        peer = trained(name, task)
        mine = distance(peer.parameters(), truth) / change if peer.share is not None else 0.0
        del peer
        everyone = task.world.allgather_object(mine)
        # What is not a number is further from the truth than any number.
        found[name] = max(everyone, key=lambda difference: (math.isnan(difference), difference))
    return found


def trained(name: str, task: Task) -> Peer:
    peer = build(name, task, SGD)
    if peer.share is not None:
        for _ in range(3):
            peer.step()
    return peer


@torch.no_grad()
def distance(mine: dict[str, Tensor], truth: dict[str, Tensor]) -> float:
    """Return the Euclidean distance from the truth as near as the type of mine can hold it."""
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
    """Return resident memory, and with shared pages divided, when all ranks have freed what they can."""
    give_freed_memory_back()
    world.barrier()
    return kernel_nbytes("status", "VmRSS"), proportional_nbytes()


def largest(of_ranks: Sequence[int | None]) -> int | None:
    known = [nbytes for nbytes in of_ranks if nbytes is not None]
    return max(known) if len(known) == len(of_ranks) else None


def take_turn(peer: Peer, task: Task, steps: int, *, forward_only: bool) -> Turn | None:
    """Take an untimed step, then timed ones; None on a rank that only waits. Collective."""
    step = peer.forward_only if forward_only else peer.step
    if peer.share is not None:
        step()
        peer.settle()
    task.world.barrier()
    if peer.share is None:
        return None
    phases_s = []
    waited_s = seconds_waited(task.world)
    cpu_s, start_s = time.process_time(), time.perf_counter()
    for _ in range(steps):
        loss, marks = step()
        phases_s.append([stop - start for start, stop in pairwise(marks)])
    peer.settle()
    step_s, cpu_s = (time.perf_counter() - start_s) / steps, (time.process_time() - cpu_s) / steps
    exposed_s = (seconds_waited(task.world) - waited_s) / steps
    return Turn(step_s, cpu_s, exposed_s, phases_s, loss)


def seconds_waited(world: Communicator) -> float:
    return sum(row.seconds_waited for traffic in world.traffics().values() for row in traffic.rows())


def take_turns(
    peers: Sequence[Peer], task: Task, options: argparse.Namespace
) -> dict[tuple[str, bool], list[Turn | None]]:
    """Take every round in another order; return this rank's turns, by peer and by whether forward only."""
    kinds = (False, True) if options.forward_only else (False,)
    players = [(peer, forward_only) for peer in peers for forward_only in kinds]
    taken: dict[tuple[str, bool], list[Turn | None]] = {(peer.name, kind): [] for peer, kind in players}
    for peer, forward_only in in_turn(players, options.rounds):
        turn = take_turn(peer, task, options.steps, forward_only=forward_only)
        taken[peer.name, forward_only].append(turn)
        task.world.barrier()
    return taken


def measure(
    names: Sequence[str], task: Task, options: argparse.Namespace, phases: Sequence[str] = PHASES
) -> list[Result]:
    """Check, weigh and time the peers; collective."""
    differences = check(names, task)
    memory = {name: peak_memory(name, task) for name in names}
    activations = {name: activation_nbytes(name, task) if task.cp > 1 else (None, None) for name in names}
    peers = [build(name, task, ADAMW) for name in names]
    everyone = task.world.allgather_object(take_turns(peers, task, options))
    results = []
    for name, forward_only in everyone[0]:
        # By turn, of the ranks that worked, rank 0 first.
        turns = [
            [turn for turn in of_ranks if turn is not None]
            for of_ranks in zip(*(taken[name, forward_only] for taken in everyone), strict=True)
        ]
        times = zip(*(step for of_ranks in turns for step in of_ranks[0].phases_s), strict=True)
        sequences = task.batch if name == "one rank alone" else task.global_batch
        peak_nbytes, shared_nbytes = (None, None) if forward_only else memory[name]
        results.append(
            Result(
                peer=name,
                forward_only=forward_only,
                step_s=[max(turn.step_s for turn in of_ranks) for of_ranks in turns],
                cpu_s=[statistics.mean(turn.cpu_s for turn in of_ranks) for of_ranks in turns],
                exposed_s=exposed_s(turns) if name.startswith("hpcpar") else None,
                phases_s=dict(zip(phases, map(statistics.median, times), strict=False)),
                tokens_per_step=sequences * task.sequence,
                peak_nbytes=peak_nbytes,
                shared_nbytes=shared_nbytes,
                saved_nbytes=None if forward_only else activations[name][0],
                allocated_nbytes=None if forward_only else activations[name][1],
                loss=next(turn.loss for turn in turns[-1] if not math.isnan(turn.loss)),
                difference=None if forward_only else differences[name],
            )
        )
    return results


def exposed_s(turns: Sequence[Sequence[Turn]]) -> float:
    return statistics.median(max(turn.exposed_s for turn in of_ranks) for of_ranks in turns)


def describe(task: Task, options: argparse.Namespace) -> dict[str, Any]:
    installed = {
        name: getattr(sys.modules[name], "__version__", "?")
        for name in ("horovod", "deepspeed", "megatron.core")
        if name in sys.modules
    }
    return header(
        task.world,
        tp=task.tp,
        cp=task.cp,
        ep=task.ep,
        experts=task.config.experts and task.config.experts.count,
        model=options.model,
        hidden=task.config.hidden_size,
        layers=task.config.layers,
        parameters=task.config.parameters(),
        sequence=options.sequence,
        batch_per_rank=options.batch,
        global_batch=task.global_batch,
        dtype=options.dtype,
        bucket_bytes=task.bucket_bytes,
        shared_parameters=options.shared_parameters,
        repeats=options.rounds,
        steps_per_turn=options.steps,
        tolerance=TOLERANCES[options.dtype],
        **installed,
    )


def main() -> None:
    options = arguments()
    world = hpcpar.init()
    local_size = world.nodes.count(world.nodes[world.rank])
    torch.set_num_threads(options.threads or max(1, len(binding.affinity()) // local_size))
    task = make_task(world, options)
    with ExitStack() as cleanup:
        names = choose(options.peers, task, cleanup)
        results = measure(names, task, options)
        about = describe(task, options)
        if world.rank == 0:
            report(about, results)
            write_json(options.json, about, results)
    if any(wrong(result, about) for result in results):
        give_up(world, "a peer computes something else than one process: see WRONG above")


if __name__ == "__main__":
    main()
