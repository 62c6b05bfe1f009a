"""CUDA-awareness of MPI: the user's word, probes that crash or hang, what is remembered."""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from hpcpar.launch import cuda_aware
from hpcpar.launch.cuda_aware import (
    CudaAwareness,
    Ended,
    find_awareness,
    own_cache,
    own_environ,
    query_cuda_support,
    run_job,
    session_members,
)
from hpcpar.launch.settings import CAPABILITIES
from tests.command import write_script

OPEN_MPI = "Open MPI v5.0.11, package: Open MPI"
MPICH = "MPICH Version: 5.0.2"
CRASHED, HUNG, FINE = Ended(139, "Segmentation fault"), Ended(None, ""), Ended(0, "")
YES = ["start", "yes"]


class Jobs:
    """Stands for MPI jobs: each writes the lines that a probe would, and ends as it is told."""

    def __init__(self, lines: Sequence[str], ended: Ended) -> None:
        self._lines, self._ended = lines, ended
        self.environs: list[Mapping[str, str]] = []

    def __call__(self, n: int, argv: Sequence[str], environ: Mapping[str, str], limit_s: float) -> Ended:
        assert (n, argv[1:-1], limit_s) == (2, ["-m", "hpcpar.transport.gpu.probe"], 60.0)
        self.environs.append(environ)
        if self._lines:
            Path(argv[-1]).write_text("\n".join(self._lines) + "\n")
        return self._ended


def never(n: int, argv: Sequence[str], environ: Mapping[str, str], limit_s: float) -> Ended:
    raise AssertionError("a job was started where none is needed")


Find = Callable[..., CudaAwareness]


@pytest.fixture
def find(tmp_path: Path) -> Find:
    def found(
        job: object, library: str = OPEN_MPI, environ: Mapping[str, str] | None = None, **words: object
    ) -> CudaAwareness:
        environ = {"XDG_CACHE_HOME": str(tmp_path), **(environ or {})}
        words = {"loaded": (), "driver": "13000", **words}
        return find_awareness(library, job=job, environ=environ, **words)  # type: ignore[arg-type]

    return found


def kept(tmp_path: Path) -> list[Path]:
    return [path for path in tmp_path.rglob("cuda-aware/*") if path.is_file()]


def test_an_mpi_that_takes_device_pointers_is_tried_once(find: Find) -> None:
    first = find(Jobs(YES, FINE))
    assert str(first) == "yes (two ranks tried it)"
    again = find(never)
    assert again.point_to_point is True
    assert "two ranks tried it, remembered in" in again.source


@pytest.mark.parametrize(
    ("lines", "ended", "says"), [([], CRASHED, "crashed"), ([], HUNG, "hung"), (["no"], FINE, "wrong bytes")]
)
def test_a_crash_a_hang_and_wrong_bytes_are_a_no(
    find: Find, tmp_path: Path, lines: list[str], ended: Ended, says: str
) -> None:
    found = find(Jobs(["start", *lines], ended))
    assert str(found).startswith("no (two ranks tried it; point-to-point ")
    assert says in found.source
    assert find(never).point_to_point is False
    assert len(kept(tmp_path)) == 1


def test_what_mpich_leaves_behind_a_crash_is_removed_and_nothing_else(
    find: Find, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_aware, "LEFT_BY_A_CRASH", (f"{tmp_path}/mpich_shm_",))
    names = ("mpich_shm_1", "mpich_shm_2", "cuda.shm.0")
    for name in names:
        (tmp_path / name).write_text("")
    lines = [f"segment {tmp_path}/mpich_shm_1", f"segment {tmp_path}/cuda.shm.0", "start"]
    assert find(Jobs(lines, CRASHED)).point_to_point is False
    assert [name for name in names if (tmp_path / name).exists()] == ["mpich_shm_2", "cuda.shm.0"]


@pytest.mark.parametrize(
    ("lines", "ended", "why"),
    [
        (["cannot the device has no memory left"], FINE, "no memory left"),
        (["cannot mpiexec started worlds of 1: it is not this library's"], FINE, "worlds of 1"),
        ([], Ended(None, "", "found no mpiexec"), "found no mpiexec"),
        ([], HUNG, "over before it began"),
        ([], Ended(1, "ModuleNotFoundError: No module named 'mpi4py'\n\n------\n"), "No module named"),
        (["nonsense \0"], Ended(0, ""), "ended with 0: no word"),
    ],
)
def test_a_probe_that_comes_to_nothing_is_not_an_answer_and_not_remembered(
    find: Find, tmp_path: Path, lines: list[str], ended: Ended, why: str
) -> None:
    found = find(Jobs(lines, ended))
    assert why in found.source
    assert str(found).startswith("not known (")
    assert not kept(tmp_path)


def test_a_machine_without_room_for_a_probe_gets_no_answer_and_no_error(find: Find) -> None:
    def full(n: int, argv: Sequence[str], environ: Mapping[str, str], limit_s: float) -> Ended:
        raise OSError(28, "No space left on device")

    found = find(full)
    assert found.point_to_point is None
    assert "No space left" in found.source


