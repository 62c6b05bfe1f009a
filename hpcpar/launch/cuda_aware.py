"""CUDA-awareness of the MPI library: tried, not believed. A wrong guess is a crash.

In the order of trust:

    the user        HPCPAR_CUDA_AWARE=0, 1, or names out of CAPABILITIES
    a probe         two ranks on this node try, in a job of their own, whose crash harms nobody; the answer is
                    kept for this library, these settings and this driver
    the library     where no job can be started from here: MPI 4.1's mpi_memory_alloc_kinds, and
                    MPIX_Query_cuda_support, which says no of an MPI that is CUDA-aware by its UCX alone

Libraries and versions are no answer: Open MPI with a UCX that knows CUDA passes messages between device
memories, and dies of a sum on the same memory.

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
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from hpcpar import cuda_wheels
from hpcpar.durable import write_whole
from hpcpar.errors import LaunchError
from hpcpar.launch.bootstrap.pmi_selection import loaded_libraries
from hpcpar.launch.crosscheck import flavour, library_name
from hpcpar.launch.environment import is_of_a_job
from hpcpar.launch.launch_command import environ_for, find_launcher
from hpcpar.launch.processes import every_process
from hpcpar.launch.settings import CAPABILITIES

PROBE = "hpcpar.transport.gpu.probe"
JOB_LIMIT_S = 60.0
PROBE_LIMIT_S = 150.0
"""For all jobs of a probe together, below the 600 s for which the other ranks wait without a word."""

CACHE_VERSION = 1

GRACE_S = 2.0
"""From SIGTERM, on which a launcher ends its ranks, to SIGKILL for whatever is left."""

MOST_OUTPUT_NBYTES = 1 << 20

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
"""Variables that do, too."""

# Whose it is -> the variable without which a device pointer crashes it, and what that must hold.
_SWITCHES = {
    "cray": ("MPICH_GPU_SUPPORT_ENABLED", "1"),
    "mvapich": ("MV2_USE_CUDA", "1"),
    "intel": ("I_MPI_OFFLOAD", "1"),
}


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of a probe's job.

    status   of the launcher; None where the time was over, or nothing could be started
    output   the last of what the launcher and the ranks wrote
    why      nothing was started: what stood in the way
    """

    status: int | None
    output: str
    why: str = ""


Job = Callable[[int, Sequence[str], Mapping[str, str], float], Ended]


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Uses for which MPI takes device pointers. None: not known, which is to be treated as no.

    point_to_point   contiguous messages, prepared ones too
    collectives      MPI's own that only move: broadcast, all-gather, all-to-all
    reductions       MPI's own sums
    derived_types    strided messages
    source           how this is known, for people
    evidence         UCX's words about the protocol of such messages; "" where it said nothing
    """

    point_to_point: bool | None = None
    collectives: bool | None = None
    reductions: bool | None = None
    derived_types: bool | None = None
    source: str = ""
    evidence: str = ""

    def __str__(self) -> str:
        words = {True: "yes", False: "no", None: "not known"}
        found = {name.replace("_", "-"): words[getattr(self, name)] for name in CAPABILITIES}
        if len(set(found.values())) == 1:
            return f"{next(iter(found.values()))} ({self.source})"
        return f"{', '.join(f'{name} {word}' for name, word in found.items())} ({self.source})"


def own_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of somebody who has logged in to this node and belongs to no job."""
    kept = {name: value for name, value in environ.items() if not is_of_a_job(name)}
    for name, value in _SETTINGS.items():
        kept.setdefault(name, value)
    kept = environ_for(kept, "", is_root=os.geteuid() == 0)
    del kept["HPCPAR_RUN_DIRECTORY"]
    return kept


def run_job(n: int, argv: Sequence[str], environ: Mapping[str, str], limit_s: float) -> Ended:
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
    """End the launcher and all of its session: ranks may have left its process group."""
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
            break  # blocked in the kernel: its alarm, or the end of the job, ends it
        time.sleep(0.02)
    with suppress(subprocess.TimeoutExpired):
        process.wait(GRACE_S)


def session_members(session: int) -> list[int]:
    """List processes of a session that have not ended; none where the system does not tell."""
    return [found.pid for found in every_process() if found.session == session]


