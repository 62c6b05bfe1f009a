"""RankMap on a real Slurm: nodes, ranks and GPUs as Slurm hands them out."""

from __future__ import annotations

import json
import sys

import pytest

from tests.slurm.cluster import Cluster

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(60)]

# Two nodes of four CPUs and two GPUs each; the machine that plays them all may have fewer cores.
PROGRAM = """
import json, logging, sys
logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
import hpcpar
from hpcpar.launch.rank_map import gather_rank_map
world = hpcpar.init(sets_threads=True)
tp2 = hpcpar.Mesh(world, tp=2)
found = gather_rank_map(world)
if found:
    ranks = [[[place.rank, place.gpus, place.granted] for place in node.ranks] for node in found.nodes]
    print(json.dumps(list(zip([node.host for node in found.nodes], ranks))))
"""


def placed(
    cluster: Cluster, *options: str
) -> tuple[list[str], list[tuple[str, list[tuple[int, list[str], int]]]]]:
    """Return the log of a step with these options, and the rank map of its rank 0."""
    script = cluster.state / "work" / "place.py"
    script.write_text(PROGRAM)
    done = cluster.run("srun", "-t1", "--mpi=pmi2", *options, sys.executable, str(script))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    (gathered,) = [json.loads(line) for line in lines if line.startswith("[[")]
    return [line for line in lines if not line.startswith("[[")], gathered


def test_every_rank_has_a_gpu_of_its_own_and_the_nodes_are_told(cluster: Cluster) -> None:
    lines, gathered = placed(cluster, "-N2", "-n4", "--ntasks-per-node=2", "--gpus-per-task=1")
    assert [(host, [(rank, gpus) for rank, gpus, _ in ranks]) for host, ranks in gathered] == [
        ("node1", [(0, ["0"]), (1, ["1"])]),
        ("node2", [(2, ["0"]), (3, ["1"])]),
    ]
    told = [line for line in lines if line.startswith("node ")]
    assert [line.partition(", core")[0] for line in told] == [
        "node 0  node1: ranks 0-1",
        "node 1  node2: ranks 2-3",
    ]
    assert all("GPUs 0-1 (one each)" in line for line in told)
    assert not any("crosses" in line for line in lines), "tp=2 stays inside the nodes"


def test_uneven_nodes_are_told_as_they_are_and_tp_across_them_is_named(cluster: Cluster) -> None:
    lines, gathered = placed(cluster, "-N2", "-n4", "-m", "plane=3", "--cpus-per-task=1")
    assert [(host, [rank for rank, *_ in ranks]) for host, ranks in gathered] == [
        ("node1", [0, 1, 2]),
        ("node2", [3]),
    ]
    assert [granted for _, ranks in gathered for *_, granted in ranks] == [3, 3, 3, 1]
    (warning,) = [line for line in lines if "crosses nodes" in line]
    assert "tp=2 crosses nodes in 1 of 2 groups (mesh ranks 2 on node 0 and 3 on node 1)" in warning
