"""One rank ends before the others: how soon the launcher returns, with which status, and who is named.

    python benchmarks/scoreboard/ends.py
    python benchmarks/scoreboard/ends.py --launchers srun-none,srun-pmi2,srun-pmix --json ends.jsonl

The last of four ranks ends in one of these ways while the others wait in a collective, compute in Python,
sleep, or are inside of a C function that keeps Python's lock. Those with srun need a Slurm, and two nodes. A
try is

    ended    the launcher returned within --within-s of that moment, with the status that such an end has,
             and what was printed names the rank, by hpcpar or as srun's task
    late, status, unnamed    it did not

A rank that leaves by sys.exit() with a failure gives others a second to end as well: its limit is one more.
srun itself returns the largest status of all tasks, and 137 for one that it has killed: more than 128 counts
as right there where the end is an exception or a status.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, NoReturn

import numpy as np

import hpcpar
from hpcpar.comm import Communicator

RANKS = 4
LIMIT_S = 120.0
FAR_S = 3600.0

MORE_RANKS_THAN_CORES = {
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}
LAUNCHERS = {
    "mpiexec": ("mpiexec", "-n", str(RANKS)),
    "run": (sys.executable, "-m", "hpcpar", "run", "-n", str(RANKS), "--"),
    **{
        f"srun-{plugin}": ("srun", f"--mpi={plugin}", "--nodes=2", f"--ntasks={RANKS}")
        for plugin in ("none", "pmi2", "pmix")
    },
}


def raised() -> NoReturn:
    raise ValueError("broken on purpose")


def raised_in_a_thread() -> None:
    thread = threading.Thread(target=raised)
    thread.start()
    thread.join()
    time.sleep(FAR_S)


def interrupted() -> NoReturn:
    raise KeyboardInterrupt


def out_of_memory() -> object:
    return np.zeros(1 << 50)


def by_signal(number: int) -> Callable[[], None]:
    def end() -> None:
        os.kill(os.getpid(), number)
        time.sleep(FAR_S)

    return end


def in_a_finally(comm: Communicator) -> None:
    try:
        raised()
    finally:
        comm.barrier()


class Way(NamedTuple):
    """A way to end.

    statuses   that the job may have; None: any but 0
    more_s     time that the others get first
    """

    end: Callable[[], object]
    statuses: tuple[int, ...] | None = (1,)
    more_s: float = 0.0


WAYS = {
    "exception": Way(raised),
    "exception in a thread": Way(raised_in_a_thread),
    "MemoryError": Way(out_of_memory),
    "KeyboardInterrupt": Way(interrupted, (130,)),
    "sys.exit(3)": Way(
        lambda: sys.exit(3), (3, 1), 1.0
    ),  # 1: others waited for it, and ended by an exception
    "sys.exit(words)": Way(lambda: sys.exit("broken on purpose"), (1,), 1.0),
    "os._exit(4)": Way(lambda: os._exit(4), None),
    "os.abort()": Way(os.abort, None),
    "segmentation fault": Way(lambda: ctypes.string_at(0), None),
    "SIGKILL": Way(by_signal(signal.SIGKILL), None),
    "SIGTERM": Way(by_signal(signal.SIGTERM), None, 1.0),
    "SIGBUS": Way(by_signal(signal.SIGBUS), None),
}


def compute(comm: Communicator) -> None:
    while True:
        sum(range(1000))


OTHERS: dict[str, Callable[[Communicator], object]] = {
    "collective": lambda comm: comm.allreduce(np.ones(8)),
    "compute": compute,
    "sleep": lambda comm: time.sleep(FAR_S),
    "lock": lambda comm: ctypes.PyDLL(None).sleep(int(FAR_S)),
}


def be_rank(way: str, others: str, stamp: Path) -> None:
    """One rank of the program that is tried."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    comm = hpcpar.init()
    comm.barrier()
    if comm.rank < comm.size - 1:
        OTHERS[others](comm)
        return
    time.sleep(0.5)  # the others have begun
    stamp.write_text(repr(time.time()))
    WAYS[way].end()


class Try(NamedTuple):
    launcher: str
    way: str
    others: str
    result: str
    seconds: float
    status: int
    said: str


def tried(launcher: str, way: str, others: str, within_s: float) -> Try:
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as place:  # which all nodes see
        stamp = Path(place) / "stamp"
        program = (__file__, "--rank", way, others, str(stamp))
        if launcher != "run":
            program = (sys.executable, *program)
        job = subprocess.Popen(
            [*LAUNCHERS[launcher], *program],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env=os.environ | MORE_RANKS_THAN_CORES,
        )  # fmt: skip
        try:
            said, _ = job.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            job.kill()
            said, _ = job.communicate()
        seconds = time.time() - float(stamp.read_text()) if stamp.exists() else LIMIT_S
    expected = WAYS[way]
    is_status = job.returncode != 0
    if expected.statuses and not (launcher.startswith("srun") and job.returncode > 128):
        is_status = job.returncode in expected.statuses
    faults = [
        *(["late"] if seconds > within_s + expected.more_s else []),
        *([] if is_status else ["status"]),
        *([] if f"rank {RANKS - 1}" in said or f": task {RANKS - 1}: " in said else ["unnamed"]),
    ]
    return Try(launcher, way, others, ", ".join(faults) or "ended", seconds, job.returncode, said)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--launchers", default="mpiexec,run", help=f"of {', '.join(LAUNCHERS)}")
    parser.add_argument("--ways", default=",".join(WAYS), help="of ending")
    parser.add_argument("--others", default=",".join(OTHERS), help="what the others do")
    parser.add_argument("--within-s", type=float, default=2.0, help="default: %(default)s")
    parser.add_argument("--words", action="store_true", help="print what a launcher said in tries that fail")
    parser.add_argument("--json", type=Path, help="also write each try as a line of JSON")
    parser.add_argument("--rank", nargs=3, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    asked = options()
    if asked.rank:
        way, others, stamp = asked.rank
        be_rank(way, others, Path(stamp))
        return
    print(f"{'launcher':10} {'the last rank ends by':24} {'others':11} {'seconds':>7} {'status':>6}  result")
    tries = []
    for launcher in asked.launchers.split(","):
        for way in asked.ways.split(","):
            for others in asked.others.split(","):
                each = tried(launcher, way, others, asked.within_s)
                tries.append(each)
                print(
                    f"{launcher:10} {way:24} {others:11} {each.seconds:7.2f} {each.status:6d}  {each.result}",
                    flush=True,
                )
                if asked.words and each.result != "ended":
                    print("".join(f"    {line}\n" for line in each.said.splitlines()), flush=True)
    counted = Counter(each.result for each in tries)
    print(f"{counted['ended']} of {len(tries)} ended as they should; {dict(counted)}")
    if asked.json:
        kept = [each if each.result != "ended" else each._replace(said="") for each in tries]
        asked.json.write_text("".join(json.dumps(each._asdict()) + "\n" for each in kept))
    raise SystemExit(counted["ended"] != len(tries))


if __name__ == "__main__":
    main()
