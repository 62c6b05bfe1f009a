"""torch.distributed over hpcpar beside gloo, in turn in one call: DDP, FSDP2, DTensor, and single calls.

    hpcpar run -n 2 benchmarks/torch_backend.py [--cases ddp-5M,fsdp2-5M,tp] [--json FILE]

    ddp-5M, ddp-50M   a step of DistributedDataParallel: forward, backward, buckets of 25 MB
    fsdp2-5M          a step of fully_shard on each layer, which gathers and scatters 3 times the parameters
    tp                a forward and a backward of an MLP that is divided by DTensor's parallelize_module
    8B, 64MiB         one all_reduce; beside it, communicator.allreduce itself

Two bounds stand beside them: "fake" is torch's own group that moves nothing, so that only torch's share of
the step is left (of DDP a step under no_sync); "alone" is the plain model (for tp its part of the work; for a
call communicator.allreduce on the same tensor). A turn is some steps of one player; wall time is that of the
slowest rank, processor time that of all ranks together. Ratios are of turns of one round.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from common import add_options, append_json, header, in_turn, print_header, quartiles, ratios, turn
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed import fake_pg  # noqa: F401    it makes the backend known

import hpcpar

PLAYERS = ("hpcpar", "gloo", "fake", "alone")
Step = Callable[[], Any]


def network(width: int, layers: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(layers)])


def training(model: nn.Module, width: int, rows: int) -> Step:
    inputs = torch.randn(rows, width)

    def step() -> None:
        model.zero_grad()
        model(inputs).square().mean().backward()

    return step


def ddp(group: Any, width: int, layers: int) -> Step:
    model = network(width, layers)
    if group is None:
        return training(model, width, 64)
    replica = DistributedDataParallel(model, process_group=group)
    step = training(replica, width, 64)
    if distributed.get_backend(group) != "fake":
        return step

    def without_reduction() -> None:
        with replica.no_sync():
            step()

    return without_reduction


def fsdp2(group: Any, width: int, layers: int) -> Step:
    model = network(width, layers)
    if group:
        mesh = DeviceMesh.from_group(group, "cpu")
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return training(model, width, 64)


def tensor_parallel(group: Any, width: int, size: int) -> Step:
    inner = 4 * width if group else 4 * width // size
    torch.manual_seed(0)
    layers = [nn.Linear(width, inner, bias=False), nn.GELU(), nn.Linear(inner, width, bias=False)]
    model: nn.Module = nn.Sequential(*layers)
    if group:
        mesh = DeviceMesh.from_group(group, "cpu")
        model = parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return training(model, width, 64)


@cache
def ones(nbytes: int) -> torch.Tensor:
    return torch.ones(nbytes // 4)


def one_call(group: Any, nbytes: int, comm: Any) -> Step:
    tensor = ones(nbytes)
    return (lambda: distributed.all_reduce(tensor, group=group)) if group else lambda: comm.allreduce(tensor)


def cases(comm: Any) -> dict[str, tuple[Callable[[Any], Step], int]]:
    """Make of a group (None: alone) a step, and steps of a turn."""
    return {
        "ddp-5M": (lambda group: ddp(group, 512, 20), 5),
        "ddp-50M": (lambda group: ddp(group, 1600, 20), 2),
        "fsdp2-5M": (lambda group: fsdp2(group, 512, 20), 5),
        "tp": (lambda group: tensor_parallel(group, 512, comm.size), 20),
        "8B": (lambda group: one_call(group, 8, comm), 500),
        "64MiB": (lambda group: one_call(group, 2**26, comm), 3),
    }


def measure(make: Callable[[Any], Step], steps: int, groups: dict[str, Any], comm: Any, rounds: int) -> Any:
    players = {name: make(groups[name]) for name in PLAYERS}
    for step in players.values():
        for _ in range(3):
            step()
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in PLAYERS}
    for name in in_turn(PLAYERS, rounds):
        found[name].append(turn(players[name], steps, comm))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="torch.distributed over hpcpar and over gloo, in turn.")
    parser.add_argument("--cases", default="ddp-5M,ddp-50M,fsdp2-5M,tp,8B,64MiB")
    add_options(parser, rounds=12, threads=1, json=None)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    start = hpcpar.init()
    directory = start.broadcast_object(tempfile.mkdtemp() if start.rank == 0 else None)
    # gloo needs a store; ours takes the ranks from MPI all the same.
    distributed.init_process_group(
        "hpcpar", init_method=f"file://{directory}/store", rank=start.rank, world_size=start.size
    )
    comm = hpcpar.communicator_of()
    groups = {"hpcpar": distributed.group.WORLD, "alone": None}
    groups |= {name: distributed.new_group(backend=name) for name in ("gloo", "fake")}
    about = header(comm, rounds=options.rounds)
    lines = [{"benchmark": "torch backend", **about}]
    known = cases(comm)
    if comm.rank == 0:
        print_header(about)
        print("case       player       median        quartiles (ms)       cpu   hpcpar is × (cpu ×)")
    for case in options.cases.split(","):
        found = measure(*known[case], groups, comm, options.rounds)
        ours = found["hpcpar"]
        for name in PLAYERS:
            walls, cpus = ([1000 * turn[part] for turn in found[name]] for part in (0, 1))
            low, middle, high = quartiles(walls)
            by, by_cpu = (
                ratios([turn[part] for turn in ours], [turn[part] for turn in found[name]]) for part in (0, 1)
            )
            lines.append(
                {"case": case, "player": name, "ms": [low, middle, high], "cpu_ms": quartiles(cpus)}
                | {"ratio": by, "cpu_ratio": by_cpu}
            )
            if comm.rank == 0:
                print(
                    f"{case:<10} {name:<8} {middle:>10.3f} {low:>10.3f} {high:>10.3f} "
                    f"{quartiles(cpus)[1]:>9.3f}   {by[1]:.3f} ({by_cpu[1]:.3f})",
                    flush=True,
                )
    if comm.rank == 0:
        append_json(options.json, lines)
        (Path(directory) / "store").unlink(missing_ok=True)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
