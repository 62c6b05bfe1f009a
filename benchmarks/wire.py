"""Collectives over a wire: hosts in network namespaces, their links held to 1 Gbit/s.

    python benchmarks/wire.py                                              (as root)
    python benchmarks/wire.py --hosts 2 --ranks-per-host 2 --sizes 16M --json wire.jsonl

For each number of hosts and of ranks on each, a job is started over them with Hydra, MPICH's launcher.
Ours and MPI's own run in turn within each round. A line of the table has

    time      of a call, the median of the rounds, and half their spread
    wire      bytes that a host has sent for one call, by its network interface (headers and all that is
              sent again are in it); the host that has sent most
    steps     bytes that it should send by the steps of that algorithm
    theory    the least that any algorithm must send: 2(N-1)/N·S for an all-reduce on N hosts, half of
              that for a reduce-scatter or an all-gather, however many ranks a host has
    of wire   the time that theory's bytes take at the pace of a plain TCP stream between two hosts, which is
              measured before each table, over the time of the call

`hosts.py` makes the hosts, and takes them down whatever happens.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import hosts as network
from common import at_least, output_file

import hpcpar
from hpcpar.algorithms.registry import ALGORITHMS, Algorithm
from hpcpar.algorithms.simulate import simulate
from hpcpar.algorithms.topology import MessageCost, Topology
from hpcpar.bench import peers, sweep
from hpcpar.bench.measure import (
    Buffers,
    Candidate,
    Case,
    Place,
    ResultRow,
    measure,
    row,
    usable,
    wrong_elements,
)
from hpcpar.comm.select import segments_for
from hpcpar.transport.mpi_library import library_facts
from hpcpar.units import MiB, busbw_factor, format_nbytes, parse_nbytes

if TYPE_CHECKING:
    from hpcpar.comm import Communicator

COLLECTIVES = ("allreduce", "reduce_scatter", "allgather")
CANDIDATES = (sweep.CHOSEN, "ring", "hierarchical", "hierarchical_pipelined", "mpi")

PLACE: Place = "in"
"""In place, as training does it: no copy of the input is in the time."""

TRANSPORT = {"MPIR_CVAR_CH4_NETMOD": "ofi", "FI_PROVIDER": "tcp"}
"""What makes the MPICH wheel speak TCP between hosts; within a host it uses shared memory."""

SETTINGS = {"HPCPAR_TUNING": "none", "HPCPAR_TIMEOUT_S": "120", "OMP_NUM_THREADS": "1"}

STREAM_NBYTES, PIECE_NBYTES = 32 * MiB, MiB
STREAMS = 3
COUNTED_CALLS = 2


@dataclass(frozen=True)
class Job:
    hosts: int
    ranks_per_host: int
    sizes: tuple[int, ...]
    collectives: tuple[str, ...]
    candidates: tuple[str, ...]
    rounds: int
    transport: dict[str, str]
    json: str


@dataclass(frozen=True)
class Line:
    """One measured line: seconds of a call, and what a host sends for it."""

    hosts: int
    ranks_per_host: int
    timed: ResultRow
    stream_mb_per_s: float
    wire_nbytes: float
    steps_nbytes: float | None
    theory_nbytes: float

    @property
    def of_wire(self) -> float:
        return self.theory_nbytes / (self.stream_mb_per_s * 1e6) / self.timed.median_s

    def facts(self) -> dict[str, object]:
        mine = {name: value for name, value in asdict(self).items() if name != "timed"}
        return {**asdict(self.timed), **mine, "of_wire": self.of_wire}


def main() -> int:
    """Make hosts, and start a job on them, for each number of hosts and of ranks."""
    options = parse(sys.argv[1:])
    if options.inside:
        return measure_on_all_ranks(job_of(options.inside))
    file = options.json and options.json.resolve()
    if file:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("", encoding="utf-8")
    failed = 0
    try:
        for count in options.hosts:
            with network.hosts(count, network.Link(rate=options.rate)) as up:
                for ranks in options.ranks_per_host:
                    job = Job(
                        count,
                        ranks,
                        tuple(options.sizes),
                        tuple(options.collectives),
                        tuple(options.candidates),
                        options.rounds,
                        TRANSPORT | dict(options.set),
                        str(file or ""),
                    )
                    failed = launch(job, up) or failed
    except network.HostsError as error:
        print(f"wire: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("wire: interrupted; the hosts are down", file=sys.stderr)
        return 130
    return failed


def parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--ranks-per-host", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--sizes", type=parse_nbytes, nargs="+", default=[16 * MiB, 64 * MiB])
    parser.add_argument("--collectives", nargs="+", choices=COLLECTIVES, default=list(COLLECTIVES))
    parser.add_argument("--candidates", nargs="+", default=list(CANDIDATES))
    parser.add_argument("--rounds", type=at_least(1), default=3)
    parser.add_argument("--rate", default="1gbit", help="of each link, as tc has it")
    parser.add_argument(
        "--set", type=setting, nargs="+", default=[], metavar="NAME=VALUE", help="of the ranks' environment"
    )
    parser.add_argument(
        "--json", type=output_file, help="write JSON lines: for each job a header, then its lines"
    )
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    return parser.parse_args(words)


def setting(text: str) -> tuple[str, str]:
    """ "FI_PROVIDER=tcp" -> ("FI_PROVIDER", "tcp")"""
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise argparse.ArgumentTypeError(f"{text!r} is no setting: write NAME=VALUE")
    return name, value


def job_of(text: str) -> Job:
    facts = json.loads(text)
    return Job(**{name: tuple(value) if isinstance(value, list) else value for name, value in facts.items()})


def launch(job: Job, up: network.Hosts) -> int:
    """Start the ranks over the hosts with Hydra, which enters them where it would use ssh; its status."""
    beside = Path(sys.executable).parent
    mpiexec = shutil.which("mpiexec", path=os.pathsep.join((str(beside), os.environ.get("PATH", ""))))
    if mpiexec is None:
        raise network.HostsError(
            f"no mpiexec beside {sys.executable} or on the PATH; pip install hpcpar[mpich]"
        )
    words = [mpiexec, "-launcher", "ssh", "-launcher-exec", str(up.enter), "-hosts", ",".join(up.names)]
    words += ["-ppn", str(job.ranks_per_host), "-n", str(job.hosts * job.ranks_per_host)]
    words += [sys.executable, str(Path(__file__).resolve()), "--inside", json.dumps(asdict(job))]
    process = subprocess.Popen(up.command(words), env=os.environ | SETTINGS | job.transport)
    try:
        return process.wait()
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()


def measure_on_all_ranks(job: Job) -> int:
    world = hpcpar.init()
    if len(set(world.nodes)) != job.hosts:
        raise SystemExit(f"MPI sees {len(set(world.nodes))} nodes on {job.hosts} hosts: {world.nodes}")
    say: Callable[[str], None] = (
        (lambda text: print(text, flush=True)) if world.rank == 0 else lambda text: None
    )
    with peers.connected(world, job.candidates) as (others, said):
        options = sweep.SweepOptions(rounds=job.rounds)
        facts = sweep.header(options, world, library_facts()["vendor"], said)
        facts |= {"benchmark": "wire", "link": link_facts(), "transport": job.transport}
        for name, value in facts.items():
            say(f"# {name}: {value}")
        lines = [json.dumps(facts)]
        for collective in job.collectives:
            stream_mb_per_s = stream_rate(world) / 1e6
            for title in titles(collective, job, stream_mb_per_s):
                say(title)
            for nbytes in job.sizes:
                case = Case.of(collective, nbytes, "float32", "torch", world.size)
                for line in measure_case(case, job, world, others, stream_mb_per_s):
                    say(show(line))
                    lines.append(json.dumps(line.facts()))
    if world.rank == 0 and job.json:
        with open(job.json, "a", encoding="utf-8") as file:
            file.write("\n".join(lines) + "\n")
    return 0


def measure_case(
    case: Case, job: Job, comm: Communicator, others: Sequence[sweep.Peer], stream_mb_per_s: float
) -> Iterator[Line]:
    """Measure all candidates of one size in turn; then count each one's bytes alone. Collective."""
    buffers = Buffers.of(case, comm)
    found = sweep.ours(case, comm, buffers, PLACE)
    for peer in others:
        found += peer.candidates(case, comm, buffers, PLACE)
    chosen = sweep.chosen_name(case, comm)
    wanted = set(job.candidates)
    if sweep.CHOSEN in wanted:
        wanted.discard(chosen)  # or it would run twice
    for candidate in found:
        if candidate.name not in wanted:
            candidate.close()
    able = usable([candidate for candidate in found if candidate.name in wanted], comm)
    wrong = {candidate.name: wrong_elements(candidate, case, comm, buffers) for candidate in able}
    buffers.clear()
    timings = measure(
        {candidate.name: candidate.run for candidate in able}, comm, rounds=job.rounds, round_s=0.0
    )
    for candidate in able:
        chose = chosen if candidate.name == sweep.CHOSEN else ""
        algorithm = ALGORITHMS[case.collective].get(chose or candidate.name)
        yield Line(
            job.hosts,
            job.ranks_per_host,
            row(case, candidate.name, PLACE, timings[candidate.name], wrong[candidate.name], chose),
            stream_mb_per_s,
            wire_nbytes(candidate, comm),
            algorithm and scheduled_nbytes(algorithm, job.hosts, job.ranks_per_host, case.nbytes),
            # The least that each host must send, however many ranks it has (Patarasuk, Yuan 2009).
            busbw_factor(case.collective, job.hosts) * case.nbytes,
        )
        candidate.close()


