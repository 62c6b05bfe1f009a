"""Collectives on CUDA tensors by each way that hpcpar has, beside what else there is and what the GPU can do.

    hpcpar run -n 2 benchmarks/device_collectives.py [--ways pull,mpi,staged] [--max-bytes 256M] [--json FILE]

In turn, in one call, for every size; gloo and NCCL after all others, as torch.distributed's threads slow down
everything in their process, be it a copy:

    pull     hpcpar; ranks of a node read each other's memory where it lies (CUDA IPC)
    mpi      hpcpar over a CUDA-aware MPI's messages
    staged   hpcpar through pinned host memory
    MPI      the library's own collectives on device pointers, where HPCPAR_CUDA_AWARE says that it can
    gloo     torch.distributed over gloo
    nccl     torch.distributed over NCCL: one rank per GPU; two on one GPU from NCCL 2.30.3 on, with
             NCCL_MULTI_RANK_GPU_ENABLE=1
    copy     a copy within the GPU's memory, by one rank of each GPU while the others rest

A call's time is that of the host, from its start until the caller's stream has nothing left to do, on the
slowest rank; figures are the median and the quartiles of the rounds. With --in-a-row=N the wait comes after N
calls, and a call's time is an Nth of that, as training queues them and as NCCL's tests count: what the host
does for one call then runs beside the GPU's part of the one before it. Results are compared with the serial
truth first, in a pass that is not timed.

When n ranks share one GPU, all bytes go through its one memory, which a copy reads and writes at B bytes/s.
An all-reduce of S bytes can then take no less than 5(n-1)S/B as a ring, and (3n-1)S/B directly, where each
rank sums up its piece of all arrays at once; "of ring" and "of direct" are these times in parts of the
measured one.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from common import at_least, output_file, quartiles

import hpcpar
from hpcpar.bench.gpus import finished, use_gpu
from hpcpar.bench.measure import (
    DTYPES,
    MEMORY_COPY,
    Buffers,
    Candidate,
    Case,
    Place,
    ResultRow,
    copy_candidate,
    measure,
    row,
    usable,
    wrong_elements,
)
from hpcpar.bench.sweep import CHOSEN, about, ours, write_json
from hpcpar.comm import Communicator
from hpcpar.errors import CudaError, PeerFailedError
from hpcpar.launch import binding
from hpcpar.units import GB, parse_nbytes

if TYPE_CHECKING:
    from hpcpar.launch.cuda_aware import CudaAwareness

PLACES: dict[str, Place] = {
    "allreduce": "in",
    "reduce_scatter": "out",
    "allgather": "out",
    "broadcast": "in",
    "alltoall": "out",
}
"""What is measured, and where the result goes: as training does it, and as everybody can."""

WAYS = ("pull", "mpi", "staged")
PEERS = ("mpi", "gloo", "nccl")
COPY = "copy"
SUMS = ("allreduce", "reduce_scatter")
SEVERAL_NCCL_RANKS = "NCCL_MULTI_RANK_GPU_ENABLE"
SEVERAL_NCCL_RANKS_FROM = (2, 30, 3)

Timed = tuple[str, Candidate]
"""Way and candidate."""


@dataclass(frozen=True, kw_only=True)
class Line(ResultRow):
    """One measured line; seconds are of one call.

    way             pull, mpi, staged: ours; else who did it: MPI, gloo, nccl, copy
    gpus            different ones, of all ranks
    copy_gb_per_s   bytes read and written by a copy of the same size, on one GPU
    of_ring, of_direct   the least possible time, in parts of the measured one; None where it is not known
    """

    way: str
    gpus: int
    lower_quartile_s: float
    upper_quartile_s: float
    copy_gb_per_s: float
    of_ring: float | None
    of_direct: float | None


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Collectives on CUDA tensors, in turn with their peers.")
    parser.add_argument("--collectives", type=words_of(PLACES), default=tuple(PLACES), metavar="NAME,…")
    parser.add_argument("--ways", type=words_of(WAYS), default=WAYS, metavar="WAY,…", help="of hpcpar")
    parser.add_argument("--peers", type=words_of(PEERS), default=PEERS, metavar="PEER,…", help='or "none"')
    parser.add_argument(
        "--algorithms",
        default="chosen,ring,direct",
        help="of hpcpar, where a collective has them; chosen: names none (default: chosen,ring,direct)",
    )
    parser.add_argument(
        "--min-bytes", type=at_least(1, parse_nbytes), default=parse_nbytes("64K"), help="default: 64K"
    )
    parser.add_argument(
        "--max-bytes", type=at_least(1, parse_nbytes), default=parse_nbytes("256M"), help="default: 256M"
    )
    parser.add_argument("--factor", type=at_least(2), default=16, help="from size to size (default: 16)")
    parser.add_argument("--dtype", default="float32", choices=DTYPES)
    parser.add_argument("--rounds", type=at_least(1), default=15, help="default: 15")
    parser.add_argument("--round-seconds", type=float, default=0.1, help="of each line (default: 0.1)")
    parser.add_argument(
        "--in-a-row", type=at_least(1), default=1, metavar="N", help="calls before a wait (default: 1)"
    )
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds, of a wait (default: 120)")
    parser.add_argument("--json", type=output_file, help="write JSON lines, the first of which is the header")
    parser.add_argument(
        "--device",
        default="cuda",
        choices=("cuda", "cpu"),
        help="cpu: to try this script itself where there is no GPU; its figures say nothing",
    )
    return parser.parse_args()


def words_of(known: Sequence[str] | Mapping[str, Any]) -> Callable[[str], tuple[str, ...]]:
    def parse(text: str) -> tuple[str, ...]:
        words = tuple(word for word in text.split(",") if word and word != "none")
        for word in words:
            if word not in known:
                raise argparse.ArgumentTypeError(f"{word!r} is none of {', '.join(known)}")
        return words

    return parse


# --- ceilings ------------------------------------------------------------------------------------------


def ring_s(ranks: int, nbytes: int, copy_bytes_per_s: float) -> float:
    """The least time of a ring all-reduce by ranks of one GPU.

    Each of its n(n-1) sums of S/n reads two pieces and writes one; each of as many copies reads one and
    writes one.
    """
    return 5 * (ranks - 1) * nbytes / copy_bytes_per_s


def direct_s(ranks: int, nbytes: int, copy_bytes_per_s: float) -> float:
    """The least time of a direct one: n sums of n pieces, (n+1)S in all, then n(n-1) copies of S/n."""
    return (3 * ranks - 1) * nbytes / copy_bytes_per_s


# --- who takes part ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """What all cases have in common.

    is_first   whether this rank is the first of those that use its GPU
    ways       communicators of the same ranks, by the way in which they move device memory
    said       what there is of each peer, and why it is not, for the header
    copies_s   of a copy of as many bytes as a case has, by collective and bytes
    """

    world: Communicator
    options: argparse.Namespace
    device: torch.device
    gpus: int
    is_first: bool
    awareness: CudaAwareness
    ways: dict[str, Communicator]
    said: dict[str, str]
    copies_s: dict[tuple[str, int], float] = field(default_factory=dict)

    @property
    def shares_one_gpu(self) -> bool:
        return self.device.type == "cuda" and self.gpus == 1 < self.world.size


def bind_to_gpu(world: Communicator, wanted: str) -> tuple[torch.device, tuple[str, ...]]:
    """Return this rank's device, and the identities of all ranks' devices. End the job without a GPU."""
    if wanted == "cpu":
        return torch.device("cpu"), ("cpu",) * world.size
    try:
        device = use_gpu(world)
    except CudaError as error:
        if world.rank == 0:
            print(f"ERROR: {error}", file=sys.stderr, flush=True)
        world.barrier()
        raise SystemExit(1) from error
    identity = f"{world.nodes[world.rank]} {torch.cuda.get_device_properties(device).uuid}"
    return device, tuple(world.allgather_object(identity))


def find_awareness(world: Communicator, device: torch.device) -> CudaAwareness:
    """Find out on rank 0 whether MPI takes device pointers."""
    from hpcpar.cli.doctor.facts import find_awareness as find
    from hpcpar.launch.cuda_aware import CudaAwareness
    from hpcpar.transport.mpi_library import library_facts, memory_kinds

    if device.type == "cpu":
        return CudaAwareness(True, "no device pointers: --device=cpu")
    found: CudaAwareness = world.broadcast_object(
        find(library_facts()["library"], memory_kinds()) if world.rank == 0 else None
    )
    return found


def open_ways(
    world: Communicator, options: argparse.Namespace, device: torch.device, awareness: CudaAwareness
) -> tuple[dict[str, Communicator], dict[str, str]]:
    """Return a communicator for each way that works here, and why others do not. Collective."""
    from hpcpar.transport.mpi import MpiTransport

    found, said = {}, {}
    local_size = world.nodes.count(world.nodes[world.rank])
    for way in options.ways if device.type == "cuda" else ("host",):
        if way == "mpi" and not awareness.point_to_point:
            said[way] = f"left out: MPI is not known to take device pointers ({awareness.source})"
            continue
        transport = MpiTransport.world()
        transport.yield_at_once = binding.oversubscribed(local_size)
        comm = Communicator.over(transport, timeout_s=options.timeout)
        if way != "host":
            try:
                comm.share_devices(way, lambda: True)
            except CudaError as error:
                said[way] = f"left out: {error}"
                continue
        found[way] = comm
    return found, said


class NcclPeer:
    """torch.distributed over NCCL, by the calls that are measured of gloo."""

    def __init__(self, gloo: Any) -> None:
        import torch.distributed as dist

        self._gloo, self._dist = gloo, dist
        self._group = dist.new_group(backend="nccl", timeout=timedelta(seconds=60))

    def candidates(self, case: Case, comm: Communicator, buffers: Buffers, place: Place) -> list[Candidate]:
        self._gloo.group = self._group
        try:
            found: list[Candidate] = self._gloo.candidates(case, comm, buffers, place)
        finally:
            self._gloo.group = None
        return [replace(one, name="nccl") for one in found]

    def free(self) -> None:
        self._dist.destroy_process_group(self._group)


def nccl_obstacle(world: Communicator, gpus: int, device: torch.device) -> str | None:
    """Return why NCCL cannot be started here; the same on every rank."""
    import torch.distributed as dist

    if device.type == "cpu" or not dist.is_nccl_available():
        return "torch has no NCCL for this device"
    version = torch.cuda.nccl.version()
    shown = ".".join(map(str, version))
    if gpus < world.size and version < SEVERAL_NCCL_RANKS_FROM:
        return f"{world.size} ranks share {gpus} GPUs, which NCCL {shown} refuses (2.30.3 does not)"
    if gpus < world.size and os.environ.get(SEVERAL_NCCL_RANKS) != "1":
        return f"ranks share a GPU, for which NCCL {shown} needs {SEVERAL_NCCL_RANKS}=1"
    return None


class Builtin:
    """MPI's own collectives on device pointers: only those that HPCPAR_CUDA_AWARE names."""

    def __init__(self, device: torch.device) -> None:
        from hpcpar.bench.peers import MpiPeer
        from hpcpar.launch.settings import CAPABILITIES, Settings

        self._asked = CAPABILITIES if device.type == "cpu" else Settings.from_environ().cuda_aware or ()
        self._mpi = MpiPeer()
        self.free = self._mpi.free

    def candidates(self, case: Case, comm: Communicator, buffers: Buffers, place: Place) -> list[Candidate]:
        if ("reductions" if case.collective in SUMS else "collectives") not in self._asked:
            return []
        found = self._mpi.candidates(case, comm, buffers, place)
        for one in found[1:]:
            one.close()
        return [replace(one, name="MPI") for one in found[:1]]


