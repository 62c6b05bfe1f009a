"""Cores and GPU of a rank, and the test whether its waits must yield."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from hpcpar.errors import ConfigError


def gpu_for(local_rank: int, visible: int, local_size: int) -> int | None:
    """Return the visible device of a local rank: local rank modulo visible devices; None without one.

    A launcher that shows every rank one device of its own (`--gpus-per-task=1`) is served as well.
    """
    if not 0 <= local_rank < local_size:
        raise ConfigError(f"local rank {local_rank} of {local_size} does not exist: 0 to {local_size - 1} do")
    return local_rank % visible if visible > 0 else None


def gpu_sharing_warning(visible: int, local_size: int, identities: Sequence[str] | None = None) -> str | None:
    """Return a sentence if ranks of a node share a GPU, else None.

    identities   the chosen device's UUID or bus id of every local rank, which decides exactly;
                 without them one visible device says nothing (each rank may see another one)
    """
    if identities is not None:
        most = max(Counter(identities).values(), default=0)
        return _sharing(len(set(identities)), local_size) if most > 1 else None
    return _sharing(visible, local_size) if 1 < visible < local_size else None


def _sharing(devices: int, local_size: int) -> str:
    return (
        f"{local_size} ranks of this node share {devices} GPU{'s' if devices > 1 else ''}: each gets a part "
        f"of its time and memory; start one rank per GPU (`--ntasks-per-node={devices}`) for full speed, or "
        f"NVIDIA's MPS (`nvidia-cuda-mps-control -d`) before the job: without it they take turns"
    )


def affinity() -> tuple[int, ...]:
    """Return the cores that this process may run on, in order; all where the system has no masks."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def quota_cores(path: str = "/sys/fs/cgroup/cpu.max") -> float:
    """Return the cores' worth of time that the control group grants; inf where there is no limit."""
    try:
        with open(path, encoding="ascii") as file:
            quota, period = file.read().split()[:2]
        return math.inf if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return math.inf


def oversubscribed(
    local_size: int, masks: Sequence[Collection[int]] | None = None, *, quota: float | None = None
) -> bool:
    """Return whether the node has more ranks than cores in the union of their masks.

    masks   affinity masks of all ranks of the node. Without them this rank's mask counts for all,
            which errs on the side of yielding when the launcher bound each rank to cores of its own.
    """
    return local_size > node_cores(masks, quota)


def node_cores(masks: Sequence[Collection[int]] | None = None, quota: float | None = None) -> int:
    """Count the cores that the ranks of a node may use: the union of their masks, within the quota."""
    union = set(affinity()) if not masks else {core for mask in masks for core in mask}
    limit = quota_cores() if quota is None else quota
    return max(1, min(len(union), math.ceil(limit) if math.isfinite(limit) else len(union)))


def thread_count(
    local_size: int,
    masks: Sequence[Collection[int]] | None = None,
    *,
    environ: Mapping[str, str] = os.environ,
    quota: float | None = None,
) -> int:
    """Return the compute threads for each rank: OMP_NUM_THREADS, else an equal part of the node's cores."""
    text = environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if text:
        if not text.isdigit() or int(text) < 1:
            raise ConfigError(
                f"OMP_NUM_THREADS={text!r} is not a number of threads: set it to 1 or more, or unset it"
            )
        return int(text)
    return max(1, node_cores(masks, quota) // max(1, local_size))


def format_cores(cores: Collection[int]) -> str:
    """Format core numbers: format_cores((0, 1, 2, 5)) == "0-2,5"."""
    runs: list[list[int]] = []
    for core in sorted(cores):
        if runs and core == runs[-1][1] + 1:
            runs[-1][1] = core
        else:
            runs.append([core, core])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
