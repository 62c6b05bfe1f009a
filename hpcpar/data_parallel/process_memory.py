"""What the operating system and CUDA say that this process takes, beside what its tensors do."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import torch

from hpcpar.units import KiB

STATUS = Path("/proc/self/status")
ROLLUP = Path("/proc/self/smaps_rollup")


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
    """Of this process, and, where its tensors are on a CUDA device, of that."""
    status, rollup = _read(STATUS), _read(ROLLUP)
    on_cuda = device is not None and device.type == "cuda"
    return ProcessMemory(
        _field(status, "VmRSS"),
        _field(status, "VmHWM"),
        _field(rollup, "Pss"),
        torch.cuda.memory_allocated(device) if on_cuda else None,
        torch.cuda.max_memory_allocated(device) if on_cuda else None,
    )


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # another system, or an older kernel
        return ""


def _field(text: str, name: str) -> int | None:
    found = re.search(rf"^{name}:\s+(\d+) kB", text, re.MULTILINE)
    return int(found[1]) * KiB if found else None
