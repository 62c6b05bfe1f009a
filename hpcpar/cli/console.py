"""Standard output as rank 0 uses it for people."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from rich.console import Console

from hpcpar.errors import LaunchError
from hpcpar.launch.environment import detect


def own_console(**options: Any) -> Console:
    """Return standard output, without colours and animation unless it ends on a terminal."""
    return Console(force_terminal=False if is_launchers_terminal() else None, **options)


def is_launchers_terminal(environ: Mapping[str, str] = os.environ) -> bool:
    """True where standard output is a terminal that only the launcher has made, and nobody may look at.

    Open MPI's gives each rank a terminal of its own, also where the job's output goes into a file.
    TTY_COMPATIBLE says what is at the end; `hpcpar run` sets it. False where variables contradict each other.
    """
    try:
        launcher = detect(environ).launcher
    except LaunchError:  # which is said by this console
        return False
    return launcher == "openmpi" and "TTY_COMPATIBLE" not in environ
