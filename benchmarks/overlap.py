"""Hiding communication behind computation: the measured fraction beside the possible one.

    hpcpar run -n 2 benchmarks/overlap.py [--collective allreduce] [--bytes 8M] [--json FILE]

Timed on every rank, in turn within each round, the slowest rank counted:

    a  compute         torch matrix products alone
    b  communication   started and waited for, nothing beside it
    c  both            start ── products ── progress ── products ── … ── products ── wait

    hidden = (a + b - c) / b

hidden is 1 where the communication costs nothing beside the computation, 0 where both take as long as one
after the other, and negative where they disturb each other.
source  OSU micro-benchmarks, osu_iallreduce; Intel MPI Benchmarks, IMB-NBC. Both cut at 0 and 100 %.

**The bound.** Only waiting can be hidden: the processor time u of one communication on a rank (copies, sums,
posts and tests) adds to the computation whoever spends it. Hence

    c >= a + u                              progress made by the computing thread
    c >= (n_busy a + n_ranks u) / n_cores   the cores of a node, n_busy = min(n_ranks × threads, n_cores)
    c >= b                                  the undisturbed communication

The largest of these gives hidden <= (a + b - c) / b; for a >= b it is 1 - u/b. A network card that moves the
bytes itself makes u small and the bound near 1. Between ranks that share memory the processors move every
byte, u is nearly b, and next to nothing can be hidden. u is measured by `time.process_time` of the
communication alone, sleeping between tests; the least of the rounds counts.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np
import torch
from common import add_options, append_json, at_least, header, print_header, quartiles

import hpcpar
from hpcpar import partition
from hpcpar.bench.measure import Buffers, Candidate, Case, Place, measure, wrong_elements
from hpcpar.bench.peers import METHODS, MpiPeer
from hpcpar.comm import Communicator
from hpcpar.launch.binding import affinity, node_cores
from hpcpar.units import format_nbytes, parse_nbytes

PLACE: dict[str, Place] = {
    "allreduce": "in",
    "reduce_scatter": "in",
    "allgather": "in",
    "broadcast": "in",
    "alltoall": "out",
}
PRODUCT_ROWS = 128
"""Size of the square matrices: one product takes some 50 µs on one core."""

NAP_S = 50e-6
"""Sleep between two tests while processor time is measured."""

CPU_ITERATIONS = 3
"""Calls whose processor time is taken together."""


class Pending(Protocol):
    """An outstanding communication."""

    def test(self) -> bool: ...

    def wait(self) -> object: ...


class MpiRequest:
    """An MPI request with hpcpar's method names."""

    def __init__(self, request: Any) -> None:
        self.test, self.wait = request.Test, request.Wait


@dataclass(frozen=True)
class Row:
    """One measured row; seconds are of one call on the slowest rank."""

    collective: str
    algorithm: str
    nbytes: int
    compute: float
    tests: int
    compute_s: float
    communication_s: float
    both_s: float
    hidden: float
    hidden_quartiles: tuple[float, float]
    cpu_s: float
    bound: float
    wrong: int


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Communication hidden behind computation.")
    parser.add_argument("--collective", choices=list(PLACE), default="allreduce")
    parser.add_argument("--bytes", type=at_least(4, parse_nbytes), default=parse_nbytes("8M"))
    parser.add_argument("--compute", type=float, nargs="+", default=[1, 2, 4], help="times the communication")
    parser.add_argument(
        "--tests", type=at_least(0), nargs="+", default=[0, 4, 16, 64], help="during the computation"
    )
    add_options(parser, rounds=15, threads=None, json=None)
    return parser.parse_args()


def starters(case: Case, comm: Communicator, b: Buffers) -> dict[str, tuple[Callable[[], Pending], Any]]:
    """Return the non-blocking calls of hpcpar and of MPI, each with its result array."""
    own, place = case.own(comm.rank), PLACE[case.collective]
    calls: dict[str, tuple[Callable[[], Pending], Any]] = {
        "allreduce": (lambda: comm.start_allreduce(b.whole), b.whole),
        "reduce_scatter": (lambda: comm.start_reduce_scatter(b.whole), b.whole[own]),
        "allgather": (lambda: comm.start_allgather(b.whole[own], out=b.whole), b.whole),
        "broadcast": (lambda: comm.start_broadcast(b.whole), b.whole),
        "alltoall": (lambda: comm.start_alltoall(b.whole, out=b.other), b.other),
    }
    mpi = MpiPeer()
    arguments, result = mpi.arguments(case, comm, b, place)
    start = getattr(mpi.comm, f"I{METHODS[case.collective].lower()}")
    return {"hpcpar": calls[case.collective], "mpi": (lambda: MpiRequest(start(*arguments)), result)}


def most_hidden(a_s: float, b_s: float, cpu_s: float, ranks: int, threads: int, cores: int) -> float:
    """Return the largest fraction of the communication that can be hidden; derived in the module's head."""
    busy = min(ranks * threads, cores)
    both_s = max(b_s, a_s, (busy * a_s + ranks * cpu_s) / cores)
    if ranks <= cores:  # otherwise a_s already contains other ranks' work
        both_s = max(both_s, a_s + cpu_s)
    return (a_s + b_s - both_s) / b_s


