"""Whether a rank's standard output is a terminal that somebody looks at."""

from __future__ import annotations

import os
from collections.abc import Mapping

from hpcpar.errors import LaunchError
from hpcpar.launch.environment import detect


def is_made_by_launcher(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether standard output is a terminal because of the launcher alone, and nobody says what is behind.

    Open MPI's gives each rank a terminal of its own, also where the job's output goes into a file.
    TTY_COMPATIBLE says what is at the end; `hpcpar run` sets it. False where variables contradict each other.
    """
    try:
        launcher = detect(environ).launcher
    except LaunchError:  # which is said by this console
        return False
    return launcher == "openmpi" and "TTY_COMPATIBLE" not in environ
