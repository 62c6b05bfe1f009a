"""Jobs that a Ray task starts."""

from __future__ import annotations

import socket

from hpcpar.launch.environment import detect
from hpcpar.launch.hosts import Host
from hpcpar.launch.ray_task import job_environ, stays_here
from tests.command import variables

# A worker of a `ray start` that srun has started on the second and third node of a job.
TASK = variables(
    "RAY_RAYLET_PID=70 RAY_JOB_ID=ffffffff OMP_NUM_THREADS=4 PATH=/bin SLURM_JOB_ID=7 SLURM_JOB_NUM_NODES=3 "
    "SLURM_STEP_ID=1 SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=2 SLURM_MPI_TYPE=none PMI_RANK=1 PBS_NODEFILE=/f "
    "OMPI_MCA_pml=ucx HPCPAR_TIMEOUT_S=9"
)


def test_ranks_stay_on_the_tasks_host_unless_others_are_named() -> None:
    assert stays_here(environ=TASK)
    assert stays_here([Host("localhost", 1), Host(socket.gethostname(), 1)], TASK)
    assert not stays_here([Host("localhost", 1), Host("elsewhere", 1)], TASK)
    assert not stays_here(environ={"SLURM_JOB_ID": "7"})


def test_the_step_that_started_ray_is_not_the_ranks_and_settings_are_kept() -> None:
    assert detect(TASK).size == 2
    environ = job_environ(2, TASK)
    assert detect(environ).launcher == "single"
    assert not [name for name in environ if name.startswith(("SLURM_", "PMI_", "PBS_"))]
    kept = {name: environ[name] for name in ("PATH", "OMPI_MCA_pml", "HPCPAR_TIMEOUT_S")}
    assert kept == {"PATH": "/bin", "OMPI_MCA_pml": "ucx", "HPCPAR_TIMEOUT_S": "9"}
    assert environ["OMPI_MCA_hwloc_base_binding_policy"] == "none"
    assert job_environ(2, {**TASK, "I_MPI_PIN": "on"})["I_MPI_PIN"] == "on"


def test_the_tasks_threads_are_divided_among_its_ranks() -> None:
    def threads(n: int, text: str) -> str:
        return job_environ(n, {**TASK, "OMP_NUM_THREADS": text})["OMP_NUM_THREADS"]

    assert [threads(n, "4") for n in (1, 2, 3, 8)] == ["4", "2", "1", "1"]
    assert [threads(2, text) for text in ("1", "6,2", "", "many")] == ["1", "3", "1", "1"]
