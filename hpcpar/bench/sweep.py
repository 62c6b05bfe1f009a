"""`hpcpar bench collectives`: hpcpar's algorithms, MPI's own and gloo by size, as nccl-tests prints them.

algbw = bytes of the whole array / time; busbw = algbw × the collective's factor (nccl-tests,
doc/PERFORMANCE.md). GB = 1e9 bytes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from hpcpar.algorithms.registry import ALGORITHMS
from hpcpar.bench.measure import (
    COPY,
    MEMORY_COPY,
    PLACES,
    WINDOW,
    Buffers,
    Candidate,
    Case,
    Kind,
    Place,
    ResultRow,
    copy_candidate,
    measure,
    partner,
    ping_pong,
    row,
    usable,
    wrong_elements,
)
from hpcpar.comm.job_facts import versions
from hpcpar.comm.select import NATIVE, NATIVES
from hpcpar.errors import ConfigError
from hpcpar.launch.binding import affinity
from hpcpar.units import MiB, format_nbytes

if TYPE_CHECKING:
    from hpcpar.comm import Communicator

CHOSEN = "chosen"
"""The candidate that names no algorithm: what a user's call runs."""

Say = Callable[[str], None]

ORDERED_NBYTES = 64 * MiB
"""Memory limit, per rank, for trying an algorithm that sums in rank order."""

PEERS = ("mpi", "mpi_nonblocking", "mpi_persistent", "gloo")
"""Names of the candidates of `hpcpar.bench.peers`, which starts MPI when imported."""

PLACED: dict[Place, str] = {"out": "out of place", "in": "in place"}
"""Headings of the table, in column order."""


class Peer(Protocol):
    """Another library that runs collectives."""

    def candidates(
        self, case: Case, comm: Communicator, buffers: Buffers, place: Place
    ) -> list[Candidate]: ...


@dataclass(frozen=True)
class SweepOptions:
    """Sizes, element types and candidates to measure.

    factor       ratio of consecutive sizes
    candidates   names to keep; empty keeps all
    shared       arrays from `comm.allocate_shared`
    singly       read the clock after every call, and report the longest call
    errors       ConfigError for unknown candidates and for an empty range of sizes
    """

    collectives: tuple[str, ...] = ("allreduce",)
    min_nbytes: int = 4
    max_nbytes: int = 64 * MiB
    factor: int = 4
    dtype: str = "float32"
    kind: Kind = "torch"
    rounds: int = 5
    round_s: float = 0.02
    candidates: tuple[str, ...] = ()
    shared: bool = False
    singly: bool = False

    def __post_init__(self) -> None:
        if self.min_nbytes < 1:
            raise ConfigError(f"--min-bytes {self.min_nbytes} is no size to begin with: give 1 or more")
        if self.min_nbytes > self.max_nbytes:
            raise ConfigError(
                f"--min-bytes {self.min_nbytes} is above --max-bytes {self.max_nbytes}: there is nothing to "
                "measure"
            )
        algorithms = (name for each in self.collectives for name in ALGORITHMS.get(each, ()))
        require_known(self.candidates, (CHOSEN, *algorithms, NATIVE, *PEERS))

    def sizes(self) -> Iterator[int]:
        nbytes = self.min_nbytes
        while nbytes <= self.max_nbytes:
            yield nbytes
            nbytes *= self.factor

    def keeps(self, name: str) -> bool:
        return not self.candidates or name in self.candidates


def require_known(candidates: Sequence[str], known: Iterable[str]) -> None:
    known = tuple(dict.fromkeys(known))
    unknown = [name for name in candidates if name not in known]
    if unknown:
        raise ConfigError(f"there is no candidate {', '.join(unknown)}; there are {', '.join(known)}")


def ours(case: Case, comm: Communicator, b: Buffers, place: Place) -> list[Candidate]:
    """Return hpcpar's candidates: the chosen algorithm, every algorithm by name, and algorithm="native"."""
    if case.collective in ("send", "send_window"):
        return [_sending(case, comm, b)]
    found = [_ours(case, comm, b, place, None)]
    on_two_levels = 1 < len(set(comm.nodes)) < comm.size
    for name, algorithm in ALGORITHMS[case.collective].items():
        if algorithm.ordered and (comm.size - 1) * case.nbytes > ORDERED_NBYTES:
            continue
        if on_two_levels or not algorithm.placed:  # on one level these equal flat algorithms
            found.append(_ours(case, comm, b, place, name))
    has_native = case.collective in NATIVES
    if has_native and comm.native_obstacle(case.collective, case.nbytes, dtype=case.dtype) is None:
        found.append(_ours(case, comm, b, place, NATIVE))
    return found


