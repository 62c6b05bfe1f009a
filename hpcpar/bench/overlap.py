"""`hpcpar bench overlap`: how much of a communication is hidden behind computation, and how much can be.

Timed on every rank, in turn within each round, the slowest rank counted:

    a  compute         torch matrix products alone
    b  communication   started and waited for, nothing beside it
    c  both            start ── products ── poke ── products ── poke ── … ── products ── wait

    hidden = (a + b - c) / b

which is 1 where the communication costs nothing beside the computation, 0 where both together last as
long as one after the other, and negative where they disturb each other.
source  OSU micro-benchmarks, osu_iallreduce: overlap = 100 - (overall - compute) / pure communication
        Intel MPI Benchmarks, IMB-NBC: overlap = (t_pure + t_CPU - t_ovrl) / min(t_pure, t_CPU), the same
        where the computation lasts at least as long. Both cut at 0 and 100 %, which is not done here.

**How much can be hidden.** Only waiting can. A core that multiplies matrices does nothing else, so what a
rank's processor must do for the communication (copy, sum, run the interpreter, post and test) comes on
top of its computation, whenever it is done. With u the processor time of one communication on a rank,
and a thread's worth of computation a on each of the cores that compute:

    c >= a + u                              who pokes from the computing thread does it all there
    c >= (n_busy a + n_ranks u) / n_cores   whoever does it: the node's cores have only so much time
    c >= b                                  if b is the time that the communication takes undisturbed

with n_busy = min(n_ranks × threads, n_cores). The larger of those that apply gives the least c, and so

    hidden <= (a + b - c) / b,    which for a >= b and the computing thread is    hidden <= 1 - u/b

For two ranks with one thread each on two cores both are the same, 1 - u/b: a helper thread has no core of
its own. With a network card that reads and writes memory by itself u is small against b and the bound is
near 1, and over a slow wire it is, too. Between ranks that share memory *the processors are the network*:
they move every byte, u is nearly b, and next to nothing can be hidden, by whatever trick.

What is hidden may stay below the bound by more than pokes that come too late: c also holds what the ranks
wait for the slowest of them at every single call, where a is only the slowest rank's mean.

u is measured: the communication alone, its waits asleep (`time.sleep` between tests, so that waiting costs
no processor time), by `time.process_time`, which also counts the threads of MPI and gloo; the rank that has
most, the least of the rounds, and of those in which it waited as the library does, for waking up has a
price, too (some 10 µs for each of the NAPS: where they are most of u, the bound is a few per cent too
low). Beside a computation the arrays are no longer in the caches, and the same work takes longer. So two
more figures stand beside u:

    company   the same with the computation going on: processor time of both less that of the
              computation, waits asleep. What it is above u, caches, pokes and waking up cost
    memory    the copies and sums that any implementation in memory must do, on the same arrays, all ranks
              at once. Where processors move the bytes, nobody's u, and so nobody's c - a, can be less;
              a faster path makes b and u smaller, both of them: it leaves less to hide
"""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from hpcpar import partition
from hpcpar.bench.collectives import about
from hpcpar.bench.measure import (
    Buffers,
    Candidate,
    Case,
    Kind,
    Place,
    Timing,
    measure,
    tensor,
    usable,
    wrong_elements,
)
from hpcpar.launch.binding import affinity, node_cores
from hpcpar.units import MiB, format_duration, format_nbytes

if TYPE_CHECKING:
    from hpcpar.comm import Communicator, Handle

COLLECTIVES = ("allreduce", "reduce_scatter", "allgather", "broadcast", "alltoall")

PLACE: dict[str, Place] = {
    "allreduce": "in",
    "reduce_scatter": "in",
    "allgather": "in",
    "broadcast": "in",
    "alltoall": "out",
}
"""As training has them: in place wherever there is such a thing."""

PRODUCT_ROWS = 128
"""Of the square matrices: one product is some 50 µs on one core, so there is much to poke between."""

