"""What Slurm tells the task of a step, and what `SLURM_*` must not be believed.

Only `SLURM_STEP_*` describe the step at hand; `SLURM_NTASKS_PER_NODE`, `SLURM_NODELIST` and
`SLURM_JOB_NODELIST` are the job's and stale in a step that uses a part of it. A process is a task
of a step if and only if `SLURM_STEP_ID` is set: a batch script's shell has `SLURM_PROCID=0`, too.

source   recorded from Slurm 22.05: block, cyclic, uneven and heterogeneous steps
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from hpcpar.errors import LaunchError

_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")


@dataclass(frozen=True, slots=True)
class SlurmTask:
    """One task of a step; what Slurm leaves open is None."""

    rank: int
    size: int
    local_rank: int | None
    local_size: int | None
    node: int | None
    nodes: tuple[str, ...] | None
    wire: str


def task_counts(text: str) -> tuple[int, ...]:
    """Tasks on each node: task_counts("2(x2),1") == (2, 2, 1)."""
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
    """The hosts of a Slurm host list in Slurm's order, repetitions kept.

    host_names("gpu[003,1-2],login") == ("gpu003", "gpu1", "gpu2", "login")

    ClusterShell expands the ranges. It works on sets, which would sort the hosts and drop the
    second mention of one, so it is given one range at a time.
    """
    try:
        from ClusterShell.NodeSet import RESOLVER_NOGROUP, NodeSet, NodeSetException
    except ImportError as error:
        raise LaunchError(
            f"reading the host list {text!r} needs ClusterShell: pip install ClusterShell"
        ) from error
    names: list[str] = []
    try:
        for piece in _pieces(text):
            names.extend(NodeSet(piece, resolver=RESOLVER_NOGROUP))
    except NodeSetException as error:
        raise LaunchError(f"cannot read {text!r} as a host list: {error}") from error
    return tuple(names)


def _pieces(text: str) -> Iterator[str]:
    """The host list cut at every comma, also at those in brackets: "a[3,1-2],b" -> a[3] a[1-2] b."""
    for item in _split(text):
        yield from _single_ranges(item)


def _split(text: str) -> Iterator[str]:
    """Cut at the commas outside brackets."""
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


def _single_ranges(item: str) -> Iterator[str]:
    """One item with several ranges in its brackets -> items with one each, first bracket slowest."""
    before, bracket, rest = item.partition("[")
    if not bracket:
        yield item
        return
    inside, _, after = rest.partition("]")
    for part in inside.split(","):
        for tail in _single_ranges(after):
            yield f"{before}[{part}]{tail}"


def in_step(environ: Mapping[str, str]) -> bool:
    """Whether this process is a task that srun started."""
    return "SLURM_STEP_ID" in environ and "SLURM_PROCID" in environ and "SLURM_STEP_NUM_TASKS" in environ


def task(environ: Mapping[str, str]) -> SlurmTask:
    """This task of its step; LaunchError where a variable is no number or the story is broken."""
    rank = integer(environ, "SLURM_PROCID")
    size = integer(environ, "SLURM_STEP_NUM_TASKS")
    local_rank = integer(environ, "SLURM_LOCALID") if "SLURM_LOCALID" in environ else None
    nodes = host_names(environ["SLURM_STEP_NODELIST"]) if environ.get("SLURM_STEP_NODELIST") else None
    counts = (
        task_counts(environ["SLURM_STEP_TASKS_PER_NODE"]) if "SLURM_STEP_TASKS_PER_NODE" in environ else None
    )
    node = integer(environ, "SLURM_NODEID") if "SLURM_NODEID" in environ else None
    local_size = _local_size(environ, size, counts, node)
    if nodes is not None and (node is None or node >= len(nodes)):
        nodes = None
    if nodes is not None and node is not None and len(set(nodes)) < len(nodes):
        # Two components of a heterogeneous step share a node: Slurm numbers each component's
        # tasks on its own, so only MPI knows the local ranks.
        host = nodes[node]
        nodes = tuple(dict.fromkeys(nodes))
        node, local_rank, local_size = nodes.index(host), None, None
    return SlurmTask(rank, size, local_rank, local_size, node, nodes, wire(environ))


def _local_size(
    environ: Mapping[str, str], size: int, counts: tuple[int, ...] | None, node: int | None
) -> int | None:
    if counts is not None and node is not None and sum(counts) == size and node < len(counts):
        return counts[node]
    if environ.get("SLURM_GTIDS"):
        return len(environ["SLURM_GTIDS"].split(","))
    return None


def wire(environ: Mapping[str, str]) -> str:
    """How this step's tasks can find each other: "pmix", "pmi2", "cray" or "none" (srun --mpi=…)."""
    if environ.get("PMIX_NAMESPACE", "").startswith("slurm.pmix"):
        return "pmix"
    if "PMI_FD" in environ or "PMI_PORT" in environ:
        return "pmi2"
    if "PALS_APINFO" in environ or "PMI_CRAY_NO_SMP_ORDER" in environ:
        return "cray"
    return "none"


def forgotten_srun(environ: Mapping[str, str]) -> str | None:
    """A hint for a process that is in a Slurm job of several tasks, but not started by srun."""
    if "SLURM_JOB_ID" not in environ or in_step(environ):
        return None
    tasks = job_tasks(environ)
    if tasks < 2:
        return None
    return (
        f"Slurm job {environ['SLURM_JOB_ID']} has {tasks} tasks, but this process was not started by srun "
        f"and runs alone; start it with `srun python …` or `hpcpar run -n {tasks} …`"
    )


def job_tasks(environ: Mapping[str, str]) -> int:
    """Tasks that the job asked for, as far as its batch script's environment tells; else 1."""
    groups = [value for name, value in environ.items() if name.startswith("SLURM_NTASKS_HET_GROUP_")]
    if groups:
        return sum(int(value) for value in groups if value.isdigit())
    for name in ("SLURM_NTASKS", "SLURM_NPROCS"):
        if environ.get(name, "").isdigit():
            return int(environ[name])
    nodes, per_node = environ.get("SLURM_JOB_NUM_NODES", "1"), environ.get("SLURM_NTASKS_PER_NODE", "1")
    return int(nodes) * int(per_node) if nodes.isdigit() and per_node.isdigit() else 1


def job_nodes(environ: Mapping[str, str]) -> int:
    """Nodes of the job, as far as its environment tells; else 1."""
    text = environ.get("SLURM_JOB_NUM_NODES", "")
    return int(text) if text.isdigit() else 1


def integer(environ: Mapping[str, str], name: str) -> int:
    """A variable that must be a whole number that is not negative; LaunchError names it otherwise."""
    text = environ[name]
    if not text.isascii() or not text.isdigit():
        raise LaunchError(
            f"{name}={text!r} in the environment: a launcher sets a number there; "
            f"unset it, or start the job with srun or mpiexec"
        )
    return int(text)