def capabilities(
    mpi_library: str,
    *,
    asked: Collection[str] | None = None,
    driver: str = "",
    memory_kinds: str | None = None,
    environ: Mapping[str, str] = os.environ,
    loaded: Collection[str] | None = None,
    cache: Path | None = None,
    job: Job = run_job,
) -> Capabilities:
    """Find out on one rank of the job, which then tells the others: seconds at first, no time afterwards.

    mpi_library    what MPI_Get_library_version says
    asked          what HPCPAR_CUDA_AWARE says (`Settings.cuda_aware`); None: find out
    driver         version of the CUDA driver; another one is probed anew
    memory_kinds   value of MPI 4.1's mpi_memory_alloc_kinds; None where MPI has no such key
    loaded         paths of the libraries in this process (default: look)
    cache          directory for answers (default: the user's)
    job            starts a throw-away job
    errors         none: whatever goes wrong is an answer of None that says so
    """
    if asked is not None:
        source = f"{cuda_wheels.ASKED}={environ.get(cuda_wheels.ASKED, ','.join(asked))}"
        return _capabilities({name: name in asked for name in CAPABILITIES}, source)
    loaded = loaded_libraries() if loaded is None else tuple(loaded)
    off = switched_off(mpi_library, environ)
    if off:
        return Capabilities(False, False, False, False, source=off)
    file = (cache or own_cache(environ)) / "cuda-aware"
    key = _key(mpi_library, driver, environ, loaded)
    file = file / f"{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:32]}.json"
    known = recall(file, key)
    if known is not None:
        return replace(known, source=f"{known.source}, remembered in {file}")
    try:
        found = probe(environ, loaded, job)
    except OSError as error:  # no room for temporary files, no more processes
        found = Capabilities(source=f"a probe of two ranks could not be started: {error}")
    if all(getattr(found, name) is not None for name in CAPABILITIES):
        remember(file, key, found)
    if found.point_to_point is not None:
        return found
    said = statement(mpi_library, memory_kinds, environ, loaded)
    return replace(said, source=f"{said.source}; {found.source}")


def _capabilities(answers: Mapping[str, bool | None], source: str, evidence: str = "") -> Capabilities:
    one, two, three, four = (answers[name] for name in CAPABILITIES)
    return Capabilities(one, two, three, four, source, evidence)


def switched_off(mpi_library: str, environ: Mapping[str, str]) -> str | None:
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


def _key(
    mpi_library: str, driver: str, environ: Mapping[str, str], loaded: Collection[str]
) -> dict[str, object]:
    """Collect everything that an answer depends on."""
    libraries = []
    for path in sorted(path for path in loaded if os.path.basename(path).startswith(_PARTS)):
        try:
            status = os.stat(path)
        except OSError:
            continue
        libraries.append([os.path.realpath(path), status.st_size, status.st_mtime_ns])
    module = ""
    with suppress(OSError):
        module = Path("/sys/module/nvidia/version").read_text().strip()
    return {
        "version": CACHE_VERSION,
        "mpi": mpi_library,
        "libraries": libraries,
        "driver": [driver, module],
        "settings": {name: environ[name] for name in sorted(environ) if _is_decisive(name)},
    }


def _is_decisive(name: str) -> bool:
    """True for the user's settings of MPI, but not for what differs from job to job."""
    return _DECISIVE.fullmatch(name) is not None and not is_of_a_job(name)


def recall(file: Path, key: Mapping[str, object]) -> Capabilities | None:
    """Read the answer in a file, if there is a whole one to this key."""
    try:
        kept = json.loads(file.read_text(encoding="utf-8"))
        if kept["key"] != key:
            return None
        found = Capabilities(**kept["found"])
    except (OSError, ValueError, TypeError, KeyError):
        return None
    answers = all(isinstance(getattr(found, name), bool) for name in CAPABILITIES)
    return found if answers and isinstance(found.source, str) and isinstance(found.evidence, str) else None


def remember(file: Path, key: Mapping[str, object], found: Capabilities) -> None:
    """Keep an answer, whole or not at all; without room for it, it is tried again."""
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, json.dumps({"key": key, "found": asdict(found)}, indent=1))


def probe(environ: Mapping[str, str], loaded: Collection[str], job: Job = run_job) -> Capabilities:
    """Have two ranks try everything, in one job after the other: each goes on behind what ended the last."""
    # The job's ranks shall load what this process has loaded, whatever they would choose by themselves.
    joined = "1" if cuda_wheels.are_joined(loaded) else "0"
    environ = {**environ, cuda_wheels.ASKED: joined, "UCX_PROTO_INFO": "y"}
    answers: dict[str, bool | None] = dict.fromkeys(CAPABILITIES)
    causes: list[str] = []
    evidence = ""
    left_s = PROBE_LIMIT_S
    while left_s > 0 and (open_ := [name for name in CAPABILITIES if answers[name] is None]):
        with tempfile.TemporaryDirectory(prefix="hpcpar-probe-", ignore_cleanup_errors=True) as directory:
            report = Path(directory, "report")
            argv = [sys.executable, "-m", PROBE, str(report), *open_]
            start_s = time.monotonic()
            ended = job(2, argv, environ, min(JOB_LIMIT_S, left_s))
            left_s -= time.monotonic() - start_s
            lines = _lines(report)
        _remove_segments(lines)
        evidence = evidence or ucx_evidence(ended.output)
        trouble = _settle(answers, causes, lines, ended)
        if trouble:
            causes.append(f"a probe of two ranks came to nothing: {trouble}")
            break
        if answers["point_to_point"] is False:
            answers.update(dict.fromkeys(answers, False))  # the others are built on it
    if all(answer is None for answer in answers.values()):
        return Capabilities(source="; ".join(causes), evidence=evidence)
    if None in answers.values() and left_s <= 0:
        causes.append("then the time was over")
    source = "; ".join(["two ranks tried it", *causes])
    return _capabilities(answers, source, evidence)


