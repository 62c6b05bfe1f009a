"""`module load hpcpar`, then `srun python`, as docs/install.md has it: on the cluster, by either system."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.modulefiles import installation, systems
from tests.modulefiles.installation import ROOT, page_block, pasted
from tests.slurm.cluster import Cluster

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(200)]


@pytest.fixture(scope="session")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prefix of `make install-module` with this version over MPICH's wheel."""
    return installation.installed(tmp_path_factory.getbasetemp())


@pytest.mark.parametrize("name", systems.NAMES)
def test_a_bare_srun_trains_by_copy_and_paste_from_the_documentation(
    cluster: Cluster, prefix: Path, tmp_path: Path, name: str
) -> None:
    modules = systems.find(name)
    # `hpcpar run` needs no Slurm: tests/modulefiles pastes that line.
    commands = pasted(
        page_block((ROOT / "docs/install.md").read_text(), "Modules", 1), prefix, without="hpcpar run"
    )
    assert "srun -n 4 python" in commands
    script = f"cd {tmp_path}\n{commands}\nprintf '%s ' $SLURM_MPI_TYPE $SLURM_KILL_BAD_EXIT"
    done = cluster.run(*modules.command(script), timeout_s=180, **systems.login_environ(cluster.environ))
    assert done.returncode == 0, done.stdout + done.stderr
    # Four ranks of one job print once, four jobs of one rank would print four times.
    assert len(re.findall(r"^step   10  loss \d\.\d+$", done.stdout, re.MULTILINE)) == 1, done.stdout
    assert done.stdout.endswith("pmi2 1 ")


def test_a_lost_rank_ends_the_step_of_whoever_has_loaded_the_module(
    cluster: Cluster, prefix: Path, tmp_path: Path
) -> None:
    modules = systems.find(systems.NAMES[0])
    (tmp_path / "lost.py").write_text(
        "import os, sys, time\nsys.exit(3) if os.environ['SLURM_PROCID'] == '1' else time.sleep(80)\n"
    )
    script = f"module use {prefix}/modulefiles; module load hpcpar; cd {tmp_path}; srun -n 2 python lost.py"
    done = cluster.run(*modules.command(script), timeout_s=40, **systems.login_environ(cluster.environ))
    # Rank 0 would sleep for longer than `run` waits.
    assert done.returncode != 0
    assert "task 1: Exited with exit code 3" in done.stderr
    assert "task 0: Terminated" in done.stderr
