"""Run a command of a test, and return its status and its two outputs as text."""

from __future__ import annotations

import os
import subprocess
import time
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


def write_script(path: Path, does: str) -> Path:
    """Write an executable shell script."""
    path.write_text(f"#!/bin/sh\n{does}\n")
    path.chmod(0o755)
    return path


def until(condition: Callable[[], object], what: str = "what was awaited", limit_s: float = 60.0) -> None:
    """Wait until a condition is true; AssertionError when the time is over."""
    deadline_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline_s, f"after {limit_s:g} s it has not happened: {what}"
        time.sleep(0.01)
