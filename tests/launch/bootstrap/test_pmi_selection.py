"""The bootstrap that is selected, for every library and every plugin of srun."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpcpar.errors import ConfigError
from hpcpar.launch.bootstrap.pmi_selection import (
    Bootstrap,
    choose,
    loaded_libraries,
    name_hint,
    own_library,
    remove_variables,
    srun_plugins,
)
from hpcpar.launch.environment import RankInfo
from tests.command import write_script

MPICH = "MPICH Version:      5.0.2\nMPICH Release date: Tue\n"
OPENMPI_5 = "Open MPI v5.0.11, package: Open MPI runner, ident: 5.0.11"
OPENMPI_4 = "Open MPI v4.1.4, package: Debian OpenMPI, ident: 4.1.4"
INTEL = "Intel(R) MPI Library 2021.19 for Linux* OS\n"
MVAPICH = "MVAPICH2 Version      :	2.3.7\n"
CRAY = "MPI VERSION    : CRAY MPICH version 8.1.28.29 (ANL base 3.4a2)\n"

LIBMPI = "/opt/mpi/lib/libmpi.so.12"


def selected(pmi: str, library: str, *loaded: str, **environ: str) -> Bootstrap:
    info = RankInfo(2, 4, 0, 2, 1, ("node1", "node2"), "slurm", pmi)
    return choose(info, library, environ=environ, loaded=(LIBMPI, *loaded))


@pytest.mark.parametrize(
    ("library", "none", "pmi2", "pmix", "cray"),
    [
        (MPICH, "server", "launcher", "server", "server"),
        (INTEL, "server", "launcher", "server", "server"),
        (MVAPICH, "server", "launcher", "server", "server"),
        (OPENMPI_5, "none", "none", "launcher", "launcher"),
        (CRAY, "launcher", "launcher", "launcher", "launcher"),
        ("Some MPI 1.0", "launcher", "launcher", "launcher", "launcher"),
    ],
)
def test_each_library_gets_what_it_speaks_and_is_refused_only_where_nothing_can(
    library: str, none: str, pmi2: str, pmix: str, cray: str
) -> None:
    kinds = [selected(pmi, library).kind for pmi in ("none", "pmi2", "pmix", "cray")]
    assert kinds == [none, pmi2, pmix, cray]


def test_the_bootstrap_says_why() -> None:
    assert selected("none", MPICH).why == "own PMI-1 server: srun offers --mpi=none, MPICH 5.0.2 speaks PMI-1"
    assert selected("pmi2", MPICH).why == "srun offers --mpi=pmi2, which MPICH 5.0.2 speaks"
    assert selected("none", OPENMPI_5).why == "srun offers --mpi=none, which Open MPI v5.0.11 does not speak"


def test_open_mpi_5_under_srun_says_nothing_for_a_while_after_its_start() -> None:
    late = [selected("pmix", OPENMPI_5), selected("pmix", OPENMPI_5, HPCPAR_WIRE="launcher")]
    assert [found.settle_s > 0.1 for found in late] == [True, True]
    assert {selected("pmix", library).settle_s for library in (OPENMPI_4, MPICH, CRAY)} == {0.0}


def test_an_mpich_over_ucx_is_not_left_to_pmi2_whose_lines_may_be_too_short() -> None:
    over_ucx = MPICH + "MPICH Device:       ch4:ucx ofi\n"
    assert selected("pmi2", over_ucx).kind == "server"
    assert "too short for MPICH 5.0.2 over UCX" in selected("pmi2", over_ucx).why
    assert selected("pmi2", over_ucx, HPCPAR_WIRE="launcher").kind == "launcher"
    assert selected("pmi2", MPICH + "MPICH Device:       ch4:ofi\n").kind == "launcher"


def test_a_library_that_was_built_with_or_told_of_sruns_protocol_is_left_to_it() -> None:
    assert selected("pmix", MPICH, "/usr/lib/libpmix.so.2").kind == "launcher"
    assert selected("none", MPICH, "/usr/lib/libpmix.so.2").kind == "server"
    assert selected("none", MPICH, "/usr/lib/libpmi.so.0").kind == "launcher"
    assert selected("none", MPICH, "/usr/lib/libpmi2.so.0").kind == "server"
    assert selected("none", INTEL, I_MPI_PMI_LIBRARY="/usr/lib/libpmi.so").kind == "launcher"


@pytest.mark.parametrize(
    ("component", "kind"), [("mca_pmix_ext3x.so", "none"), ("mca_pmix_s2.so", "launcher"), (None, "launcher")]
)
def test_open_mpi_4_is_refused_under_pmi2_only_where_it_certainly_was_built_without(
    tmp_path: Path, component: str | None, kind: str
) -> None:
    library = tmp_path / "libmpi.so.40"
    library.touch()
    if component:
        plugins = tmp_path / "openmpi" / "lib"
        plugins.mkdir(parents=True)
        (plugins / component).touch()
    assert selected("pmi2", OPENMPI_4, str(library)).kind == kind


def test_other_launchers_connect_their_ranks_themselves_and_a_step_of_one_task_needs_nobody() -> None:
    for launcher in ("hydra", "openmpi", "single"):
        info = RankInfo(0, 2, 0, 2, 0, None, launcher, "own")
        assert choose(info, MPICH, environ={}, loaded=()).kind == "launcher"
    info = RankInfo(0, 1, 0, 1, 0, None, "slurm", "none")
    assert choose(info, OPENMPI_5, environ={}, loaded=()).kind == "launcher"


@pytest.mark.parametrize(("library", "kind"), [(MPICH, "server"), (OPENMPI_5, "launcher")])
def test_under_torchrun_ranks_of_mpich_find_each_other_by_our_server(library: str, kind: str) -> None:
    for size, expected in ((2, kind), (1, "launcher")):
        info = RankInfo(0, size, 0, size, 0, None, "torchrun", "none")
        assert choose(info, library, environ={}, loaded=()).kind == expected


def test_the_user_can_decide() -> None:
    assert selected("none", MPICH, HPCPAR_WIRE="launcher").kind == "launcher"
    assert selected("pmi2", MPICH, HPCPAR_WIRE="server").kind == "server"
    assert selected("none", OPENMPI_5, HPCPAR_WIRE="server").kind == "none"
    assert selected("none", MPICH, HPCPAR_BOOTSTRAP="launcher", HPCPAR_WIRE="server").kind == "launcher"
    for name in ("HPCPAR_BOOTSTRAP", "HPCPAR_WIRE"):
        with pytest.raises(ConfigError, match=f"{name}='srun' is not understood"):
            selected("none", MPICH, **{name: "srun"})


def test_the_libraries_of_this_process_are_found() -> None:
    assert any("libc" in path for path in loaded_libraries())


@pytest.mark.parametrize("stream", ["", " >&2"])
def test_sruns_plugins_are_read_from_its_list(tmp_path: Path, stream: str) -> None:
    text = "MPI plugin types are...\\n\\tpmix\\n\\tnone\\n\\tpmi2\\nspecific pmix plugin versions: pmix_v4"
    write_script(tmp_path / "srun", f"printf '{text}\\n'{stream}")
    assert srun_plugins({"PATH": f"{tmp_path}:/usr/bin:/bin"}) == ("pmix", "none", "pmi2")


def test_older_srun_names_itself_on_every_line_and_without_srun_nothing_is_known(tmp_path: Path) -> None:
    assert srun_plugins({"PATH": str(tmp_path)}) is None
    write_script(tmp_path / "srun", "printf 'srun: MPI types are...\\nsrun: none\\nsrun: pmi2\\n' >&2")
    assert srun_plugins({"PATH": f"{tmp_path}:/usr/bin:/bin"}) == ("none", "pmi2")


HYDRA = RankInfo(1, 4, 1, 4, None, None, "hydra", "own")
OPENMPI_RANK = RankInfo(1, 4, 1, 4, None, None, "openmpi", "own")
FLUX = RankInfo(1, 4, 1, None, None, None, "flux", "own")
JSRUN = RankInfo(1, 4, 1, 4, None, None, "jsrun", "own")
STEP_OF_ONE = RankInfo(0, 1, 0, 1, 0, ("node1",), "slurm", "pmix")
SINGLE = RankInfo(0, 1, 0, 1, 0, None, "single", "none")
PMI_1 = {"PMI_FD": "5", "PMI_RANK": "1", "PMI_SIZE": "4"}
OF_SLURM = {"PMIX_NAMESPACE": "slurm.pmix.7.0", "PMIX_RANK": "0"}
OF_PRTE = {"PMIX_NAMESPACE": "prterun-host-77@1", "PMIX_RANK": "1"}


@pytest.mark.parametrize(
    ("info", "environ"),
    [
        (HYDRA, PMI_1 | OF_SLURM),  # Hydra's proxies were started by `srun --mpi=pmix`
        (FLUX, PMI_1 | OF_PRTE),  # Flux was started by Open MPI's mpiexec
        (STEP_OF_ONE, OF_SLURM),
        (SINGLE, OF_SLURM),  # typed into the shell of a step
        (RankInfo(0, 1, 0, 1, None, None, "openmpi", "own"), OF_PRTE),
    ],
)
def test_an_mpich_without_pmix_gets_rid_of_variables_that_it_would_abort_over(
    info: RankInfo, environ: dict[str, str]
) -> None:
    found = choose(info, MPICH, environ=environ, loaded=[LIBMPI])
    assert found.kind == "launcher"
    kept = dict(environ)
    remove_variables(found.stale, kept)
    assert not [name for name in kept if name.startswith("PMIX_")]
    assert {name for name in environ if name.startswith("PMI_")} <= set(kept)


@pytest.mark.parametrize(
    ("info", "library", "environ"),
    [
        (OPENMPI_RANK, MPICH, OF_PRTE),
        (JSRUN, MPICH, OF_PRTE),
        (SINGLE, MPICH, OF_PRTE),  # of a launcher that is not in the table
        (HYDRA, OPENMPI_5, PMI_1),
    ],
)
def test_a_launcher_that_the_library_cannot_speak_with_is_refused_before_mpi_starts(
    info: RankInfo, library: str, environ: dict[str, str]
) -> None:
    assert choose(info, library, environ=environ, loaded=[LIBMPI]).kind == "none"


def test_launcher_and_library_of_one_kind_are_left_alone() -> None:
    for info, library, environ, loaded in (
        (HYDRA, MPICH, PMI_1, []),
        (OPENMPI_RANK, OPENMPI_5, OF_PRTE, []),
        (OPENMPI_RANK, MPICH, OF_PRTE, ["/usr/lib/libpmix.so.2"]),
        (FLUX, OPENMPI_5, PMI_1 | OF_PRTE, []),
        (SINGLE, MPICH, {}, []),
    ):
        found = choose(info, library, environ=environ, loaded=[LIBMPI, *loaded])
        assert (found.kind, found.stale) == ("launcher", ())


def test_an_mpich_with_pmix_keeps_the_protocol_of_its_launcher() -> None:
    pmix = "/usr/lib/libpmix.so.2"
    assert choose(HYDRA, MPICH, environ=PMI_1 | OF_SLURM, loaded=[pmix]).stale == ("PMIX_",)
    assert selected("pmix", MPICH, pmix).stale == ("PMI_",)
    assert selected("pmi2", MPICH).stale == ("PMIX_",)


def python_that(tmp_path: Path, does: str) -> str:
    return str(write_script(tmp_path / "python", does))


@pytest.mark.parametrize(
    ("version", "library"),
    [
        ("MPICH Version: 5.0.2", "mpich"),
        ("Open MPI v5.0.11, package: Open MPI", "openmpi"),
        ("Intel(R) MPI Library 2021.19", "intel"),
        ("something else", None),
    ],
)
def test_the_library_is_known_by_what_it_says(tmp_path: Path, version: str, library: str | None) -> None:
    assert own_library({}, python_that(tmp_path, f"echo '{version}'")) == library


@pytest.mark.parametrize("does", ["exit 1", "echo MPICH; exit 1", "kill -SEGV $$"])
def test_a_python_that_cannot_load_mpi_has_none(tmp_path: Path, does: str) -> None:
    assert own_library({}, python_that(tmp_path, does)) is None
    assert own_library({}, str(tmp_path / "nowhere")) is None


def test_this_environments_library_is_the_one_that_mpi4py_loads() -> None:
    from hpcpar.launch.crosscheck import flavour
    from hpcpar.transport.mpi_library import library_version

    assert own_library(os.environ) == flavour(library_version())


@pytest.mark.parametrize(("machine_has", "hinted"), [("libmpich.so.12", True), (None, False)])
def test_an_mpich_by_debians_name_is_pointed_out(
    monkeypatch: pytest.MonkeyPatch, machine_has: str | None, hinted: bool
) -> None:
    monkeypatch.setattr("ctypes.util.find_library", lambda name: machine_has)
    hint = name_hint("libmpi.so.12: cannot open shared object file: No such file or directory")
    assert ("ln -s" in hint) is hinted
    assert name_hint("No module named 'mpi4py'") == ""