def scheduled_nbytes(algorithm: Algorithm, hosts: int, ranks_per_host: int, nbytes: int) -> float:
    """Return the bytes that each host sends to others by the algorithm's steps; the mean of the hosts."""
    topology = Topology(ranks_per_host, MessageCost(0.0, 0.0), MessageCost(0.0, 0.0))
    segments = segments_for(algorithm, nbytes)
    cost = simulate(algorithm, hosts * ranks_per_host, nbytes, topology, segments=segments)
    return cost.nbytes_between_nodes / hosts


def wire_nbytes(candidate: Candidate, comm: Communicator) -> float:
    """Return the bytes that the busiest host sends for one call, by its interface's counter. Collective."""
    comm.barrier()
    before = sent_nbytes()
    comm.barrier()  # none sends for the next call before all have looked
    for _ in range(COUNTED_CALLS):
        candidate.run()
    comm.barrier()
    return max(comm.allgather_object((sent_nbytes() - before) / COUNTED_CALLS))


def sent_nbytes() -> int:
    for line in Path("/proc/self/net/dev").read_text(encoding="ascii").splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == network.PORT:
            return int(counters.split()[8])
    raise network.HostsError(f"this host has no interface {network.PORT}")


def stream_rate(comm: Communicator) -> float:
    """Return the bytes per second of a plain TCP stream from the first host to the last. Collective."""
    last = comm.size - 1
    listener = socket.create_server((socket.gethostname(), 0)) if comm.rank == last else None
    where = comm.broadcast_object(listener.getsockname() if listener else None, last)
    rates: list[float] = []
    if listener is not None:
        connection, _ = listener.accept()
        with listener, connection:
            for _ in range(1 + STREAMS):
                drain(connection)
    elif comm.rank == 0:
        with socket.create_connection(where) as connection:
            rates = [send_stream(connection) for _ in range(1 + STREAMS)][1:]
    comm.barrier()
    return statistics.median(comm.broadcast_object(rates))