NAP_S = 50e-6
"""Of a wait that is asleep, at least; and of the thread that pokes, between two pokes."""

NAPS = 50
"""About so many naps in one communication, so that falling asleep is not what is measured."""

CPU_ITERATIONS = 3
"""Calls of which the processor time is taken together, in each round."""

OURS, THREAD = "hpcpar", "hpcpar_thread"

Say = Callable[[str], None]


class Pending(Protocol):
    """A communication under way."""

    def test(self) -> bool:
        """Bring it on; True when it is complete."""

    def wait(self) -> object:
        """Return when it is complete."""


@dataclass(frozen=True)
class Way:
    """One way to have a communication under way while the program computes.

    name      as it stands in the table
    start     begin; all ranks do
    poke      what the computing thread does between two slices of its computation
    result    the array that is left behind
    helper    a thread other than the computing one makes progress, so nothing has to be poked
    close     gives back what was prepared
    """

    name: str
    start: Callable[[], Pending]
    poke: Callable[[Pending], object]
    result: Any
    helper: bool = False
    close: Callable[[], object] = lambda: None


class Peer(Protocol):
    """Something else that can do collectives."""

    def starters(
        self, case: Case, comm: Communicator, buffers: Buffers, place: Place
    ) -> list[tuple[str, Callable[[], Pending], Any, bool]]:
        """Its ways that do not block: name, start, result, and whether a thread of its own makes progress."""


@dataclass(frozen=True)
class Options:
    """What to measure.

    computes     how long the computation lasts, in times the communication
    pokes        how often progress is made during it
    candidates   names of ways to keep; empty keeps all
    threads      torch's threads on each rank, as it has been told already
    may_thread   MPI allows a thread other than the one that started it to call it
    """

    collective: str = "allreduce"
    nbytes: int = 8 * MiB
    dtype: str = "float32"
    kind: Kind = "torch"
    computes: tuple[float, ...] = (1, 2, 4)
    pokes: tuple[int, ...] = (0, 1, 4, 16, 64)
    rounds: int = 15
    round_s: float = 0.02
    candidates: tuple[str, ...] = ()
    threads: int = 1
    may_thread: bool = False

    def keeps(self, name: str) -> bool:
        return not self.candidates or name in self.candidates


@dataclass(frozen=True)
class Row:
    """One measured line; seconds are of one call.

    compute      asked for: the computation, in times the communication
    hidden       median of the rounds; with the quartiles
    cpu_s        processor time that the communication costs alone, without waiting
    company_cpu_s  the same beside the computation
    memory_s     bare copies and sums that it cannot do without in memory
    bound        the most that can be hidden with cpu_s
    """

    collective: str
    algorithm: str
    ranks: int
    nbytes: int
    dtype: str
    kind: str
    compute: float
    pokes: int
    products: int
    iterations: int
    compute_s: float
    communication_s: float
    both_s: float
    hidden: float
    quarter_hidden: float
    three_quarters_hidden: float
    cpu_s: float
    company_cpu_s: float
    memory_s: float
    bound: float
    wrong: int


@dataclass(frozen=True)
class Node:
    """Where the ranks compute: ranks on this node, cores that they share, torch threads of each."""

    ranks: int
    cores: int
    threads: int

    @classmethod
    def of(cls, comm: Communicator, threads: int) -> Node:
        """Collective."""
        masks = comm.allgather_object(affinity())
        here = [mask for mask, node in zip(masks, comm.nodes, strict=True) if node == comm.nodes[comm.rank]]
        return cls(len(here), node_cores(here), threads)


def starting(peers: Sequence[Any]) -> list[Peer]:
    """Those that can communicate without blocking."""
    return [peer for peer in peers if hasattr(peer, "starters")]


