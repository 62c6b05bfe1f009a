"""CUDA-awareness of the MPI library: tried, not believed. A wrong guess is a crash.

In the order of trust:

    the user        HPCPAR_CUDA_AWARE=0, 1, or names out of CAPABILITIES
    a probe         two ranks on this node exchange device memory in a job of their own, whose crash harms
                    nobody; the answer is kept for this library, these settings and this driver
    the library     where no job can be started from here: MPI 4.1's mpi_memory_alloc_kinds, and
                    MPIX_Query_cuda_support, which says no of an MPI that is CUDA-aware by its UCX alone

Messages are all that is tried, for hpcpar's own collectives send nothing else. Libraries and versions are no
answer: Open MPI with a UCX that knows CUDA passes messages between device memories, and dies of a sum on the
same memory.

The probe's job has a session of its own, which ends whole when its time is over, and sees nothing of this
job: a child that inherits PMI_FD or PMIX_RANK believes that it is a rank of it, and one that finds
SLURM_JOB_ID would be started on all of the job's nodes.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hpcpar import cuda_wheels
from hpcpar.durable import write_whole
from hpcpar.errors import LaunchError
from hpcpar.launch.bootstrap.pmi_selection import loaded_libraries
from hpcpar.launch.crosscheck import flavour, library_name
from hpcpar.launch.environment import is_of_a_job
from hpcpar.launch.launch_command import environ_for, find_launcher
from hpcpar.launch.processes import every_process

PROBE = "hpcpar.transport.gpu.probe"
JOB_LIMIT_S = 60.0

GRACE_S = 2.0
"""From SIGTERM, on which a launcher ends its ranks, to SIGKILL for whatever is left."""

_SETTINGS = {
    "HYDRA_LAUNCHER": "fork",
    "I_MPI_HYDRA_BOOTSTRAP": "fork",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "OMPI_MCA_hwloc_base_binding_policy": "none",
}

LEFT_BY_A_CRASH = ("/dev/shm/mpich_shm_", "/dev/shm/Intel_MPI_", "/dev/shm/sm_segment.")

_PARTS = (
    "libmpi.so",
    "libmpich.so",
    "libmpi_cray",
    "libucp.so",
    "libuct.so",
    "libuct_cuda.so",
    "libfabric.so",
)
"""Prefixes of libraries through which a device pointer passes."""

_DECISIVE = re.compile(r"(OMPI_MCA|UCX|MPICH|MPIR_CVAR|I_MPI|MV2|MVP|FI|PSM2|PSM3)_.*|CUDA_VISIBLE_DEVICES")
"""Variables that may decide, too; without those that differ from job to job (`is_of_a_job`)."""

# MPI library -> the variable without which a device pointer crashes it, and its value.
_SWITCHES = {
    "cray": ("MPICH_GPU_SUPPORT_ENABLED", "1"),
    "mvapich": ("MV2_USE_CUDA", "1"),
    "intel": ("I_MPI_OFFLOAD", "1"),
}


@dataclass(frozen=True, slots=True)
class Ended:
    """End of a probe's job.

    status   the launcher's; None where the time was over, or nothing could be started
    output   of the launcher and the ranks
    why      reason for starting nothing
    """

    status: int | None
    output: str
    why: str = ""


Job = Callable[[int, Sequence[str], Mapping[str, str], float], Ended]


@dataclass(frozen=True, slots=True)
class CudaAwareness:
    """Answer whether MPI's messages take device pointers; None: not known, which is to be treated as no.

    source   how this is known, for people
    """

    point_to_point: bool | None = None
    source: str = ""

    def __str__(self) -> str:
        words = {True: "yes", False: "no", None: "not known"}
        return f"{words[self.point_to_point]} ({self.source})"


def find_awareness(
    mpi_library: str,
    *,
    asked: Collection[str] | None = None,
    driver: str = "",
    memory_kinds: str | None = None,
    environ: Mapping[str, str] = os.environ,
    loaded: Collection[str] | None = None,
    job: Job | None = None,
) -> CudaAwareness:
    """Find out on one rank of the job, which then tells the others: seconds at first, no time afterwards.

    mpi_library    text of MPI_Get_library_version
    asked          names in HPCPAR_CUDA_AWARE (`Settings.cuda_aware`); None: find out
    driver         version of the CUDA driver; another one is probed anew
    memory_kinds   value of MPI 4.1's mpi_memory_alloc_kinds; None where MPI has no such key
    loaded         paths of the libraries in this process (default: look)
    job            starts the probe's job (default: `run_job`)
    errors         none: whatever goes wrong is an answer of None that says so
    """
    if asked is not None:
        source = f"{cuda_wheels.ASKED}={environ.get(cuda_wheels.ASKED, ','.join(asked))}"
        return CudaAwareness("point_to_point" in asked, source)
    loaded = loaded_libraries() if loaded is None else tuple(loaded)
    off = _switched_off(mpi_library, environ)
    if off:
        return CudaAwareness(False, off)
    file = own_cache(environ) / "cuda-aware" / _digest(mpi_library, driver, environ, loaded)
    with suppress(OSError, UnicodeDecodeError):
        word, _, source = file.read_text("utf-8").partition(" ")
        if word in ("yes", "no"):
            return CudaAwareness(word == "yes", f"{source}, remembered in {file}")
    try:
        found = _probe(environ, loaded, job or run_job)
    except OSError as error:  # no room for temporary files, no more processes
        found = CudaAwareness(None, f"a probe of two ranks could not be started: {error}")
    if found.point_to_point is None:
        said, source = _statement(mpi_library, memory_kinds, loaded)
        return CudaAwareness(said, f"{source}; {found.source}")
    with suppress(OSError):  # without room for the answer it is tried again
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, f"{'yes' if found.point_to_point else 'no'} {found.source}")
    return found


def _switched_off(mpi_library: str, environ: Mapping[str, str]) -> str | None:
    """Name the setting without which this library takes no device pointer; None where it is set."""
    library = flavour(mpi_library)
    if library in _SWITCHES:
        name, value = _SWITCHES[library]
        return None if environ.get(name) == value else f"{library_name(mpi_library)} needs {name}={value}"
    if library == "mpich" and environ.get("MPIR_CVAR_ENABLE_GPU") == "0":
        return "MPIR_CVAR_ENABLE_GPU=0"
    return None


def own_cache(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the user's cache directory."""
    home = environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(home):  # the standard has others ignored
        return Path(home) / "hpcpar"
    with suppress(RuntimeError):  # a user without a home
        return Path.home() / ".cache" / "hpcpar"
    return Path(tempfile.gettempdir()) / f"hpcpar-{os.getuid()}"


