"""The variables that Slurm gives to the task of a step, and those that must not be believed.

Only `SLURM_STEP_*` describe the step at hand; `SLURM_NTASKS_PER_NODE`, `SLURM_NODELIST` and
`SLURM_JOB_NODELIST` are the job's and stale in a step that uses a part of it. A process is a task
of a step if and only if `SLURM_STEP_ID` is set: a batch script's shell has `SLURM_PROCID=0`, too.
But for a batch script that a task has submitted: sbatch hands it that task's `SLURM_STEP_*`.

source   recorded from Slurm 22.05: block, cyclic, uneven and heterogeneous steps
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping
from itertools import chain, product, zip_longest
from pathlib import Path
from typing import NamedTuple

from hpcpar.errors import ConfigError, LaunchError
from hpcpar.launch.processes import PROC, process

_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")
_RANGE = re.compile(r"(?P<first>[0-9]+)(?:-(?P<last>[0-9]+))?")
_HET_JOB_IDS = "SLURM_JOB_ID_HET_GROUP_"
_BATCH_DAEMON = re.compile(r"slurmstepd: \[\S+\.batch\]")
_INTERACTIVE_STEP = str(0xFFFFFFFA)
"""The step that is the shell of `salloc`, where a site has it on one of the job's nodes."""


class SlurmTask(NamedTuple):
    """One task of a step; what Slurm leaves open is None."""

    rank: int
    size: int
    local_rank: int | None
    local_size: int | None
    node: int | None
    nodes: tuple[str, ...] | None
    pmi: str


def task_counts(text: str) -> tuple[int, ...]:
    """Expand the tasks on each node: task_counts("2(x2),1") == (2, 2, 1)."""
    counts: list[int] = []
    for part in text.split(","):
        match = _COUNT.fullmatch(part.strip())
        if match is None:
            raise LaunchError(
                f"cannot read {text!r} as Slurm's tasks per node: {part!r} is not like 4 or 4(x2)"
            )
        counts.extend([int(match[1])] * int(match[2] or 1))
    return tuple(counts)


def host_names(text: str) -> tuple[str, ...]:
    """Expand a Slurm host list in Slurm's order, repetitions kept.

    host_names("gpu[003,1-2],login") == ("gpu003", "gpu1", "gpu2", "login")
    errors   LaunchError where brackets do not pair or a range is none
    """
    names: list[str] = []
    for item in _split(text):
        names.extend(_hosts(item, text))
    return tuple(names)


def _split(text: str) -> Iterator[str]:
    depth, start = 0, 0
    for i, character in enumerate(text):
        depth += (character == "[") - (character == "]")
        if depth not in (0, 1):
            raise LaunchError(
                f"cannot read {text!r} as a host list: brackets do not pair at character {i + 1}"
            )
        if character == "," and depth == 0:
            yield text[start:i]
            start = i + 1
    if depth:
        raise LaunchError(f"cannot read {text!r} as a host list: a bracket is not closed")
    yield text[start:]


def _hosts(item: str, text: str) -> Iterator[str]:
    """Yield the hosts of one item of a list: "r[1-2]n[1,3]" -> r1n1 r1n3 r2n1 r2n3.

    Of several brackets Slurm changes the last one fastest, but before it the first one: from fast to
    slow last, first, second, ... That is no plan, but its order, and a node's number counts by it.
    """
    first, *rest = item.split("[")
    brackets, texts = [], [first]
    for piece in rest:
        inside, _, after = piece.partition("]")
        brackets.append(_numbers(inside, text))
        texts.append(after)
    slow_to_fast = brackets[-2::-1] + brackets[-1:]
    for numbers in product(*slow_to_fast):
        in_place = [*numbers[-2::-1], *numbers[-1:]]
        yield "".join(chain.from_iterable(zip_longest(texts, in_place, fillvalue="")))


def _numbers(ranges: str, text: str) -> list[str]:
    numbers: list[str] = []
    for part in ranges.split(","):
        match = _RANGE.fullmatch(part)
        if match is None or int(match["last"] or match["first"]) < int(match["first"]):
            raise LaunchError(f"cannot read {text!r} as a host list: {part!r} is not like 7 or 3-12")
        first, last = match["first"], match["last"] or match["first"]
        numbers.extend(str(number).zfill(len(first)) for number in range(int(first), int(last) + 1))
    return numbers


