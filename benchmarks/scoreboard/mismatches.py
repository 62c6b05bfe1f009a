"""Ranks that make different calls: who is told, and how soon.

    mpiexec -n 2 python benchmarks/scoreboard/mismatches.py
    mpiexec -n 4 python benchmarks/scoreboard/mismatches.py --sizes 8,4K,4M --json mismatches.jsonl

In every case the last rank deviates. Each case has a communicator of its own; each rank makes the case's
calls and then a few barriers, catches its error, and tells the others what it was and after which time:

    named      every rank has got a MismatchError (or another error of hpcpar that says what is wrong)
    named k/n  k of n ranks have; the others waited until their limit, or noticed nothing
    timed out  a StallError, after --timeout-s (by default a program waits for 600 s)
    silent     no rank has got an error

The status is 0 if all are named but those of `NOT_SEEN` and `STALLS`.

Settings are those of the environment, so defaults as shipped, but for the time limit.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch  # noqa: F401  which the first call with compression would import

import hpcpar
from hpcpar.comm import Communicator
from hpcpar.errors import HpcparError, StallError
from hpcpar.units import format_nbytes, parse_nbytes

CLOSING_BARRIERS = 9
"""A rank that waits for nobody, such as the root of a broadcast, hears in a later call: eight slots later."""

IMMEDIATE_S = 1.0

NOT_SEEN = ("order of two arrays of one shape",)
"""Nothing that ranks exchange tells these apart, nor does checked mode, unless the caller names them."""

STALLS = ("other communicator", "message: other tag", "message: not sent")
"""Ranks that wait for what nobody sends are told who waits for whom, at the limit."""

Calls = Callable[[Communicator, int, bool], Any]
"""Of a communicator and a number of float32 elements; True: on the rank that deviates."""


def ones(count: int, dtype: str = "float32") -> np.ndarray:
    return np.ones(count, dtype)


def counts(comm: Communicator, n: int) -> list[int]:
    """Elements of each rank's piece: uneven ones, n in all."""
    return [n - comm.size + 1] + [1] * (comm.size - 1)


def two(comm: Communicator, first: int, second: int, other: bool) -> None:
    """Reduce two arrays, in the other order on one rank."""
    arrays = [ones(first), 2 * ones(second)]
    for array in reversed(arrays) if other else arrays:
        comm.allreduce(array)


def two_named(comm: Communicator, n: int, other: bool) -> None:
    """Reduce two arrays of one shape, each by its name, in the other order on one rank."""
    for name in ("second", "first") if other else ("first", "second"):
        comm.allreduce(ones(n), name=name)


def two_async(comm: Communicator, first: int, second: int, other: bool) -> None:
    arrays = [ones(first), 2 * ones(second)]
    for handle in [comm.start_allreduce(array) for array in (reversed(arrays) if other else arrays)]:
        handle.wait()


def some(comm: Communicator, n: int, how_many: int) -> None:
    for _ in range(how_many):
        comm.allreduce(ones(n))


def elsewhere(comm: Communicator, n: int, other: bool) -> None:
    """Call on another communicator of the same ranks."""
    second = comm.split(0, comm.rank)
    (second if other else comm).allreduce(ones(n))


def message(
    send: Callable[[Communicator, int, int], Any], receive: Callable[[Communicator, int], Any]
) -> Calls:
    """Send from rank 0 to the last rank, which deviates; the others make no call."""

    def calls(comm: Communicator, n: int, other: bool) -> None:
        if comm.rank == 0:
            send(comm, n, comm.size - 1)
        elif other:
            receive(comm, n)

    return calls


def sent(comm: Communicator, n: int, to: int) -> None:
    comm.send(ones(n), to)


def started(comm: Communicator, n: int, to: int) -> None:
    comm.start_send(ones(n), to).wait()


