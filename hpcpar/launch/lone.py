"""Refuse a process that MPI counts as alone although it is one of several.

Four processes that each train the whole model alone, and say 0 in the end, are the mistake that costs most.
Variables of launchers that are not in the table tell of it, and, where a container or `env -i` has taken all
variables away, the daemon that this process descends from.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from hpcpar.errors import LaunchError
from hpcpar.launch.environment import DAEMONS, LAUNCHERS, RankInfo
from hpcpar.launch.processes import PROC, Process, ancestors, ask, every_process
from hpcpar.launch.settings import was_started_by_a_rank

log = logging.getLogger("hpcpar")

PAIRS = dict.fromkeys([*((each.rank, each.size) for each in LAUNCHERS), ("HOROVOD_RANK", "HOROVOD_SIZE")])
"""Variables of a rank and of a size, which also launchers set that leave no marker."""

STARTERS = (
    *(*DAEMONS, "flux-shell", "mpiexec", "mpirun", "mpiexec.hydra", "mpiexec.openmpi"),
    *("prterun", "orterun"),
)
STEP_DAEMON = re.compile(r"slurmstepd: \[(\d+\.\d+)")
ASK_LIMIT_S = 10.0


def require_alone(info: RankInfo, environ: Mapping[str, str] = os.environ, proc: Path = PROC) -> None:
    """Raise LaunchError where variables or ancestors show one process of several; warn where it can be meant.

    A process that a rank has started with variables taken away is meant to be alone.
    """
    if was_started_by_a_rank(environ):
        return
    for rank, size in PAIRS:
        if not environ.get(size, "").isdigit() or int(environ[size]) < 2:
            continue
        found = " and ".join(f"{name}={environ[name]}" for name in (rank, size) if name in environ)
        if rank in environ and info.launcher == "single":
            raise LaunchError(
                f"{found} say that this process is one of {environ[size]}, but MPI knows of this one alone: "
                f"each would train the whole model. Start them with srun, mpiexec or `hpcpar run -n "
                f"{environ[size]} …`; if this one is meant to be alone, unset {rank} and {size}"
            )
        if size == "WORLD_SIZE" or info.launcher == "single":
            log.warning("%s, but this process runs alone: start it with srun, mpiexec or `hpcpar run`", found)
    if info.launcher == "single" and "SLURM_STEP_ID" not in environ:
        _require_no_task(environ)
        _ask_who_started_us(environ, proc)


def _require_no_task(environ: Mapping[str, str]) -> None:
    """Raise LaunchError with a part of a task's variables; a batch script's shell has SLURM_PROCID=0, too."""
    if environ.get("SLURM_PROCID", "0").strip("0"):
        raise LaunchError(
            f"SLURM_PROCID={environ['SLURM_PROCID']} says that this is one of several tasks of srun, but "
            f"SLURM_STEP_ID is not set and MPI knows of this process alone: pass all of SLURM_* into the "
            f"container; if this process is meant to be alone, unset SLURM_PROCID"
        )


def refuse_nested(environ: Mapping[str, str] = os.environ, proc: Path = PROC) -> None:
    """Raise LaunchError where the mpiexec of this rank was itself started as one of several by another one.

    The outer one's variables are gone then, if it is of the same kind. A rank that starts a job of its own
    means to.
    """
    if was_started_by_a_rank(environ):
        return
    above = [process for process in ancestors(proc) if process.name in STARTERS]
    for outer in above:
        # What is between a rank and its own mpiexec: a daemon, whose parent that mpiexec is.
        inner = next((each for each in above if each.parent == outer.pid), None)
        if outer.name not in DAEMONS or inner is None:
            continue
        count = _children(outer, proc)
        if count is not None:
            raise LaunchError(
                f"{outer.name} (pid {outer.pid}) started {count} processes, of which one is {inner.name} "
                f"(pid {inner.pid}), which started this rank: the others have worlds of their own, and each "
                f"world has a rank 0 that does the same work and writes the same files. Use one mpiexec; "
                f"worlds that shall be separate take a launch each"
            )


def _ask_who_started_us(environ: Mapping[str, str], proc: Path) -> None:
    """Look for a launcher's daemon among the ancestors: the variables that it set have been taken away."""
    for process in ancestors(proc):
        step = STEP_DAEMON.match(process.title)
        if step is not None:
            tasks, who = _tasks_of_step(step[1], process, environ, proc), f"srun (step {step[1]})"
        elif process.name in STARTERS:
            tasks, who = _children(process, proc), f"{process.name} (pid {process.pid})"
        else:
            continue
        if tasks is not None and tasks > 1:
            raise LaunchError(
                f"{who} started {tasks} processes, of which this is one, but none of its variables is left "
                f"to tell which: each would train the whole model alone. Do not start it with an empty "
                f"environment (`env -i`; containers: without --cleanenv, or with what the launcher sets, as "
                f"SLURM_* and PMI*, passed in)"
            )
        if tasks is None:
            log.warning("%s started this process, but none of its variables is left: it runs alone", who)
        return


def _children(parent: Process, proc: Path) -> int | None:
    """Count the processes that a daemon has started here; None for one: other nodes may have more."""
    count = sum(process.parent == parent.pid for process in every_process(proc))
    return count if count > 1 else None


def _tasks_of_step(step: str, daemon: Process, environ: Mapping[str, str], proc: Path) -> int | None:
    scontrol = shutil.which("scontrol", path=environ.get("PATH"))
    if scontrol is not None:
        said = ask([scontrol, "show", "step", step], ASK_LIMIT_S, {**environ, **_configuration(daemon, proc)})
        tasks = re.search(r"\bTasks=(\d+)", said.stdout if said else "")
        if tasks is not None:
            return int(tasks[1])
    return _children(daemon, proc)


def _configuration(daemon: Process, proc: Path) -> dict[str, str]:
    try:
        variables = (proc / str(daemon.pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return {}
    told = (os.fsdecode(variable).partition("=") for variable in variables)
    return {name: value for name, _, value in told if name == "SLURM_CONF"}
