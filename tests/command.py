"""Run a command of a test, and return its status and its two outputs as text."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

Output = Callable[..., str]
"""The fixture of `tests/cli/conftest.py`."""


def run(
    *command: str | Path, directory: Path | None = None, timeout_s: float = 100.0, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run it with `variables` added to this process's environment; whatever its status, no error."""
    return subprocess.run(
        command,
        cwd=directory,
        env={**os.environ, **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def variables(text: str) -> dict[str, str]:
    """Parse an environment: variables("PMI_RANK=2 PMI_SIZE=4") == {"PMI_RANK": "2", "PMI_SIZE": "4"}."""
    return dict(word.split("=", 1) for word in text.split())