def in_step(environ: Mapping[str, str], proc: Path = PROC) -> bool:
    """Return whether this process is a task that srun started, or a child of one."""
    names = {"SLURM_STEP_ID", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"}
    return names <= environ.keys() and not in_batch_script(environ, proc)


def in_batch_script(environ: Mapping[str, str], proc: Path) -> bool:
    """Return whether this process is a batch script's, where a step's variables are the submitter's."""
    script = process(environ.get("SLURM_TASK_PID") or "none", proc)
    daemon = process(script.parent, proc) if script else None
    return daemon is not None and _BATCH_DAEMON.match(daemon.title) is not None


def came_with_the_task(names: Collection[str], environ: Mapping[str, str], proc: Path) -> bool:
    """Return whether srun's task, or a batch script, was started with these: nobody inside of it set them.

    It is this process, or one that this process descends from (a shell, a launcher's daemon).
    """
    if not environ.get("SLURM_TASK_PID", "").isdigit():
        return False
    try:
        started = (proc / environ["SLURM_TASK_PID"] / "environ").read_bytes().split(b"\0")
    except OSError:  # of another process namespace, as in some containers
        return False
    return {os.fsencode(f"{name}={environ[name]}") for name in names} <= set(started)


def in_interactive_shell(environ: Mapping[str, str], proc: Path) -> bool:
    """Return whether this process was typed into a shell inside of a step (`srun --pty bash`, tmux in it).

    A shell with job control gives each command a process group of its own, on the terminal that it leads the
    session of; what a script starts has no terminal, or stays in the leader's group.
    """
    task_pid = environ.get("SLURM_TASK_PID", "")
    if not in_step(environ, proc) or not task_pid.isdigit():
        return False
    here = process("self", proc)
    if here is None or here.pid == int(task_pid):  # a task is a rank, on a terminal or not
        return False
    return here.terminal != 0 and here.group != here.session


def task(environ: Mapping[str, str]) -> SlurmTask:
    """Read this task of its step; LaunchError where a variable is no number or they contradict each other."""
    rank = integer(environ, "SLURM_PROCID")
    size = integer(environ, "SLURM_STEP_NUM_TASKS")
    local_rank = integer(environ, "SLURM_LOCALID") if "SLURM_LOCALID" in environ else None
    nodes = host_names(environ["SLURM_STEP_NODELIST"]) if environ.get("SLURM_STEP_NODELIST") else None
    counts = (
        task_counts(environ["SLURM_STEP_TASKS_PER_NODE"]) if "SLURM_STEP_TASKS_PER_NODE" in environ else None
    )
    node = integer(environ, "SLURM_NODEID") if "SLURM_NODEID" in environ else None
    name = environ.get("SLURMD_NODENAME", "")
    if "SLURM_HET_SIZE" in environ and nodes is not None and nodes.count(name) == 1:
        # Components are numbered in their order, but their hosts and tasks are listed in the hosts' order.
        node = nodes.index(name)
    local_size = _local_size(environ, size, counts, node)
    if nodes is not None and (node is None or node >= len(nodes)):
        nodes = None
    if nodes is not None and node is not None and len(set(nodes)) < len(nodes):
        # Two components of a heterogeneous step share a node: Slurm numbers each component's
        # tasks on its own, so only MPI knows the local ranks.
        host = nodes[node]
        nodes = tuple(dict.fromkeys(nodes))
        node, local_rank, local_size = nodes.index(host), None, None
    return SlurmTask(rank, size, local_rank, local_size, node, nodes, pmi_of_step(environ))


def _local_size(
    environ: Mapping[str, str], size: int, counts: tuple[int, ...] | None, node: int | None
) -> int | None:
    if counts is not None and node is not None and sum(counts) == size and node < len(counts):
        return counts[node]
    if environ.get("SLURM_GTIDS"):
        return len(environ["SLURM_GTIDS"].split(","))
    return None


def pmi_of_step(environ: Mapping[str, str]) -> str:
    """Return the PMI that this step's tasks have: "pmix", "pmi2", "cray" or "none" (srun --mpi=…).

    A step that a task of another step, or a rank of mpiexec, has started inherits that one's variables; they
    lead nowhere.
    """
    namespace, job_and_step = environ.get("PMIX_NAMESPACE", ""), environ.get("PMI_JOBID", "")
    if namespace.startswith("slurm.pmix.") and _of_this_step(namespace[len("slurm.pmix.") :], environ):
        return "pmix"
    of_hydra = "MPI_LOCALNRANKS" in environ and not job_and_step
    told = ("PMI_FD" in environ or "PMI_PORT" in environ) and not of_hydra
    if told and _of_this_step(job_and_step, environ):
        return "pmi2"
    if "PALS_APINFO" in environ or "PMI_CRAY_NO_SMP_ORDER" in environ:
        return "cray"
    return "none"


def _of_this_step(job_and_step: str, environ: Mapping[str, str]) -> bool:
    """Compare "7.0" with this job and step; True for what looks otherwise, of other versions of Slurm."""
    job, _, step = job_and_step.partition(".")
    if not (job.isdigit() and step.isdigit()) or "SLURM_STEP_ID" not in environ:
        return True
    own = (environ[name] for name in environ if name == "SLURM_JOB_ID" or name.startswith(_HET_JOB_IDS))
    return step == environ["SLURM_STEP_ID"] and job in own


def forgotten_srun(environ: Mapping[str, str], proc: Path = PROC) -> str | None:
    """Return a hint for a process in a Slurm job of several tasks that srun has not started."""
    typed = in_interactive_shell(environ, proc)
    in_own_step = in_step(environ, proc) and environ["SLURM_STEP_ID"] != _INTERACTIVE_STEP and not typed
    if "SLURM_JOB_ID" not in environ or in_own_step:
        return None
    tasks = job_tasks(environ)
    if tasks < 2:
        return None
    # A shell's step holds all cores of the job.
    start = f"`srun{' --overlap' if typed else ''} python …` or `hpcpar run -n {tasks} …`"
    components = environ.get("SLURM_HET_SIZE", "")
    if components.isdigit():  # without the option a step is in the first component alone
        start = f"`srun --het-group=0-{int(components) - 1} python …`"
    return (
        f"Slurm job {environ['SLURM_JOB_ID']} has {tasks} tasks, but this process was not started by srun "
        f"and runs alone; start it with {start}"
    )


def job_tasks(environ: Mapping[str, str]) -> int:
    """Return the tasks that the job asked for, as far as its environment tells; else 1."""
    groups = [value for name, value in environ.items() if name.startswith("SLURM_NTASKS_HET_GROUP_")]
    if groups:
        return sum(int(value) for value in groups if value.isdigit())
    for name in ("SLURM_NTASKS", "SLURM_NPROCS"):
        if environ.get(name, "").isdigit():
            return int(environ[name])
    nodes, per_node = environ.get("SLURM_JOB_NUM_NODES", "1"), environ.get("SLURM_NTASKS_PER_NODE", "1")
    return int(nodes) * int(per_node) if nodes.isdigit() and per_node.isdigit() else 1


def job_nodes(environ: Mapping[str, str]) -> int:
    """Return the nodes of the job, as far as its environment tells; else 1."""
    text = environ.get("SLURM_JOB_NUM_NODES", "")
    return int(text) if text.isdigit() else 1


def require_cores(n: int, environ: Mapping[str, str]) -> None:
    """Raise ConfigError where the job has fewer cores than n: an mpiexec would put several ranks on one."""
    listed = environ.get("SLURM_JOB_CPUS_PER_NODE")
    if not listed or "SLURM_HET_SIZE" in environ or environ.get("SLURM_OVERCOMMIT"):
        return
    cores = sum(task_counts(listed))
    if n > cores:
        raise ConfigError(
            f"{n} ranks were asked for, but Slurm job {environ.get('SLURM_JOB_ID')} has {cores} cores: start "
            f"fewer, ask sbatch or salloc for more, or have several on a core by naming hosts with their "
            f"slots, as in `hpcpar run -H node1:{n} …`"
        )


def cores_per_task(n: int, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variable by which srun, from 22.05 on, gives each of n tasks the job's --cpus-per-task.

    Nothing where so many do not fit: the job may have fewer tasks, or the number be another job's.
    """
    cores, listed = environ.get("SLURM_CPUS_PER_TASK", ""), environ.get("SLURM_JOB_CPUS_PER_NODE", "")
    if not cores.isdigit() or not listed or "SRUN_CPUS_PER_TASK" in environ:
        return {}
    room = sum(count // max(1, int(cores)) for count in task_counts(listed))
    return {"SRUN_CPUS_PER_TASK": cores} if n <= room else {}


def restarts(environ: Mapping[str, str] = os.environ) -> int:
    """Count how often Slurm has requeued and restarted this job; 0 outside of one."""
    return integer(environ, "SLURM_RESTART_COUNT") if environ.get("SLURM_RESTART_COUNT") else 0


def integer(environ: Mapping[str, str], name: str) -> int:
    """Read a whole number that is not negative; LaunchError names the variable otherwise."""
    text = environ[name]
    if not text.isascii() or not text.isdigit():
        raise LaunchError(
            f"{name}={text!r} in the environment: a launcher sets a number there; "
            f"unset it, or start the job with srun or mpiexec"
        )
    return int(text)
