"""Arithmetic of reductions beside a plain copy of memory, in one process.

    python benchmarks/reductions.py
    python benchmarks/reductions.py --dtype bfloat16 --min-bytes 1M --json reductions.jsonl

Each line names what is done to a target of `size` bytes. Its rate counts the bytes that must be read and
written at least once (`moved`): a copy 2 targets, `combine` 3, `fold` of k incoming pieces k + 2.
`of copy` is that rate over the copy's at the same size; what calculates cannot be expected to pass 1, but
an array that is read without being written to can be faster than one that is.

Lines named numpy, torch, or "k combines" are what each of ours is to be compared with. All run in turn
within each round, so that a noisy machine touches all of them; the table has the median of the rounds.
`#wrong` counts wrong elements of a separate, untimed pass on small whole numbers.
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
from functools import partial

import numpy as np
import torch
from option_types import at_least, output_file

import hpcpar
from hpcpar.comm.half_precision import decode, encode
from hpcpar.comm.reductions import combine, fold, prepare_combine, prepare_fold, scale
from hpcpar.launch.binding import affinity
from hpcpar.transport.buffers import HostBuffer, bind
from hpcpar.units import GB, KiB, MiB

DTYPES = ("float32", "float64", "float16", "bfloat16")
ROUND_NBYTES = 32 * MiB
"""A round of one candidate touches about this much, between LEAST and MOST iterations."""
LEAST, MOST = 2, 500

Run = Callable[[], object]


@dataclass(frozen=True)
class Row:
    """One measured line; seconds are of one call."""

    what: str
    dtype: str
    nbytes: int
    moved_nbytes: int
    median_s: float
    fastest_s: float
    slowest_s: float
    rate_gb_per_s: float
    of_copy: float
    wrong: int


@dataclass(frozen=True)
class Candidate:
    """A call, the targets' worth of bytes that it moves, and what 1 + the incoming ones' 1, 2, 3 … become."""

    what: str
    run: Run
    moved: float
    expected: float


def filled(count: int, dtype: str, value: float) -> HostBuffer:
    return bind(torch.full((count,), value, dtype=getattr(torch, dtype)), writable=True).host


def candidates(count: int, dtype: str, pieces: int) -> tuple[HostBuffer, list[Candidate]]:
    """The target, which holds 1, and what is done to it with `pieces` incoming ones that hold 1, 2, 3 …"""
    target = filled(count, dtype, 1)
    incoming = [filled(count, dtype, 1 + number) for number in range(pieces)]
    first = incoming[0]
    total = 1 + sum(range(1, pieces + 1))

    def one_after_the_other() -> None:
        for piece in incoming:
            combine("sum", target, piece)

    def combine_then_scale() -> None:
        combine("sum", target, first)
        scale(target, 0.5)

    found = [
        Candidate("copy", lambda: np.copyto(target.octets, first.octets), 2, 1),
        Candidate("combine", lambda: combine("sum", target, first), 3, 2),
        Candidate("combine, prepared", prepare_combine("sum", target, target, first), 3, 2),
        Candidate(f"fold of {pieces}", lambda: fold("sum", target, (target, *incoming)), pieces + 2, total),
        Candidate(
            "fold, prepared",
            prepare_fold("sum", target, (target, *incoming)),
            pieces + 2,
            total,
        ),
        Candidate(f"{pieces} combines", one_after_the_other, pieces + 2, total),
        Candidate("fold, scaled", lambda: fold("sum", target, (target, first), factor=0.5), 3, 1),
        Candidate("combine, then scale", combine_then_scale, 3, 1),
        Candidate("scale", lambda: scale(target, 0.5), 2, 0.5),
        *peers(target, first),
    ]
    if dtype in ("float32", "float64"):
        found += wired(target, first)
    return target, found


def peers(target: HostBuffer, incoming: HostBuffer) -> Iterator[Candidate]:
    """What NumPy and torch do when asked plainly."""
    if isinstance(target.elements, np.ndarray):
        a, b = target.elements, incoming.elements
        yield Candidate("numpy add", lambda: np.add(a, b, out=a), 3, 2)
        x, y = torch.from_numpy(a), torch.from_numpy(b)
    else:
        x, y = target.elements, incoming.elements
    yield Candidate("torch add_", lambda: x.add_(y), 3, 2)


def wired(target: HostBuffer, incoming: HostBuffer) -> Iterator[Candidate]:
    """Encoding and decoding, by each wire type."""
    part = 2 / target.itemsize
    for wire in ("float16", "bfloat16"):
        sent, arrived = encode(incoming, wire), encode(incoming, wire)
        yield Candidate(f"encode {wire}", partial(encode, target, wire, sent.octets), 1 + part, 1)
        yield Candidate(f"decode {wire}", partial(decode, arrived, target), 1 + part, 1)


def reset(target: HostBuffer, value: float) -> None:
    target.elements[...] = value


def wrong_elements(target: HostBuffer, candidate: Candidate) -> int:
    reset(target, 1)
    candidate.run()
    return int((target.elements != candidate.expected).sum())


def time_round(run: Run, iterations: int) -> float:
    """Seconds of one call."""
    started_s = time.perf_counter()
    for _ in range(iterations):
        run()
    return (time.perf_counter() - started_s) / iterations


def measure(nbytes: int, dtype: str, options: argparse.Namespace) -> Iterator[Row]:
    """All candidates of one size, in turn."""
    count = max(1, nbytes // getattr(torch, dtype).itemsize)
    target, found = candidates(count, dtype, options.pieces)
    wrong = [wrong_elements(target, candidate) for candidate in found]
    iterations = max(LEAST, min(MOST, ROUND_NBYTES // nbytes))
    times: list[list[float]] = [[] for _ in found]
    for round_number in range(options.rounds + 1):
        for candidate, seconds in zip(found, times, strict=True):
            reset(target, 0)  # zeros added to what grows stay far from overflow, and from slow subnormals
            elapsed_s = time_round(candidate.run, iterations)
            if round_number > 0:  # the first is the warm-up
                seconds.append(elapsed_s)
    copy_rate = found[0].moved / statistics.median(times[0])
    for candidate, seconds, bad in zip(found, times, wrong, strict=True):
        median = statistics.median(seconds)
        moved = round(candidate.moved * count * target.itemsize)
        yield Row(
            candidate.what,
            dtype,
            count * target.itemsize,
            moved,
            median,
            min(seconds),
            max(seconds),
            moved / median / GB,
            candidate.moved / median / copy_rate,
            bad,
        )


def header(options: argparse.Namespace) -> dict[str, object]:
    return {
        "benchmark": "reductions",
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "hpcpar": hpcpar.__version__,
        "ranks": 1,
        "torch_threads": torch.get_num_threads(),
        "rounds": options.rounds,
        "numpy": np.__version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {platform.system()}",
        "cores": len(affinity()),
    }


def show(row: Row) -> None:
    print(
        f"{row.nbytes:>11} {row.dtype:>9}  {row.what:<26} {row.median_s * 1e6:>10.2f} "
        f"{row.rate_gb_per_s:>8.2f} {row.of_copy:>8.2f} {row.wrong:>7}",
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
    parser.add_argument("--dtype", choices=(*DTYPES, "all"), default="all")
    parser.add_argument("--min-bytes", type=at_least(1, nbytes_argument), default=KiB, help="as 8, 64K or 1M")
    parser.add_argument(
        "--max-bytes", type=at_least(1, nbytes_argument), default=64 * MiB, help="as 8, 64K or 1M"
    )
    parser.add_argument("--factor", type=at_least(2), default=16, help="from one size to the next")
    parser.add_argument("--pieces", type=at_least(1), default=7, help="incoming ones of fold: ranks - 1")
    parser.add_argument("--rounds", type=at_least(1), default=5)
    parser.add_argument("--threads", type=int, default=1, help="of torch; NumPy has one")
    parser.add_argument("--json", type=output_file, help="also write JSON lines, the first the header")
    return parser.parse_args()


def main() -> None:
    options = parse()
    torch.set_num_threads(options.threads)
    facts = header(options)
    for name, value in facts.items():
        print(f"# {name}: {value}")
    rows: list[Row] = []
    for dtype in DTYPES if options.dtype == "all" else (options.dtype,):
        print("#\n#  size (B)      type  what                         time (us)   (GB/s)  of copy  #wrong")
        for nbytes in sizes(options):
            for row in measure(nbytes, dtype, options):
                rows.append(row)
                show(row)
    if options.json:
        lines = [json.dumps(facts), *(json.dumps(asdict(row)) for row in rows)]
        options.json.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
