"""`hpcpar doctor`: its facts, findings and report, alone and on several ranks."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from rich.console import Console

from hpcpar.cli.doctor import facts as doctor_facts
from hpcpar.cli.doctor.facts import (
    Build,
    JobFacts,
    Measurement,
    RankFacts,
    TorchFacts,
    choices,
    find_build,
    gather,
    measure,
)
from hpcpar.cli.doctor.findings import judge
from hpcpar.cli.doctor.print import print_build, print_report
from hpcpar.cli.start_times import Elapsed, StartTimes
from hpcpar.comm import run_loopback
from hpcpar.comm.select import UP_TO, describe
from hpcpar.launch.cuda_aware import CudaAwareness
from hpcpar.launch.environment import RankInfo
from hpcpar.launch.rank_map import RankBinding
from hpcpar.units import GiB, MiB

if TYPE_CHECKING:
    from hpcpar.comm import Communicator

REPOSITORY = Path(__file__).parents[2]


def rank(
    number: int, node: int = 0, cores: tuple[int, ...] = (0, 1, 2, 3), waited_s: float = 0.1, **others: object
) -> RankFacts:
    common = RankFacts(
        number,
        node,
        f"node{node}",
        RankBinding(number, cores, cores),
        TorchFacts("2.13.0+cpu", 1, 0),
        2 * GiB,
        StartTimes(0.2, {"numpy": Elapsed(0.25), "torch": Elapsed(2.0 + waited_s, waited_s)}, 0.05),
    )
    return replace(common, **others)  # type: ignore[arg-type]


def job(*ranks: RankFacts) -> JobFacts:
    return JobFacts(
        info=RankInfo(0, len(ranks), 0, len(ranks), 0, None, "hydra", "own"),
        mpi={"library": "MPICH Version: 5.0.2", "standard": "5.0", "thread_level": "multiple"},
        awareness=CudaAwareness(source="not tried"),
        ranks=ranks,
        measurements=(Measurement(8, 4e-6, 2000, True), Measurement(4 * MiB, 6e-4, 1000, True)),
        choices="bruck up to 4.0 KiB, then ring",
    )


HEALTHY = job(rank(0), rank(1))


def test_a_healthy_job_has_nothing_to_mend() -> None:
    assert judge(HEALTHY) == []


ILLS: dict[str, tuple[JobFacts, str, str, bool]] = {
    "wrong sum": (
        replace(HEALTHY, measurements=(Measurement(8, 1e-6, 9, False),)),
        "all-reduce of 8 B gave a wrong sum",
        "do not train",
        True,
    ),
    "no torch": (
        job(*(rank(r, torch=TorchFacts(problem="No module named 'torch'")) for r in range(2))),
        "No module named 'torch'",
        "pip install torch",
        True,
    ),
    "old torch": (job(*(rank(r, torch=TorchFacts("2.4.1", 1)) for r in range(2))), "2.4.1", "2.5", True),
    "two torches": (
        job(rank(0), rank(1, torch=TorchFacts("2.12.0", 1))),
        "2.12.0, 2.13.0+cpu",
        "one environment",
        True,
    ),
    "too many threads": (
        job(rank(0, torch=TorchFacts("2.13.0", 8)), rank(1, torch=TorchFacts("2.13.0", 8))),
        "more threads than",
        "OMP_NUM_THREADS=2",
        False,
    ),
    "cores shared needlessly": (
        job(*(rank(r, place=RankBinding(r, (1, 2), (0, 1, 2, 3))) for r in range(2))),
        "ranks 0 and 1 share core 1 of node0, although cores 0,3 are free",
        "mpiexec -bind-to core:2",
        False,
    ),
    "a slow file system": (
        job(rank(0), rank(1, node=1, waited_s=60.0)),
        "rank 1 on node1 waited 1 min 00 s for files while it imported",
        "jobscripts/node-local.sh",
        False,
    ),
    "too many ranks": (
        job(*(rank(r, cores=(0, 1)) for r in range(3))),
        "3 ranks on 2 cores",
        "at most 2",
        False,
    ),
    "forgotten launcher": (
        replace(
            job(rank(0)),
            info=RankInfo(
                0, 1, 0, 1, 0, None, "single", "none", "PBS job 1 has 4 slots; start it with mpiexec"
            ),
        ),
        "PBS job 1 has 4 slots",
        "start it with mpiexec",
        True,
    ),
    "alone": (job(rank(0)), "one process", "hpcpar run -n 2", False),
    "one thread level": (
        replace(HEALTHY, mpi={**HEALTHY.mpi, "thread_level": "funneled"}),
        "one thread only (funneled)",
        "THREAD_MULTIPLE",
        False,
    ),
    "little shared memory": (
        job(*(rank(r, shared_memory_nbytes=64 * MiB) for r in range(2))),
        "64.0 MiB",
        "--shm-size",
        False,
    ),
    "shared GPU": (
        replace(
            job(*(rank(r, torch=TorchFacts("2.13.0", 1, 2)) for r in range(4))),
            awareness=CudaAwareness(True, source="two ranks tried it"),
        ),
        "4 ranks of this node share 2 GPUs",
        "one rank per GPU",
        False,
    ),
    "one GPU for two": (
        replace(
            job(*(rank(r, torch=TorchFacts("2.13.0", 1, 1), gpu="a1") for r in range(2))),
            awareness=CudaAwareness(True, source="two ranks tried it"),
        ),
        "2 ranks of this node share 1 GPU:",
        "one rank per GPU",
        False,
    ),
    "GPU and plain MPI": (
        job(*(rank(r, torch=TorchFacts("2.13.0", 1, 2)) for r in range(2))),
        "not known to take device pointers",
        "CUDA-aware MPI",
        False,
    ),
}


@pytest.mark.parametrize("ill", list(ILLS))
def test_each_ill_is_found_alone_and_answered(ill: str) -> None:
    patient, found, do, wrong = ILLS[ill]
    (finding,) = judge(patient)
    assert found in finding.found
    assert do in finding.do
    assert finding.wrong is wrong


def test_ranks_bound_to_cores_of_their_own_are_not_too_many() -> None:
    assert judge(job(*(rank(r, cores=(r,)) for r in range(4)))) == []


def test_wrong_things_come_before_notes() -> None:
    ranks = [rank(r, cores=(0,), torch=TorchFacts(problem="broken")) for r in range(2)]
    assert [finding.wrong for finding in judge(job(*ranks))] == [True, False]


def test_the_report_shows_library_nodes_cores_and_times() -> None:
    text = io.StringIO()
    two_nodes = job(rank(0), rank(1), rank(2, node=1), rank(3, node=1))
    print_report(Console(file=text, width=160), two_nodes, judge(two_nodes))
    for words in (
        "MPICH 5.0.2 (MPI standard 5.0)",
        "multiple",
        "hydra",
        "4 on 2 nodes",
        "node0: ranks 0-1, cores 0-3 (shared)",
        "node1: ranks 2-3",
        "2.4 s rank 0 on node0 (numpy 250.00 ms, torch 2.1 s), of it 100.00 ms waiting for files",
        "2.4 s, 2.4 s on the slowest rank of each",
        "50.00 ms for MPI_Init and hpcpar.init(), 200.00 ms for Python before the imports",
        "4.0 µs",
        "4.0 MiB",
        "10.49 GB/s",
        "bruck up to 4.0 KiB, then ring",
        "PyTorch 2.13.0+cpu (not TensorFlow, MXNet)",
        "MPI (MPICH 5.0.2) (not Gloo)",
        "MPI, shared memory within a node (not NCCL, DDL, CCL, Gloo)",
        "nothing to mend",
    ):
        assert words in text.getvalue(), words


def test_what_is_not_there_has_no_cross(capsys: pytest.CaptureFixture[str]) -> None:
    print_build(Build(torch="", mpi=""))
    said = capsys.readouterr().out
    assert "    [ ] PyTorch\n" in said
    assert "    [ ] MPI\n" in said
    assert "[X]" not in said


def test_the_build_is_found_without_starting_mpi() -> None:
    import importlib.metadata

    build = find_build()
    assert build.torch == importlib.metadata.version("torch")
    assert build.mpi


def test_the_report_says_which_all_reduce_runs_at_what_size() -> None:
    said = run_loopback(2, choices)
    assert said[0] == said[1]
    assert said[0] == describe((int(min(limit, GiB)), name) for limit, name in UP_TO["allreduce"])


@pytest.mark.parametrize("nbytes", [8, 4096])
def test_the_check_finds_right_sums_and_the_same_time_on_all_ranks(
    nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor_facts, "CHECK_S", 0.02)
    results = run_loopback(2, lambda comm: measure(comm, nbytes))
    assert results[0] == results[1]
    assert results[0].right
    assert results[0].seconds > 0


def test_the_check_notices_a_collective_that_sums_wrongly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_facts, "CHECK_S", 0.01)

    class Wrong:
        """A communicator whose first sum forgets a rank."""

        def __init__(self, comm: Communicator) -> None:
            self.rank, self.size, self.barrier = comm.rank, comm.size, comm.barrier
            self.allreduce: Callable[..., object] = self.first
            self.true = comm.allreduce

        def first(self, buffer: object) -> None:
            self.allreduce = self.true

    results = run_loopback(2, lambda comm: measure(Wrong(comm), 8))  # type: ignore[arg-type]
    assert not results[0].right
    assert not results[1].right


def doctor(**variables: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    command = [sys.executable, "-m", "hpcpar", "doctor"]
    environ = {**kept, **variables}
    return subprocess.run(
        command, cwd=REPOSITORY, env=environ, capture_output=True, text=True, timeout=90, check=False
    )


def test_the_doctor_works_alone() -> None:
    done = doctor()
    assert done.returncode == 0, done.stderr
    assert "1 on 1 node" in done.stdout
    assert "this is one process" in done.stdout


@pytest.mark.parametrize(
    ("variables", "found"),
    [
        ({"HPCPAR_ALGORITHM": "ring"}, "HPCPAR_ALGORITHM"),
        ({"MPI4PY_LIBMPI": "/none/libmpi.so"}, "no MPI library could be loaded"),
        ({"MPI_LOCALNRANKS": "2", "PMI_RANK": "2", "PMI_SIZE": "2"}, "hydra's variables say rank 2 of 2"),
    ],
)
def test_what_stands_in_the_way_of_a_start_is_a_finding(variables: dict[str, str], found: str) -> None:
    done = doctor(**variables)
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.startswith(f"wrong {found}")
    assert done.stdout.endswith("-> nothing else can be looked at before this works\n")


@pytest.mark.mpi
def test_every_rank_of_a_job_comes_to_the_same_report(
    world: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor_facts, "CHECK_S", 0.05)
    found = gather(world)
    size, right = len(found.ranks), all(measurement.right for measurement in found.measurements)
    everyone = world.allgather_object((size, right, found.measurements, judge(found)))
    assert all(answer == everyone[0] for answer in everyone)
    assert everyone[0][:2] == (world.size, True)