def connect(job: Job) -> list[Any]:
    """Start torch.distributed. Collective."""
    from hpcpar.bench.peers import GlooPeer

    wanted, said, found = job.options.peers, job.said, []
    if {"gloo", "nccl"} & set(wanted):
        obstacle = nccl_obstacle(job.world, job.gpus, job.device) if "nccl" in wanted else None
        try:
            gloo = GlooPeer(job.world)
        except PeerFailedError as error:
            said["peer gloo"] = f"left out: {error}".splitlines()[0]
            return found
        found.append(gloo)
        if "gloo" in wanted:
            said["peer gloo"] = f"torch {torch.__version__}"
        if "nccl" in wanted and obstacle is None:
            found.append(NcclPeer(gloo))
            said["peer nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        elif "nccl" in wanted:
            said["peer nccl"] = f"left out: {obstacle}"
    return found


# --- measuring -----------------------------------------------------------------------------------------


def measure_case(case: Case, job: Job, ways: Mapping[str, Communicator], peers: Sequence[Any]) -> list[Line]:
    """Measure hpcpar's ways and these peers, and a copy where none of this size has been measured yet."""
    place = PLACES[case.collective]
    buffers = Buffers.of(case, job.world, device=job.device)
    entered = [
        (way, one)
        for way, comm in ways.items()
        for one in ours(case, comm, buffers, place)
        if one.name in job.options.algorithms.split(",")
    ]
    for peer in peers:
        for one in peer.candidates(case, job.world, buffers, place):
            if one.name.lower() in job.options.peers:
                entered.append((one.name, one))
    options = job.options
    kept: list[Timed] = [(way, one) for way, one in entered if usable([finished(one, job.device)], job.world)]
    wrong = [wrong_elements(finished(one, job.device), case, job.world, buffers) for _, one in kept]
    buffers.clear()
    timed = list(kept)
    copied = case.collective, case.nbytes
    if copied not in job.copies_s:
        copy = copy_candidate(case, buffers).run if job.is_first else lambda: None
        timed.append((COPY, Candidate(MEMORY_COPY, copy, lambda: None)))
        wrong.append(0)
    runs = {(way, one.name): finished(one, job.device, options.in_a_row).run for way, one in timed}
    timings = {
        name: timing.scaled(1 / options.in_a_row)
        for name, timing in measure(
            runs, job.world, rounds=options.rounds, round_s=options.round_seconds
        ).items()
    }
    if (COPY, MEMORY_COPY) in timings:
        job.copies_s[copied] = timings[COPY, MEMORY_COPY].median_s
    copy_bytes_per_s = 2 * case.nbytes / job.copies_s[copied]
    lines = [
        line_of(case, job, way, algorithm, timing, copy_bytes_per_s, faults)
        for ((way, algorithm), timing), faults in zip(timings.items(), wrong, strict=True)
    ]
    for _, one in kept:
        one.close()
    return lines


def line_of(
    case: Case, job: Job, way: str, algorithm: str, timing: Any, copy_bytes_per_s: float, wrong: int
) -> Line:
    chose = chosen(case, job.ways[way]) if algorithm == CHOSEN else ""
    timed = row(case, algorithm, PLACES[case.collective], timing, wrong, chose)
    if way == COPY:
        timed = replace(timed, busbw_gb_per_s=timed.algbw_gb_per_s)
    lower_s, _, upper_s = quartiles(timing.rounds_s)
    bounded = case.collective == "allreduce" and way != COPY and job.shares_one_gpu
    least = (case.size, case.nbytes, copy_bytes_per_s)
    return Line(
        **vars(timed),
        way=way,
        gpus=job.gpus,
        lower_quartile_s=lower_s,
        upper_quartile_s=upper_s,
        copy_gb_per_s=copy_bytes_per_s / GB,
        of_ring=ring_s(*least) / timed.median_s if bounded else None,
        of_direct=direct_s(*least) / timed.median_s if bounded else None,
    )


def chosen(case: Case, comm: Communicator) -> str:
    return comm.algorithm_for(case.collective, case.nbytes, dtype=case.dtype, on_device=True)


def cases(options: argparse.Namespace, size: int) -> Iterator[Case]:
    for collective in options.collectives:
        nbytes = options.max_bytes
        sizes = []
        while nbytes >= max(1, options.min_bytes):
            sizes.append(nbytes)
            nbytes //= options.factor
        for one in reversed(sizes):
            yield Case.of(collective, one, options.dtype, "torch", size)


TITLE = (
    f"# {'collective':<14} {'size (B)':>11}  {'way':<7} {'algorithm':<12} {'median':>10} "
    f"{'quartiles (us)':>21} {'algbw':>8} {'busbw':>8} {'of ring':>8} {'of direct':>9} {'#wrong':>7}"
)


def show(line: Line) -> str:
    ring, direct = ("-" if part is None else f"{part:.0%}" for part in (line.of_ring, line.of_direct))
    return (
        f"  {line.collective:<14} {line.nbytes:>11}  {line.way:<7} {line.algorithm:<12} "
        f"{line.median_s * 1e6:>10.1f} {line.lower_quartile_s * 1e6:>10.1f} "
        f"{line.upper_quartile_s * 1e6:>10.1f} {line.algbw_gb_per_s:>8.2f} {line.busbw_gb_per_s:>8.2f} "
        f"{ring:>8} {direct:>9} {line.wrong:>7}  {line.chose}".rstrip()
    )


def header(job: Job) -> dict[str, Any]:
    from hpcpar.transport.mpi_library import library_facts

    options, device = job.options, job.device
    what: dict[str, Any] = {
        "dtype": options.dtype,
        "arrays": f"torch, {device.type}",
        "rounds": options.rounds,
        "in_a_row": options.in_a_row,
        "gpus": job.gpus,
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        what |= {"gpu": properties.name, "gpu_nbytes": properties.total_memory, "cuda": torch.version.cuda}
        what["mps"] = "CUDA_MPS_PIPE_DIRECTORY" in os.environ
    tried = options.ways if device.type == "cuda" else tuple(job.ways)
    what |= {f"way {way}": job.said.pop(way, "measured") for way in tried}
    return {**about("device collectives", job.world, library_facts()["vendor"], what, {}), **job.said}


def main() -> None:
    options = arguments()
    # The communicators that are measured choose their ways themselves.
    os.environ["HPCPAR_DEVICES"] = "none"
    world = hpcpar.init(timeout_s=options.timeout)
    device, identities = bind_to_gpu(world, options.device)
    awareness = find_awareness(world, device)
    ways, said = open_ways(world, options, device, awareness)
    gpus = len(set(identities))
    is_first = identities.index(identities[world.rank]) == world.rank
    job = Job(world, options, device, gpus, is_first, awareness, ways, said)
    say = print if world.rank == 0 else lambda *_, **__: None
    lines: list[Line] = []
    facts = header(job)
    for name, value in facts.items():
        say(f"# {name}: {value}")
    say(TITLE, flush=True)

    def take(ways: Mapping[str, Communicator], peers: Sequence[Any]) -> None:
        for case in cases(options, world.size):
            for line in measure_case(case, job, ways, peers):
                lines.append(line)
                say(show(line), flush=True)
            if world.rank == 0 and options.json is not None:
                write_json(options.json, facts, lines)  # each time: what comes next may fail

    builtin = [Builtin(device)] if "mpi" in options.peers else []
    take(ways, builtin)
    peers = connect(job)
    for name, value in said.items():
        say(f"# {name}: {value}")
    facts |= said
    if peers:
        take({}, peers)
    for peer in reversed([*builtin, *peers]):  # not after an error: it is collective
        peer.free()
    missing = [way for way in options.ways if way not in ways] if device.type == "cuda" else []
    faults = sum(line.wrong for line in lines)
    if faults:
        say(f"# WRONG: {faults} elements", flush=True)
    if missing:
        say(f"# not measured: {', '.join(missing)}", flush=True)
    world.barrier()
    if faults or not any(line.way in ways for line in lines):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
