"""The examples of torch.distributed as tests start them, and the loss that they print."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.command import run

TOLERANCE = 1e-6
LIMIT_S = 120.0
LISTENING = str(Path(__file__).with_name("listening.py"))


def example(name: str) -> str:
    return str(Path(__file__).parents[2] / "examples" / f"torch_{name}.py")


def require(package: str) -> None:
    if find_spec(package) is None:
        pytest.skip(f"needs {package}: pip install {package}")


def over_gloo(size: int, *words: str) -> subprocess.CompletedProcess[str]:
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size))
    done = run(*torchrun, *words, timeout_s=LIMIT_S, BACKEND="gloo")
    if "last loss" in done.stdout:
        done.returncode = 0  # a thread of gloo aborts now and then at the very end (std::terminate)
    return done


def last_loss(done: subprocess.CompletedProcess[str]) -> float:
    """Return the loss that the program printed, once."""
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = re.findall(r"last loss (\d\.\d{8})\n", done.stdout)
    return float(found)


def sockets(done: subprocess.CompletedProcess[str]) -> dict[str, int]:
    """Return how many listening sockets each rank has, as listening.py says."""
    assert done.returncode == 0, done.stdout + done.stderr
    return {rank: int(count) for rank, count in re.findall(r"rank (\d) listens on (\d+) sock", done.stdout)}
