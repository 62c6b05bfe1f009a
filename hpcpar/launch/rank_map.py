"""The rank map of a job: a line for each node with its ranks, cores and GPUs, and warnings about binding.

    node 0  gpu001: ranks 0-3, cores 0-63 (16 each), GPUs 0-3 (one each), OMP_NUM_THREADS=16
    nodes 1-127  gpu002 to gpu128: as node 0, ranks 4-511

A core is what the system numbers as one: a hardware thread where it has several for each core.
`gather_rank_map` collects the bindings of all ranks on rank 0.
"""

from __future__ import annotations

import glob
import os
import socket
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, groupby, takewhile
from typing import Any

from hpcpar.launch.binding import affinity, format_cores, node_cores
from hpcpar.launch.environment import detect

VISIBLE_DEVICES = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
NO_DEVICES = ("NoDevFiles", "-1")
"""Words of Slurm, and of users, that hide all of them."""


@dataclass(frozen=True, slots=True)
class RankBinding:
    """One rank's cores and GPUs, as it sees them itself.

    cores         its affinity mask
    allowed       cores that it might be bound to: what its control group grants
    granted       how many cores of the node the launcher says that it has for the job; None: it does not
    gpus          devices that the rank sees, as they are named to it
    node_gpus     devices that the step has on the node, or this task of it, as Slurm names them; () where
                  nobody tells
    omp_threads   OMP_NUM_THREADS, "" where it is not set
    """

    rank: int
    cores: tuple[int, ...]
    allowed: tuple[int, ...] = ()
    granted: int | None = None
    gpus: tuple[str, ...] = ()
    node_gpus: tuple[str, ...] = ()
    omp_threads: str = ""

    @classmethod
    def here(cls, rank: int, environ: Mapping[str, str] = os.environ) -> RankBinding:
        """Describe this process, without initialising anything, a GPU's driver least of all."""
        granted = environ.get("SLURM_CPUS_ON_NODE", "")
        cores = affinity()
        return cls(
            rank=rank,
            cores=cores,
            allowed=allowed_cores(cores),
            granted=int(granted) if granted.isdigit() else None,
            gpus=visible_gpus(environ),
            node_gpus=_names(environ.get("SLURM_STEP_GPUS", "")),
            omp_threads=environ.get("OMP_NUM_THREADS", "").strip(),
        )


def allowed_cores(cores: tuple[int, ...]) -> tuple[int, ...]:
    """Return the cores that this thread, now on `cores`, might be bound to.

    Asked of the kernel, which cuts a mask of all cores to those that the control group grants; where
    these are written down differs with the kind of control group and the container.
    """
    if not hasattr(os, "sched_setaffinity"):
        return cores
    try:
        os.sched_setaffinity(0, range(max(os.cpu_count() or 1, *cores, 1) + 1))
        try:
            return affinity()
        finally:
            os.sched_setaffinity(0, cores)
    except OSError:  # a sandbox that forbids the question
        return cores


def visible_gpus(environ: Mapping[str, str], device_files: str = "/dev/nvidia") -> tuple[str, ...]:
    """Return the GPUs that a rank sees: those that its variables name, else all that the node has files for.

    A name that hides all of them hides those behind it; the ones before it stay.
    """
    for name in VISIBLE_DEVICES:
        if name in environ:
            return tuple(takewhile(lambda device: device not in NO_DEVICES, _names(environ[name])))
    found = (path.removeprefix(device_files) for path in glob.glob(f"{device_files}[0-9]*"))
    return tuple(map(str, sorted(int(number) for number in found if number.isdigit())))


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


