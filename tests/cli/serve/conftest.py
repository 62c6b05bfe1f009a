"""A small trained run, in float64 with one training step."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.serve.small_run import train


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """The run's directory, tmp_path/runs/small."""
    return train(tmp_path)


@pytest.fixture
def trained_anew(tmp_path: Path, trained: Path) -> Callable[[], None]:
    """Another training into the same directory, when it is called."""

    def again() -> None:
        shutil.rmtree(trained / "checkpoints")
        train(tmp_path, "optimizer.learning_rate=0.5")

    return again
