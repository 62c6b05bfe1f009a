"""Cores for the threads of a server's ranks on CPUs: of one memory each, a thread for a core.

vLLM by itself gives each rank a whole NUMA node, the first one to rank 0: it refuses more ranks than nodes,
and does not see that a job has only some of the cores.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from hpcpar.errors import LayoutError
from hpcpar.launch.binding import affinity, format_cores, quota_cores
from hpcpar.partition import bounds

SYSTEM = Path("/sys/devices/system")


def thread_binding(tp: int, cores: Sequence[int], threads: float = math.inf) -> str:
    """Divide cores among tp ranks, in order: thread_binding(2, (0, 1, 2, 3)) == "0-1|2-3".

    threads   the most that are to run at once, where a control group grants less time than the cores have
    errors    LayoutError for fewer cores than ranks
    """
    if tp > len(cores):
        raise LayoutError(
            f"tp={tp} ranks need a core each, but this process may run on {len(cores)} "
            f"({format_cores(cores)}); serve with --tp {len(cores)} or less, or ask for more cores"
        )
    most = math.inf if math.isinf(threads) else max(1, math.ceil(threads) // tp)
    return "|".join(
        format_cores(cores[start : min(stop, start + int(min(most, stop - start)))])
        for start, stop in bounds(len(cores), tp)
    )


def binding_here(tp: int) -> str:
    """Divide the cores that this process may run on."""
    return thread_binding(tp, physical_cores(affinity()), quota_cores())


def physical_cores(cores: Sequence[int], system: Path = SYSTEM) -> list[int]:
    """Return one of the hardware threads of each core, cores of one NUMA node beside each other."""
    kept: dict[frozenset[int], int] = {}
    for core in cores:
        siblings = _numbers(system / "cpu" / f"cpu{core}" / "topology" / "thread_siblings_list")
        kept.setdefault(siblings or frozenset((core,)), core)
    node_of = {
        core: int(directory.name.removeprefix("node"))
        for directory in (system / "node").glob("node[0-9]*")
        for core in _numbers(directory / "cpulist")
    }
    return sorted(kept.values(), key=lambda core: (node_of.get(core, 0), core))


def _numbers(path: Path) -> frozenset[int]:
    """Read a list like "0-3,8"; empty where the system does not tell."""
    try:
        text = path.read_text(encoding="ascii").strip()
    except OSError:
        return frozenset()
    ranges = [part.partition("-") for part in text.split(",") if part]
    return frozenset(core for low, _, high in ranges for core in range(int(low), int(high or low) + 1))
