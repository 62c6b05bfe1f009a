"""The rank of this process, from the environment alone.

Launchers nest (mpiexec inside a Slurm step inside a batch job), and the inner one's children inherit the
outer one's variables. So the table runs from the innermost launcher outward, and the first that left its
marker is believed; unless srun's own task had the same from the start: then srun was called inside that
launcher. Once MPI has started, `hpcpar.launch.crosscheck` believes whichever launcher agrees with it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hpcpar.errors import LaunchError
from hpcpar.launch import slurm
from hpcpar.launch.allocation import forgotten_launcher
from hpcpar.launch.processes import PROC, process


@dataclass(frozen=True, slots=True)
class RankInfo:
    """Position of this process in its job; what the launcher leaves open is None.

    node      index of this rank's node, 0-based
    nodes     host names, by node index
    launcher  "torchrun" "flux" "openmpi" "pals" "mvapich" "hydra" "jsrun" "slurm" or "single"
    pmi       how MPI finds its peers: srun's "pmix" "pmi2" "cray" "none"; "own" for launchers
              that bring their MPI's own; "none" where there is none
    hint      something that looks forgotten, to be said once, or None
    """

    rank: int
    size: int
    local_rank: int | None
    local_size: int | None
    node: int | None
    nodes: tuple[str, ...] | None
    launcher: str
    pmi: str
    hint: str | None = None


@dataclass(frozen=True, slots=True)
class Launcher:
    """Variables by which one launcher tells a process who it is; "" where it has none.

    marker    set for this launcher's own processes only
    called    what people know it as
    """

    name: str
    marker: str
    rank: str
    size: str
    local_rank: str
    local_size: str
    node: str = ""
    pmi: str = "own"
    called: str = ""


def _by_prefix(name: str, prefix: str, called: str) -> Launcher:
    rank, size, local_rank, local_size = (
        f"{prefix}_{each}" for each in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    )
    return Launcher(name, size, rank, size, local_rank, local_size, called=called)


# srun --mpi=cray_shasta sets PALS_RANKID as well, but not PALS_LOCAL_RANKID: that one tells PALS.
# Hydra is MPICH's and Intel MPI's launcher. Flux leaves the ranks per node to MPI; its brokers are often
# started by one of the others, so it stands before them.
LAUNCHERS = (
    Launcher(
        *("torchrun", "TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
        node="GROUP_RANK",
        pmi="none",
        called="torchrun",
    ),
    Launcher(
        *("flux", "FLUX_TASK_RANK", "FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID", ""),
        called="Flux (`flux run`)",
    ),
    _by_prefix("openmpi", "OMPI_COMM_WORLD", "Open MPI's mpiexec"),
    Launcher(
        *("pals", "PALS_LOCAL_RANKID", "PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"),
        node="PALS_NODEID",
        called="PALS' mpiexec (HPE Cray)",
    ),
    _by_prefix("mvapich", "MV2_COMM_WORLD", "MVAPICH's mpirun_rsh"),
    _by_prefix("mvapich", "MVP_COMM_WORLD", "MVAPICH's mpirun_rsh"),
    Launcher(
        *("hydra", "MPI_LOCALNRANKS", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
        called="MPICH's or Intel's mpiexec (Hydra)",
    ),
    _by_prefix("jsrun", "JSM_NAMESPACE", "jsrun"),
)


DAEMONS = ("hydra_pmi_proxy", "hydra_bstrap_pr", "pmi_proxy", "orted", "prted")
"""Programs by which an mpiexec reaches nodes, and which it has srun start; names end after 15 letters."""


# Variables of launchers for their ranks; not those by which a user sets MPI.
_OF_A_JOB = re.compile(
    r"(PMI|PMIX|PALS|PRTE|PRRTE|ORTE|HYDRA|HYDI|MPIEXEC|MPI_LOCAL|SLURM|SLURMD|SRUN|FLUX|JSM|LSB|LSF|PBS|COBALT"
    r"|TORCHELASTIC|MV2_COMM_WORLD|MVP_COMM_WORLD|I_MPI_HYDRA|HPCPAR_RUN|HPCPAR_STEP)(_.*|[A-Z]*)?"
    r"|OMPI_(?!MCA_|ALLOW_RUN_AS_ROOT).*"
    r"|OMPI_MCA_(orte|ess|pmix|prte|num_procs|initial_wdir|cpu_type|PREFIXES|shmem_RUNTIME|hwloc|app_ctx).*"
)


def is_of_a_job(name: str) -> bool:
    """Return whether a variable tells a process to which job, or rank of it, it belongs."""
    return _OF_A_JOB.fullmatch(name) is not None


def detect(environ: Mapping[str, str] = os.environ, proc: Path = PROC) -> RankInfo:
    """Return this process's rank. Reads variables only; LaunchError where they contradict each other.

    proc   where the system shows the environments that processes were started with

    `hpcpar.launch.crosscheck` then holds the answer against MPI's own.
    """
    for innermost in claims(environ, proc):
        return innermost
    hint = slurm.forgotten_srun(environ, proc) or forgotten_launcher(environ)
    return RankInfo(0, 1, 0, 1, 0, None, launcher="single", pmi="none", hint=hint)


def claims(environ: Mapping[str, str] = os.environ, proc: Path = PROC) -> Iterator[RankInfo]:
    """Yield this process's rank by each launcher that has left its variables, the innermost first.

    A step that an mpiexec has made for its own daemons is none of them, nor is one whose task is a shell
    that this process was typed into.
    """
    outside = []
    is_task, is_within = slurm.in_step(environ, proc), False
    for launcher in LAUNCHERS:
        names = (launcher.marker, launcher.rank, launcher.size)
        if not all(name in environ for name in names):
            continue
        if is_task and slurm.came_with_the_task(names, environ, proc):
            outside.append(launcher)
        else:
            is_within = True
            yield _checked(_from_launcher(launcher, environ))
    if is_task and not slurm.in_interactive_shell(environ, proc):
        started = process(environ.get("SLURM_TASK_PID") or "none", proc)
        if not is_within or (started is not None and started.name not in DAEMONS):
            yield _checked(_from_step(environ, proc))
    for launcher in outside:
        yield _checked(_from_launcher(launcher, environ))


def sound_claims(environ: Mapping[str, str] = os.environ) -> list[RankInfo]:
    """Return all claims up to the first that makes no sense: but for the innermost they may be stale."""
    found = []
    with suppress(LaunchError):
        for claim in claims(environ):
            found.append(claim)
    return found


def _from_step(environ: Mapping[str, str], proc: Path) -> RankInfo:
    task = slurm.task(environ)
    return RankInfo(*task[:6], "slurm", task.pmi, slurm.forgotten_srun(environ, proc))


def _from_launcher(launcher: Launcher, environ: Mapping[str, str]) -> RankInfo:
    def optional(name: str) -> int | None:
        return slurm.integer(environ, name) if name and environ.get(name) else None

    rank, size = (slurm.integer(environ, name) for name in (launcher.rank, launcher.size))
    local_rank, local_size = optional(launcher.local_rank), optional(launcher.local_size)
    node = optional(launcher.node)
    return RankInfo(rank, size, local_rank, local_size, node, None, launcher.name, launcher.pmi)


def _checked(info: RankInfo) -> RankInfo:
    wrong = ""
    if info.rank >= info.size:
        wrong = f"rank {info.rank} of {info.size}: ranks end at {info.size - 1};"
    elif info.local_rank is not None and info.local_size is not None and info.local_rank >= info.local_size:
        wrong = f"local rank {info.local_rank} of {info.local_size} on this node:"
    if wrong:
        raise LaunchError(
            f"{info.launcher}'s variables say {wrong} they may be left from another launcher: start the job "
            f"from a fresh shell"
        )
    return info