CRAY = "CRAY MPICH version 8"


@pytest.mark.parametrize(
    ("library", "memory_kinds", "environ", "expected", "says"),
    [
        (MPICH, "system,mpi,cuda:device", {}, True, "mpi_memory_alloc_kinds"),
        (MPICH, "system,mpi", {}, None, "does not say"),
        (CRAY, None, {"MPICH_GPU_SUPPORT_ENABLED": "1"}, True, "believed"),
        (OPEN_MPI, None, {}, None, "does not say"),
    ],
)
def test_where_no_job_can_be_started_the_library_is_asked(
    find: Find,
    library: str,
    memory_kinds: str | None,
    environ: dict[str, str],
    expected: bool | None,
    says: str,
) -> None:
    job = Jobs([], Ended(None, "", "found no mpiexec"))
    found = find(job, library, memory_kinds=memory_kinds, environ=environ)
    assert found.point_to_point is expected
    assert says in found.source
    assert "found no mpiexec" in found.source


@pytest.mark.parametrize(
    ("library", "environ", "do"),
    [
        (CRAY, {}, "MPICH_GPU_SUPPORT_ENABLED=1"),
        (CRAY, {"MPICH_GPU_SUPPORT_ENABLED": "0"}, "MPICH_GPU_SUPPORT_ENABLED=1"),
        ("Intel(R) MPI Library 2021", {}, "I_MPI_OFFLOAD=1"),
        ("MVAPICH2 2.3", {}, "MV2_USE_CUDA=1"),
        (MPICH, {"MPIR_CVAR_ENABLE_GPU": "0"}, "MPIR_CVAR_ENABLE_GPU=0"),
    ],
)
def test_a_library_that_is_switched_off_is_not_tried(
    find: Find, library: str, environ: dict[str, str], do: str
) -> None:
    found = find(never, library, environ=environ)
    assert found.point_to_point is False
    assert do in found.source


@pytest.mark.parametrize("asked", [(), ("point_to_point",), ("collectives",), CAPABILITIES])
def test_the_users_word_is_not_questioned(find: Find, asked: tuple[str, ...]) -> None:
    found = find(never, asked=asked, environ={"HPCPAR_CUDA_AWARE": "as asked"})
    assert found == CudaAwareness("point_to_point" in asked, "HPCPAR_CUDA_AWARE=as asked")


def test_a_query_answers_for_the_library_that_is_loaded() -> None:
    class Library:
        def __init__(self, path: str) -> None:
            if "other" in path:
                raise OSError
            self.path = path

        def MPIX_Query_cuda_support(self) -> int:  # noqa: N802
            return int("aware" in self.path)

    opened: Callable[[str], ctypes.CDLL] = Library  # type: ignore[assignment]
    assert query_cuda_support(["/lib/libc.so.6", "/aware/libmpi.so.40"], opened) is True
    assert query_cuda_support(["/other/libmpi.so.12", "/plain/libmpi.so.40"], opened) is False
    assert query_cuda_support(["/lib/libc.so.6"], opened) is None
    assert query_cuda_support([ctypes.CDLL(None)._name or "/nowhere/libmpi.so"], ctypes.CDLL) is None


@pytest.mark.parametrize(
    "change",
    [
        {"library": MPICH},
        {"driver": "12080"},
        {"environ": {"OMPI_MCA_pml": "ucx"}},
        {"environ": {"UCX_TLS": "^cuda_ipc"}},
        {"loaded": (__file__,)},
    ],
)
def test_what_an_answer_depends_on_is_what_it_is_remembered_by(
    find: Find, monkeypatch: pytest.MonkeyPatch, change: dict[str, object]
) -> None:
    monkeypatch.setattr(cuda_aware, "_PARTS", ("test_cuda_aware",))
    find(Jobs(YES, FINE))
    find(never)
    find(never, environ={"OMPI_COMM_WORLD_RANK": "3", "OMPI_MCA_initial_wdir": "/here", "HOME": "/root"})
    jobs = Jobs(YES, FINE)
    find(jobs, **change)
    assert jobs.environs


def test_a_library_that_was_installed_anew_is_tried_anew(find: Find, tmp_path: Path) -> None:
    library = tmp_path / "libmpi.so.40"
    library.write_text("old")
    find(Jobs(YES, FINE), loaded=[str(library)])
    find(never, loaded=[str(library)])
    os.utime(library, ns=(1, 1))
    assert find(Jobs(["start"], CRASHED), loaded=[str(library)]).point_to_point is False


@pytest.mark.parametrize("damage", [b"", b"ye", b"[1, 2]", b"\xff\xfe\x00"])
def test_a_damaged_memory_is_tried_anew_and_mended(find: Find, tmp_path: Path, damage: bytes) -> None:
    find(Jobs(YES, FINE))
    (file,) = kept(tmp_path)
    file.write_bytes(damage)
    assert find(Jobs(["start"], CRASHED)).point_to_point is False
    assert find(never).point_to_point is False
    assert kept(tmp_path) == [file]