def most_hidden(compute_s: float, communication_s: float, cpu_s: float, node: Node, *, helper: bool) -> float:
    """The largest fraction of the communication that can be hidden; the module's head derives it."""
    busy = min(node.ranks * node.threads, node.cores)
    both_s = max(communication_s, compute_s, (busy * compute_s + node.ranks * cpu_s) / node.cores)
    if not helper and node.ranks <= node.cores:  # else others' work is in compute_s, or elsewhere
        both_s = max(both_s, compute_s + cpu_s)
    return (compute_s + communication_s - both_s) / communication_s


class Products:
    """The computation: products of square float32 matrices."""

    def __init__(self, rows: int = PRODUCT_ROWS) -> None:
        generator = torch.Generator().manual_seed(0)
        self._left = torch.rand(rows, rows, generator=generator)
        self._right = torch.rand(rows, rows, generator=generator)
        self._into = torch.empty(rows, rows)

    def run(self, count: int) -> None:
        for _ in range(count):
            torch.mm(self._left, self._right, out=self._into)


class Attendant:
    """A thread that pokes a communicator while another thread computes. An experiment.

    `Progress` is made for one thread. So whatever touches it holds `lock`: the thread while it pokes,
    which it does only while `_attending`, and the computing thread whenever it starts or waits. While
    it is not attending the computing thread may use the communicator as ever.
    """

    def __init__(self, comm: Communicator, nap_s: float = NAP_S) -> None:
        self.lock = threading.Lock()
        self._comm = comm
        self._nap_s = nap_s
        self._attending = threading.Event()
        self._ended = False
        self._thread = threading.Thread(target=self._attend, name="hpcpar attendant", daemon=True)
        self._thread.start()

    def start(self, begin: Callable[[], Handle]) -> Pending:
        with self.lock:
            handle = begin()
            self._attending.set()
        return _Attended(self, handle)

    def dismiss(self) -> None:
        """No more pokes; under the lock."""
        self._attending.clear()

    def close(self) -> None:
        self._ended = True
        self._attending.set()
        self._thread.join()

    def _attend(self) -> None:
        while True:
            self._attending.wait()
            if self._ended:
                return
            with self.lock:
                if self._attending.is_set():  # not since the wait above: it may have been dismissed since
                    self._comm.poke()
            time.sleep(self._nap_s)


class _Attended:
    def __init__(self, attendant: Attendant, handle: Handle) -> None:
        self._attendant = attendant
        self._handle = handle

    def test(self) -> bool:
        with self._attendant.lock:
            done = self._handle.test()
            if done:
                self._attendant.dismiss()
            return done

    def wait(self) -> object:
        with self._attendant.lock:
            self._attendant.dismiss()
            return self._handle.wait()


def ours(case: Case, comm: Communicator, b: Buffers, *, may_thread: bool) -> list[Way]:
    """Poked by the computing thread, and by a thread of its own where MPI allows it."""
    own = case.own(comm.rank)
    calls: dict[str, tuple[Callable[[], Handle], Any]] = {
        "allreduce": (lambda: comm.start_allreduce(b.whole), b.whole),
        "reduce_scatter": (lambda: comm.start_reduce_scatter(b.whole), b.whole[own]),
        "allgather": (lambda: comm.start_allgather(b.whole[own], out=b.whole), b.whole),
        "broadcast": (lambda: comm.start_broadcast(b.whole), b.whole),
        "alltoall": (lambda: comm.start_alltoall(b.whole, out=b.other), b.other),
    }
    begin, result = calls[case.collective]
    found = [Way(OURS, begin, lambda _: comm.poke(), result)]
    if may_thread:
        attendant = Attendant(comm)
        start = attendant.start
        found.append(Way(THREAD, lambda: start(begin), _nothing, result, helper=True, close=attendant.close))
    return found


def _nothing(pending: Pending) -> None:
    """What has to be done for a communication that a thread takes care of."""


