"""A node is killed under a running job: the job ends, and the ranks that were lost are named.

Slurm alone would let the other nodes' ranks wait for `SlurmdTimeout`, 300 s by default.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster, wait_until

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(90)]

PROGRAM = """
import os, time
import numpy as np
import hpcpar

world = hpcpar.init()
for _ in range(20):
    world.allreduce(np.ones(8))
    time.sleep(0.05)
open(f"works-{world.rank}", "w").close()
while True:
    world.allreduce(np.ones(8))
    time.sleep(0.05)
"""

NODE_2 = "hpcpar: node2 was lost with ranks 2-3 (pids "
NODE_1 = "hpcpar: node1 was lost with ranks 0-1: "


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


def await_work(directory: Path, ranks: int, story: Callable[[], str] = str) -> None:
    wait_until(
        lambda: len(list(directory.glob("works-*"))) == ranks,
        40,
        lambda: f"of {ranks} ranks work {[path.name for path in directory.glob('works-*')]}; {story()}",
    )


@contextmanager
def srun(
    cluster: Cluster, program: Path, *options: str, nodes: int = 2, **variables: str
) -> Iterator[subprocess.Popen[str]]:
    """A step of two ranks on each node that has begun to work."""
    words = ["srun", "--mpi=none", f"--nodes={nodes}", "--ntasks-per-node=2", "--time=5", *options]
    process = subprocess.Popen(
        cluster.command(*words, sys.executable, str(program), directory=program.parent),
        env=cluster.environ | variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        await_work(program.parent, 2 * nodes)
        yield process
    finally:
        process.kill()
        process.communicate(timeout=10)


def said(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith("hpcpar:")]


@pytest.mark.parametrize("option", ["--kill-on-bad-exit=0", "--kill-on-bad-exit=1"])
def test_a_killed_node_ends_the_step_with_its_ranks_named(
    cluster: Cluster, program: Path, option: str
) -> None:
    with srun(cluster, program, option) as process:
        cluster.kill_node("node2")
        output, _ = process.communicate(timeout=30)
    assert process.returncode != 0
    (line,) = said(output)
    assert line.startswith(NODE_2)


def test_when_the_first_node_is_killed_the_second_says_so(cluster: Cluster, program: Path) -> None:
    with srun(cluster, program, nodes=3, SLURM_KILL_BAD_EXIT="1") as process:
        cluster.kill_node("node1")
        output, _ = process.communicate(timeout=30)
    assert process.returncode != 0
    (line,) = said(output)
    assert line.startswith(NODE_1)


def test_a_batch_script_hears_of_a_killed_node_and_goes_on(cluster: Cluster, program: Path) -> None:
    script = f"hpcpar run -n 4 {program}; echo status $?"
    job = cluster.submit("-N2", "--ntasks-per-node=2", "--wrap", script, directory=program.parent)
    await_work(program.parent, 4, lambda: job.output)
    cluster.kill_node("node2")
    wait_until(lambda: "status" in job.output, 30, lambda: f"the script has not gone on: {job.output}")
    (line,) = said(job.output)
    assert line.startswith(NODE_2)
    assert f"hpcpar run: {line.removeprefix('hpcpar: ')}" in job.output
    assert "status 0" not in job.output


def test_when_the_batch_scripts_own_node_is_killed_the_jobs_output_tells(
    cluster: Cluster, program: Path
) -> None:
    script = f"srun --mpi=none {sys.executable} {program}"
    job = cluster.submit("-N2", "--ntasks-per-node=2", "--wrap", script, directory=program.parent)
    await_work(program.parent, 4, lambda: job.output)
    cluster.kill_node("node1")
    wait_until(lambda: said(job.output) != [], 30, lambda: f"nothing is said in {job.output!r}")
    (line,) = said(job.output)
    assert line.startswith(NODE_1)


def test_a_cancelled_job_has_lost_nobody(cluster: Cluster, program: Path) -> None:
    with srun(cluster, program) as process:
        cluster.run("scancel", "--user=root")
        output, _ = process.communicate(timeout=30)
    assert process.returncode != 0
    assert said(output) == []
