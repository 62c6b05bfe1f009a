"""The scoreboards of ends, stalls and checkpoints, in short, with limits for busy machines."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCOREBOARD = Path(__file__).parents[2] / "benchmarks" / "scoreboard"


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("script", "words", "told"),
    [
        (
            "ends.py",
            "--launchers run --ways exception,SIGKILL --others lock --within-s 60 --words",
            "2 of 2 ended as they should",
        ),
        (
            "stalls.py",
            "--kinds SIGSTOP,sleep --tries 1 --within-s 60 --timeout-s 4",
            "2 of 2 named and ended as they should",
        ),
        ("checkpoints.py", "--tries 1", "disk: Input/output error"),
    ],
)
def test_what_goes_wrong_is_named_and_ends_well(script: str, words: str, told: str) -> None:
    command = [sys.executable, str(SCOREBOARD / script), *words.split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    assert told in done.stdout
