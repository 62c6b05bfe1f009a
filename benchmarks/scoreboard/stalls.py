"""One rank does not come to a collective: who is named, when, and when the job ends.

    python benchmarks/scoreboard/stalls.py

The last of three ranks stops, sleeps, computes, keeps Python's lock inside of C, blocks in reading, or
leaves, while the others wait in an all-reduce. A try is

    named    within `--within-s` after `--warn-s` the log of a rank names the missing one with its host, and
             with file and line of its program where it can still tell; as soon after `--timeout-s`, or after
             the rank has left, the job has ended with a status other than 0
    late, unnamed, no line, status    it was not so
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

import hpcpar

RANKS = 3
LIMIT_S = 60.0
FAR_S = 3600.0


def compute() -> None:
    while True:
        sum(range(1000))


def block_in_reading(read: Callable[..., object] | None = None) -> None:
    """Read from a pipe that nobody writes to, by Python or by this function of C."""
    reader, _writer = os.pipe()
    if read is None:
        os.read(reader, 1)
    else:
        read(reader, ctypes.create_string_buffer(1), 1)


class Kind(NamedTuple):
    """What the last rank does.

    has_line   a signal can still find its line
    leaves     it comes to its end, of which the others hear at once
    """

    do: Callable[[], object]
    has_line: bool = True
    leaves: bool = False


KINDS = {
    "SIGSTOP": Kind(lambda: os.kill(os.getpid(), signal.SIGSTOP), has_line=False),
    "sleep": Kind(lambda: time.sleep(FAR_S)),
    "compute": Kind(compute),
    "lock": Kind(lambda: block_in_reading(ctypes.PyDLL(None).read)),
    "read": Kind(block_in_reading),
    "return": Kind(lambda: None, leaves=True),
}


def be_rank(kind: str, stamp: Path) -> None:
    """One rank of the program that is tried."""
    comm = hpcpar.init()
    comm.barrier()
    if comm.rank < comm.size - 1:
        comm.allreduce(np.ones(8))
    stamp.write_text(repr(time.time()))
    KINDS[kind].do()


class Try(NamedTuple):
    """warned_s, ended_s: after the rank did not come."""

    kind: str
    result: str
    warned_s: float
    ended_s: float
    said: str


def tried(kind: str, warn_s: float, timeout_s: float, within_s: float) -> Try:
    with tempfile.TemporaryDirectory() as place:
        stamp = Path(place) / "stamp"
        launcher = (sys.executable, "-m", "hpcpar", "run", "-n", str(RANKS), "--")
        job = subprocess.Popen(
            [*launcher, __file__, "--rank", kind, str(stamp)],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env={**os.environ, "HPCPAR_STALL_WARN_S": str(warn_s), "HPCPAR_TIMEOUT_S": str(timeout_s)},
        )  # fmt: skip
        assert job.stdout is not None
        lines = [(time.time(), line) for line in job.stdout]
        status, ended = job.wait(LIMIT_S), time.time()
        began = float(stamp.read_text())
    missing = re.compile(
        rf"has waited .* for rank {RANKS - 1}: rank {RANKS - 1} \(pid \d+ on {socket.gethostname()}\)"
    )
    warnings = [(when, line) for when, line in lines if missing.search(line)]
    expected = KINDS[kind]
    warned_s = warnings[0][0] - began if warnings else LIMIT_S
    ends_s = 0.0 if expected.leaves else timeout_s
    faults = [
        *(["late"] if ended - began > ends_s + within_s else []),
        *(["status"] if status == 0 else []),
    ]
    if not expected.leaves:
        faults += ["unnamed"] if warned_s > warn_s + within_s else []
        has_line = any(re.search(rf"{Path(__file__).name}:\d+", line) for _, line in warnings)
        faults += ["no line"] if expected.has_line and not has_line else []
    said = "".join(line for _, line in lines)
    return Try(kind, ", ".join(faults) or "named", warned_s, ended - began, said)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kinds", default=",".join(KINDS), help="default: all")
    parser.add_argument("--tries", type=int, default=2, help="of each (default: %(default)s)")
    parser.add_argument("--warn-s", type=float, default=2.0, help="default: %(default)s; users have 60")
    parser.add_argument("--timeout-s", type=float, default=5.0, help="default: %(default)s; users have 600")
    parser.add_argument("--within-s", type=float, default=1.0, help="default: %(default)s")
    parser.add_argument("--words", action="store_true", help="print what was said")
    parser.add_argument("--json", type=Path, help="also write each try as a line of JSON")
    parser.add_argument("--rank", nargs=2, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    asked = options()
    if asked.rank:
        be_rank(asked.rank[0], Path(asked.rank[1]))
        return
    print(f"{'the last rank does':20} {'warned (s)':>10} {'ended (s)':>10}  result")
    tries = []
    for kind in asked.kinds.split(","):
        for _ in range(asked.tries):
            each = tried(kind, asked.warn_s, asked.timeout_s, asked.within_s)
            tries.append(each)
            warned = "-" if KINDS[kind].leaves else f"{each.warned_s:.2f}"
            print(f"{kind:20} {warned:>10} {each.ended_s:10.2f}  {each.result}", flush=True)
            if asked.words:
                print("".join(f"    {line}\n" for line in each.said.splitlines()), flush=True)
    counted = Counter(each.result for each in tries)
    print(f"{counted['named']} of {len(tries)} named and ended as they should; {dict(counted)}")
    if asked.json:
        asked.json.write_text("".join(json.dumps(each._asdict()) + "\n" for each in tries))
    raise SystemExit(counted["named"] != len(tries))


if __name__ == "__main__":
    main()
