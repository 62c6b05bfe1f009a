"""The launcher's word against MPI's."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hpcpar.errors import LaunchError
from hpcpar.launch.crosscheck import (
    MpiView,
    believed,
    check_against_mpi,
    flavour,
    library_name,
    refusal,
    refuse_separate_worlds,
    require_asked_size,
)
from hpcpar.launch.environment import RankInfo

MPICH = "MPICH Version:      5.0.2\nMPICH Release date: Tue\n"
OPENMPI = "Open MPI v5.0.11, package: Open MPI runner, ident: 5.0.11"
INTEL = "Intel(R) MPI Library 2021.19 for Linux* OS\n"
CRAY = "MPI VERSION    : CRAY MPICH version 8.1.28.29 (ANL base 3.4a2)\n"

SLURM = RankInfo(2, 4, 0, 2, 1, ("node1", "node2"), "slurm", "none")
HYDRA = RankInfo(2, 4, 0, 2, None, None, "hydra", "own")


def check(info: RankInfo, library: str = MPICH, **mpi: object) -> RankInfo:
    said = {"rank": 2, "size": 4, "local_rank": 0, "local_size": 2}
    return check_against_mpi(info, MpiView(library=library, **{**said, **mpi}), "node2")  # type: ignore[arg-type]


def singleton(info: RankInfo, library: str) -> str:
    with pytest.raises(LaunchError) as caught:
        check(info, library, rank=0, size=1, local_rank=0, local_size=1)
    return str(caught.value)


def test_agreement_returns_what_the_launcher_said() -> None:
    assert check(SLURM) == SLURM


def test_local_ranks_in_any_order_of_the_node_s_ranks_are_no_disagreement() -> None:
    assert check(SLURM, local_rank=1, neighbours=[1, 0]) == SLURM
    for neighbours in ([0, 0], [0, 2], [0, None]):
        with pytest.raises(LaunchError, match="local rank 0 of 2"):
            check(SLURM, local_rank=1, neighbours=neighbours)


def test_mpi_fills_in_what_the_launcher_leaves_open() -> None:
    flux = RankInfo(2, 4, None, None, None, None, "flux", "own")
    assert check(flux, node=1) == replace(flux, local_rank=0, local_size=2, node=1)


@pytest.mark.parametrize(
    ("library", "option"),
    [(MPICH, "srun --mpi=pmi2"), (OPENMPI, "srun --mpi=pmix"), (CRAY, "srun --mpi=cray_shasta")],
)
def test_silent_singletons_under_srun_are_refused_and_the_right_option_named(
    library: str, option: str
) -> None:
    message = singleton(SLURM, library)
    assert "srun started 4 processes, but MPI_COMM_WORLD has size 1" in message
    assert "--mpi=none" in message
    assert "node2, rank 2" in message
    assert f"`{option} …`" in message
    assert library_name(library) in message


def test_a_program_that_started_mpi_itself_is_told_to_leave_it_to_hpcpar_where_that_helps() -> None:
    early = {"rank": 0, "size": 1, "local_rank": 0, "local_size": 1, "started_before": True}
    with pytest.raises(LaunchError, match=r"call `hpcpar.init\(\)` first .* Else: Use `srun --mpi=pmi2"):
        check(SLURM, MPICH, **early)
    with pytest.raises(LaunchError) as caught:
        check(SLURM, OPENMPI, **early)
    assert "first" not in str(caught.value)


def test_a_refusal_names_only_what_this_slurm_has() -> None:
    assert "Use `srun --mpi=pmix …`" in refusal(SLURM, OPENMPI, ("none", "pmi2", "pmix"))
    without = refusal(SLURM, OPENMPI, ("none", "pmi2"))
    assert "This Slurm has no pmix (it has none, pmi2): use `hpcpar run -n 4 …`" in without
    assert "pip install mpich" in without
    assert "srun --mpi=pmix" not in without
    assert "`srun --mpi=list` shows" in refusal(SLURM, OPENMPI)


def test_a_refusal_names_the_launcher_or_option_that_fits_the_library() -> None:
    torchrun = RankInfo(2, 4, 2, 4, 0, None, "torchrun", "none")
    for info, library, words in (
        (SLURM, INTEL, ("I_MPI_PMI_LIBRARY",)),
        (HYDRA, OPENMPI, ("Open MPI's own `mpiexec`", "module")),
        (torchrun, MPICH, ("torchrun does not start MPI ranks",)),
        (
            RankInfo(0, 2, 0, 2, None, None, "openmpi", "own"),
            MPICH,
            (
                "use the `mpiexec` of MPICH 5.0.2 (Debian calls them mpiexec.mpich",
                "`hpcpar run` starts the mpiexec beside this Python, else the first on PATH",
            ),
        ),
    ):
        message = singleton(info, library)
        assert all(each in message for each in words), message


def test_another_rank_or_size_is_refused_with_both_answers() -> None:
    for info, mpi, answers in (
        (SLURM, {"rank": 1}, r"rank 2 of 4, MPICH 5\.0\.2 says rank 1 of 4"),
        (HYDRA, {"size": 8}, r"rank 2 of 4, .* says rank 2 of 8"),
        (SLURM, {"local_rank": 1}, r"local rank 0 of 2, .* says local rank 1 of 2"),
        (SLURM, {"local_size": 4}, r"local rank 0 of 2, .* says local rank 0 of 4"),
    ):
        with pytest.raises(LaunchError, match=answers):
            check(info, **mpi)


def test_a_launcher_that_we_do_not_know_is_taken_at_mpis_word() -> None:
    single = RankInfo(0, 1, 0, 1, 0, None, "single", "none")
    assert check(single, node=1) == RankInfo(2, 4, 0, 2, 1, None, "unknown", "own")


def test_one_process_alone_is_in_order() -> None:
    single = RankInfo(0, 1, 0, 1, 0, None, "single", "none", hint="a hint")
    assert check(single, rank=0, size=1, local_rank=0, local_size=1) == single


@pytest.mark.parametrize(
    ("library", "expected"),
    [
        (MPICH, "mpich"),
        (OPENMPI, "openmpi"),
        (INTEL, "intel"),
        (CRAY, "cray"),
        ("MVAPICH2 2.3", "mvapich"),
        ("", "unknown"),
    ],
)
def test_the_library_is_known_by_its_version_text(library: str, expected: str) -> None:
    assert flavour(library) == expected


def test_the_librarys_name_is_short() -> None:
    assert library_name(MPICH) == "MPICH 5.0.2"
    assert library_name(OPENMPI) == "Open MPI v5.0.11"
    assert library_name("") == "unknown"


FLUX = RankInfo(1, 4, 1, None, None, None, "flux", "own")


def test_whoever_agrees_with_mpi_is_believed() -> None:
    step_of_brokers = replace(SLURM, rank=0, size=2)
    assert believed(FLUX, [HYDRA], 1, 4) == FLUX  # `flux start` under mpiexec
    assert believed(FLUX, [HYDRA], 2, 4) == HYDRA  # mpiexec under `flux run`
    assert believed(HYDRA, [step_of_brokers], 2, 4) == HYDRA
    assert believed(HYDRA, [FLUX], 3, 8) == HYDRA  # nobody agrees: check_against_mpi refuses the inner one


def test_an_outer_launchers_size_1_does_not_excuse_a_rank_that_is_alone() -> None:
    left_by_a_shell = RankInfo(0, 1, 0, 1, None, None, "openmpi", "own")
    info = believed(SLURM, [left_by_a_shell], 0, 1)
    assert "every rank would train alone" in singleton(info, MPICH)


def test_an_mpiexec_in_each_of_several_tasks_is_refused_with_both_launchers_named() -> None:
    tasks = replace(SLURM, rank=1, size=2)
    with pytest.raises(
        LaunchError, match=r"srun started 2 tasks, .* rank 2 of 4 in the world of task 1, beside 1"
    ):
        refuse_separate_worlds(HYDRA, [tasks])
    with pytest.raises(LaunchError, match="flux started 4 tasks"):
        refuse_separate_worlds(replace(HYDRA, rank=0, size=2), [FLUX])
    with pytest.raises(LaunchError, match="Open MPI's mpiexec started 4 tasks"):
        refuse_separate_worlds(HYDRA, [replace(HYDRA, rank=1, launcher="openmpi")])


def test_managers_of_resources_may_run_in_what_a_launcher_has_started() -> None:
    refuse_separate_worlds(FLUX, [replace(HYDRA, rank=0, size=2)])
    refuse_separate_worlds(SLURM, [replace(HYDRA, rank=0, size=2)])
    refuse_separate_worlds(HYDRA, [replace(SLURM, size=1, rank=0)])
    refuse_separate_worlds(HYDRA, [replace(HYDRA, launcher="mvapich")])  # one launcher with two names


def test_a_size_that_was_not_asked_for_is_refused() -> None:
    require_asked_size(None, 4)
    require_asked_size(4, 4)
    with pytest.raises(LaunchError, match=r"asked for 2 ranks, but there are 4.*`env -u HPCPAR_RUN_RANKS …`"):
        require_asked_size(2, 4)


def test_a_refusal_names_the_launcher_and_what_it_speaks() -> None:
    prte = RankInfo(1, 4, 1, 4, None, None, "openmpi", "own")
    assert "Open MPI's mpiexec started 4 processes and speaks PMIx, which MPICH 5.0.2" in refusal(prte, MPICH)
    assert "mpiexec started 4 processes and speaks PMI-1, which Open MPI v5.0.11" in refusal(HYDRA, OPENMPI)
    unknown = RankInfo(0, 1, 0, 1, 0, None, "single", "none")
    assert "unset PMIX_NAMESPACE" in refusal(unknown, MPICH)
