"""Horovod's API: ours beside torch DistributedDataParallel, no communication, and Horovod itself.

    python benchmarks/horovod.py [-n 2] [--json FILE] [--horovod-python PYTHON]

One call measures all peers in turn, so a noisy machine touches all of them. Within a process the peers
change places every round. Real Horovod cannot be in one process with ours, because both are
`import horovod` to a script; where the Python named has it (install_horovod.sh builds it), jobs of its own
run between ours, turn by turn, as installed and with HOROVOD_CYCLE_TIME=0. The peers "gloo", "ddp" and
"alone" are in every job, so that each library can be compared with what ran beside it.

    sync     all-reduce of 1 KiB, one after the other               against gloo
    async    64 all-reduces of 64 KiB, started, then awaited        against gloo
    llama    step of DistributedOptimizer, 4.9 M parameters         against DDP over gloo
    resnet   step of DistributedOptimizer, ResNet-20, 32 x 32       against the same without communication

Times are of the slowest rank, from a barrier on; processor time is that of all threads, mean of the ranks.
What is computed is checked before, untimed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from common import add_options, append_json, at_least, in_turn, print_header, quartiles
from torch import Tensor, distributed, nn
from torch.nn import functional

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
CASES = ("sync", "async", "llama", "resnet")
AGAINST = {"sync": "gloo", "async": "gloo", "llama": "ddp", "resnet": "alone"}
KIB = 1024
TENSORS = 64
CALLS = {"sync": 200, "async": 3}
SEQUENCE, SEQUENCES = 128, 4  # of the Llama, on each rank
IMAGES = 32  # of ResNet-20, on each rank

Measure = Callable[[], None]
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Horovod's API over hpcpar, in turn with its peers.")
    parser.add_argument("-n", "--ranks", type=at_least(1), default=2)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--turns", type=at_least(1), default=2, help="jobs of each library (default: 2)")
    add_options(parser, rounds=15, threads=1, json=None)
    parser.add_argument(
        "--horovod-python", default=sys.executable, help="a Python that may have real Horovod (default: this)"
    )
    parser.add_argument(
        "--horovod-launcher", help='what starts its ranks, as "mpirun -n 2" (default: as for ours)'
    )
    parser.add_argument("--worker", choices=("hpcpar", "horovod"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


@dataclass
class Samples:
    """What one peer took, in one job or in several.

    seconds   of each round, the slowest rank's, for one call or step
    cpu_s     processor time of one call or step, mean of the ranks
    """

    case: str
    library: str
    peer: str
    seconds: list[float]
    cpu_s: list[float]
    per_round: int


# ---------------------------------------------------------------------------------------------- a rank


class Rank:
    """One process of a job: a library with Horovod's API, and gloo for the same ranks."""

    def __init__(self, hvd: ModuleType, options: argparse.Namespace) -> None:
        self.hvd: Any = hvd
        self.options = options
        self.rank, self.size = hvd.rank(), hvd.size()
        store = distributed.FileStore(str(options.folder / "store"), self.size)  # type: ignore[attr-defined]
        distributed.init_process_group("gloo", store=store, rank=self.rank, world_size=self.size)

    def peers(self, case: str) -> dict[str, Measure]:
        """Return one round of each peer, in the same order on all ranks."""
        if case == "sync":
            return self.synchronous()
        if case == "async":
            return self.asynchronous()
        return self.steps(case)

    def synchronous(self) -> dict[str, Measure]:
        tensor = torch.zeros(KIB // 4)
        found: dict[str, Measure] = {
            "hvd": repeated(lambda: self.hvd.allreduce_(tensor, op=self.hvd.Sum, name="sync"), CALLS["sync"]),
            "gloo": repeated(lambda: distributed.all_reduce(tensor), CALLS["sync"]),
        }
        if self.options.worker == "hpcpar":
            import hpcpar

            world = hpcpar.init()
            found["hpcpar"] = repeated(lambda: world.allreduce(tensor), CALLS["sync"])
        return found

    def asynchronous(self) -> dict[str, Measure]:
        tensors = [torch.zeros(64 * KIB // 4) for _ in range(TENSORS)]
        hvd = self.hvd

        def by_hvd() -> None:
            handles = [
                hvd.allreduce_async_(tensor, op=hvd.Sum, name=f"async.{i}")
                for i, tensor in enumerate(tensors)
            ]
            for handle in handles:
                hvd.synchronize(handle)

        def by_gloo() -> None:
            for work in [distributed.all_reduce(tensor, async_op=True) for tensor in tensors]:
                work.wait()

        return {"hvd": repeated(by_hvd, CALLS["async"]), "gloo": repeated(by_gloo, CALLS["async"])}

    def steps(self, case: str) -> dict[str, Measure]:
        make = adamw if case == "llama" else sgd
        return {peer: self.step(case, peer, make)[0] for peer in ("hvd", "ddp", "alone")}

    def step(self, case: str, peer: str, make: MakeOptimizer) -> tuple[Measure, nn.Module]:
        """Return a training step of one peer, and its model; all start from the same parameters."""
        model, inputs, targets, loss_of = (llama if case == "llama" else resnet)(self.rank)
        module, optimizer = model, make(model.parameters())
        if peer == "ddp":
            module = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
        if peer == "hvd":
            self.hvd.broadcast_parameters(model.state_dict(), root_rank=0)
            names = [(f"{case}.{name}", parameter) for name, parameter in model.named_parameters()]
            optimizer = self.hvd.DistributedOptimizer(optimizer, named_parameters=names)

        def step() -> None:
            optimizer.zero_grad()
            loss_of(module(inputs), targets).backward()
            optimizer.step()

        return step, model

    def check(self, case: str) -> float:
        """Return the largest relative difference from the correct result; untimed."""
        hvd = self.hvd
        if case in ("sync", "async"):
            mine = [torch.full((KIB,), float(self.rank + i)) for i in range(TENSORS)]
            handles = [hvd.allreduce_async_(tensor, op=hvd.Sum) for tensor in mine]
            sums = [hvd.synchronize(handle) for handle in handles]
            right = [self.size * (self.size - 1) / 2 + self.size * i for i in range(TENSORS)]
            return max((total - each).abs().max().item() for total, each in zip(sums, right, strict=True))
        ends = []
        for peer in ("hvd", "ddp"):
            step, model = self.step(case, peer, sgd)
            for _ in range(3):
                step()
            ends.append(torch.cat([p.detach().double().reshape(-1) for p in model.parameters()]))
        return ((ends[0] - ends[1]).abs().max() / ends[1].abs().max()).item()

    def measure(self, case: str) -> list[Samples]:
        peers = self.peers(case)
        calls = CALLS.get(case, 1)
        taken: dict[str, list[tuple[float, float]]] = {name: [] for name in peers}
        for name in in_turn(list(peers), self.options.rounds):
            peers[name]()
            distributed.barrier()
            cpu, start = time.process_time(), time.perf_counter()
            peers[name]()
            seconds = time.perf_counter() - start
            taken[name].append((seconds / calls, (time.process_time() - cpu) / calls))
            distributed.barrier()
        everyone: list[Any] = [None] * self.size
        distributed.all_gather_object(everyone, taken)
        found = []
        for name in peers:
            rounds = [
                zip(*ranks, strict=True) for ranks in zip(*(rank[name] for rank in everyone), strict=True)
            ]
            slowest_s, cpu_s = zip(*((max(s), statistics.mean(c)) for s, c in rounds), strict=True)
            found.append(Samples(case, self.options.worker, name, [*slowest_s], [*cpu_s], calls))
        return found


def repeated(call: Callable[[], object], times: int) -> Measure:
    def round_() -> None:
        for _ in range(times):
            call()

    return round_


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, fused=True)


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Also for the check: Adam would hide gradients of the wrong scale."""
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


Work = tuple[nn.Module, Tensor, Tensor, Callable[[Tensor, Tensor], Tensor]]


def llama(rank: int) -> Work:
    from hpcpar.models import Llama, LlamaConfig, next_token_loss

    config = LlamaConfig.preset("5m")
    generator = torch.Generator().manual_seed(rank)
    tokens = torch.randint(config.vocab_size, (SEQUENCES, SEQUENCE + 1), generator=generator)
    return Llama(config, seed=0), tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), next_token_loss


def resnet(rank: int) -> Work:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(rank)
    images = torch.randn(IMAGES, 3, 32, 32, generator=generator)
    labels = torch.randint(10, (IMAGES,), generator=generator)
    return ResNet20(), images, labels, functional.cross_entropy


class Block(nn.Module):
    """Two 3 x 3 convolutions and a shortcut, which drops pixels and pads channels where shapes change."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.stride = 1 if before == after else 2
        self.conv1 = nn.Conv2d(before, after, 3, stride=self.stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(after)
        self.more = after - before

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(functional.relu(self.norm1(self.conv1(x)))))
        shortcut = functional.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.more))
        return functional.relu(y + shortcut)


