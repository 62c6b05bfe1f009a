"""Our collective algorithms beside MPI's own, by message size, laid out as nccl-tests does.

    mpiexec -n 2 python benchmarks/collectives.py
    mpiexec -n 4 python benchmarks/collectives.py --collective allgather --json allgather.jsonl

Candidates run in turn within each round, so that a noisy machine touches all of them. A round's
time is that of the slowest rank over its iterations, after a barrier; the table shows the median of
the rounds and their spread. `#wrong` counts wrong elements of a separate, untimed pass on all ranks.

algbw = bytes of the whole array / time; busbw = algbw × the collective's factor (nccl-tests,
doc/PERFORMANCE.md). GB = 1e9 bytes.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path

import mpi4py
import numpy as np
from mpi4py import MPI

import hpcpar
from hpcpar.algorithms.catalogue import ALGORITHMS
from hpcpar.comm import Communicator
from hpcpar.launch.binding import affinity
from hpcpar.transport.mpi import library_facts
from hpcpar.units import GB, KiB, MiB, busbw_factor

COLLECTIVES = ("allreduce", "reduce_scatter", "allgather", "broadcast", "alltoall")
NATIVE = "mpi"
ROUND_NBYTES = 64 * MiB
"""A round moves about this much, between LEAST and MOST iterations."""
LEAST, MOST = 2, 200

Array = np.ndarray
Run = Callable[[], None]


@dataclass(frozen=True)
class Row:
    """One measured line; seconds are of one call."""

    collective: str
    algorithm: str
    ranks: int
    nbytes: int
    count: int
    dtype: str
    median_s: float
    fastest_s: float
    slowest_s: float
    algbw_gb_per_s: float
    busbw_gb_per_s: float
    wrong: int


@dataclass
class Buffers:
    """Memory of one size. `whole` is the whole array; `shard` this rank's equal piece of it."""

    whole: Array
    shard: Array
    other: Array

    @classmethod
    def of(cls, count: int, dtype: str, comm: Communicator) -> Buffers:
        whole = np.zeros(count, dtype=dtype)
        share = count // comm.size
        return cls(whole, np.zeros(share, dtype=dtype), np.zeros(count, dtype=dtype))


def ours(collective: str, name: str, comm: Communicator, b: Buffers) -> Run:
    """One of our algorithms as a call without arguments."""
    calls: dict[str, Run] = {
        "allreduce": lambda: comm.allreduce(b.whole, algorithm=name),
        "reduce_scatter": lambda: comm.reduce_scatter(b.whole, out=b.shard, algorithm=name),
        "allgather": lambda: comm.allgather(b.shard, out=b.whole, algorithm=name),
        "broadcast": lambda: comm.broadcast(b.whole, algorithm=name),
        "alltoall": lambda: comm.alltoall(b.whole, out=b.other, algorithm=name),
    }
    return calls[collective]


def native(collective: str, b: Buffers) -> Run:
    """MPI's own collective on the same memory."""
    mpi = MPI.COMM_WORLD
    calls: dict[str, Run] = {
        "allreduce": lambda: mpi.Allreduce(MPI.IN_PLACE, b.whole),
        "reduce_scatter": lambda: mpi.Reduce_scatter_block(b.whole, b.shard),
        "allgather": lambda: mpi.Allgather(b.shard, b.whole),
        "broadcast": lambda: mpi.Bcast(b.whole),
        "alltoall": lambda: mpi.Alltoall(b.whole, b.other),
    }
    return calls[collective]


def wrong_elements(collective: str, run: Run, comm: Communicator, b: Buffers) -> int:
    """Run once on known small whole numbers; how many elements, over all ranks, are not as they should be."""
    total = comm.size * (comm.size + 1) // 2
    pattern = np.arange(b.whole.size) % 3
    by_rank = np.repeat(np.arange(comm.size), b.shard.size)
    b.whole[:] = pattern + comm.rank + 1
    b.shard[:] = comm.rank
    run()
    summed = comm.size * pattern + total
    own = slice(comm.rank * b.shard.size, (comm.rank + 1) * b.shard.size)
    found, expected = {
        "allreduce": (b.whole, summed),
        "reduce_scatter": (b.shard, summed[own]),
        "allgather": (b.whole, by_rank),
        "broadcast": (b.whole, pattern + 1),
        "alltoall": (b.other, np.tile(pattern[own], comm.size) + by_rank + 1),
    }[collective]
    wrong = np.array([np.count_nonzero(found != expected.astype(found.dtype))])
    return int(comm.allreduce(wrong)[0])