def test_a_cache_that_cannot_be_written_costs_the_memory_alone(find: Find, tmp_path: Path) -> None:
    (tmp_path / "a file").write_text("")
    for _ in range(2):
        jobs = Jobs(YES, FINE)
        assert find(jobs, environ={"XDG_CACHE_HOME": str(tmp_path / "a file")}).point_to_point is True
        assert jobs.environs


def test_the_jobs_ranks_load_what_this_process_has_loaded(
    find: Find, monkeypatch: pytest.MonkeyPatch
) -> None:
    for joined, word in ((True, "1"), (False, "0")):
        monkeypatch.setattr(cuda_aware.cuda_wheels, "are_joined", lambda loaded, joined=joined: joined)
        jobs = Jobs(["cannot today"], FINE)
        find(jobs)
        assert jobs.environs[0]["HPCPAR_CUDA_AWARE"] == word


def test_the_cache_lies_where_the_user_keeps_such() -> None:
    assert own_cache({"XDG_CACHE_HOME": "/scratch/me"}) == Path("/scratch/me/hpcpar")
    assert own_cache({}) == Path.home() / ".cache" / "hpcpar"
    assert own_cache({"XDG_CACHE_HOME": "relative"}) == own_cache({})


OF_A_RANK = """
PMI_FD PMI_RANK PMIX_RANK PMIX_SERVER_URI41 PRTE_LAUNCHED OMPI_COMM_WORLD_RANK OMPI_UNIVERSE_SIZE
OMPI_MCA_initial_wdir OMPI_MCA_ess OMPI_MCA_orte_jobid HYDI_CONTROL_FD MPI_LOCALRANKID PALS_LOCAL_RANKID
SLURM_JOB_ID SLURM_STEP_ID SLURMD_NODENAME FLUX_TASK_RANK TORCHELASTIC_RUN_ID MV2_COMM_WORLD_RANK
HPCPAR_RUN_DIRECTORY HPCPAR_STEP_SECRET
"""
OF_THE_USER = """
PATH LD_LIBRARY_PATH OMPI_MCA_pml OMPI_MCA_opal_common_ucx_tls OMPI_ALLOW_RUN_AS_ROOT UCX_TLS I_MPI_OFFLOAD
MPICH_GPU_SUPPORT_ENABLED MPIR_CVAR_ENABLE_GPU MV2_USE_CUDA CUDA_VISIBLE_DEVICES HPCPAR_CUDA_AWARE
"""


def test_the_job_inherits_what_the_user_tells_mpi_and_not_what_tells_a_rank_who_it_is() -> None:
    own = own_environ(dict.fromkeys((OF_A_RANK + OF_THE_USER).split(), "chosen"))
    assert {name for name, value in own.items() if value == "chosen"} == set(OF_THE_USER.split())


def launcher_that(tmp_path: Path, does: str) -> dict[str, str]:
    """An environment whose mpiexec is a shell script; the one beside this Python must not be taken."""
    write_script(tmp_path / "mpiexec", does)
    return {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}


@pytest.fixture
def no_mpiexec_beside_python(monkeypatch: pytest.MonkeyPatch) -> None:
    def find(environ: dict[str, str], which: cuda_aware.shutil.which, launcher: str) -> str:  # type: ignore[valid-type]
        return which("mpiexec")  # type: ignore[no-any-return, misc]

    monkeypatch.setattr(cuda_aware, "find_launcher", find)


def test_the_job_runs_and_its_output_and_status_come_back(
    tmp_path: Path, no_mpiexec_beside_python: None
) -> None:
    environ = launcher_that(tmp_path, 'printf "%s " "$@"; echo oh >&2; exit 3')
    assert run_job(2, ["program", "word"], environ, 20.0) == Ended(3, "-n 2 program word oh\n")
    assert run_job(2, ["x"], launcher_that(tmp_path, "kill -SEGV $$"), 20.0).status == -11


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
    ended = run_job(2, ["x"], environ, 2.0)
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
    assert run_job(2, ["x"], environ, 30.0).status == 0
    assert time.monotonic() - start_s < 20.0
    assert session_members(int(word.read_text())) == []


def test_without_a_launcher_nothing_is_started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    find = cuda_aware.find_launcher
    monkeypatch.setattr(
        cuda_aware, "find_launcher", lambda *words: find(*words, executable=str(tmp_path / "python"))
    )
    ended = run_job(2, ["x"], {"PATH": str(tmp_path)}, 5.0)
    assert ended.status is None
    assert "no mpiexec" in ended.why


def test_a_launcher_that_is_no_program_is_said(tmp_path: Path, no_mpiexec_beside_python: None) -> None:
    environ = launcher_that(tmp_path, "")
    (tmp_path / "mpiexec").write_text("#!/nowhere/sh\n")
    ended = run_job(2, ["x"], environ, 5.0)
    assert ended.status is None
    assert "cannot be started" in ended.why