class ResNet20(nn.Sequential):
    """He et al. 2015, arXiv 1512.03385, section 4.2: n = 3, 0.27 M parameters; [B, 3, 32, 32] -> [B, 10]."""

    def __init__(self) -> None:
        widths = [16] * 4 + [32] * 3 + [64] * 3
        blocks = [Block(before, after) for before, after in pairwise(widths)]
        super().__init__(
            nn.Conv2d(3, 16, 3, padding=1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            *blocks,
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(64, 10),
        )


def work(options: argparse.Namespace) -> None:
    """Run a rank of a job; rank 0 leaves the figures in the folder."""
    # This file's own name would hide Horovod from the import.
    sys.path[:] = [path for path in sys.path if Path(path or ".").resolve() != HERE]
    if options.worker == "hpcpar":
        import hpcpar.horovod.torch as hvd
    else:
        import horovod.torch as hvd  # type: ignore[no-redef]
    hvd.init()
    torch.set_num_threads(options.threads)
    rank = Rank(hvd, options)
    differences = {case: rank.check(case) for case in options.cases}
    samples = [found for case in options.cases for found in rank.measure(case)]
    if rank.rank == 0:
        figures = {"differences": differences, "samples": [asdict(found) for found in samples]}
        (options.folder / "figures.json").write_text(json.dumps(figures))
    distributed.barrier()
    distributed.destroy_process_group()
    hvd.shutdown()


# ------------------------------------------------------------------------------------- the whole of it


@dataclass(frozen=True)
class Library:
    name: str
    worker: str
    python: str
    launcher: str | None = None
    variables: tuple[tuple[str, str], ...] = ()


def libraries(options: argparse.Namespace) -> list[Library]:
    """Return ours, and Horovod as installed and at its quickest for short messages, where there is one."""
    found = [Library("hpcpar", "hpcpar", sys.executable)]
    looked = subprocess.run(
        [options.horovod_python, "-c", "import horovod.torch as hvd; hvd.init"],
        capture_output=True,
        cwd=ROOT,
        check=False,
    )
    if looked.returncode == 0:
        python, launcher = options.horovod_python, options.horovod_launcher
        found.append(Library("horovod", "horovod", python, launcher))
        at_once = (("HOROVOD_CYCLE_TIME", "0"),)
        found.append(Library("horovod, cycle time 0", "horovod", python, launcher, at_once))
    return found


def job(library: Library, options: argparse.Namespace) -> dict[str, Any]:
    """Run one library's job, and return what its rank 0 has left."""
    from hpcpar.launch import supervise
    from hpcpar.launch.settings import env

    with tempfile.TemporaryDirectory() as folder:
        words = [library.python, str(Path(__file__).resolve()), "--worker", library.worker]
        words += ["--folder", folder, "--rounds", str(options.rounds), "--threads", str(options.threads)]
        words += ["--cases", *options.cases]
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
        with env(PYTHONPATH=path, OMP_NUM_THREADS=str(options.threads), **dict(library.variables)):
            if library.launcher:
                status = subprocess.run([*shlex.split(library.launcher), *words], check=False).returncode
            else:
                status = supervise.run(options.ranks, words, say=lambda line: None)
        if status:
            raise SystemExit(f"the job of {library.name} ended with status {status}")
        figures: dict[str, Any] = json.loads((Path(folder) / "figures.json").read_text())
        return figures


def measure(options: argparse.Namespace) -> tuple[dict[str, dict[str, float]], list[Samples]]:
    """Measure all libraries in turn: differences by library and case, and samples joined over the turns."""
    differences: dict[str, dict[str, float]] = {}
    joined: dict[tuple[str, str, str], Samples] = {}
    found = libraries(options)
    for turn in range(options.turns):
        for library in found if turn % 2 == 0 else found[::-1]:
            figures = job(library, options)
            differences[library.name] = figures["differences"]
            for fields in figures["samples"]:
                samples = Samples(**{**fields, "library": library.name})
                key = (samples.case, samples.library, samples.peer)
                if key in joined:
                    joined[key].seconds += samples.seconds
                    joined[key].cpu_s += samples.cpu_s
                else:
                    joined[key] = samples
    return differences, list(joined.values())


def ratio(samples: Samples, all_samples: Sequence[Samples]) -> float:
    """Return the median ratio to the case's peer of comparison in the same rounds."""
    other = next(
        each
        for each in all_samples
        if (each.case, each.library, each.peer) == (samples.case, samples.library, AGAINST[samples.case])
    )
    return statistics.median(a / b for a, b in zip(samples.seconds, other.seconds, strict=True))


def report(
    about: dict[str, Any], differences: dict[str, dict[str, float]], samples: Sequence[Samples]
) -> list[dict[str, Any]]:
    """Print the table; the same as records for JSON."""
    print_header(about)
    for library, of_cases in differences.items():
        print(f"# checked, {library}: " + ", ".join(f"{case} {d:.1e}" for case, d in of_cases.items()))
    print(
        "# median (quartiles) of the slowest rank; cpu: all threads, mean of the ranks; ratio: round by round"
    )
    print(f"{'case':<8}{'library':<24}{'peer':<9}{'median':>11}{'quartiles':>19}{'cpu':>11}  ratio")
    records = []
    for case in CASES:
        for each in (each for each in samples if each.case == case):
            unit, scale = ("us", 1e6) if case in ("sync", "async") else ("ms", 1e3)
            low, median, high = quartiles(each.seconds)
            cpu = statistics.median(each.cpu_s)
            times = ratio(each, samples)
            spread = f"{low * scale:.1f}-{high * scale:.1f}"
            print(
                f"{case:<8}{each.library:<24}{each.peer:<9}{median * scale:>8.1f} {unit}{spread:>19}"
                f"{cpu * scale:>8.1f} {unit}  {times:.3f} x {AGAINST[case]}"
            )
            derived = {"median_s": median, "median_cpu_s": cpu, f"ratio_to_{AGAINST[case]}": times}
            difference = differences[each.library][case]
            records.append({**about, **asdict(each), **derived, "difference": difference})
    return records


def main() -> None:
    options = arguments()
    if options.worker:
        work(options)
        return
    import hpcpar

    differences, samples = measure(options)
    about = {
        "ranks": options.ranks,
        "cores": len(os.sched_getaffinity(0)),
        "threads": options.threads,
        "repeats": options.rounds * options.turns,
        "torch": torch.__version__,
        "hpcpar": hpcpar.__version__,
        "python": platform.python_version(),
    }
    if not any(each.library.startswith("horovod") for each in samples):
        print(f"# {options.horovod_python} has no Horovod, so its rows are missing: see install_horovod.sh")
    records = report(about, differences, samples)
    append_json(options.json, records)


if __name__ == "__main__":
    main()