def alltoall_counts(comm: Communicator, n: int, other: bool) -> None:
    """The last rank expects one element more from rank 0 than that sends."""
    each = [max(1, n // comm.size)] * comm.size
    received = [each[0] + other, *each[1:]]
    comm.alltoall(ones(sum(each)), send_counts=each, receive_counts=received)


COLLECTIVES: dict[str, Calls] = {
    "count: n and n+1": lambda comm, n, other: comm.allreduce(ones(n + other)),
    "count: n and n/2": lambda comm, n, other: comm.allreduce(ones(n // 2 if other else n)),
    "count, async": lambda comm, n, other: comm.start_allreduce(ones(n + other)).wait(),
    "dtype: float32 and int32": lambda comm, n, o: comm.allreduce(ones(n, "int32" if o else "float32")),
    "dtype: float32 and float64 of as many bytes": lambda comm, n, other: comm.allreduce(
        ones(n // 2, "float64") if other else ones(n)
    ),
    "op: sum and max": lambda comm, n, other: comm.allreduce(ones(n), "max" if other else "sum"),
    "op: sum and average": lambda comm, n, other: comm.allreduce(ones(n), "average" if other else "sum"),
    "order of two shapes": lambda comm, n, other: two(comm, n, 2 * n, other),
    "order of two shapes, async": lambda comm, n, other: two_async(comm, n, 2 * n, other),
    "order of two arrays of one shape": lambda comm, n, other: two(comm, n, n, other),
    "order of two arrays of one shape, with name=": two_named,
    "allreduce and broadcast": lambda comm, n, o: comm.broadcast(ones(n)) if o else comm.allreduce(ones(n)),
    "allreduce and reduce": lambda comm, n, o: comm.reduce(ones(n)) if o else comm.allreduce(ones(n)),
    "allreduce and barrier": lambda comm, n, o: comm.barrier() if o else comm.allreduce(ones(n)),
    "root of broadcast": lambda comm, n, other: comm.broadcast(ones(n), root=int(other)),
    "root of scatter": lambda comm, n, other: comm.scatter(ones(n * comm.size), int(other), out=ones(n)),
    "algorithm": lambda comm, n, o: comm.allreduce(ones(n), algorithm="ring" if o else "recursive_doubling"),
    "blocking and async": lambda comm, n, o: (
        comm.start_reduce(ones(n)).wait() if o else comm.allreduce(ones(n))
    ),
    "one of three calls skipped": lambda comm, n, other: some(comm, n, 2 if other else 3),
    "one call more": lambda comm, n, other: some(comm, n, 4 if other else 3),
    "other communicator": elsewhere,
    "prescale_factor": lambda comm, n, o: comm.allreduce(ones(n), prescale_factor=2.0 if o else 1.0),
    "compression": lambda comm, n, o: comm.allreduce(ones(n), compression="float16" if o else None),
    "counts of allgather": lambda comm, n, other: comm.allgather(ones(n + other)),
    "counts of reduce_scatter": lambda comm, n, other: comm.reduce_scatter(
        ones(n + comm.size), counts=counts(comm, n + comm.size)[:: -1 if other else 1]
    ),
    "counts of alltoall": alltoall_counts,
    "empty array": lambda comm, n, other: comm.allreduce(ones(0 if other else n)),
    "object and array": lambda comm, n, o: comm.broadcast_object("x") if o else comm.broadcast(ones(n)),
}

MESSAGES: dict[str, Calls] = {
    "message: receive longer": message(sent, lambda comm, n: comm.recv(ones(n + 1), 0)),
    "message: receive shorter": message(sent, lambda comm, n: comm.recv(ones(n - 1), 0)),
    "message: float32 and int32": message(sent, lambda comm, n: comm.recv(ones(n, "int32"), 0)),
    "message: float32 and float64 of as many bytes": message(
        sent, lambda comm, n: comm.recv(ones(n // 2, "float64"), 0)
    ),
    "message: float32 and int32, async": message(
        started, lambda comm, n: comm.start_recv(ones(n, "int32"), 0).wait()
    ),
    "message: receive longer, async": message(
        started, lambda comm, n: comm.start_recv(ones(n + 1), 0).wait()
    ),
    "message: other tag": message(sent, lambda comm, n: comm.recv(ones(n), 0, tag=1)),
    "message: object and array": message(sent, lambda comm, n: comm.recv_object(0)),
    "message: not sent": message(lambda comm, n, to: None, lambda comm, n: comm.recv(ones(n), 0)),
}

CASES = COLLECTIVES | MESSAGES


class Told(NamedTuple):
    """Error of one rank: how it counts, after which time, and its words."""

    kind: str
    seconds: float
    text: str


def tell(comm: Communicator, calls: Calls, n: int) -> Told:
    """Make the calls of a case, and return what this rank hears."""
    began_s = time.perf_counter()
    try:
        calls(comm, n, comm.rank == comm.size - 1)
        for _ in range(CLOSING_BARRIERS):
            comm.barrier()
    except StallError as error:
        kind, text = "timed out", str(error)
    except HpcparError as error:
        kind, text = "named", f"{type(error).__name__}: {error}"
    except Exception as error:
        kind, text = "other error", f"{type(error).__name__}: {error}"
    else:
        kind, text = "silent", ""
    return Told(kind, time.perf_counter() - began_s, text)


def gather(world: Communicator, told: Told) -> list[Told]:
    """Wait for all ranks, however long theirs take, and exchange what each was told."""
    barrier = world.start_barrier()
    while True:
        try:
            barrier.wait()
            break
        except StallError:
            continue
    return [Told(*each) for each in world.allgather_object(tuple(told))]


def verdict(told: list[Told]) -> str:
    kinds = [each.kind for each in told]
    if len(set(kinds)) == 1:
        return kinds[0]
    found = [
        f"{kind} {kinds.count(kind)}/{len(kinds)}" for kind in ("named", "timed out", "other error", "silent")
    ]
    return ", ".join(text for text in found if " 0/" not in text)


def expected(case: str) -> str:
    return "silent" if case in NOT_SEEN else "timed out" if case in STALLS else "named"


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sizes", default="8,4K,4M", help="bytes of the arrays (default: %(default)s)")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--timeout-s", type=float, default=4.0, help="default: %(default)s")
    parser.add_argument("--json", type=Path, help="also write each case as a line of JSON")
    parser.add_argument("--words", action="store_true", help="print what the first and last rank are told")
    return parser.parse_args()


def main() -> None:
    asked = options()
    world = hpcpar.init(timeout_s=asked.timeout_s)
    lines, counted = [], {}
    if world.rank == 0:
        print(f"{world.size} ranks, the last one deviates\n{'case':48} {'size':>7}  {'seconds':>7}  result")
    for name in (name for name in CASES if asked.only in name):
        for nbytes in map(parse_nbytes, asked.sizes.split(",")):
            comm = world.split(0, world.rank)
            told = gather(world, tell(comm, CASES[name], nbytes // 4))
            comm.abandon()
            result, seconds = verdict(told), max(each.seconds for each in told)
            counted[result] = counted.get(result, 0) + 1
            lines.append({"case": name, "nbytes": nbytes, "seconds": seconds, "result": result,
                          "ranks": world.size, "told": [each.text for each in told]})  # fmt: skip
            if world.rank == 0:
                late = "" if seconds <= IMMEDIATE_S or result == "silent" else "  late"
                print(f"{name:48} {format_nbytes(nbytes):>7}  {seconds:7.3f}  {result}{late}", flush=True)
                for each in (told[0], told[-1]) if asked.words else ():
                    print(f"    {each.text}", flush=True)
    if world.rank == 0:
        prompt = sum(line["result"] == "named" and line["seconds"] <= IMMEDIATE_S for line in lines)
        print(f"named on every rank within {IMMEDIATE_S:g} s: {prompt} of {len(lines)}; {counted}")
        if asked.json:
            asked.json.write_text("".join(json.dumps(line) + "\n" for line in lines))
    raise SystemExit(any(line["result"] != expected(line["case"]) for line in lines))


if __name__ == "__main__":
    main()
