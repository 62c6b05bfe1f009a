"""`hpcpar.init()`: launcher and MPI must tell the same story; importing starts nothing."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SLURM_STEP_OF_FOUR = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "2",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NODELIST": "node[1-2]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
}


def python(code, **variables):
    """Run a program alone, outside of any launcher, with some variables set."""
    launchers = ("PMI", "OMPI_", "SLURM_", "MPI_", "HPCPAR_", "RANK", "WORLD_SIZE")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(launchers)}
    return subprocess.run(
        [sys.executable, "-c", code],
        env=environ | variables,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_srun_that_started_four_tasks_of_which_each_is_alone_is_refused():
    code = (
        "import os, hpcpar\n"
        "try: hpcpar.init()\n"
        "except RuntimeError as error:\n"
        "    raise SystemExit(f'{type(error).__module__}.{type(error).__name__}: {error}')"
    )
    done = python(code, **SLURM_STEP_OF_FOUR, HPCPAR_BOOTSTRAP="launcher")
    assert done.returncode == 1
    told = done.stderr.strip().splitlines()[-1]
    assert told.startswith("hpcpar.errors.LaunchError")
    assert "4 processes, but MPI_COMM_WORLD has size 1" in told
    assert "every rank would train alone" in told
    assert "srun --mpi=" in told


def test_a_single_process_needs_no_launcher():
    done = python("import hpcpar; w = hpcpar.init(); print(w.rank, w.size, w.nodes)")
    assert (done.returncode, done.stdout.strip()) == (0, "0 1 (0,)"), done.stderr


def test_a_variable_that_is_not_understood_is_named():
    done = python("import hpcpar; hpcpar.init()", HPCPAR_TIMEOUT_S="soon")
    assert done.returncode == 1
    assert "HPCPAR_TIMEOUT_S" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("timeout_s", ["-1", "0", "float('nan')"])
def test_a_timeout_that_is_none_is_named(timeout_s):
    done = python(f"import hpcpar; hpcpar.init(timeout_s={timeout_s})")
    assert done.returncode == 1
    assert "is no time to wait" in done.stderr.splitlines()[-1]


@pytest.mark.mpi
def test_a_process_that_a_rank_starts_is_told_that_it_cannot_be_that_rank(world):
    told = ""
    if world.rank == 0 and world.size > 1:
        argv = [sys.executable, "-c", "import hpcpar; hpcpar.init()"]
        try:
            told = subprocess.run(argv, stderr=subprocess.PIPE, text=True, timeout=40, check=False).stderr
        except subprocess.TimeoutExpired:
            told = "it hung"
    told = world.broadcast_object(told)
    if world.size > 1:
        last = told.strip().splitlines()[-1]
        assert last.startswith(f"hpcpar.errors.LaunchError: rank 0 of {world.size}"), told
        assert "no second process can be it" in last


def test_importing_starts_nothing_and_is_quick():
    code = (
        "import time; t = time.perf_counter(); import hpcpar; seconds = time.perf_counter() - t;"
        "import sys; print(seconds, [m for m in ('torch', 'numpy', 'mpi4py', 'rich') if m in sys.modules])"
    )
    runs = [python(code).stdout.split(maxsplit=1) for _ in range(3)]
    assert all(loaded.strip() == "[]" for _, loaded in runs)
    assert min(float(seconds) for seconds, _ in runs) < 0.2  # the promise; it is about 0.005


def test_init_may_be_called_again_and_gives_a_world_of_its_own():
    code = (
        "import hpcpar, numpy as np; a = hpcpar.init(); b = hpcpar.init();"
        "print(float(a.allreduce(np.ones(1))[0] + b.allreduce(np.ones(1))[0]), a is b)"
    )
    assert python(code).stdout.strip() == "2.0 False"


@pytest.mark.mpi
def test_a_new_world_starts_with_an_empty_account(world):
    import hpcpar

    fresh = hpcpar.init()
    counted = list(fresh.traffics()), fresh.traffic.rows()
    fresh.free()
    assert counted == (["world"], [])