@dataclass(frozen=True, slots=True)
class NodeRanks:
    node: int
    host: str
    ranks: tuple[RankBinding, ...]

    @property
    def free_cores(self) -> tuple[int, ...]:
        """Cores that the job may use here and no rank is bound to."""
        allowed = {core for place in self.ranks for core in (*place.allowed, *place.cores)}
        used = {core for place in self.ranks for core in place.cores}
        # Without control groups a rank is allowed all cores, those of other people's jobs, too.
        told = [place.granted for place in self.ranks if place.granted is not None]
        granted = min(told, default=len(allowed))
        return tuple(sorted(allowed - used)) if len(used) < granted else ()

    @property
    def sharing(self) -> tuple[tuple[int, int, int], ...]:
        """Pairs of ranks that are bound to one core although cores are free, with that core."""
        if not self.free_cores:
            return ()
        return tuple(
            (one.rank, other.rank, min(common))
            for one, other in combinations(self.ranks, 2)
            if (common := set(one.cores) & set(other.cores))
        )

    @property
    def openmp_threads(self) -> int:
        """Threads that OpenMP takes here where OMP_NUM_THREADS is not set: on each rank one for each core."""
        return sum(len(place.cores) for place in self.ranks if not place.omp_threads)

    @property
    def cores(self) -> int:
        """Cores that the ranks of this node may use together."""
        return node_cores([place.cores for place in self.ranks])

    def facts(self) -> str:
        """Describe cores and GPUs: "cores 0-63 (16 each), GPUs 0-3 (one each)"."""
        threads = sorted({place.omp_threads for place in self.ranks} - {""})
        omp = f"OMP_NUM_THREADS={' or '.join(threads)}" if threads else ""
        return ", ".join(filter(None, (_core_facts(self.ranks), _gpu_facts(self.ranks), omp)))


def _core_facts(ranks: Sequence[RankBinding]) -> str:
    union = {core for place in ranks for core in place.cores}
    named = f"core{'s' if len(union) > 1 else ''} {format_cores(union)}"
    sizes = sorted(len(place.cores) for place in ranks)
    if len(ranks) == 1:
        return named
    if sum(sizes) == len(union):
        return f"{named} ({sizes[0]}{f' to {sizes[-1]}' if sizes[-1] > sizes[0] else ''} each)"
    if len({place.cores for place in ranks}) == 1:
        return f"{named} (shared)"
    return f"{named} (overlapping)"


def _gpu_facts(ranks: Sequence[RankBinding]) -> str:
    """Describe the devices that the ranks take (`binding.gpu_for`), and who shares one."""
    taken = [place.gpus[i % len(place.gpus)] for i, place in enumerate(ranks) if place.gpus]
    if not taken:
        return ""
    of_node = tuple(dict.fromkeys(name for place in ranks for name in place.node_gpus))
    if {place.gpus for place in ranks} == {("0",)} and len(of_node) >= len(ranks):
        # In a control group of its own each rank's only device is number 0.
        taken = list(of_node[: len(ranks)])
    names = tuple(dict.fromkeys(taken))
    numbered = all(name.isdigit() for name in names)
    numbers = format_cores([int(name) for name in names]) if numbered else ",".join(names)
    seen = {name for place in ranks for name in place.gpus}
    more = f" of {len(seen)}" if len(seen) > len(names) else ""
    named = f"GPU{'s' if len(names) > 1 else ''} {numbers}{more}"
    if len(ranks) == 1:
        return named
    most = max(Counter(taken).values())
    return f"{named} ({'one each' if most == 1 else f'shared by up to {most} ranks'})"


@dataclass(frozen=True, slots=True)
class Finding:
    """Problem and remedy; a `wrong` one makes `hpcpar doctor` fail."""

    found: str
    do: str
    wrong: bool = False

    def __str__(self) -> str:
        return f"{self.found}; {self.do}"