def ways(
    case: Case, options: Options, comm: Communicator, buffers: Buffers, peers: Sequence[Peer]
) -> list[Way]:
    """All that work here and were asked for. Collective."""
    may_thread = options.may_thread and options.keeps(THREAD)
    found = ours(case, comm, buffers, may_thread=may_thread)
    for peer in peers:
        for name, start, result, helper in peer.starters(case, comm, buffers, PLACE[case.collective]):
            found.append(Way(name, start, _nothing if helper else Pending.test, result, helper))
    kept = {way.name: way for way in found if options.keeps(way.name)}
    able = usable([Candidate(way.name, _alone(way), lambda: None, way.close) for way in kept.values()], comm)
    return [kept[candidate.name] for candidate in able]


def _alone(way: Way) -> Callable[[], object]:
    start = way.start
    return lambda: start().wait()


def _asleep(way: Way, nap_s: float) -> Callable[[], object]:
    """The communication alone, without processor time for the waiting."""

    def run() -> None:
        _wait_asleep(way.start(), nap_s)

    return run


def _wait_asleep(pending: Pending, nap_s: float) -> None:
    while not pending.test():
        time.sleep(nap_s)
    pending.wait()


def overlapped(
    way: Way, products: Products, count: int, pokes: int, *, nap_s: float | None = None
) -> Callable[[], None]:
    """Start, compute in slices with a poke between every two, wait.

    nap_s   sleep between tests in the wait; None: wait as the library does
    """
    first, *others = partition.counts(count, pokes + 1)
    multiply, start, poke = products.run, way.start, way.poke

    def run() -> None:
        pending = start()
        multiply(first)
        for some in others:
            poke(pending)
            multiply(some)
        if nap_s is None:
            pending.wait()
        else:
            _wait_asleep(pending, nap_s)

    return run


def memory_work(case: Case, buffers: Buffers) -> Callable[[], None]:
    """The copies and sums on the slowest rank that no implementation in memory can do without.

    With p ranks and S bytes: a rank sums the other ranks' share of its own S/p, (p - 1)/p·S, and brings
    what it has not made itself, as much again, into its own memory.
    """
    whole, other = (tensor(array).view(torch.uint8).numpy() for array in (buffers.whole, buffers.other))
    itemsize = case.nbytes // case.count
    elsewhere = case.nbytes if case.collective == "broadcast" else (case.size - 1) * case.share * itemsize
    sums = case.collective in ("allreduce", "reduce_scatter")
    left, right = tensor(buffers.whole)[: case.share], tensor(buffers.other)[: case.share]

    def run() -> None:
        if sums:
            for _ in range(case.size - 1):
                torch.add(left, right, out=left)
        if case.collective != "reduce_scatter" and case.size > 1:
            np.copyto(other[:elsewhere], whole[:elsewhere])

    return run


def processor_s(run: Callable[[], object], iterations: int, comm: Communicator) -> float:
    """Processor time of one call, on the rank that has most of it. Collective."""
    comm.barrier()
    started_s = time.process_time()
    for _ in range(iterations):
        run()
    mine = np.array([(time.process_time() - started_s) / iterations])
    return float(comm.allreduce(mine, "max")[0])


@contextmanager
def _closing(found: Sequence[Way]) -> Iterator[None]:
    yield
    for way in found:
        way.close()


def run(
    options: Options, comm: Communicator, peers: Sequence[Peer] = (), say: Say = lambda line: None
) -> list[Row]:
    """Measure everything that was asked for, and say it line by line on rank 0. Collective."""
    speak = say if comm.rank == 0 else lambda line: None
    case = Case.of(options.collective, options.nbytes, options.dtype, options.kind, comm.size)
    bench = Bench(case, options, comm)
    found = ways(case, options, comm, bench.buffers, peers)
    rows: list[Row] = []
    with _closing(found):
        bench.buffers.clear()
        for line in titles(case):
            speak(line)
        for compute in options.computes:
            for row in bench.measure(found, compute):
                rows.append(row)
                speak(show(row))
        for told in explain(rows, bench.node):
            speak(f"# {told}")
    return rows