def _settle(answers: dict[str, bool | None], causes: list[str], lines: Sequence[str], ended: Ended) -> str:
    """Enter the report of one job; returns why it says nothing, else ""."""
    started = ""
    settled = False
    for line in lines:
        word, _, rest = line.partition(" ")
        if word == "cannot":
            return rest
        if word == "start" and rest in answers:
            started = rest
        if word in ("yes", "no") and rest == started and started:
            answers[rest] = word == "yes"
            if word == "no":
                causes.append(f"{_spoken(rest)} gave wrong bytes")
            started, settled = "", True
    if started:
        answers[started] = False
        causes.append(f"{_spoken(started)} {'hung' if ended.status is None else 'crashed'}")
        return ""
    if settled:
        return ""
    if ended.why:
        return ended.why
    last = next((line for line in reversed(ended.output.splitlines()) if line.strip(" -")), "no word")
    end = (
        "its time was over before it began" if ended.status is None else f"mpiexec ended with {ended.status}"
    )
    return f"{end}: {last.strip()[:200]}"


def _spoken(name: str) -> str:
    return name.replace("_", "-")


def _lines(report: Path) -> list[str]:
    try:
        return report.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def _remove_segments(lines: Sequence[str]) -> None:
    """Remove what the ranks shared: of MPICH 2 MB stay behind each crash."""
    for word, _, path in (line.partition(" ") for line in lines):
        if word == "segment" and path.startswith(LEFT_BY_A_CRASH):
            with suppress(OSError):
                os.unlink(path)


def ucx_evidence(output: str) -> str:
    """Extract UCX's protocol (UCX_PROTO_INFO=y) for the largest messages from device memory.

    "… | 11293..inf | (?) rendezvous zero-copy flushed write to remote | cuda_ipc/cuda |"
    -> "11293..inf: rendezvous zero-copy flushed write to remote, cuda_ipc/cuda"
    """
    found = []
    for line in output.splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(cells) == 3 and ".." in cells[0] and "cuda" in f"{cells[1]} {cells[2]}":
            found.append((cells[0], cells[1].removeprefix("(?)").strip(), cells[2]))
    found.sort(key=lambda cells: ("cuda_ipc" in cells[2], "zero-copy" in cells[1], cells[0].endswith("inf")))
    if not found:
        return ""
    sizes, protocol, transports = found[-1]
    return f"{sizes}: {protocol}{', ' if transports else ''}{transports}"


def statement(
    mpi_library: str, memory_kinds: str | None, environ: Mapping[str, str], loaded: Collection[str]
) -> Capabilities:
    """Report what the library, or its settings, say of themselves."""
    if memory_kinds is not None and "cuda" in {kind.partition(":")[0] for kind in memory_kinds.split(",")}:
        source = f"the library says so itself: mpi_memory_alloc_kinds={memory_kinds}"
        return Capabilities(True, True, True, True, source=source)
    library = flavour(mpi_library)
    if library in _SWITCHES:
        return Capabilities(True, True, source="believed: " + "=".join(_SWITCHES[library]))
    answer = query_cuda_support(loaded)
    if answer is None:
        return Capabilities(source=f"{library_name(mpi_library)} does not say")
    source = f"the library says so itself: MPIX_Query_cuda_support is {int(answer)}"
    return (
        Capabilities(True, True, source=source)
        if answer
        else Capabilities(False, False, False, False, source)
    )


def query_cuda_support(
    loaded: Collection[str], open_library: Callable[[str], ctypes.CDLL] = ctypes.CDLL
) -> bool | None:
    """Call MPIX_Query_cuda_support of Open MPI or MPICH; None where there is no such function."""
    for path in loaded:
        if not os.path.basename(path).startswith(("libmpi.so", "libmpich.so", "libmpi_cray")):
            continue
        try:
            return bool(open_library(path).MPIX_Query_cuda_support())
        except (OSError, AttributeError):
            continue
    return None


def parts(loaded: Collection[str] | None = None) -> tuple[str, ...]:
    """List the libraries of this process through which a device pointer passes."""
    loaded = loaded_libraries() if loaded is None else loaded
    return tuple(path for path in loaded if os.path.basename(path).startswith(_PARTS))
