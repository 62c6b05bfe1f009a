"""The page of the documentation on launchers, from the tables that are read at a start.

python docs/launchers.py > docs/launchers.md
"""
# ruff: noqa: E501

from __future__ import annotations

import sys

from hpcpar.launch.allocation import HOST_LISTS
from hpcpar.launch.crosscheck import MPIEXECS
from hpcpar.launch.environment import DAEMONS, LAUNCHERS
from hpcpar.launch.launch_command import AGAINST_THE_REQUEST, PLACES_OF_THE_JOB
from hpcpar.launch.lone import PAIRS, STARTERS
from hpcpar.launch.settings import ASKED_RANKS

TEXT = """\
# Launchers: whose variables are read, and what happens when two disagree

This page is made from the tables in the code: `python docs/launchers.py > docs/launchers.md`.

## Who is this process?

`hpcpar.init()` reads variables first and starts MPI then. Launchers nest, and the inner one's processes inherit
the outer one's variables. So the table is read from its top, the innermost launcher, and the first one whose
marker, rank and size are all set is believed.

{launchers}

Where none of them is there, this is one process alone.

| when | then |
|---|---|
| srun's own task was started with the variables of another launcher already in its environment (`/proc/PID/environ` of `SLURM_TASK_PID`) | srun was called inside of that launcher, and Slurm is believed |
| the task of the step is a daemon by which an mpiexec reaches a node ({daemons}) | the step is not the job: the mpiexec is believed |
| this process was typed into a shell inside of a step (`srun --pty bash`): it has a process group of its own on the session's terminal | it is one process alone, with a hint at what starts several |
| a batch script was submitted by a task of a step, whose variables `sbatch` hands on: the parent of `SLURM_TASK_PID` is `slurmstepd: [….batch]` | they are passed over |
| MPI has several ranks, and the launcher that is believed does not agree with it, but another one does | that one is believed: it is the inner one |
| MPI has several ranks, and no launcher left variables | MPI is believed |
| launcher and MPI disagree on rank, size, local rank or local size | `LaunchError` on every rank, with what to type |
| the launcher started several processes, and MPI knows of this one alone | `LaunchError`: each would train alone |
| one of {mpiexecs} agrees with MPI, and srun, Flux or another mpiexec has several tasks around it | `LaunchError`: each task has a world of its own, and each world has a rank 0 |
| the same, but of one kind, so that the outer one's variables are gone: a daemon above the mpiexec of this rank has started others | `LaunchError`; not in what a rank itself starts |
| `hpcpar run -n N` started a job of another size ({asked}) | `LaunchError` |

## Alone, and meant to be?

With one rank by MPI and no launcher in the table above:

| found | then |
|---|---|
| {pairs}, of 2 or more | `LaunchError` that names both; a `WORLD_SIZE` without `RANK`, or beside a launcher that says 1: a warning |
| `SLURM_PROCID` above 0 without `SLURM_STEP_ID` | `LaunchError`: a container got a part of the variables |
| nothing, but a daemon among the ancestors of this process: `slurmstepd` of a numbered step, {starters} | its variables were taken away (`env -i`, containers). It started several: `LaunchError`; one: silence if Slurm says that the step has one task, else a warning |
| a Slurm, PBS, LSF, Grid Engine or OAR job of several slots, or a Flux instance | a warning: the batch script's own process may be meant |

A process that a rank has started without the launcher's variables is alone (`HPCPAR_RANK_PID` tells).

## Before MPI starts

| library | finds | then |
|---|---|---|
| MPICH without PMIx | `PMIX_*`, from an outer launcher or from Slurm's pmix, beside a PMI-1 of its own or with one rank | the variables are taken away; MPICH would abort |
| MPICH without PMIx | only `PMIX_*`, and several ranks (Open MPI's mpiexec, jsrun) | `LaunchError` |
| MPICH with PMIx | `PMI_*` and `PMIX_*` | what this launcher does not use is taken away |
| Open MPI 5 | Hydra | `LaunchError` |
| MPICH 5 | less room in /dev/shm than its ranks on the node need | `LaunchError` with what to set |

Under srun, what connects the ranks is in the table at the top of `hpcpar/launch/bootstrap/pmi_selection.py`.

## Where `hpcpar run` starts ranks

In a Slurm allocation by srun, else by the mpiexec beside this Python or on PATH. Under srun these variables of the
job are taken out, since srun would follow them against the request: {against}; and where hosts are named
(`-H`), {places}; and so is `SLURM_CPU_BIND` where it names the cores of the task that `hpcpar run` is called in.
The job's `SLURM_CPUS_PER_TASK` becomes `SRUN_CPUS_PER_TASK`, if so many fit. An mpiexec in a Slurm allocation gets `SLURM_MPI_TYPE=none`, and in a step `SLURM_OVERLAP=1`, for the
srun by which it starts its daemons. In other batch systems the hosts come from the first of these that is set:

{hosts}

More ranks than slots (under Slurm: than cores) are an error there, and Open MPI is not told to allow more ranks than cores. A Flux instance
of several nodes is refused with the `flux run` that works. An mpiexec that is neither MPICH's, Intel's nor Open MPI's
is left to its own way of finding hosts.
"""


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def code(*names: str) -> str:
    return ", ".join(f"`{name}`" for name in names if name)


def page() -> str:
    """Return the page in Markdown."""
    launchers = [
        (
            each.called,
            code(each.marker),
            code(each.rank),
            code(each.size),
            code(each.local_rank, each.local_size) or "from MPI",
            code(each.node) or "from MPI",
        )
        for each in LAUNCHERS
    ]
    step = (
        "srun",
        code("SLURM_STEP_ID"),
        code("SLURM_PROCID"),
        code("SLURM_STEP_NUM_TASKS"),
        code("SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
        code("SLURM_NODEID", "SLURM_STEP_NODELIST"),
    )
    return TEXT.format(
        launchers=table(
            ("launcher", "marker", "rank", "size", "local rank, local size", "node"), [*launchers, step]
        ),
        daemons=code(*DAEMONS),
        mpiexecs=code(*MPIEXECS),
        asked=code(ASKED_RANKS),
        pairs="; ".join(code(*pair).replace(", ", " and ") for pair in PAIRS),
        starters=code(*STARTERS),
        against=code(*AGAINST_THE_REQUEST),
        places=code(*PLACES_OF_THE_JOB),
        hosts=table(
            ("batch system", "variable", "what it is"),
            [
                (each.system, code(each.variable), "a file" if each.is_file else "the list itself")
                for each in HOST_LISTS
            ],
        ),
    )


if __name__ == "__main__":
    sys.stdout.write(page())
