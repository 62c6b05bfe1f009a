"""Time a rank's start: imports, MPI, `hpcpar.init()`; and how much of it is waiting for files.

A thread that neither computes nor waits for a core waits for something else; while it imports, for the
file system. Linux counts all three, so a busy machine is not taken for a slow file system.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

MODULES = {
    "numpy": "numpy",
    "mpi4py": "hpcpar.transport.mpi",
    "hpcpar": "hpcpar.comm.world",
    "torch": "torch",
}
"""Modules whose import is timed, by the package that they bring, in the order of a program's imports.

`hpcpar.transport.mpi` loads mpi4py and the MPI library without starting MPI.
"""


class Elapsed(NamedTuple):
    """Seconds by the clock, and those of them spent waiting for files."""

    wall_s: float = 0.0
    waited_s: float = 0.0


@dataclass(frozen=True)
class StartTimes:
    """Start times of one rank.

    python_s   from the start of the process to the first import that is timed
    imports    by the names of MODULES
    init_s     hpcpar.init(), MPI_Init among it
    """

    python_s: float = 0.0
    imports: Mapping[str, Elapsed] = field(default_factory=dict)
    init_s: float = 0.0

    @property
    def imported(self) -> Elapsed:
        spans = self.imports.values()
        return Elapsed(sum(span.wall_s for span in spans), sum(span.waited_s for span in spans))


def time_import(module: str) -> Elapsed:
    """Import a module, if it can be imported, and return the time that this took."""
    wall_s, busy_s = time.perf_counter(), _busy_s()
    with suppress(ImportError, OSError, RuntimeError):  # the last is mpi4py's word for having found no MPI
        importlib.import_module(module)
    wall_s, busy_s = time.perf_counter() - wall_s, _busy_s() - busy_s
    return Elapsed(wall_s, max(0.0, wall_s - busy_s))


def _busy_s() -> float:
    """Return the seconds that this thread has computed, or has stood in line for a core."""
    in_line_s = 0.0
    # Not every kernel counts this; then standing in line counts as waiting.
    with suppress(OSError, ValueError, IndexError):
        in_line_s = int(Path("/proc/thread-self/schedstat").read_text("ascii").split()[1]) / 1e9
    return time.thread_time() + in_line_s


def process_age_s() -> float:
    """Return the seconds since this process was started; 0 where the system does not say."""
    try:
        ticks = int(Path("/proc/self/stat").read_text("ascii", "replace").rpartition(")")[2].split()[19])
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0
