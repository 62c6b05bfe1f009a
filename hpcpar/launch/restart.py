"""Start a job again after a crash: `hpcpar run --restarts 3`, and what its program is told and tells.

A program that is started again after it had saved a checkpoint finds HPCPAR_RESTART_COUNT above 0, and goes
on from the newest one, as `hpcpar train` does. Rank 0 leaves word in the run's directory when it starts, and
`hpcpar.checkpoint.save` when a checkpoint is whole; another way of saving calls `leave_word(SAVED)`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from hpcpar.launch.settings import run_directory
from hpcpar.launch.signals import START_AGAIN
from hpcpar.launch.slurm import integer

COUNT = "HPCPAR_RESTART_COUNT"
"""Times that `hpcpar run` has started this job again, once a checkpoint was saved."""

STARTED, SAVED = "started", "saved"

IDLE_ATTEMPTS = 2
"""So many attempts in a row that save no checkpoint end the restarts: the same would happen again."""

LONGEST_PAUSE_S = 60.0


def count(environ: Mapping[str, str] = os.environ) -> int:
    """Return how often `hpcpar run` has started this job again; LaunchError for what is no number."""
    return integer(environ, COUNT) if environ.get(COUNT) else 0


def leave_word(what: str, environ: Mapping[str, str] = os.environ) -> None:
    """Tell `hpcpar run`, where it is on this host, that rank 0 has started, or saved a checkpoint."""
    directory = run_directory(environ)
    if directory is not None and os.path.isdir(directory):
        with suppress(OSError):  # it then believes that nothing was saved
            Path(directory, what).touch()


class Restarts:
    """Decides after each attempt whether there is another one, and waits for it: 1, 2, 4, … 60 s.

    most      restarts at most
    is_here   all ranks run on this host, and so does rank 0
    """

    def __init__(self, most: int, say: Callable[[str], None], *, is_here: bool) -> None:
        self.done = 0
        self._goes_on = False
        self._is_here = is_here
        self._most = most
        self._say = say
        self._idle = 0

    @property
    def variables(self) -> dict[str, str]:
        """Return the variables of the next attempt; none where no earlier one has saved: it starts anew."""
        return {COUNT: str(self.done)} if self._goes_on else {}

    def again(
        self, status: int, directory: Path, *, ended: bool, sleep: Callable[[float], None] = time.sleep
    ) -> bool:
        """Return True once the job is to be started again.

        directory   of the run that ended with this status
        ended       a signal to `hpcpar run` has ended it
        """
        if not self._most or ended or status in (0, START_AGAIN):
            return False
        # A rank 0 on another host leaves no word here, and only the number of restarts is known.
        hears = self._is_here or (directory / STARTED).exists()
        may_have_saved = not hears or (directory / SAVED).exists()
        self._idle = 0 if may_have_saved else self._idle + 1
        self._goes_on |= may_have_saved
        if self._idle == IDLE_ATTEMPTS:
            self._say(
                f"hpcpar run: not started again: {IDLE_ATTEMPTS} attempts in a row have saved no checkpoint"
            )
            return False
        if self.done == self._most:
            self._say(f"hpcpar run: not started again, for that was restart {self.done} of {self._most}")
            return False
        pause_s = min(2.0**self.done, LONGEST_PAUSE_S)
        self.done += 1
        self._say(f"hpcpar run: restart {self.done} of {self._most} in {pause_s:g} s")
        sleep(pause_s)
        return True
