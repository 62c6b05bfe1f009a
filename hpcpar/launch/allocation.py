"""The hosts of a batch job of PBS, LSF, Grid Engine or OAR, and whether a Flux instance is around.

Slurm's are in `hpcpar.launch.slurm`. An mpiexec that was built without a batch system's library, as those of
the wheels are, starts all ranks on the host that it runs on: `hpcpar run` reads the list and names the hosts.

source   the batch systems' manuals: PBS_NODEFILE, OAR_NODEFILE and LSB_DJOB_HOSTFILE have a line for each
         slot, LSB_MCPU_HOSTS is "host slots host slots", LSB_HOSTS "host host"; PE_HOSTFILE's lines begin
         with host and slots
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from hpcpar.errors import ConfigError
from hpcpar.launch import slurm
from hpcpar.launch.hosts import Host, added_up
from hpcpar.launch.processes import ask

ASK_LIMIT_S = 10.0

Slots = list[tuple[str, int]]


def _words(text: str) -> Slots:
    return [(host, 1) for host in text.split()]


def _pairs(text: str) -> Slots:
    words = text.split()
    return [(host, int(slots)) for host, slots in zip(words[::2], words[1::2], strict=True)]


def _first_two(text: str) -> Slots:
    return [(line.split()[0], int(line.split()[1])) for line in text.splitlines() if line.strip()]


@dataclass(frozen=True, slots=True)
class HostList:
    """One variable by which a batch system lists a job's hosts.

    is_file   it names a file with the list
    read      the list's hosts and slots
    """

    system: str
    job: str
    variable: str
    is_file: bool
    read: Callable[[str], Slots]


HOST_LISTS = (
    HostList("PBS", "PBS_JOBID", "PBS_NODEFILE", True, _words),
    HostList("LSF", "LSB_JOBID", "LSB_DJOB_HOSTFILE", True, _words),
    HostList("LSF", "LSB_JOBID", "LSB_MCPU_HOSTS", False, _pairs),
    HostList("LSF", "LSB_JOBID", "LSB_HOSTS", False, _words),
    HostList("Grid Engine", "JOB_ID", "PE_HOSTFILE", True, _first_two),
    HostList("OAR", "OAR_JOB_ID", "OAR_NODEFILE", True, _words),
)


def _listed(environ: Mapping[str, str]) -> HostList | None:
    return next((known for known in HOST_LISTS if environ.get(known.variable)), None)


def allocated_hosts(environ: Mapping[str, str] = os.environ) -> tuple[Host, ...]:
    """Read the batch job's hosts and their slots, in its order; () outside of such a job.

    errors   ConfigError where the list cannot be read
    """
    known = _listed(environ)
    if known is None:
        return ()
    text = environ[known.variable]
    try:
        slots = known.read(Path(text).read_text("utf-8") if known.is_file else text)
    except (OSError, ValueError, IndexError) as error:
        raise ConfigError(
            f"the hosts of this {known.system} job cannot be read from {known.variable}={text!r} ({error}): "
            f"name them, as in `hpcpar run -H node1:4,node2:4 …`"
        ) from error
    return added_up([Host(name, count) for name, count in slots])


def has_several_hosts(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether a job that is started from here may get ranks on other hosts by itself."""
    if "SLURM_JOB_ID" in environ:
        return slurm.job_nodes(environ) > 1
    try:
        return len(allocated_hosts(environ)) > 1
    except ConfigError:
        return True


def is_batch_job(environ: Mapping[str, str]) -> bool:
    """Return whether this process is in the job of a batch system, whose slots are what was asked for."""
    return "SLURM_JOB_ID" in environ or "FLUX_URI" in environ or _listed(environ) is not None


def flux_nodes(environ: Mapping[str, str]) -> int | None:
    """Ask the Flux instance around this process for its number of nodes: 0 without one, None if unknown."""
    if "FLUX_URI" not in environ:
        return 0
    flux = shutil.which("flux", path=environ.get("PATH"))
    if flux is None:
        return None
    said = ask([flux, "getattr", "size"], ASK_LIMIT_S, environ)
    size = said.stdout.strip() if said else ""
    return int(size) if size.isdigit() else None


def forgotten_launcher(environ: Mapping[str, str]) -> str | None:
    """Return a hint for a process that no launcher has started, in a batch job of several slots."""
    known = _listed(environ)
    if known is not None:
        try:
            slots = sum(host.slots for host in allocated_hosts(environ))
        except ConfigError:
            return None
        job = f"{known.system} job {environ.get(known.job, '(without a number)')} has {slots} slots"
        start = f"`hpcpar run -n {slots} …` or the site's mpiexec"
    elif "FLUX_URI" in environ:
        slots, job, start = 2, "this is a Flux instance", "`flux run -n … python …`"
    else:
        return None
    if slots < 2:
        return None
    return f"{job}, but this process was started by no launcher and runs alone; start it with {start}"