def _digest(mpi_library: str, driver: str, environ: Mapping[str, str], loaded: Collection[str]) -> str:
    """Hash everything that an answer depends on."""
    libraries = []
    for path in sorted(parts(loaded)):
        with suppress(OSError):
            status = os.stat(path)
            libraries.append([os.path.realpath(path), status.st_size, status.st_mtime_ns])
    module = ""
    with suppress(OSError):
        module = Path("/sys/module/nvidia/version").read_text().strip()
    names = sorted(name for name in environ if _DECISIVE.fullmatch(name) and not is_of_a_job(name))
    key = [mpi_library, libraries, driver, module, [(name, environ[name]) for name in names]]
    return hashlib.sha256(json.dumps(key).encode()).hexdigest()[:32]


def _statement(
    mpi_library: str, memory_kinds: str | None, loaded: Collection[str]
) -> tuple[bool | None, str]:
    """Report what the library, or its settings, say of themselves, and where."""
    if memory_kinds is not None and "cuda" in {kind.partition(":")[0] for kind in memory_kinds.split(",")}:
        return True, f"the library says so itself: mpi_memory_alloc_kinds={memory_kinds}"
    library = flavour(mpi_library)
    if library in _SWITCHES:
        return True, "believed: " + "=".join(_SWITCHES[library])
    answer = query_cuda_support(loaded)
    if answer is None:
        return None, f"{library_name(mpi_library)} does not say"
    return answer, f"the library says so itself: MPIX_Query_cuda_support is {int(answer)}"


def query_cuda_support(
    loaded: Collection[str], open_library: Callable[[str], ctypes.CDLL] = ctypes.CDLL
) -> bool | None:
    """Call MPIX_Query_cuda_support of Open MPI or MPICH; None where there is no such function."""
    for path in loaded:
        if os.path.basename(path).startswith(("libmpi.so", "libmpich.so", "libmpi_cray")):
            with suppress(OSError, AttributeError):
                return bool(open_library(path).MPIX_Query_cuda_support())
    return None


