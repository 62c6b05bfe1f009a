"""A job whose ranks start from copies of the Python environment on their nodes' own disks.

Three jobs, one after the other, all through the launcher that `hpcpar run` uses anyway:

    one rank for each node    hpcpar.cli.distribute: make the copy
    the user's                from the copy's Python, with PATH and the like to match
    one process for each      hpcpar.launch.local_copy remove: take it away, whatever became of the others

Of a Slurm job that is cancelled, or whose time is over, the ranks' ends remove the copies. What is left even
so (mpiexec killed, a node lost) the user's next such job there removes, if the site does not.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from hpcpar.errors import ConfigError
from hpcpar.launch import hosts as host_lists
from hpcpar.launch import slurm, supervise
from hpcpar.launch.allocation import allocated_hosts
from hpcpar.launch.environment_trees import trees_of_this_python
from hpcpar.launch.hosts import Host
from hpcpar.launch.local_copy import AFTER_RANK, NAME, LocalCopy, place_for_copies
from hpcpar.launch.supervise import NO_WISHES, Say, Which, Wishes


@dataclass(frozen=True, slots=True)
class EachNode:
    """One process on each node: the number, the hosts if they are known, the launcher's options."""

    n: int
    hosts: tuple[Host, ...] = ()
    words: tuple[str, ...] = ()


def each_node(kind: str, n: int, hosts: Sequence[Host], environ: Mapping[str, str]) -> EachNode:
    """One process on each node that a job of n ranks may use.

    kind     of the launcher: "srun", "mpich", "intel", "openmpi" or ""
    hosts    that the user has named; else all nodes of the batch job, else this one
    errors   ConfigError where the launcher cannot be told
    """
    if "SLURM_HET_SIZE" in environ and kind == "srun":
        raise ConfigError(
            "a heterogeneous Slurm job has nodes of several kinds: copying the environment to all of them is "
            "not done; leave --broadcast-env out"
        )
    hosts = hosts or (allocated_hosts(environ) if kind != "srun" else ())
    if hosts:
        placed = tuple(Host(host.name, 1) for host in host_lists.place(hosts, n))
        return EachNode(len(placed), placed)
    nodes = slurm.job_nodes(environ) if "SLURM_JOB_ID" in environ else 1
    if kind == "srun":
        return EachNode(nodes, words=(f"--nodes={nodes}", "--ntasks-per-node=1"))
    if nodes == 1:
        return EachNode(1)
    if kind in ("mpich", "intel"):
        return EachNode(nodes, words=("-ppn", "1"))
    if kind == "openmpi":
        return EachNode(nodes, words=("--map-by", "ppr:1:node"))
    raise ConfigError(
        "this mpiexec is of an MPI library that is not known here, so it cannot be told to start one process "
        "on each node: leave --broadcast-env out"
    )


def run(
    n: int,
    argv: Sequence[str],
    *,
    say: Say,
    wanted: str = "",
    launcher: str = "auto",
    options: Sequence[str] = (),
    wishes: Wishes = NO_WISHES,
    environ: Mapping[str, str] = os.environ,
    which: Which = shutil.which,
) -> int:
    """Run a job as `supervise.run` does, from copies; return its status, or that of making the copies.

    wanted   directory on the nodes for the copies; "": where jobs keep such things
    """
    name = f"{NAME}{os.geteuid()}-{secrets.token_hex(8)}"
    copy = LocalCopy(os.path.join(place_for_copies(wanted, environ), name), trees_of_this_python(environ))
    launcher, kind = settled_launcher(launcher, environ, which)
    nodes = each_node(kind, n, wishes.hosts, environ)
    helpers = replace(wishes, hosts=nodes.hosts, output_directory=None, variables={})

    def on_each_node(*program: str, say: Say) -> int:
        return supervise.run(
            nodes.n,
            program,
            say=say,
            launcher=launcher,
            options=nodes.words,
            wishes=helpers,
            environ=environ,
            which=which,
            stdin=subprocess.DEVNULL,  # srun takes all that there is, and it is the user's job's
        )

    try:
        status = on_each_node("-m", "hpcpar.cli.distribute", copy.directory, say=say)
        if status:
            say("hpcpar run: without the copies the job was not started")
            return status
        return supervise.run(
            n,
            argv,
            say=say,
            launcher=launcher,
            options=[*after_each_rank(kind, copy), *options],
            wishes=wishes,
            environ=environ,
            which=which,
            copy=copy,
        )
    finally:
        with undisturbed():
            left = on_each_node("-m", "hpcpar.launch.local_copy", "remove", copy.directory, say=_be_silent)
        if left:
            say(
                f"hpcpar run: no job could be started to see that {copy.directory} is gone from every node; "
                f"what is left of it your next --broadcast-env there removes"
            )


def after_each_rank(kind: str, copy: LocalCopy) -> tuple[str, ...]:
    """Words by which the ranks' own ends remove the copy, for when no job can be started any more."""
    return (f"--task-epilog={os.path.join(copy.directory, AFTER_RANK)}",) if kind == "srun" else ()


def settled_launcher(launcher: str, environ: Mapping[str, str], which: Which) -> tuple[str, str]:
    """ "srun" or "mpiexec", as a job would be started, and whose words that one understands."""
    with tempfile.TemporaryDirectory(prefix="hpcpar-run-") as directory:
        command, _ = supervise.prepare(
            1, ["true"], directory, _be_silent, launcher, (), NO_WISHES, environ, which
        )
    kind = supervise.launcher_kind(command[0])
    return "srun" if kind == "srun" else "mpiexec", kind


def _be_silent(line: str) -> None:
    """Swallow the words of a job that nobody has asked for: the one who started it speaks."""


@contextmanager
def undisturbed() -> Iterator[None]:
    """Signals that would end the job find it at its end: they are passed over."""
    ours = supervise.FORWARDED if threading.current_thread() is threading.main_thread() else ()
    before = {number: signal.signal(number, signal.SIG_IGN) for number in ours}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