@dataclass(frozen=True, slots=True)
class RankMap:
    """Nodes of a job with their ranks, by number.

    launcher   as `environment.detect` names it: its options mend the flaws
    """

    nodes: tuple[NodeRanks, ...]
    launcher: str = ""

    def lines(self) -> list[str]:
        """Return a line for each node; two or more that are as the one before them share a line."""
        lines = []
        for _, run in groupby(self.nodes, key=lambda node: (len(node.ranks), node.facts())):
            first, *others = run
            for node in [first] if len(others) > 1 else [first, *others]:
                lines.append(f"node {node.node}  {node.host}: {_ranks([node])}, {node.facts()}")
            if len(others) > 1:
                lines.append(
                    f"nodes {others[0].node}-{others[-1].node}  {others[0].host} to {others[-1].host}: "
                    f"as node {first.node}, {_ranks(others)}"
                )
        return lines

    def flaws(self, *, sets_threads: bool = False) -> list[Finding]:
        """Find what costs time: shared cores, too many threads.

        sets_threads   the program sets its compute threads itself, so OMP_NUM_THREADS need not be set
        """
        found = (self._shared_core(), None if sets_threads else self._crowded_cores())
        return [flaw for flaw in found if flaw is not None]

    def _shared_core(self) -> Finding | None:
        found = [node for node in self.nodes if node.sharing]
        if not found:
            return None
        node = found[0]
        (one, other, core), *more = node.sharing
        free = node.free_cores
        pairs = f", as {len(more)} more pairs of ranks share one" if more else ""
        free_ones = f"cores {format_cores(free)} are" if len(free) > 1 else f"core {free[0]} is"
        each = max(1, (node.cores + len(free)) // len(node.ranks))
        return Finding(
            f"ranks {one} and {other} share core {core} of {node.host}{pairs}{_and_elsewhere(found)}, "
            f"although {free_ones} free: each gets a part of its time",
            _binding_advice(self.launcher, each),
        )

    def _crowded_cores(self) -> Finding | None:
        # With more ranks than cores one thread each is too much already, and the variable changes nothing.
        found = [node for node in self.nodes if node.openmp_threads > max(node.cores, len(node.ranks))]
        if not found:
            return None
        node = found[0]
        return Finding(
            f"OMP_NUM_THREADS is not set: the {len(node.ranks)} ranks of {node.host} may start "
            f"{node.openmp_threads} threads on {node.cores} cores{_and_elsewhere(found)}",
            f"`export OMP_NUM_THREADS={max(1, node.cores // len(node.ranks))}`, "
            f"or have the launcher give each rank cores of its own",
        )


def _ranks(nodes: Collection[NodeRanks]) -> str:
    numbers = [place.rank for node in nodes for place in node.ranks]
    return f"rank{'s' if len(numbers) > 1 else ''} {format_cores(numbers)}"


def _and_elsewhere(nodes: Sequence[NodeRanks]) -> str:
    others = len(nodes) - 1
    return f" (and likewise on {others} other node{'s' if others > 1 else ''})" if others else ""


def _binding_advice(launcher: str, each: int) -> str:
    if launcher == "slurm":
        return f"start them with `srun --cpus-per-task={each} --cpu-bind=cores`"
    if launcher == "openmpi":
        return f"start them with `mpiexec --map-by slot:PE={each} --bind-to core`, or `--bind-to none`"
    if launcher == "hydra":
        return f"start them with `mpiexec -bind-to core:{each}` (MPICH; Intel MPI: `I_MPI_PIN_DOMAIN=auto`)"
    return f"look at the launcher's options for binding: {each} core{'s' if each > 1 else ''} for each rank"


def gather_rank_map(comm: Any) -> RankMap | None:
    """Gather the rank map of all ranks of a `Communicator` on its rank 0; None elsewhere. Collective.

    steps    within each node first, so that between nodes one object for each node travels
    """
    with comm.split_by_node() as node:
        bindings = node.allgather_object(RankBinding.here(comm.rank))
        return gather_from_nodes(comm, bindings, first=node.rank == 0)


def gather_from_nodes(comm: Any, bindings: Sequence[RankBinding], *, first: bool) -> RankMap | None:
    """Gather where every rank knows those of its node already; `first` is true on one rank of each node."""
    own = NodeRanks(comm.nodes[comm.rank], socket.gethostname(), tuple(bindings)) if first else None
    gathered = comm.gather_object(own)
    if gathered is None:
        return None
    return RankMap(tuple(node for node in gathered if node is not None), detect().launcher)
