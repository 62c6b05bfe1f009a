"""A rank is lost on one node of several: the job ends on all of them, and the rank is named."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster, wait_until

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(90)]

PROGRAM = """
import os, signal, time
import numpy as np
import hpcpar

world = hpcpar.init()
for _ in range(20):
    world.allreduce(np.ones(8))
    time.sleep(0.05)
open(f"works-{world.rank}", "w").close()
while True:
    world.allreduce(np.ones(8))
    for number in (signal.SIGKILL, signal.SIGTERM):
        if os.path.exists(f"end-{world.rank}-{number.name}"):
            os.kill(os.getpid(), number)
    time.sleep(0.05)
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


@contextmanager
def srun(
    cluster: Cluster, program: Path, *options: str, ranks_per_node: int = 2
) -> Iterator[subprocess.Popen[str]]:
    """A step on two nodes that has begun to work."""
    words = ["srun", "--mpi=none", "--nodes=2", f"--ntasks-per-node={ranks_per_node}", "--time=5", *options]
    directory = program.parent
    process = subprocess.Popen(
        cluster.command(*words, sys.executable, str(program), directory=directory),
        env=cluster.environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        wait_until(
            lambda: len(list(directory.glob("works-*"))) == 2 * ranks_per_node,
            40,
            lambda: f"only {[path.name for path in directory.glob('works-*')]} work",
        )
        yield process
    finally:
        process.kill()
        process.communicate(timeout=10)


def said(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith("hpcpar:")]


@pytest.mark.parametrize("option", ["--kill-on-bad-exit=0", "--kill-on-bad-exit=1"])
def test_a_rank_killed_on_one_node_ends_the_step_on_both_and_is_named(
    cluster: Cluster, program: Path, option: str
) -> None:
    with srun(cluster, program, option) as process:
        (program.parent / "end-3-SIGKILL").touch()
        output, _ = process.communicate(timeout=30)
    assert process.returncode != 0
    first = min(said(output), key=lambda line: line.rpartition("(at ")[2])
    assert first.startswith("hpcpar: rank 3 (pid "), output
    assert " on node2) was lost" in first


def test_a_nodes_only_rank_that_is_told_to_end_ends_the_step_on_the_other(
    cluster: Cluster, program: Path
) -> None:
    with srun(cluster, program, "--kill-on-bad-exit=0", ranks_per_node=1) as process:
        (program.parent / "end-1-SIGTERM").touch()
        process.communicate(timeout=30)
    assert process.returncode != 0


def test_a_cancelled_job_has_lost_nobody(cluster: Cluster, program: Path) -> None:
    with srun(cluster, program) as process:
        cluster.run("scancel", "--user=root")
        output, _ = process.communicate(timeout=30)
    assert process.returncode != 0
    assert said(output) == []