def _ours(case: Case, comm: Communicator, b: Buffers, place: Place, name: str | None) -> Candidate:
    own = case.own(comm.rank)
    inside = place == "in"
    root = comm.rank == 0
    out = None if inside else b.other
    shard = b.whole[own] if inside else b.shard
    asked: dict[str, tuple[Any, dict[str, Any], Any]] = {
        "allreduce": (b.whole, {"out": out}, b.whole if inside else b.other),
        "reduce_scatter": (b.whole, {"out": None if inside else b.shard}, shard),
        "allgather": (shard, {"out": b.whole}, b.whole),
        "broadcast": (b.whole, {}, b.whole),
        "reduce": (
            b.whole,
            {"out": out if root else None},
            (b.whole if inside else b.other) if root else None,
        ),
        "alltoall": (b.whole, {"out": b.other}, b.other),
    }
    array, options, result = asked[case.collective]
    call = partial(getattr(comm, case.collective), array, algorithm=name, **options)
    return Candidate(name or CHOSEN, call, lambda: result)


def _sending(case: Case, comm: Communicator, b: Buffers) -> Candidate:
    first, peer = comm.rank == 0, partner(comm)
    if peer is None:
        return Candidate(CHOSEN, lambda: None, lambda: None)

    def window() -> None:
        if first:
            handles = [comm.start_send(b.whole, peer) for _ in range(WINDOW)]
        else:
            handles = [comm.start_recv(b.other, peer) for _ in range(WINDOW)]
        for handle in handles:
            handle.wait()
        if first:
            comm.recv(b.other[:1], peer)
        else:
            comm.send(b.whole[:1], peer)

    if case.collective == "send":
        send, receive = partial(comm.send, b.whole, peer), partial(comm.recv, b.other, peer)
        return Candidate(CHOSEN, ping_pong(comm, send, receive), lambda: b.other)
    return Candidate(CHOSEN, window, lambda: None if first else b.other)


def measure_case(
    case: Case, options: SweepOptions, comm: Communicator, peers: Sequence[Peer]
) -> list[tuple[ResultRow, ...]]:
    """Measure all candidates of one size in turn, in and out of place, and a memory copy. Collective."""
    buffers = Buffers.of(case, comm, shared=options.shared)
    found: dict[tuple[str, Place], Candidate] = {}
    for place in PLACES[case.collective]:
        candidates = ours(case, comm, buffers, place)
        for peer in peers:
            candidates += peer.candidates(case, comm, buffers, place)
        kept = [candidate for candidate in candidates if options.keeps(candidate.name)]
        for candidate in candidates:
            if candidate not in kept:
                candidate.close()
        found |= {(candidate.name, place): candidate for candidate in usable(kept, comm)}
    wrong = {key: wrong_elements(candidate, case, comm, buffers) for key, candidate in found.items()}
    buffers.clear()
    runs: dict[Any, Callable[[], object]] = {key: candidate.run for key, candidate in found.items()}
    runs[COPY] = copy_candidate(case, buffers).run
    timings = measure(runs, comm, rounds=options.rounds, round_s=options.round_s, singly=options.singly)
    for candidate in found.values():
        candidate.close()
    lines = []
    factor = 0.5 if case.collective == "send" else 1.0  # a ping-pong sends two messages; the row is for one
    for name in dict.fromkeys(name for name, _ in found):
        chose = chosen_name(case, comm) if name == CHOSEN else ""
        places = [place for place in PLACES[case.collective] if (name, place) in found]
        lines.append(
            tuple(
                row(case, name, place, timings[name, place].scaled(factor), wrong[name, place], chose)
                for place in places
            )
        )
    copied = Case(COPY, case.count, case.dtype, case.kind, case.size)
    lines.append((row(copied, MEMORY_COPY, "out", timings[COPY], 0),))
    return lines


def chosen_name(case: Case, comm: Communicator) -> str:
    if case.collective not in ALGORITHMS:
        return ""
    return comm.algorithm_for(case.collective, case.nbytes, dtype=case.dtype)


def run(
    options: SweepOptions, comm: Communicator, peers: Sequence[Peer] = (), say: Say = lambda line: None
) -> list[ResultRow]:
    """Measure all cases of the options; report each row on rank 0. Collective."""
    speak = say if comm.rank == 0 else lambda line: None
    rows: list[ResultRow] = []
    for collective in options.collectives:
        if collective.startswith("send") and comm.size == 1:
            speak(f"# {collective} is left out: it takes two ranks")
            continue
        for title in titles(collective, singly=options.singly):
            speak(title)
        done = set()
        for nbytes in options.sizes():
            case = Case.of(collective, nbytes, options.dtype, options.kind, comm.size)
            if case in done:  # sizes below one element for each rank
                continue
            done.add(case)
            for line in measure_case(case, options, comm, peers):
                rows += line
                speak(show(line))
        for told in compare([one for one in rows if one.collective == collective]):
            speak(f"# {told}")
    return rows


