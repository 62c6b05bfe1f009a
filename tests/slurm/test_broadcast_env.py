"""`hpcpar run --broadcast-env` on a real Slurm: ranks start from copies that their nodes do not share."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster, wait_until

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(120)]

REPOSITORY = Path(__file__).parents[2]

# A package that is installed in the environment, with a console script of its own.
TOLD = """
import os, sys
import hpcpar, mpi4py, numpy, told

def main():
    world = hpcpar.init()
    libraries = sorted({line.split()[-1] for line in open("/proc/self/maps") if "libmpi.so" in line})
    files = [module.__file__ for module in (told, hpcpar, os)]
    lines = world.gather_object([os.uname().nodename, sys.prefix, *files, *libraries])
    if world.rank == 0:
        for rank, words in enumerate(lines):
            print("rank", rank, *words, flush=True)
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with an MPI, a package and an editable one, which sees this one's packages."""
    path = tmp_path_factory.mktemp("shared") / "venv"
    own = Path(sys.prefix)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(path)], check=True, timeout=60)
    site = next(path.glob("lib/python3*/site-packages"))
    (site / "others.pth").write_text(f"{next(own.glob('lib/python3*/site-packages'))}\n")
    (site / "__editable__.hpcpar.pth").write_text(f"{REPOSITORY}\n")
    (site / "told").mkdir()
    (site / "told" / "__init__.py").write_text(TOLD)
    for found in (
        *own.glob("lib/libmpi*"),
        *own.glob("lib/mpich"),
        *own.glob("bin/mpiexec*"),
        *own.glob("bin/hydra*"),
    ):
        subprocess.run(["cp", "-a", str(found), str(path / found.relative_to(own))], check=True, timeout=60)
    (path / "bin" / "tell").write_text(f"#!{path}/bin/python\nimport told\ntold.main()\n")
    (path / "bin" / "tell").chmod(0o700)
    return path


def batch(cluster: Cluster, environment: Path, *runs: str) -> str:
    """The output of a job on two nodes that calls `hpcpar run` with these words, one after the other.

    After each it says the status, and what is left on every node of its own: /dev/shm, as disks are slow.
    """
    lines = ["#!/bin/sh"]
    for words in runs:
        lines += [
            f"{environment}/bin/python -m hpcpar run -n 4 {words}",
            'echo "status $?"',
            "srun -N2 -n2 sh -c 'ls -d /dev/shm/hpcpar-env-* 2>/dev/null; echo seen on $(hostname)'",
        ]
    script = cluster.state / "work" / "broadcast.sh"
    script.write_text("\n".join(lines) + "\n")
    return cluster.sbatch("-N2", "--ntasks-per-node=2", "-t2", str(script)).output


def test_ranks_start_from_the_copies_and_leave_nothing_behind(cluster: Cluster, environment: Path) -> None:
    told = batch(
        cluster,
        environment,
        "--broadcast-to /dev/shm -- -c 'import told, sys; told.main(); sys.exit(7)'",
        "--broadcast-to /tmp tell",
    )
    system, wheel = (
        os.path.realpath(sys.base_prefix).startswith("/usr"),
        list((environment / "lib").glob("libmpi*")),
    )
    failing, refused, _ = told.split("\nstatus ")
    place = rf"(/dev/shm/hpcpar-env-{os.geteuid()}-[0-9a-f]+)"
    ranks = re.findall(
        rf"rank (\d) node(\d) {place}/env (\S+) (\S+) (\S+)(?: (\S+))?$", failing, re.MULTILINE
    )
    assert [(rank, node) for rank, node, *_ in ranks] == [("0", "1"), ("1", "1"), ("2", "2"), ("3", "2")], (
        told
    )
    for _, _, directory, *files in ranks:
        package, hpcpar, standard_library, mpi = files
        assert package.startswith(f"{directory}/env/lib/"), files
        assert re.fullmatch(rf"{directory}/env/lib/python\S+/site-packages/hpcpar/__init__.py", hpcpar)
        assert standard_library.startswith("/usr/" if system else f"{directory}/base/"), files
        assert not mpi or mpi.startswith(f"{directory}/env/lib/libmpi.so") or not wheel, files
    assert re.match(r"7\nseen on node\d\nseen on node\d\n", refused), told
    # /tmp is one directory for all nodes of this cluster.
    assert "is there already: /tmp is shared by several nodes" in refused, told
    assert "without the copies the job was not started" in refused
    assert not list(Path("/tmp").glob(f"hpcpar-env-{os.geteuid()}-*/env/bin/tell"))


def test_a_cancelled_job_leaves_nothing_behind_either(cluster: Cluster, environment: Path) -> None:
    wait = "import told, time; told.main(); time.sleep(300)"
    command = f'{environment}/bin/python -m hpcpar run -n 3 --broadcast-to /dev/shm -- -c "{wait}"'
    out = cluster.state / "work" / "cancelled.txt"
    job = cluster.submit("-N2", "--ntasks-per-node=2", "-t2", f"--output={out}", "--wrap", command)
    wait_until(lambda: out.exists() and "rank 2 node2" in out.read_text(), 90, out.read_text)
    cluster.run("scancel", job.id)
    assert job.wait(30).state() == "CANCELLED"
    look = "ls -d /dev/shm/hpcpar-env-*; echo seen on $(hostname)"
    seen = cluster.run("srun", "-N2", "-n2", "-t1", "sh", "-c", look)
    assert sorted(seen.stdout.splitlines()) == ["seen on node1", "seen on node2"]
