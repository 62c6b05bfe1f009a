"""Shared parts of the benchmark scripts: option types, the header, statistics, JSON lines, memory."""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import platform
import random
import re
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from hpcpar.cli.picture import Output
    from hpcpar.comm import Communicator

Player = TypeVar("Player")

# --- options ------------------------------------------------------------------------------------------


def at_least(least: int, parse: Callable[[str], int] = int) -> Callable[[str], int]:
    """Make an argparse type for integers from `least` on."""

    def number(text: str) -> int:
        found = parse(text)
        if found < least:
            raise argparse.ArgumentTypeError(f"{text}: it takes at least {least}")
        return found

    return number


def output_file(text: str) -> Path:
    """Parse the path of a file, which must be writable now: the measurements come first."""
    path = Path(text)
    _require_writable(path)
    return path


def add_picture_options(parser: argparse.ArgumentParser) -> None:
    """Add --output, a file that can be written now, and --dark, as `hpcpar draw` has them."""
    parser.add_argument(
        "--output", type=_picture_file, metavar="FILE", help="draw into this file (.svg, .png, .pdf)"
    )
    parser.add_argument("--dark", action="store_true", help="the picture is light on dark")


def write_picture(options: argparse.Namespace, draw: Callable[[], Figure]) -> None:
    """Draw into the file of --output, where one is given."""
    if options.output is not None:
        from hpcpar.cli.picture import Output, save

        save(draw(), Output(options.output, options.dark))


def _picture_file(text: str) -> Path:
    from hpcpar.cli.picture import Output

    path = Path(text)
    _require_writable(picture=Output(path))
    return path


def _require_writable(*paths: Path, picture: Output | None = None) -> None:
    # Imported here: a peer's Python may have no hpcpar.
    from hpcpar.cli.bench import require_writable
    from hpcpar.errors import ConfigError

    try:
        require_writable(*paths, picture=picture)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def add_options(parser: argparse.ArgumentParser, **defaults: Any) -> None:
    """Add options that several scripts have, each with the default of this one."""
    known: dict[str, tuple[Callable[[str], Any], str]] = {
        "rounds": (at_least(1), "turns of each peer"),
        "steps": (at_least(1), "timed steps in a turn, after an untimed one"),
        "threads": (int, "torch threads per rank"),
        "sequence": (at_least(1), "tokens of a sequence"),
        "batch": (at_least(1), "sequences of a microbatch on each rank"),
        "stages_per_rank": (at_least(1), "of the interleaved schedules"),
        "json": (output_file, "append JSON lines to this file"),
    }
    for name, default in defaults.items():
        kind, text = known[name]
        told = "" if default is None else f" (default: {default})"
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, default=default, help=text + told)


# --- measuring in turn --------------------------------------------------------------------------------


def in_turn(players: Sequence[Player], rounds: int) -> Iterator[Player]:
    """Yield each player once a round, in another order each round, which is the same on all ranks.

    Noise of the machine then reaches all players, and none always follows the same other one.
    """
    order = random.Random(0)
    for _ in range(rounds):
        yield from order.sample(players, len(players))


def turn(step: Callable[[], Any], steps: int, comm: Communicator) -> tuple[float, float]:
    """Return seconds of a step on the slowest rank, and processor seconds of it on all ranks together."""
    import torch  # a peer's Python may have none

    comm.barrier()
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    for _ in range(steps):
        step()
    wall_s, cpu_s = time.perf_counter() - start_s, time.process_time() - start_cpu_s
    slowest = comm.allreduce(torch.tensor([wall_s], dtype=torch.float64), "max")
    total = comm.allreduce(torch.tensor([cpu_s], dtype=torch.float64))
    return slowest.item() / steps, total.item() / steps


def quartiles(values: Sequence[float]) -> list[float]:
    """Return the first quartile, the median and the third quartile."""
    if len(values) == 1:
        return [values[0]] * 3
    return statistics.quantiles(values, n=4, method="inclusive")


def ratios(mine: Sequence[float], others: Sequence[float]) -> list[float]:
    """Return the quartiles of mine / other, each turn divided by the other's turn of the same round."""
    return quartiles([a / b for a, b in zip(mine, others, strict=True)])


# --- results ------------------------------------------------------------------------------------------


def header(world: Communicator, **settings: Any) -> dict[str, Any]:
    """Describe the job: ranks, nodes, machine, the script's own settings, and versions."""
    import torch

    import hpcpar
    from hpcpar.launch.binding import affinity
    from hpcpar.transport.mpi_library import library_facts

    return {
        "ranks": world.size,
        "nodes": len(set(world.nodes)),
        "host": socket.gethostname(),
        "cores": len(affinity()),
        "threads": torch.get_num_threads(),
        **settings,
        "mpi": library_facts()["vendor"],
        "torch": torch.__version__,
        "hpcpar": hpcpar.__version__,
        "python": platform.python_version(),
    }


def print_header(about: dict[str, Any]) -> None:
    print("# " + "  ".join(f"{key} {value}" for key, value in about.items()))


def append_json(path: Path | None, lines: Iterable[dict[str, Any]]) -> None:
    """Append JSON lines to a file, if there is one."""
    if path is not None:
        with path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)


def give_up(world: Communicator, why: str) -> NoReturn:
    """Print the reason on rank 0, then end the job with status 1. Collective."""
    if world.rank == 0:
        sys.stdout.flush()
        print(f"benchmarks/{Path(sys.argv[0]).name}: {why}", file=sys.stderr, flush=True)
    world.barrier()
    sys.exit(1)


# --- memory -------------------------------------------------------------------------------------------


def give_freed_memory_back() -> None:
    """Return garbage and the C library's free memory to the system (glibc)."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def reset_peak() -> bool:
    """Start the kernel's count of peak resident memory anew (Linux)."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def proportional_nbytes() -> int:
    """Return shared memory divided by its users, without pages of files (other jobs map libraries, too)."""
    return kernel_nbytes("smaps_rollup", "Pss_Anon") + kernel_nbytes("smaps_rollup", "Pss_Shmem")


def kernel_nbytes(file: str, field: str) -> int:
    """Return a figure that Linux tells of this process; 0 where it does not."""
    try:
        found = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self", file).read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(found[1]) * 1024 if found else 0
