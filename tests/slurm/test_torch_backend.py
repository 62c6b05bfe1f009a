"""torch.distributed under real Slurm: plain `srun python`, on two nodes, without a master's address.

Without Slurm they are in tests/torch_backend/test_recipes.py.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.slurm import mpi_libraries
from tests.slurm.cluster import Cluster
from tests.torch_backend.recipes import (
    LIMIT_S,
    LISTENING,
    TOLERANCE,
    example,
    last_loss,
    over_gloo,
    require,
    sockets,
)

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]

SRUN = ("srun", "-N2", "--ntasks-per-node=1", "-t5")
MPIEXEC = ("mpiexec", "-n", "2")

Start = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Python with the wheel of MPICH, for which srun needs no option."""
    return mpi_libraries.wheel("mpich", tmp_path_factory.mktemp("mpi")).python


@pytest.fixture
def start(cluster: Cluster, python: str, tmp_path: Path) -> Start:
    """`start(SRUN, "script.py", "argument")`: the ranks, with nothing in their environment but PATH first."""
    path = f"{Path(python).parent}:{cluster.environ['PATH']}"

    def run(launcher: tuple[str, ...], *words: str) -> subprocess.CompletedProcess[str]:
        return cluster.run(*launcher, "python", *words, timeout_s=LIMIT_S, directory=tmp_path, PATH=path)

    return run


@pytest.mark.parametrize(
    ("name", "words", "package"),
    [
        ("ddp", (), "torch"),
        ("fsdp2", (), "torch"),
        ("hf_trainer", (), "accelerate"),
        pytest.param("tensor_parallel", (), "torch", marks=pytest.mark.long),
        pytest.param("pipeline", (), "torch", marks=pytest.mark.long),
        pytest.param("checkpoint", ("saved",), "torch", marks=pytest.mark.long),
        pytest.param("accelerate", (), "accelerate", marks=pytest.mark.long),
        pytest.param("fabric", (), "lightning", marks=pytest.mark.long),
        pytest.param("lightning", (), "lightning", marks=pytest.mark.long),
        pytest.param("deepspeed", (), "deepspeed", marks=pytest.mark.long),
    ],
)
def test_an_example_ends_under_srun_with_the_loss_of_gloo(
    start: Start, name: str, words: tuple[str, ...], package: str, tmp_path: Path
) -> None:
    require(package)
    found = last_loss(start(SRUN, example(name), *words))
    by_gloo = last_loss(over_gloo(2, example(name), *(str(tmp_path / f"{word}-gloo") for word in words)))
    assert found == pytest.approx(by_gloo, rel=0, abs=TOLERANCE)


@pytest.mark.parametrize("launcher", [SRUN, MPIEXEC], ids=lambda words: words[0])
def test_no_rank_listens_on_a_port_but_for_what_mpi_itself_opens(
    start: Start, launcher: tuple[str, ...]
) -> None:
    by_mpi = sockets(start(launcher, LISTENING))
    assert sorted(by_mpi) == ["0", "1"]
    assert sockets(start(launcher, LISTENING, example("ddp"))) == by_mpi
