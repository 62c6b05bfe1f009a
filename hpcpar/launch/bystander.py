"""Starting a small process beside the ranks: the sentinel of a node, or the PMI-1 server of a step.

It outlives the rank that starts it, is nobody's child, and has a session of its own, so that what ends
the ranks does not end it. It runs in an isolated interpreter without site packages.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

START_LIMIT_S = 60.0


def start(
    script: str,
    order: str,
    descriptors: Sequence[int],
    *,
    executable: str = sys.executable,
    without: Sequence[str] = (),
) -> None:
    """Run the script's first process to its end; the second, which it leaves behind, is the one that stays.

    order         goes through standard input, for a command line can be read by other users
    descriptors   sockets that it inherits; the first one's number is its argument
    without       variables that it shall not see
    errors        OSError or subprocess.SubprocessError where it cannot be started
    """
    process = subprocess.run(
        [executable, "-I", "-S", script, str(descriptors[0])],
        input=order + "\n",
        text=True,
        stdout=subprocess.DEVNULL,
        env={name: value for name, value in os.environ.items() if name not in ("LD_PRELOAD", *without)},
        pass_fds=tuple(descriptors),
        start_new_session=True,
        timeout=START_LIMIT_S,
        check=False,
    )
    if process.returncode != 0:
        name = os.path.basename(script)
        raise OSError(f"{executable} ended with status {process.returncode} when it was to start {name}")
