"""A small MPI job beside this one, to try what may crash or hang.

It has a session of its own, which ends whole when its time is over, and sees nothing of this job: a child
that inherits PMI_FD or PMIX_RANK believes that it is a rank of it, and one that finds SLURM_JOB_ID would be
started on all of the job's nodes. It runs on this node.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from hpcpar.errors import LaunchError
from hpcpar.launch.processes import every_process
from hpcpar.launch.supervise import environ_for, find_launcher

GRACE_S = 2.0
"""From SIGTERM, on which a launcher ends its ranks, to SIGKILL for whatever is left."""

MOST_OUTPUT_NBYTES = 1 << 20

# What launchers tell their ranks. What the user tells MPI stays: it is a part of what is tried.
_OF_THE_JOB = re.compile(
    r"(PMI|PMIX|PALS|PRTE|PRRTE|ORTE|HYDRA|HYDI|MPIEXEC|MPI_LOCAL|SLURM|SLURMD|SRUN|FLUX|JSM|LSB|LSF|PBS|COBALT"
    r"|TORCHELASTIC|MV2_COMM_WORLD|MVP_COMM_WORLD|I_MPI_HYDRA|HPCPAR_RUN|HPCPAR_STEP)(_.*|[A-Z]*)?"
    r"|OMPI_(?!MCA_|ALLOW_RUN_AS_ROOT).*"
    r"|OMPI_MCA_(orte|ess|pmix|prte|num_procs|initial_wdir|cpu_type|PREFIXES|shmem_RUNTIME|hwloc|app_ctx).*"
)
_SETTINGS = {
    "HYDRA_LAUNCHER": "fork",
    "I_MPI_HYDRA_BOOTSTRAP": "fork",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "OMPI_MCA_hwloc_base_binding_policy": "none",
}


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of a throwaway job.

    status   of the launcher; None where the time was over, or nothing could be started
    output   the last of what the launcher and the ranks wrote
    why      nothing was started: what stood in the way
    """

    status: int | None
    output: str
    why: str = ""


Job = Callable[[int, Sequence[str], Mapping[str, str], float], Ended]


def is_of_the_job(name: str) -> bool:
    """Return whether a variable tells a process to which job, or rank of it, it belongs."""
    return _OF_THE_JOB.fullmatch(name) is not None


def own_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of somebody who has logged in to this node and belongs to no job."""
    kept = {name: value for name, value in environ.items() if not is_of_the_job(name)}
    for name, value in _SETTINGS.items():
        kept.setdefault(name, value)
    kept = environ_for(kept, "", is_root=os.geteuid() == 0)
    del kept["HPCPAR_RUN_DIRECTORY"]
    return kept


def run(n: int, argv: Sequence[str], environ: Mapping[str, str], limit_s: float) -> Ended:
    """Run argv on n ranks of this node, for at most so long. Never raises for what happens to the job."""
    own = own_environ(environ)
    try:
        launcher = find_launcher(own, lambda name: shutil.which(name, path=own.get("PATH")), "mpiexec")
    except LaunchError as error:
        return Ended(None, "", str(error))
    return _run([launcher, "-n", str(n), *argv], own, limit_s)


def _run(command: Sequence[str], environ: Mapping[str, str], limit_s: float) -> Ended:
    # A file, not a pipe: what outlives the launcher with the pipe's end in its hands would have us wait.
    with tempfile.TemporaryFile() as output:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=dict(environ),
                start_new_session=True,
            )
        except OSError as error:
            return Ended(None, "", f"{command[0]} cannot be started: {error}")
        status: int | None = None
        try:
            with suppress(subprocess.TimeoutExpired):
                status = process.wait(limit_s)
        finally:
            _end_session(process)
        size = output.seek(0, os.SEEK_END)
        output.seek(max(0, size - MOST_OUTPUT_NBYTES))
        text = output.read().decode(errors="replace")
    return Ended(status, text)


def _end_session(process: subprocess.Popen[bytes]) -> None:
    """End the launcher and whatever it has started, wherever that has moved to: process groups are left, the
    session stays."""
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
    deadline = time.monotonic() + GRACE_S
    while left := session_members(process.pid):
        for pid in left:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        process.poll()
        if time.monotonic() > deadline:
            break  # in the kernel, and not to be had: its alarm, or the end of the job, gets it
        time.sleep(0.02)
    with suppress(subprocess.TimeoutExpired):
        process.wait(GRACE_S)


def session_members(session: int) -> list[int]:
    """Processes of a session that have not ended; none where the system does not tell."""
    return [found.pid for found in every_process() if found.session == session]
