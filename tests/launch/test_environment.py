"""The rank by the variables of each launcher, and of several at once."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hpcpar.errors import LaunchError
from hpcpar.launch.environment import LAUNCHERS, RankInfo, claims, detect, sound_claims
from tests.command import run, variables
from tests.launch.proc_tree import add_process

if TYPE_CHECKING:
    from hpcpar.comm import Communicator

# As recorded from `srun --mpi=… -N2 --ntasks-per-node=2` of Slurm 22.05, task 3.
STEP = variables(
    "SLURM_JOB_ID=2 SLURM_STEP_ID=0 SLURM_PROCID=3 SLURM_STEP_NUM_TASKS=4 SLURM_LOCALID=1 SLURM_NODEID=1 "
    "SLURM_GTIDS=2,3 SLURM_STEP_NODELIST=node[1-2] SLURM_STEP_TASKS_PER_NODE=2(x2)"
)
# The same step's variables as a rank of MPICH's mpiexec sees them: of its own proxy's step.
PROXY_STEP = STEP | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
HYDRA = {"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2", "PMI_FD": "5"}
OPENMPI = variables(
    "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=3 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=3 "
    "PMIX_NAMESPACE=prterun-host-77@1"
)
TORCHRUN = variables(
    "TORCHELASTIC_RUN_ID=none RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4 GROUP_RANK=1"
)
PALS = variables("PALS_RANKID=6 PMI_SIZE=8 PMI_RANK=6 PALS_LOCAL_RANKID=2 PALS_LOCAL_SIZE=4 PALS_NODEID=1")
MVAPICH = variables(
    "MV2_COMM_WORLD_RANK=1 MV2_COMM_WORLD_SIZE=2 MV2_COMM_WORLD_LOCAL_RANK=1 MV2_COMM_WORLD_LOCAL_SIZE=2"
)
JSRUN = variables(
    "JSM_NAMESPACE_RANK=3 JSM_NAMESPACE_SIZE=4 JSM_NAMESPACE_LOCAL_RANK=1 JSM_NAMESPACE_LOCAL_SIZE=2"
)
FLUX = {"FLUX_TASK_RANK": "2", "FLUX_JOB_SIZE": "4", "FLUX_TASK_LOCAL_ID": "0", "FLUX_JOB_NNODES": "2"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (TORCHRUN, RankInfo(5, 8, 1, 4, 1, None, "torchrun", "none")),
        (OPENMPI, RankInfo(1, 3, 1, 3, None, None, "openmpi", "own")),
        (PALS, RankInfo(6, 8, 2, 4, 1, None, "pals", "own")),
        (MVAPICH, RankInfo(1, 2, 1, 2, None, None, "mvapich", "own")),
        (HYDRA, RankInfo(2, 4, 0, 2, None, None, "hydra", "own")),
        (JSRUN, RankInfo(3, 4, 1, 2, None, None, "jsrun", "own")),
        (FLUX, RankInfo(2, 4, 0, None, None, None, "flux", "own")),
        (STEP, RankInfo(3, 4, 1, 2, 1, ("node1", "node2"), "slurm", "none")),
        ({}, RankInfo(0, 1, 0, 1, 0, None, "single", "none")),
    ],
)
def test_each_launcher_is_recognised_by_its_own_variables(
    environ: dict[str, str], expected: RankInfo
) -> None:
    assert detect(environ) == expected


@pytest.mark.parametrize(
    ("inner", "outer", "launcher"),
    [
        (HYDRA, PROXY_STEP, "hydra"),
        (OPENMPI, PROXY_STEP, "openmpi"),
        (TORCHRUN, HYDRA | PROXY_STEP, "torchrun"),
        (TORCHRUN, OPENMPI, "torchrun"),
        (OPENMPI, HYDRA, "openmpi"),
        (PALS, STEP, "pals"),
        (MVAPICH, HYDRA, "mvapich"),
        (FLUX, STEP, "flux"),
        (FLUX, JSRUN, "flux"),
        (FLUX, OPENMPI, "flux"),
        (FLUX | {"PMI_RANK": "2", "PMI_SIZE": "4", "PMI_FD": "9"}, HYDRA, "flux"),
    ],
)
def test_the_inner_launcher_is_believed_where_the_outer_ones_variables_are_stale(
    inner: dict[str, str], outer: dict[str, str], launcher: str
) -> None:
    assert detect(outer | inner).launcher == launcher
    assert detect(outer | inner).rank == detect(inner).rank


@pytest.mark.parametrize(
    "outer", [HYDRA, OPENMPI, TORCHRUN, PALS, MVAPICH, FLUX], ids=lambda outer: min(outer)
)
def test_what_sruns_task_was_started_with_is_of_a_launcher_outside_of_the_step(
    outer: dict[str, str], tmp_path: Path
) -> None:
    """A rank of mpiexec, or a shell with what one has left, that calls srun: here with a shell in between."""
    task = STEP | {"SLURM_TASK_PID": "391"}
    add_process(tmp_path, 391, environ=task | outer)
    assert detect(task | outer, tmp_path) == RankInfo(3, 4, 1, 2, 1, ("node1", "node2"), "slurm", "none")
    add_process(tmp_path, 391, environ=task)
    inner = detect(outer)
    assert detect(task | outer, tmp_path) == inner
    assert detect(task | outer, tmp_path / "of another process namespace") == inner


def test_srun_with_crays_plugin_is_slurm_although_it_sets_one_variable_of_pals() -> None:
    info = detect(STEP | {"PALS_RANKID": "3", "PMI_SIZE": "4", "PALS_APINFO": "/var/spool/apinfo"})
    assert (info.launcher, info.pmi) == ("slurm", "cray")


def test_the_shell_of_a_batch_script_is_one_process_and_gets_a_hint() -> None:
    info = detect({"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "4"})
    assert (info.rank, info.size, info.launcher) == (0, 1, "single")
    assert info.hint is not None
    assert "4 tasks" in info.hint
    assert "srun" in info.hint


def test_a_batch_script_that_a_rank_has_submitted_is_not_that_rank(tmp_path: Path) -> None:
    script = STEP | variables("SLURM_JOB_ID=8 SLURM_PROCID=0 SLURM_NTASKS=3 SLURM_TASK_PID=35")
    add_process(tmp_path, 31, "slurmstepd", title="slurmstepd: [8.batch]")
    add_process(tmp_path, 35, "slurm_script", parent=31, environ=script)
    info = detect(script, tmp_path)
    assert (info.rank, info.size, info.launcher) == (0, 1, "single")
    assert "`hpcpar run -n 3 …`" in str(info.hint)
    assert [claim.launcher for claim in claims(script | OPENMPI, tmp_path)] == ["openmpi"]


# As recorded in the shell of `salloc -N2 --ntasks-per-node=2` with LaunchParameters=use_interactive_step.
SALLOC_SHELL = variables(
    "SLURM_JOB_ID=2 SLURM_NTASKS=4 SLURM_STEP_ID=4294967290 SLURM_PROCID=0 SLURM_LOCALID=0 "
    "SLURM_STEP_NUM_TASKS=1 SLURM_STEP_NODELIST=node1 SLURM_STEP_TASKS_PER_NODE=1"
)


def test_so_does_the_shell_that_salloc_opens_on_a_node_and_no_step_in_it() -> None:
    info = detect(SALLOC_SHELL)
    assert (info.rank, info.size) == (0, 1)
    assert info.hint is not None
    assert "4 tasks" in info.hint
    assert detect({**SALLOC_SHELL, "SLURM_STEP_ID": "0"}).hint is None


def test_in_a_heterogeneous_job_the_hint_is_for_all_components() -> None:
    parts = {"SLURM_NTASKS_HET_GROUP_0": "1", "SLURM_NTASKS_HET_GROUP_1": "2", "SLURM_HET_SIZE": "2"}
    hint = detect({"SLURM_JOB_ID": "7", **parts}).hint
    assert hint is not None
    assert "3 tasks" in hint
    assert hint.endswith("start it with `srun --het-group=0-1 python …`")


def test_a_job_of_one_task_gets_no_hint() -> None:
    assert detect({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "1"}).hint is None


def test_a_launcher_whose_rank_is_missing_is_passed_over() -> None:
    assert detect({"MPI_LOCALNRANKS": "2"}).launcher == "single"


@pytest.mark.parametrize("value", ["two", "-1", "", "1.0", "²"])
def test_a_rank_that_is_no_number_is_an_error_that_names_the_variable(value: str) -> None:
    with pytest.raises(LaunchError, match="PMI_RANK"):
        detect(HYDRA | {"PMI_RANK": value})


def test_a_rank_beyond_the_size_is_an_error_that_names_both() -> None:
    with pytest.raises(LaunchError, match="rank 4 of 4"):
        detect(HYDRA | {"PMI_RANK": "4"})
    with pytest.raises(LaunchError, match="local rank 2 of 2"):
        detect(HYDRA | {"MPI_LOCALRANKID": "2"})


def test_every_launcher_of_the_table_is_told_by_a_marker_that_no_other_sets() -> None:
    markers = [launcher.marker for launcher in LAUNCHERS]
    assert len(set(markers)) == len(markers)


@pytest.mark.mpi
def test_the_variables_and_mpi_agree_on_rank_size_and_node(world: Communicator) -> None:
    info = detect()
    here = [rank for rank, node in enumerate(world.nodes) if node == world.nodes[world.rank]]
    found = world.allgather_object((info.rank, info.size, info.local_rank, info.local_size))
    assert [(rank, size) for rank, size, _, _ in found] == [(rank, world.size) for rank in range(world.size)]
    # In any order: Open MPI deals local ranks out anew where there are more ranks than cores.
    assert sorted(found[rank][2] for rank in here) == list(range(len(here)))
    assert {local_size for _, _, _, local_size in found} <= {None, len(here)}


def test_all_who_left_variables_are_heard_from_the_inside_out(tmp_path: Path) -> None:
    task = STEP | {"SLURM_TASK_PID": "391"}
    add_process(tmp_path, 391, "flux-broker", environ=task | OPENMPI)
    found = [claim.launcher for claim in claims(task | OPENMPI | HYDRA | FLUX, tmp_path)]
    assert found == ["flux", "hydra", "slurm", "openmpi"]


@pytest.mark.parametrize("daemon", ["hydra_pmi_proxy", "orted", "prted"])
def test_a_step_of_an_mpiexecs_own_daemons_says_nothing_of_the_job(daemon: str, tmp_path: Path) -> None:
    task = PROXY_STEP | {"SLURM_LOCALID": "0", "SLURM_TASK_PID": "391"}
    add_process(tmp_path, 391, daemon, environ=task)
    assert [claim.launcher for claim in claims(task | HYDRA, tmp_path)] == ["hydra"]
    add_process(tmp_path, 391, "mpiexec", environ=task)
    assert [claim.launcher for claim in claims(task | HYDRA, tmp_path)] == ["hydra", "slurm"]
    unseen = tmp_path / "of another process namespace"
    assert [claim.launcher for claim in claims(task | HYDRA, unseen)] == ["hydra"]


def test_stale_variables_that_make_no_sense_do_not_refuse_a_good_job() -> None:
    stale = FLUX | JSRUN | {"JSM_NAMESPACE_RANK": "two"}
    assert [claim.launcher for claim in sound_claims(stale)] == ["flux"]
    assert [claim.launcher for claim in sound_claims(FLUX | JSRUN)] == ["flux", "jsrun"]


def shell_of_a_step(proc: Path, *, group: int, terminal: int = 34816) -> dict[str, str]:
    """The variables of a process in a step of four tasks whose first is a shell on a terminal."""
    task = STEP | {"SLURM_TASK_PID": "391", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}
    add_process(proc, "self", parent=391, group=group, session=391, terminal=terminal)
    return task


def test_what_is_typed_into_a_steps_shell_is_one_process_and_gets_a_hint(tmp_path: Path) -> None:
    info = detect(shell_of_a_step(tmp_path, group=402), tmp_path)
    assert (info.rank, info.size, info.launcher) == (0, 1, "single")
    assert info.hint is not None
    assert "`srun --overlap python …` or `hpcpar run -n 4 …`" in info.hint


def test_what_a_steps_script_starts_is_a_rank_on_a_terminal_or_not(tmp_path: Path) -> None:
    assert detect(shell_of_a_step(tmp_path, group=391), tmp_path).size == 4
    assert detect(shell_of_a_step(tmp_path, group=402, terminal=0), tmp_path).size == 4
    task = shell_of_a_step(tmp_path, group=402)
    assert detect(task | {"SLURM_TASK_PID": "99"}, tmp_path).size == 4  # the task itself


def test_the_documentation_shows_the_table_that_is_read() -> None:
    root = Path(__file__).parents[2]
    made = run(sys.executable, "docs/launchers.py", directory=root)
    assert made.stdout == (root / "docs" / "launchers.md").read_text("utf-8")
    for launcher in LAUNCHERS:
        assert f"| {launcher.called} | `{launcher.marker}` |" in made.stdout
