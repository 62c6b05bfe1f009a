"""Run examples/train.py for a few steps, and print what its parameters have become on every rank.

words    algorithms for its all-reduces, "" for its own; the training runs once for each of them
prints   a line for each of them and each rank: algorithm, host, and the parameters' SHA-256
"""

from __future__ import annotations

import hashlib
import runpy
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hpcpar
import hpcpar.models

EXAMPLE = Path(__file__).parents[2] / "examples" / "train.py"
STEPS = "2"

distributed = hpcpar.DistributedOptimizer
models: list[hpcpar.models.Llama] = []


class KeptLlama(hpcpar.models.Llama):
    """The example makes its model itself and returns nothing: keep it."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        models.append(self)


def by(algorithm: str) -> Callable[..., Any]:
    """The example names its own: another one in its place."""
    return lambda *arguments, **named: distributed(*arguments, **{**named, "algorithm": algorithm})


def digest(model: hpcpar.models.Llama) -> str:
    sha256 = hashlib.sha256()
    for parameter in model.parameters():
        sha256.update(parameter.detach().numpy().tobytes())
    return sha256.hexdigest()


hpcpar.models.Llama = KeptLlama  # type: ignore[misc]
algorithms = sys.argv[1:]
sys.argv = [str(EXAMPLE), STEPS]
for algorithm in algorithms:
    if algorithm:
        hpcpar.DistributedOptimizer = by(algorithm)  # type: ignore[assignment,misc]
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    with hpcpar.init() as world:
        found = world.allgather_object((socket.gethostname(), digest(models[-1])))
        if world.rank == 0:
            for host, parameters in found:
                print(f"digest: {algorithm or 'own'} {host} {parameters}", flush=True)
