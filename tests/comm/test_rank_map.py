"""Where all ranks run, gathered over ranks; and what `hpcpar.init()` logs of it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from hpcpar.comm import Communicator, run_loopback
from hpcpar.launch.rank_map import gather_rank_map

pytestmark = pytest.mark.every_core

LOGS = """
import logging, sys, hpcpar
logging.basicConfig(level=logging.INFO, format="%(name)s %(levelname)s %(message)s", stream=sys.stdout)
world = hpcpar.init(sets_threads="quiet" in sys.argv)
hpcpar.init()
"""


def test_rank_0_learns_of_every_rank_on_its_node() -> None:
    found = run_loopback(5, gather_rank_map, nodes=(0, 1, 0, 1, 1))
    assert found[1:] == [None] * 4
    assert found[0] is not None
    assert [(node.node, [place.rank for place in node.ranks]) for node in found[0].nodes] == [
        (0, [0, 2]),
        (1, [1, 3, 4]),
    ]


@pytest.mark.mpi
def test_rank_0_learns_of_every_rank_of_a_job(world: Communicator) -> None:
    found = gather_rank_map(world)
    everyone = world.allgather_object(
        None if found is None else [p.rank for n in found.nodes for p in n.ranks]
    )
    assert everyone == [list(range(world.size))] + [None] * (world.size - 1)


def logged(*words: str, ranks: int = 2, before: tuple[str, ...] = (), **variables: str) -> list[str]:
    """What rank 0 of such a job logs; `before` stands before Python, as `taskset` does."""
    environ = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    program = (*before, sys.executable, "-c", LOGS, *words)
    done = subprocess.run(
        [sys.executable, "-m", "hpcpar", "run", "-n", str(ranks), "--", *program],
        env=environ | variables,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [line for line in done.stdout.splitlines() if line.startswith("hpcpar ")]


@pytest.mark.skipif(
    shutil.which("taskset") is None or len(os.sched_getaffinity(0)) < 2, reason="needs taskset and two cores"
)
@pytest.mark.parametrize("ranks", [2, 3])
def test_init_logs_the_placement_once_and_warns_of_a_core_that_ranks_share_needlessly(ranks: int) -> None:
    core = min(os.sched_getaffinity(0))
    place, warning = logged(ranks=ranks, before=("taskset", "-c", str(core)))
    assert place.startswith("hpcpar INFO node 0  ")
    assert place.endswith(f": ranks 0-{ranks - 1}, core {core} (shared)")
    assert warning.startswith(f"hpcpar WARNING ranks 0 and 1 share core {core} of ")
    assert "free: each gets a part of its time; start them with `mpiexec" in warning


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_init_warns_of_threads_unless_the_program_or_the_user_sets_them() -> None:
    place, crowded = logged()
    assert place.startswith("hpcpar INFO node 0  ")
    assert crowded.startswith("hpcpar WARNING OMP_NUM_THREADS is not set: the 2 ranks")
    assert len(logged("quiet")) == 1
    assert logged(OMP_NUM_THREADS="1") == [f"{place}, OMP_NUM_THREADS=1"]
