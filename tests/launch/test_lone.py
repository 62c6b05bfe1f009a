"""One rank by MPI, and signs of more."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpcpar.errors import LaunchError
from hpcpar.launch.environment import RankInfo, detect
from hpcpar.launch.lone import refuse_nested, require_alone
from tests.command import write_script
from tests.launch.proc_tree import add_process

ALONE = RankInfo(0, 1, 0, 1, 0, None, "single", "none")
STEP_OF_ONE = RankInfo(0, 1, 0, 1, 0, ("node1",), "slurm", "none")


@pytest.mark.parametrize(
    ("rank", "size"),
    [
        ("RANK", "WORLD_SIZE"),
        ("HOROVOD_RANK", "HOROVOD_SIZE"),
        ("PMI_RANK", "PMI_SIZE"),
        ("PALS_RANKID", "PMI_SIZE"),
    ],
)
def test_a_rank_and_a_size_by_a_launcher_that_left_no_marker_are_refused_by_name(
    rank: str, size: str, tmp_path: Path
) -> None:
    environ = {rank: "0", size: "4"}
    assert detect(environ).launcher == "single"
    with pytest.raises(
        LaunchError, match=rf"{rank}=0 and {size}=4 .* or `hpcpar run -n 4 …`; .* unset {rank}"
    ):
        require_alone(ALONE, environ, tmp_path)
    require_alone(ALONE, {rank: "0", size: "1"}, tmp_path)


@pytest.mark.parametrize(
    ("info", "environ"),
    [
        (ALONE, {"WORLD_SIZE": "8"}),  # exported by a job script for what comes later
        (STEP_OF_ONE, {"RANK": "0", "WORLD_SIZE": "8"}),  # srun -n1 beside it
    ],
)
def test_what_can_be_meant_is_a_warning(
    info: RankInfo, environ: dict[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    require_alone(info, environ, tmp_path)
    (record,) = caplog.records
    assert "WORLD_SIZE=8, but this process runs alone" in record.getMessage()


def test_a_process_that_a_rank_has_started_without_its_variables_is_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    require_alone(ALONE, {"HPCPAR_RANK_PID": "12", "HOROVOD_RANK": "0", "HOROVOD_SIZE": "4"}, tmp_path)
    assert not caplog.records


class Cleaned:
    """A process whose launcher's variables were taken away, and what `scontrol` says of its step."""

    def __init__(self, directory: Path) -> None:
        self.proc = directory / "proc"
        self.bin = directory / "bin"
        self.bin.mkdir()

    def step(self, title: str, tasks: str, here: int = 1) -> None:
        add_process(self.proc, 40, "slurmstepd", title=title, environ={"SLURM_CONF": "/etc/cluster.conf"})
        for number in range(here - 1):
            add_process(self.proc, 60 + number, parent=40)
        add_process(self.proc, 50, "starter", parent=40)
        add_process(self.proc, "self", parent=50)
        said = (
            f'[ "$SLURM_CONF $*" = "/etc/cluster.conf show step 7.2" ] && echo "{tasks}"\n' if tasks else ""
        )
        write_script(self.bin / "scontrol", said)

    def check(self) -> None:
        require_alone(ALONE, {"PATH": f"{self.bin}:{os.environ['PATH']}"}, self.proc)


@pytest.fixture
def cleaned(tmp_path: Path) -> Cleaned:
    return Cleaned(tmp_path)


def test_a_step_of_several_tasks_is_found_by_its_daemon(cleaned: Cleaned) -> None:
    cleaned.step("slurmstepd: [7.2]", "StepId=7.2 UserId=0 Tasks=4 Name=python")
    with pytest.raises(LaunchError, match=r"srun \(step 7.2\) started 4 processes.*--cleanenv"):
        cleaned.check()


def test_a_step_of_one_task_is_silent(cleaned: Cleaned, caplog: pytest.LogCaptureFixture) -> None:
    cleaned.step("slurmstepd: [7.2]", "StepId=7.2 UserId=0 Tasks=1 Name=python")
    cleaned.check()
    assert not caplog.records