def send_stream(connection: socket.socket) -> float:
    """Return bytes per second, until the other end says that all has come."""
    piece = bytes(PIECE_NBYTES)
    started_s = time.perf_counter()
    for _ in range(STREAM_NBYTES // PIECE_NBYTES):
        connection.sendall(piece)
    connection.recv(1)
    return STREAM_NBYTES / (time.perf_counter() - started_s)


def drain(connection: socket.socket) -> None:
    piece = bytearray(PIECE_NBYTES)
    left = STREAM_NBYTES
    while left:
        left -= connection.recv_into(piece, min(left, PIECE_NBYTES))
    connection.sendall(b"!")


def link_facts() -> dict[str, str]:
    commands = {"shaper": f"tc qdisc show dev {network.PORT}", "route": f"ip route show {network.NETWORK}"}
    return {
        what: subprocess.run(command.split(), capture_output=True, text=True, check=True).stdout.strip()
        for what, command in commands.items()
    }


def titles(collective: str, job: Job, stream_mb_per_s: float) -> list[str]:
    return [
        "#",
        f"# {collective}, {job.hosts} hosts, {job.ranks_per_host} ranks on each; "
        f"a TCP stream between two: {stream_mb_per_s:.1f} MB/s",
        f"#{'size':>9}  {'algorithm':<24}{'time':>10}{'±%':>5}{'wire':>11}{'steps':>11}{'theory':>11}"
        f"{'of wire':>9}{'#wrong':>8}",
        f"#{'':>9}  {'':<24}{'(ms)':>10}{'':>5}{'(MB a call, sent by a host)':>33}{'(%)':>9}",
    ]


def show(line: Line) -> str:
    timed = line.timed
    spread = (timed.slowest_s - timed.fastest_s) / 2 / timed.median_s
    steps = "-" if line.steps_nbytes is None else f"{line.steps_nbytes / 1e6:.2f}"
    text = (
        f" {format_nbytes(timed.nbytes):>9}  {timed.algorithm:<24}"
        f"{timed.median_s * 1e3:>10.1f}{spread * 100:>5.0f}"
        f"{line.wire_nbytes / 1e6:>11.2f}{steps:>11}{line.theory_nbytes / 1e6:>11.2f}"
        f"{line.of_wire * 100:>9.1f}{timed.wrong:>8}  {timed.chose}"
    )
    return text.rstrip()


if __name__ == "__main__":
    sys.exit(main())