def time_round(run: Run, iterations: int, comm: Communicator) -> float:
    """Seconds of one call, on the slowest rank."""
    comm.barrier()
    started_s = time.perf_counter()
    for _ in range(iterations):
        run()
    elapsed = np.array([(time.perf_counter() - started_s) / iterations])
    return float(comm.allreduce(elapsed, "max")[0])


def measure(collective: str, nbytes: int, options: argparse.Namespace, comm: Communicator) -> Iterator[Row]:
    """All candidates of one size, in turn."""
    itemsize = np.dtype(options.dtype).itemsize
    count = max(comm.size, nbytes // itemsize // comm.size * comm.size)
    b = Buffers.of(count, options.dtype, comm)
    candidates = {name: ours(collective, name, comm, b) for name in ALGORITHMS[collective]}
    candidates[NATIVE] = native(collective, b)
    wrong = {name: wrong_elements(collective, run, comm, b) for name, run in candidates.items()}
    b.whole[:], b.shard[:] = 0, 0  # so that sums of sums stay finite
    iterations = max(LEAST, min(MOST, ROUND_NBYTES // max(1, b.whole.nbytes)))
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for round_number in range(options.rounds + 1):
        for name, run in candidates.items():
            seconds = time_round(run, iterations, comm)
            if round_number > 0:  # the first is the warm-up
                times[name].append(seconds)
    for name, seconds in times.items():
        median = statistics.median(seconds)
        algbw = b.whole.nbytes / median / GB
        yield Row(
            collective,
            name,
            comm.size,
            b.whole.nbytes,
            count,
            options.dtype,
            median,
            min(seconds),
            max(seconds),
            algbw,
            algbw * busbw_factor(collective, comm.size),
            wrong[name],
        )


def header(options: argparse.Namespace, comm: Communicator) -> dict[str, object]:
    facts = library_facts()
    return {
        "benchmark": "collectives",
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "hpcpar": hpcpar.__version__,
        "ranks": comm.size,
        "nodes": len(set(comm.nodes)),
        "dtype": options.dtype,
        "rounds": options.rounds,
        "mpi": facts["vendor"],
        "mpi4py": mpi4py.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {platform.system()}",
        "cores": len(affinity()),
    }


def show_header(facts: dict[str, object]) -> None:
    for name, value in facts.items():
        print(f"# {name}: {value}")


def show_titles(collective: str) -> None:
    print(f"#\n# {collective}")
    print("#      size        count     type  algorithm             time      spread   algbw   busbw  #wrong")
    print("#       (B)   (elements)                                 (us)        (us)  (GB/s)  (GB/s)")


def show(row: Row) -> None:
    spread = f"{row.fastest_s * 1e6:.0f}-{row.slowest_s * 1e6:.0f}"
    print(
        f"{row.nbytes:>11} {row.count:>12} {row.dtype:>8}  {row.algorithm:<18} {row.median_s * 1e6:>9.1f} "
        f"{spread:>12} {row.algbw_gb_per_s:>7.2f} {row.busbw_gb_per_s:>7.2f} {row.wrong:>7}",
        flush=True,
    )


def sizes(options: argparse.Namespace) -> Iterator[int]:
    nbytes = options.min_bytes
    while nbytes <= options.max_bytes:
        yield nbytes
        nbytes *= options.factor


def nbytes_argument(text: str) -> int:
    unit = {"K": KiB, "M": MiB}.get(text[-1:].upper(), 1)
    return int(text[:-1] if unit > 1 else text) * unit


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--collective", choices=(*COLLECTIVES, "all"), default="allreduce")
    parser.add_argument("--min-bytes", type=nbytes_argument, default=8, help="as 8, 64K or 1M")
    parser.add_argument("--max-bytes", type=nbytes_argument, default=64 * MiB, help="as 8, 64K or 1M")
    parser.add_argument("--factor", type=int, default=2, help="from one size to the next")
    parser.add_argument("--dtype", default="float32", help="a NumPy type")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="also write JSON lines, the first the header")
    return parser.parse_args()


def main() -> None:
    options = parse()
    comm = hpcpar.init()
    speaks = comm.rank == 0
    facts = header(options, comm)
    rows: list[Row] = []
    if speaks:
        show_header(facts)
    for collective in COLLECTIVES if options.collective == "all" else (options.collective,):
        if speaks:
            show_titles(collective)
        for nbytes in sizes(options):
            for row in measure(collective, nbytes, options, comm):
                rows.append(row)
                if speaks:
                    show(row)
    if speaks and options.json:
        lines = [json.dumps(facts), *(json.dumps(asdict(row)) for row in rows)]
        options.json.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