class Bench:
    """One collective on one array, and all that is timed with it."""

    def __init__(self, case: Case, options: Options, comm: Communicator) -> None:
        self.case = case
        self.options = options
        self.comm = comm
        self.node = Node.of(comm, options.threads)
        self.buffers = Buffers.of(case, comm)
        self.products = Products()
        self._memory = memory_work(case, self.buffers)
        self._product_s = self._quick({"": lambda: self.products.run(10)})[""].median_s / 10

    def measure(self, found: Sequence[Way], compute: float) -> list[Row]:
        """All ways with a computation `compute` times as long as each one's communication. Collective."""
        alone = self._quick({way.name: _alone(way) for way in found})
        counts = {
            name: max(1, math.ceil(compute * timing.median_s / self._product_s))
            for name, timing in alone.items()
        }
        runs: dict[Any, Callable[[], object]] = {"memory": self._memory}
        for way in found:
            count = counts[way.name]
            runs["compute", way.name] = lambda count=count: self.products.run(count)  # type: ignore[misc]
            runs["alone", way.name] = _alone(way)
            for pokes in self._pokes(way):
                runs["both", way.name, pokes] = overlapped(way, self.products, count, pokes)
        wrong = {
            (way.name, pokes): self._wrong(way, runs["both", way.name, pokes])
            for way in found
            for pokes in self._pokes(way)
        }
        self.buffers.clear()
        timings = measure(runs, self.comm, rounds=self.options.rounds, round_s=self.options.round_s)
        rows = []
        for way in found:
            cpu_s, company_s = self._processor(way, counts[way.name], timings["alone", way.name])
            for pokes in self._pokes(way):
                rows.append(
                    self._row(
                        way,
                        compute,
                        pokes,
                        counts[way.name],
                        timings,
                        cpu_s,
                        company_s,
                        wrong[way.name, pokes],
                    )
                )
        return rows

    def _pokes(self, way: Way) -> tuple[int, ...]:
        return (0,) if way.helper else self.options.pokes

    def _quick(self, runs: Mapping[Any, Callable[[], object]]) -> dict[Any, Timing]:
        return measure(runs, self.comm, rounds=3, round_s=self.options.round_s / 2)

    def _wrong(self, way: Way, run: Callable[[], object]) -> int:
        candidate = Candidate(way.name, run, lambda: way.result)
        return wrong_elements(candidate, self.case, self.comm, self.buffers)

    def _processor(self, way: Way, count: int, alone: Timing) -> tuple[float, float]:
        """Processor seconds of the communication alone, and beside the computation: least and median."""
        nap_s = max(NAP_S, alone.median_s / NAPS)
        pokes = max(self._pokes(way))
        runs = {
            "asleep": _asleep(way, nap_s),
            "awake": _alone(way),
            "both": overlapped(way, self.products, count, pokes, nap_s=nap_s),
            "compute": lambda: self.products.run(count),
        }
        found: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(self.options.rounds):
            for name, run in runs.items():
                found[name].append(processor_s(run, CPU_ITERATIONS, self.comm))
        beside = [both - compute for both, compute in zip(found["both"], found["compute"], strict=True)]
        return min(*found["asleep"], *found["awake"]), statistics.median(beside)

    def _row(
        self,
        way: Way,
        compute: float,
        pokes: int,
        products: int,
        timings: Mapping[Any, Timing],
        cpu_s: float,
        company_s: float,
        wrong: int,
    ) -> Row:
        alone, computing = timings["alone", way.name], timings["compute", way.name]
        both, memory_s = timings["both", way.name, pokes], timings["memory"].median_s
        low, middle, high = quartiles(hidden_by_round(computing, alone, both))
        a_s, b_s = computing.median_s, alone.median_s
        return Row(
            collective=self.case.collective,
            algorithm=way.name,
            ranks=self.case.size,
            nbytes=self.case.nbytes,
            dtype=self.case.dtype,
            kind=self.case.kind,
            compute=compute,
            pokes=pokes,
            products=products,
            iterations=both.iterations,
            compute_s=a_s,
            communication_s=b_s,
            both_s=both.median_s,
            hidden=middle,
            quarter_hidden=low,
            three_quarters_hidden=high,
            cpu_s=cpu_s,
            company_cpu_s=company_s,
            memory_s=memory_s,
            bound=most_hidden(a_s, b_s, cpu_s, self.node, helper=way.helper),
            wrong=wrong,
        )