def parts(loaded: Collection[str] | None = None) -> tuple[str, ...]:
    """List the libraries of this process through which a device pointer passes."""
    loaded = loaded_libraries() if loaded is None else loaded
    return tuple(path for path in loaded if os.path.basename(path).startswith(_PARTS))


# The probe


def _probe(environ: Mapping[str, str], loaded: Collection[str], job: Job) -> CudaAwareness:
    # The job's ranks shall load what this process has loaded, whatever they would choose by themselves.
    environ = {**environ, cuda_wheels.ASKED: "1" if cuda_wheels.are_joined(loaded) else "0"}
    with tempfile.TemporaryDirectory(prefix="hpcpar-probe-", ignore_cleanup_errors=True) as directory:
        report = Path(directory, "report")
        ended = job(2, [sys.executable, "-m", PROBE, str(report)], environ, JOB_LIMIT_S)
        lines = report.read_text("utf-8", "replace").splitlines() if report.exists() else []
    remove_segments(lines)
    said = {word: rest for word, _, rest in (line.partition(" ") for line in lines)}
    tried = "two ranks tried it"
    if "yes" in said:
        return CudaAwareness(True, tried)
    if "no" in said:
        return CudaAwareness(False, f"{tried}; point-to-point gave wrong bytes")
    if "start" in said:
        end = "hung" if ended.status is None else "crashed"
        return CudaAwareness(False, f"{tried}; point-to-point {end}")
    why = said.get("cannot") or ended.why
    if not why:
        last = next((line for line in reversed(ended.output.splitlines()) if line.strip(" -")), "no word")
        over = ended.status is None
        end = "its time was over before it began" if over else f"mpiexec ended with {ended.status}"
        why = f"{end}: {last.strip()[:200]}"
    return CudaAwareness(None, f"a probe of two ranks came to nothing: {why}")


def remove_segments(lines: Sequence[str]) -> None:
    """Remove the ranks' shared memory: of MPICH 2 MB stay behind each crash."""
    for word, _, path in (line.partition(" ") for line in lines):
        if word == "segment" and path.startswith(LEFT_BY_A_CRASH):
            with suppress(OSError):
                os.unlink(path)


def own_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of somebody who has logged in to this node and belongs to no job."""
    kept = _SETTINGS | {name: value for name, value in environ.items() if not is_of_a_job(name)}
    return environ_for(kept, None, is_root=os.geteuid() == 0)


def run_job(n: int, argv: Sequence[str], environ: Mapping[str, str], limit_s: float) -> Ended:
    """Run argv on n ranks of this node, for at most so long. Never raises for what happens to the job."""
    own = own_environ(environ)
    # A file, not a pipe: what outlives the launcher with the pipe's end in its hands would have us wait.
    with tempfile.TemporaryFile() as output:
        try:
            launcher = find_launcher(own, lambda name: shutil.which(name, path=own.get("PATH")), "mpiexec")
            process = subprocess.Popen(
                [launcher, "-n", str(n), *argv],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=own,
                start_new_session=True,
            )
        except LaunchError as error:
            return Ended(None, "", str(error))
        except OSError as error:
            return Ended(None, "", f"{launcher} cannot be started: {error}")
        status: int | None = None
        try:
            with suppress(subprocess.TimeoutExpired):
                status = process.wait(limit_s)
        finally:
            _end_session(process)
        output.seek(0)
        return Ended(status, output.read().decode(errors="replace"))


def _end_session(process: subprocess.Popen[bytes]) -> None:
    """End the launcher and all of its session: ranks may have left its process group."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(GRACE_S)
    deadline = time.monotonic() + GRACE_S  # beyond it a rank is blocked in the kernel: its alarm ends it
    while (left := session_members(process.pid)) and time.monotonic() < deadline:
        for pid in left:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        process.poll()
        time.sleep(0.02)


def session_members(session: int) -> list[int]:
    """List processes of a session that have not ended; none where the system does not tell."""
    return [found.pid for found in every_process() if found.session == session]
