"""Measurements on GPUs: choose each rank's device, and wait for the end of its calls."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from hpcpar.bench.measure import Candidate
from hpcpar.errors import CudaError
from hpcpar.launch.binding import gpu_for

if TYPE_CHECKING:
    from hpcpar.comm import Communicator


def use_gpu(comm: Communicator) -> torch.device:
    """Select this rank's GPU as torch's current device, and return it. Collective.

    errors   CudaError on every rank if torch sees none on some
    """
    here = [rank for rank, node in enumerate(comm.nodes) if node == comm.nodes[comm.rank]]
    visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
    seen = comm.allgather_object(visible)
    without = [rank for rank, count in enumerate(seen) if not count]
    if without:
        raise CudaError(
            f"torch sees no GPU on rank{'s' if len(without) > 1 else ''} {', '.join(map(str, without))} of "
            f"{comm.size} (torch {torch.__version__}): start this where there are GPUs, with a CUDA build of "
            f"torch and hpcpar[cuda13] or hpcpar[cuda12]; benchmarks/gpu_check.sh installs both"
        )
    index = gpu_for(here.index(comm.rank), visible, len(here))
    assert index is not None, "it sees one"
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device


def finished(candidate: Candidate, device: torch.device, calls: int = 1) -> Candidate:
    """Make the candidate run so many times, and then wait until its stream is idle."""

    def run() -> None:
        for _ in range(calls):
            candidate.run()
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()

    return replace(candidate, run=run)