def hidden_by_round(compute: Timing, communication: Timing, both: Timing) -> list[float]:
    """(a + b - c) / b of every round, so that a noisy second is compared with itself."""
    return [
        (a + b - c) / b
        for a, b, c in zip(compute.rounds_s, communication.rounds_s, both.rounds_s, strict=True)
    ]


def header(options: Options, comm: Communicator, mpi: str, peers: dict[str, str]) -> dict[str, Any]:
    """What the figures are of."""
    what = {
        "dtype": options.dtype,
        "arrays": options.kind,
        "rounds": options.rounds,
        "threads": options.threads,
        "product": f"{PRODUCT_ROWS} x {PRODUCT_ROWS} float32",
    }
    return about("overlap", comm, mpi, what, peers)


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """The second is the median."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    first, second, third = statistics.quantiles(values, n=4, method="inclusive")
    return first, second, third


def titles(case: Case) -> list[str]:
    """The table's head."""
    place = "in place" if PLACE[case.collective] == "in" else "out of place"
    return [
        "#",
        f"# {case.collective} of {format_nbytes(case.nbytes)} {case.dtype}, {place}, {case.size} ranks",
        f"#{'':<16}{'compute':>8}{'pokes':>6}{'compute':>10}{'alone':>10}{'both':>10}"
        f"{'hidden':>8}{'quartiles':>12}{'bound':>7}{'cpu':>10}{'company':>10}{'memory':>10}{'#wrong':>8}",
        f"#{'':<16}{'(times)':>8}{'':>6}{'a (us)':>10}{'b (us)':>10}{'c (us)':>10}"
        f"{'(%)':>8}{'(%)':>12}{'(%)':>7}{'u (us)':>10}{'(us)':>10}{'(us)':>10}",
    ]


def show(row: Row) -> str:
    """One line of the table."""
    spread = f"{row.quarter_hidden * 100:.0f}..{row.three_quarters_hidden * 100:.0f}"
    return (
        f" {row.algorithm:<16}{row.compute:>8g}{row.pokes:>6}{row.compute_s * 1e6:>10.0f}"
        f"{row.communication_s * 1e6:>10.0f}{row.both_s * 1e6:>10.0f}{row.hidden * 100:>8.0f}{spread:>12}"
        f"{row.bound * 100:>7.0f}{row.cpu_s * 1e6:>10.0f}{row.company_cpu_s * 1e6:>10.0f}"
        f"{row.memory_s * 1e6:>10.0f}{row.wrong:>8}"
    )


def explain(rows: Sequence[Row], node: Node) -> list[str]:
    """For each way what was hidden at best, beside what can be, with the figures that say so."""
    told = [
        f"{node.ranks} ranks with {node.threads} threads each on {node.cores} cores of a node. Only waiting "
        "can be hidden: the bound is 1 - u/b where no core is idle and a >= b; see hpcpar/bench/overlap.py",
    ]
    for name in dict.fromkeys(row.algorithm for row in rows):
        best = max((row for row in rows if row.algorithm == name), key=lambda row: row.hidden)
        told.append(
            f"{name}: {best.hidden:.0%} hidden at best ({best.pokes} pokes, compute {best.compute:g} times), "
            f"bound {best.bound:.0%}: of its {format_duration(best.communication_s)} alone "
            f"{format_duration(best.cpu_s)} are processor time, where bare copies and sums would take "
            f"{format_duration(best.memory_s)}"
        )
    return told
