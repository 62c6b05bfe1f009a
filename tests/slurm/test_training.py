"""Training under real Slurm: the same bits as under mpiexec, and tensor parallelism inside the nodes."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.launch.sentinel_nodes import FOR_MPIEXEC
from tests.slurm.cluster import Cluster

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(240)]

ROOT = Path(__file__).parents[2]
TRAIN = [sys.executable, str(Path(__file__).with_name("train_digest.py"))]
OTHER = "hierarchical"
"""Adds in another order than the example's own algorithm."""
# Without the number for each node it would be 3 tasks on one of them, and 1 on the other.
CYCLIC = ("--ntasks-per-node=2", "-m", "cyclic")

VERSION = """
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
print(MPI.Get_library_version())
"""

# tp on every rank: the hosts of the group, and the ranks that stand in it.
GROUPS = """
import socket
import hpcpar
from hpcpar.mesh import Layout, Mesh

world = hpcpar.init()
for degrees in ({"tp": 2, "dp": 2}, {"tp": 2, "pp": 2}):
    mesh = Mesh(world, Layout.fit(world.size, **degrees))
    hosts = mesh.comm("tp").allgather_object((socket.gethostname(), world.rank))
    lines = world.allgather_object(f"{sorted(degrees)} {hosts}")
    if world.rank == 0:
        print(*sorted(set(lines)), sep="\\n", flush=True)
"""


@pytest.fixture(scope="module")
def library() -> str:
    """Which MPI library this Python runs on."""
    told = subprocess.run(
        [sys.executable, "-c", VERSION], capture_output=True, text=True, timeout=60, check=True
    )
    return "openmpi" if "Open MPI" in told.stdout else "mpich"


def srun(library: str) -> list[str]:
    """Open MPI's ranks find each other through PMIx only; of all others hpcpar takes care itself."""
    return ["srun", "--mpi=pmix" if library == "openmpi" else "--mpi=none", "-t5"]


def digests(lines: Iterable[str]) -> dict[str, tuple[list[str], set[str]]]:
    """algorithms -> (hosts by rank, digests of all ranks), from what train_digest.py prints."""
    found: dict[str, tuple[list[str], set[str]]] = {}
    for line in lines:
        if line.startswith("digest: "):
            algorithm, host, parameters = line.split()[1:]
            hosts, seen = found.setdefault(algorithm, ([], set()))
            hosts.append(host)
            seen.add(parameters)
    return found


def test_srun_on_two_nodes_trains_to_the_same_bits_as_mpiexec(
    cluster: Cluster, library: str, tmp_path: Path
) -> None:
    per_node = ["--map-by", "ppr:2:node"] if library == "openmpi" else ["-ppn", "2"]
    under_srun = [*srun(library), "-N2", "-n4", "--ntasks-per-node=2", *TRAIN, "", OTHER]
    under_mpiexec = ["mpiexec", "-n", "4", *per_node, *TRAIN, ""]
    script = f"{shlex.join(under_srun)} > {tmp_path}/srun; {shlex.join(under_mpiexec)} > {tmp_path}/mpiexec"
    job = cluster.submit(
        "-N2", "--ntasks-per-node=2", f"--output={tmp_path}/log", "--wrap", script, directory=ROOT
    )
    assert job.wait(200).state() == "COMPLETED", job.output
    by_srun = digests((tmp_path / "srun").read_text().splitlines())
    assert {algorithm: hosts for algorithm, (hosts, _) in by_srun.items()} == {
        "own": ["node1", "node1", "node2", "node2"],
        OTHER: ["node1", "node1", "node2", "node2"],
    }
    # The same nodes, another launcher.
    assert digests((tmp_path / "mpiexec").read_text().splitlines()) == {"own": by_srun["own"]}

    # Without Slurm, all ranks on one node.
    alone = cluster.run("mpiexec", "-n", "4", *TRAIN, "", directory=ROOT, timeout_s=120, **FOR_MPIEXEC)
    hosts, on_one_node = digests(alone.stdout.splitlines())["own"]
    assert hosts == 4 * ["head"], alone.stderr
    assert on_one_node == by_srun["own"][1]
    assert all(len(parameters) == 1 for _, parameters in by_srun.values())
    assert by_srun["own"][1] != by_srun[OTHER][1]  # or the digest tells nothing of the order


def test_tensor_parallelism_stays_inside_the_nodes_when_ranks_go_round_them(
    cluster: Cluster, library: str
) -> None:
    done = cluster.run(*(*srun(library), "-N2", "-n4", *CYCLIC, sys.executable, "-c", GROUPS), timeout_s=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "['dp', 'tp'] [('node1', 0), ('node1', 2)]",
        "['dp', 'tp'] [('node2', 1), ('node2', 3)]",
        "['pp', 'tp'] [('node1', 0), ('node1', 2)]",
        "['pp', 'tp'] [('node2', 1), ('node2', 3)]",
    ]


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("own_dataset", ("--epochs", "1")),
        ("vision_digits", ("--epochs", "1")),
        ("finetune_transformers", ("--steps", "3")),
        ("ddp_by_hpcpar", ()),
    ],
)
def test_an_example_to_copy_has_under_srun_the_losses_of_one_rank(
    cluster: Cluster, library: str, tmp_path: Path, name: str, words: tuple[str, ...]
) -> None:
    pytest.importorskip(
        {"vision_digits": "sklearn", "finetune_transformers": "transformers"}.get(name, "torch")
    )
    losses = []
    for place, launcher in (("together", [*srun(library), "-N2", "-n2"]), ("alone", [])):
        (tmp_path / place).mkdir()
        program = [sys.executable, str(ROOT / "examples" / f"{name}.py"), *words]
        done = cluster.run(*launcher, *program, directory=tmp_path / place, timeout_s=200)
        assert done.returncode == 0, done.stderr
        losses.append([float(loss) for loss in re.findall(r"loss ([\d.]+)", done.stdout)])
    assert losses[0]
    assert losses[0] == pytest.approx(losses[1], abs=2e-5)  # float32, printed with six digits
