"""A job that a Ray task starts: its ranks stay on the task's node, among the cores that Ray has set aside.

Ray's workers descend from `ray start`, which on a cluster is a task of a Slurm step on every node: they
inherit that step's variables, but are none of its ranks. And several tasks of a node start jobs at once,
which know nothing of each other.

    Slurm job        nodes 1, 2            an mpiexec or srun that saw its variables would spread the ranks
      step "worker"  ray start (node 2)    over nodes whose cores Ray has given to other tasks
        Ray task     num_cpus=2            OMP_NUM_THREADS=2, set by Ray: the task's cores, not a rank's
          mpiexec    2 ranks, 1 thread     not bound to cores: each of two jobs would take cores 0 and 1
"""

from __future__ import annotations

import os
import socket
from collections.abc import Collection, Mapping

from hpcpar.launch.environment import is_of_a_job
from hpcpar.launch.hosts import Host

MARKER = "RAY_RAYLET_PID"
"""Set by Ray for its workers, and so for whatever they start."""

UNBOUND = {
    "OMPI_MCA_hwloc_base_binding_policy": "none",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    "I_MPI_PIN": "off",
    "MV2_ENABLE_AFFINITY": "0",
    "MVP_ENABLE_AFFINITY": "0",
}
"""What keeps an mpiexec from binding ranks to the node's first cores. MPICH's Hydra does not by itself."""


def is_this_host(name: str) -> bool:
    return name in ("localhost", "127.0.0.1", socket.gethostname())


def stays_here(hosts: Collection[Host] = (), environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether a job is one of a Ray task, and no other hosts are named for its ranks."""
    return MARKER in environ and all(is_this_host(host.name) for host in hosts)


def job_environ(n: int, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for a job of n ranks: of no other job, not bound, with a part of the threads.

    OMP_NUM_THREADS is the task's, set by Ray to its num_cpus unless the user has set it: each rank gets the
    n-th part of it, at least 1.
    """
    threads = environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    part = max(1, int(threads) // n) if threads.isdigit() else 1
    kept = {name: value for name, value in environ.items() if not is_of_a_job(name)}
    return {**UNBOUND, **kept, "OMP_NUM_THREADS": str(part)}