@pytest.mark.parametrize(
    "title", ["slurmstepd: [7.batch]", "slurmstepd: [7.extern]", "slurmstepd: [7.interactive]"]
)
def test_the_shells_of_a_job_are_no_step_of_several(
    cleaned: Cleaned, title: str, caplog: pytest.LogCaptureFixture
) -> None:
    cleaned.step(title, "", here=3)
    cleaned.check()
    assert not caplog.records


def test_where_slurm_does_not_answer_the_nodes_own_tasks_are_counted(
    cleaned: Cleaned, caplog: pytest.LogCaptureFixture
) -> None:
    cleaned.step("slurmstepd: [7.2]", "", here=2)
    with pytest.raises(LaunchError, match=r"srun \(step 7.2\) started 2 processes"):
        cleaned.check()


def test_one_task_here_of_who_knows_how_many_is_a_warning(
    cleaned: Cleaned, caplog: pytest.LogCaptureFixture
) -> None:
    cleaned.step("slurmstepd: [7.2]", "")
    cleaned.check()
    (record,) = caplog.records
    assert "srun (step 7.2) started this process, but none of its variables is left" in record.getMessage()


@pytest.mark.parametrize("daemon", ["hydra_pmi_proxy", "prted", "mpiexec"])
def test_ranks_of_an_mpiexec_are_found_by_its_daemon(tmp_path: Path, daemon: str) -> None:
    add_process(tmp_path, 40, daemon)
    add_process(tmp_path, 60, parent=40)
    add_process(tmp_path, "self", parent=40)
    add_process(tmp_path, 99, parent=40)
    with pytest.raises(LaunchError, match=rf"{daemon} \(pid 40\) started 2 processes"):
        require_alone(ALONE, {}, tmp_path)


def test_a_process_with_variables_of_its_step_is_not_asked_who_started_it(tmp_path: Path) -> None:
    add_process(tmp_path, 40, "slurmstepd", title="slurmstepd: [7.2]")
    add_process(tmp_path, 60, parent=40)
    add_process(tmp_path, 61, parent=40)
    add_process(tmp_path, "self", parent=40)
    require_alone(ALONE, {"SLURM_STEP_ID": "2", "PATH": "/nowhere"}, tmp_path)


def test_a_part_of_a_tasks_variables_is_refused_and_a_batch_scripts_are_not(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"SLURM_PROCID=3 says .*pass all of SLURM_\* into the container"):
        require_alone(ALONE, {"SLURM_PROCID": "3", "SLURM_NTASKS": "4"}, tmp_path)
    require_alone(ALONE, {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "7"}, tmp_path)


def nest(proc: Path, *, outer: int) -> None:
    """A rank of an mpiexec that is one of so many processes of another mpiexec."""
    add_process(proc, 40, "hydra_pmi_proxy")
    for number in range(outer - 1):
        add_process(proc, 41 + number, "mpiexec", parent=40)
    add_process(proc, 50, "mpiexec", parent=40)
    add_process(proc, 51, "hydra_pmi_proxy", parent=50)
    add_process(proc, 52, parent=51)
    add_process(proc, "self", parent=51)


def test_an_mpiexec_in_each_rank_of_one_of_its_kind_is_refused(tmp_path: Path) -> None:
    nest(tmp_path, outer=2)
    with pytest.raises(
        LaunchError, match=r"\(pid 40\) started 2 processes, of which one is mpiexec \(pid 50\)"
    ):
        refuse_nested({}, tmp_path)
    refuse_nested({"HPCPAR_RANK_PID": "12"}, tmp_path)  # a rank starts a job of its own


def test_an_mpiexec_in_a_single_process_of_another_one_is_the_only_one(tmp_path: Path) -> None:
    nest(tmp_path, outer=1)
    refuse_nested({}, tmp_path)