def header(options: SweepOptions, comm: Communicator, mpi: str, peers: dict[str, str]) -> dict[str, Any]:
    """Describe the job and the options for the head of the results."""
    memory = "shared" if options.shared else "ordinary"
    what = {"dtype": options.dtype, "arrays": f"{options.kind}, {memory} memory", "rounds": options.rounds}
    return about("collectives", comm, mpi, what, peers)


def about(
    benchmark: str, comm: Communicator, mpi: str, what: dict[str, Any], peers: dict[str, str]
) -> dict[str, Any]:
    """Describe the job, the benchmark's own settings `what`, and the versions of all libraries."""
    found = versions()
    return {
        "benchmark": benchmark,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "hpcpar": found["hpcpar"],
        "ranks": comm.size,
        "nodes": len(set(comm.nodes)),
        "ranks_per_node": max(comm.nodes.count(node) for node in set(comm.nodes)),
        **what,
        "mpi": mpi,
        **{f"peer {name}": what for name, what in peers.items()},
        **found,
        "cores": len(affinity()),
    }


def titles(collective: str, *, singly: bool = False) -> list[str]:
    half = "     time    ±%   algbw   busbw  #wrong" + ("  longest" if singly else "")
    units = "     (us)         (GB/s)  (GB/s)        " + ("     (us)" if singly else "")
    width = len(half)
    return [
        "#",
        f"# {collective}",
        f"#{'':53}{'out of place':^{width}}{'in place':^{width}}",
        f"#{'size':>11} {'count':>12} {'type':>8}  {'algorithm':<18}{half}{half}",
        f"#{'(B)':>11} {'(elements)':>12} {'':>8}  {'':<18}{units}{units}",
    ]


def show(line: Sequence[ResultRow]) -> str:
    """Format one row of the table: a candidate out of place and in place."""
    first = line[0]
    by_place = {row.place: row for row in line}
    longest = first.longest_call_s is not None
    cells = "".join(_cells(by_place.get(place), longest) for place in PLACED)
    text = f" {first.nbytes:>11} {first.count:>12} {first.dtype:>8}  {first.algorithm:<18}{cells}"
    return f"{text.rstrip()}  {first.chose}".rstrip()


def _cells(row: ResultRow | None, longest: bool) -> str:
    if row is None:
        return f"{'-':>9} {'-':>5} {'-':>7} {'-':>7} {'-':>7}" + (f"{'-':>9}" if longest else "")
    spread = (row.slowest_s - row.fastest_s) / 2 / row.median_s
    shown = (
        f"{row.median_s * 1e6:>9.1f} {spread * 100:>5.0f} {row.algbw_gb_per_s:>7.2f} "
        f"{row.busbw_gb_per_s:>7.2f} {row.wrong:>7}"
    )
    return shown + (f"{row.longest_call_s * 1e6:>9.0f}" if row.longest_call_s is not None else "")


def compare(rows: Sequence[ResultRow]) -> list[str]:
    """Summarise the speed of the chosen algorithm over each peer: geometric mean, and the worst size."""
    told = []
    peers = [name for name in dict.fromkeys(row.algorithm for row in rows) if name in PEERS]
    for place in PLACED:
        times = {(row.algorithm, row.nbytes): row.median_s for row in rows if row.place == place}
        for peer in peers:
            ratios = {
                nbytes: times[peer, nbytes] / seconds
                for (name, nbytes), seconds in times.items()
                if name == CHOSEN and (peer, nbytes) in times
            }
            if ratios:
                mean = math.exp(sum(map(math.log, ratios.values())) / len(ratios))
                worst = min(ratios, key=lambda nbytes: ratios[nbytes])
                told.append(
                    f"{PLACED[place]}, {CHOSEN} against {peer}: {mean:.2f} times as fast (geometric mean of "
                    f"{len(ratios)} sizes), least {ratios[worst]:.2f} at {format_nbytes(worst)}"
                )
    return told


def write_json(path: Path, facts: dict[str, Any], rows: Sequence[Any]) -> None:
    """Write JSON lines, the header first; rows are dataclasses."""
    lines = [json.dumps(facts), *(json.dumps(asdict(row)) for row in rows)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def read_json(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    first, *others = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line)
    return first, others