def overlapped(
    start: Callable[[], Pending], products: Callable[[int], None], count: int, tests: int
) -> Callable[[], None]:
    """Return a call that starts, computes in slices with a test between every two, and waits."""
    first, *others = partition.counts(count, tests + 1)

    def run() -> None:
        pending = start()
        products(first)
        for some in others:
            pending.test()
            products(some)
        pending.wait()

    return run


def processor_s(start: Callable[[], Pending], comm: Communicator, rounds: int) -> float:
    """Return processor seconds of one communication on the rank that has most; waits sleep. Collective."""
    found = []
    for _ in range(rounds):
        comm.barrier()
        started_s = time.process_time()
        for _ in range(CPU_ITERATIONS):
            pending = start()
            while not pending.test():
                time.sleep(NAP_S)
            pending.wait()
        mine = np.array([(time.process_time() - started_s) / CPU_ITERATIONS])
        found.append(float(comm.allreduce(mine, "max")[0]))
    return min(found)


def main() -> None:
    options = arguments()
    world = hpcpar.init()
    masks = world.allgather_object(affinity())
    here = [mask for mask, node in zip(masks, world.nodes, strict=True) if node == world.nodes[world.rank]]
    cores = node_cores(here)
    threads = options.threads or max(1, cores // len(here))
    torch.set_num_threads(threads)
    left, right = torch.rand(2, PRODUCT_ROWS, PRODUCT_ROWS).unbind()
    into = torch.empty(PRODUCT_ROWS, PRODUCT_ROWS)

    def products(count: int) -> None:
        for _ in range(count):
            torch.mm(left, right, out=into)

    case = Case.of(options.collective, options.bytes, "float32", "torch", world.size)
    buffers = Buffers.of(case, world)
    calls = starters(case, world, buffers)
    settings = {"product": f"{PRODUCT_ROWS} x {PRODUCT_ROWS} float32", "rounds": options.rounds}
    about = header(world, benchmark="overlap", **settings)
    quick = {"products": lambda: products(10), **{n: lambda s=s: s().wait() for n, (s, _) in calls.items()}}
    alone = measure(quick, world, rounds=3, round_s=0.01)
    rows: list[Row] = []
    for compute in options.compute:
        runs: dict[Any, Callable[[], object]] = {}
        for name, (start, _) in calls.items():
            count = max(1, math.ceil(10 * compute * alone[name].median_s / alone["products"].median_s))
            runs[name, "compute"] = lambda count=count: products(count)  # type: ignore[misc]
            runs[name, "alone"] = quick[name]
            for tests in options.tests:
                runs[name, tests] = overlapped(start, products, count, tests)
        wrong = {
            (name, tests): wrong_elements(
                Candidate(name, runs[name, tests], lambda result=result: result), case, world, buffers
            )
            for name, (_, result) in calls.items()
            for tests in options.tests
        }
        buffers.clear()
        timings = measure(runs, world, rounds=options.rounds, round_s=0.02)
        for name, (start, _) in calls.items():
            a, b = timings[name, "compute"], timings[name, "alone"]
            cpu_s = processor_s(start, world, options.rounds)
            bound = most_hidden(a.median_s, b.median_s, cpu_s, len(here), threads, cores)
            for tests in options.tests:
                c = timings[name, tests]
                hidden = [(x + y - z) / y for x, y, z in zip(a.rounds_s, b.rounds_s, c.rounds_s, strict=True)]
                low, middle, high = quartiles(hidden)
                times = (a.median_s, b.median_s, c.median_s, middle, (low, high), cpu_s, bound)
                rows.append(
                    Row(case.collective, name, case.nbytes, compute, tests, *times, wrong[name, tests])
                )
    if world.rank == 0:
        report(about, rows)
        append_json(options.json, [{**about, **asdict(row)} for row in rows])


def report(about: dict[str, Any], rows: list[Row]) -> None:
    print_header(about)
    print(
        f"# {rows[0].collective} of {format_nbytes(rows[0].nbytes)}; a, b, c and u in µs; hidden: quartiles"
    )
    titles = ("compute", "tests", "a", "b", "c", "hidden", "quartiles", "bound", "u", "#wrong")
    print(f"{'':<10}" + "".join(f"{title:>12}" for title in titles))
    for row in rows:
        low, high = row.hidden_quartiles
        times = (f"{seconds * 1e6:.0f}" for seconds in (row.compute_s, row.communication_s, row.both_s))
        cells = (f"{row.compute:g}", str(row.tests), *times, f"{row.hidden:.0%}", f"{low:.0%}..{high:.0%}")
        cells = (*cells, f"{row.bound:.0%}", f"{row.cpu_s * 1e6:.0f}", str(row.wrong))
        print(f"{row.algorithm:<10}" + "".join(f"{cell:>12}" for cell in cells))


if __name__ == "__main__":
    main()
