"""Throw-away jobs: what they see of this one, and that nothing of them stays."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from hpcpar.launch import throwaway
from hpcpar.launch.throwaway import own_environ, run, session_members

OF_A_RANK = [
    "PMI_FD",
    "PMI_RANK",
    "PMIX_RANK",
    "PMIX_SERVER_URI41",
    "PRTE_LAUNCHED",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_UNIVERSE_SIZE",
    "OMPI_MCA_initial_wdir",
    "OMPI_MCA_ess",
    "OMPI_MCA_orte_jobid",
    "HYDI_CONTROL_FD",
    "MPI_LOCALRANKID",
    "PALS_LOCAL_RANKID",
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
    "SLURMD_NODENAME",
    "FLUX_TASK_RANK",
    "TORCHELASTIC_RUN_ID",
    "MV2_COMM_WORLD_RANK",
    "HPCPAR_RUN_DIRECTORY",
    "HPCPAR_STEP_SECRET",
]
OF_THE_USER = [
    "PATH",
    "LD_LIBRARY_PATH",
    "OMPI_MCA_pml",
    "OMPI_MCA_opal_common_ucx_tls",
    "OMPI_ALLOW_RUN_AS_ROOT",
    "UCX_TLS",
    "I_MPI_OFFLOAD",
    "MPICH_GPU_SUPPORT_ENABLED",
    "MPIR_CVAR_ENABLE_GPU",
    "MV2_USE_CUDA",
    "CUDA_VISIBLE_DEVICES",
    "HPCPAR_CUDA_AWARE",
]


def launcher_that(tmp_path: Path, does: str) -> dict[str, str]:
    """An environment whose mpiexec is a shell script; the one beside this Python must not be taken."""
    script = tmp_path / "mpiexec"
    script.write_text(f"#!/bin/sh\n{does}\n")
    script.chmod(0o755)
    return {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}


@pytest.fixture
def no_mpiexec_beside_python(monkeypatch: pytest.MonkeyPatch) -> None:
    def find(environ: dict[str, str], which: throwaway.shutil.which, launcher: str) -> str:  # type: ignore[valid-type]
        return which("mpiexec")  # type: ignore[no-any-return, misc]

    monkeypatch.setattr(throwaway, "find_launcher", find)


@pytest.mark.parametrize("name", OF_A_RANK)
def test_what_tells_a_rank_who_it_is_is_not_handed_on(name: str) -> None:
    assert name not in own_environ({name: "1", "PATH": "/bin"})


@pytest.mark.parametrize("name", OF_THE_USER)
def test_what_the_user_tells_mpi_is_handed_on(name: str) -> None:
    assert own_environ({name: "chosen"})[name] == "chosen"


def test_the_job_runs_and_its_output_comes_back(tmp_path: Path, no_mpiexec_beside_python: None) -> None:
    ended = run(
        2, ["program", "word"], launcher_that(tmp_path, 'printf "%s " "$@"; echo oh >&2; exit 3'), 20.0
    )
    assert (ended.status, ended.why) == (3, "")
    assert ended.output == "-n 2 program word oh\n"


def test_a_crash_is_a_status(tmp_path: Path, no_mpiexec_beside_python: None) -> None:
    assert run(2, ["x"], launcher_that(tmp_path, "kill -SEGV $$"), 20.0).status == -11


def test_a_job_that_hangs_ends_with_everything_it_has_started(
    tmp_path: Path, no_mpiexec_beside_python: None
) -> None:
    """A rank in a process group of its own, deaf to SIGTERM, below a launcher that is deaf, too."""
    deaf = (
        "import os, signal, sys, time; os.setpgid(0, 0); "
        "signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        "open(sys.argv[1], 'w').write(f'{os.getpid()} {os.getsid(0)}'); time.sleep(60)"
    )
    word = tmp_path / "pid"
    environ = launcher_that(
        tmp_path, f"trap '' TERM\n{sys.executable} -IS -c \"{deaf}\" {word} &\nwait\nsleep 60\n"
    )
    start_s = time.monotonic()
    ended = run(2, ["x"], environ, 2.0)
    assert ended.status is None
    assert time.monotonic() - start_s < 20.0
    pid, session = map(int, word.read_text().split())
    assert pid not in session_members(session) == []


def test_a_rank_that_outlives_its_launcher_is_ended_too(
    tmp_path: Path, no_mpiexec_beside_python: None
) -> None:
    word = tmp_path / "session"
    environ = launcher_that(tmp_path, f"sleep 60 & ps -o sid= $$ > {word} || echo $$ > {word}; exit 0")
    start_s = time.monotonic()
    assert run(2, ["x"], environ, 30.0).status == 0
    assert time.monotonic() - start_s < 20.0
    assert session_members(int(word.read_text())) == []


def test_without_a_launcher_nothing_is_started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("hpcpar.launch.supervise.sys.executable", str(tmp_path / "python"))
    find = throwaway.find_launcher
    monkeypatch.setattr(
        throwaway, "find_launcher", lambda *words: find(*words, executable=str(tmp_path / "python"))
    )
    ended = run(2, ["x"], {"PATH": str(tmp_path)}, 5.0)
    assert ended.status is None
    assert "no mpiexec" in ended.why


def test_a_launcher_that_is_no_program_is_said(tmp_path: Path, no_mpiexec_beside_python: None) -> None:
    environ = launcher_that(tmp_path, "")
    (tmp_path / "mpiexec").write_text("#!/nowhere/sh\n")
    ended = run(2, ["x"], environ, 5.0)
    assert ended.status is None
    assert "cannot be started" in ended.why
