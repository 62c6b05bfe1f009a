"""examples/horovod_digits.py: a script written for Horovod, unchanged, on any number of ranks."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("sklearn")
pytest.importorskip("cloudpickle")

SCRIPT = Path(__file__).parents[2] / "examples" / "horovod_digits.py"
HAS_MPIEXEC = bool(
    shutil.which(os.path.join(os.path.dirname(sys.executable), "mpiexec")) or shutil.which("mpiexec")
)


def train(file: Path, start: list[str], *options: str) -> tuple[dict[str, Any], str]:
    """Return what a run leaves in its file, and what it prints."""
    outside = {name: value for name, value in os.environ.items() if not name.startswith("PMI_")}
    done = subprocess.run(
        [sys.executable, "-m", *start, str(SCRIPT), "--double", "--save", str(file), *options],
        env=outside,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return torch.load(file), done.stdout


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Four epochs on one rank, after which most digits are recognised."""
    found, said = train(tmp_path_factory.mktemp("alone") / "one.pt", ["hpcpar.horovod"], "--epochs", "4")
    assert found["accuracy"] > 0.9
    assert f"held-out accuracy {found['accuracy']:.4f} on 1 ranks" in said
    return found


@pytest.mark.skipif(not HAS_MPIEXEC, reason="needs mpiexec")
def test_losses_and_parameters_are_those_of_one_rank(alone: dict[str, Any], tmp_path: Path) -> None:
    ranks = 3
    start = ["hpcpar", "run", "-np", str(ranks), "--as-horovod"]
    together, said = train(tmp_path / "ranks.pt", start, "--epochs", "4")
    assert f"on {ranks} ranks" in said
    assert together["losses"] == pytest.approx(alone["losses"], abs=1e-6, rel=0)
    assert together["accuracy"] == alone["accuracy"]
    for name, parameter in alone["model"].items():
        assert (together["model"][name] - parameter).abs().max().item() < 1e-6, name
