"""Memory that this process takes, and may take, as the operating system and CUDA say."""

from __future__ import annotations

import re
import resource
from dataclasses import dataclass
from pathlib import Path

import torch

from hpcpar.units import KiB

STATUS = Path("/proc/self/status")
ROLLUP = Path("/proc/self/smaps_rollup")
SYSTEM = Path("/proc/meminfo")
OWN_GROUPS = Path("/proc/self/cgroup")
GROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """Bytes of one process; None where the system does not say.

    resident            in memory now, with libraries, and with all that it has touched of shared memory
    peak_resident       the most so far
    proportional        as resident, but what n processes have in common counts 1/n in each
    device, peak_device torch's tensors on a CUDA device, now and at most
    """

    resident_nbytes: int | None
    peak_resident_nbytes: int | None
    proportional_nbytes: int | None
    device_nbytes: int | None
    peak_device_nbytes: int | None


def process_memory(device: torch.device | None = None) -> ProcessMemory:
    """Return the memory of this process, and of its CUDA device."""
    status, rollup = _read(STATUS), _read(ROLLUP)
    on_cuda = device is not None and device.type == "cuda"
    return ProcessMemory(
        _field(status, "VmRSS"),
        _field(status, "VmHWM"),
        _field(rollup, "Pss"),
        torch.cuda.memory_allocated(device) if on_cuda else None,
        torch.cuda.max_memory_allocated(device) if on_cuda else None,
    )


def available_on_node() -> int | None:
    """Bytes of host memory that processes like this one may still take together; None: nobody says.

    The system's, within the limits of this process's control groups, whose file cache counts as free.
    """
    found = [_field(_read(SYSTEM), "MemAvailable")]
    for line in _read(OWN_GROUPS).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        top = GROUPS / controllers
        own = top / path.lstrip("/")
        found += [_left_in(group) for group in (own, *own.parents) if group.is_relative_to(top)]
    told = [nbytes for nbytes in found if nbytes is not None]
    return max(0, min(told)) if told else None


def available_to_process() -> int | None:
    """Bytes that this process may still map, as `ulimit -v` limits it; None: no limit."""
    limit, mapped = resource.getrlimit(resource.RLIMIT_AS)[0], _field(_read(STATUS), "VmSize")
    return None if limit == resource.RLIM_INFINITY or mapped is None else max(0, limit - mapped)


def _left_in(group: Path) -> int | None:
    """Return the bytes left in a control group, by either version of the interface."""
    for limit, usage, cache in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        told = [_read(group / name).strip() for name in (limit, usage)]
        if all(text.isdigit() for text in told):
            inactive = re.search(rf"^{cache} (\d+)", _read(group / "memory.stat"), re.MULTILINE)
            return int(told[0]) - int(told[1]) + (int(inactive[1]) if inactive else 0)
    return None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # another system, or an older kernel
        return ""


def _field(text: str, name: str) -> int | None:
    found = re.search(rf"^{name}:\s+(\d+) kB", text, re.MULTILINE)
    return int(found[1]) * KiB if found else None
