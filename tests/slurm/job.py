"""A batch job of the test cluster, as `scontrol` reports it."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.slurm.cluster import Cluster

ENDED = frozenset(
    {
        "BOOT_FAIL",
        "CANCELLED",
        "COMPLETED",
        "DEADLINE",
        "FAILED",
        "NODE_FAIL",
        "OUT_OF_MEMORY",
        "PREEMPTED",
        "TIMEOUT",
    }
)


class Job:
    """A job, an array of jobs, or a heterogeneous job of several components."""

    def __init__(self, cluster: Cluster, job_id: str) -> None:
        self._cluster, self.id = cluster, job_id

    def records(self) -> list[dict[str, str]]:
        """`scontrol show job`: one record for each job of an array and each component."""
        shown = self._cluster.run("scontrol", "--oneliner", "show", "job", self.id)
        if shown.returncode:
            raise LookupError(f"job {self.id}: {shown.stderr.strip()}")
        return [dict(re.findall(r"(\S+?)=(\S*)", line)) for line in shown.stdout.splitlines() if line.strip()]

    def field(self, name: str) -> str:
        """Return scontrol's field of the first record: "ExitCode", "Restarts", "NodeList", ..."""
        return self.records()[0][name]

    def state(self) -> str:
        """Like "PENDING" or "COMPLETED"; of several, one that has not ended, or else not COMPLETED."""
        states = [record["JobState"] for record in self.records()]
        return min(states, key=lambda state: (state in ENDED, state == "COMPLETED"))

    def wait(self, timeout_s: float = 120) -> Job:
        """Until it has ended, however it did; TimeoutError tells its state, the reason, and its output."""
        end = time.monotonic() + timeout_s
        while self.state() not in ENDED:
            if time.monotonic() > end:
                raise TimeoutError(
                    f"job {self.id} is {self.state()} ({self.field('Reason')}) after {timeout_s:g} s; "
                    f"its output ends:\n{self.output[-3000:]}"
                )
            time.sleep(0.2)
        return self

    @property
    def output(self) -> str:
        """Output so far, jobs of an array one after the other; "" before it starts."""
        files = dict.fromkeys(
            Path(record["StdOut"]) for record in reversed(self.records()) if "StdOut" in record
        )
        return "".join(file.read_text("utf-8", "replace") for file in files if file.exists())
