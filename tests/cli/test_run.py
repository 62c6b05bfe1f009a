"""`hpcpar run`, with a real launcher where there is one."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from hpcpar.cli import main
from hpcpar.launch import supervise
from hpcpar.launch.horovod_settings import HorovodSettings
from hpcpar.launch.hosts import Host
from hpcpar.launch.launch_command import LaunchOptions
from tests import command
from tests.command import Output, variables

REPOSITORY = Path(__file__).parents[2]
HAS_MPIEXEC = bool(
    shutil.which(os.path.join(os.path.dirname(sys.executable), "mpiexec")) or shutil.which("mpiexec")
)


COMMAND = ("run",)
Call = tuple[int, Sequence[str], str, Sequence[str]]
Asked = list[LaunchOptions]


@pytest.fixture
def asked() -> Asked:
    """Options of the calls of `calls`, but for the launcher and its words."""
    return []


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, asked: Asked) -> list[Call]:
    made: list[Call] = []

    def run(n: int, argv: Sequence[str], options: LaunchOptions, *, restarts: int, say: object) -> int:
        made.append((n, argv, options.launcher, list(options.words)))
        asked.append(replace(options, launcher="auto", words=()))
        return 4

    monkeypatch.setattr(supervise, "run", run)
    return made


@pytest.mark.parametrize(
    ("arguments", "argv"),
    [
        (["train.py", "-n", "9", "--lr", "0.1"], ("train.py", "-n", "9", "--lr", "0.1")),
        (["--", "-m", "hpcpar", "doctor"], ("-m", "hpcpar", "doctor")),
        (["-m", "hpcpar", "doctor"], ("-m", "hpcpar", "doctor")),
    ],
)
def test_what_follows_the_program_belongs_to_it(
    arguments: list[str], argv: tuple[str, ...], calls: list[Call]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["run", "-n", "2", *arguments])
    assert caught.value.code == 4
    assert calls == [(2, argv, "auto", [])]


def test_the_launcher_and_its_words_are_handed_on(calls: list[Call]) -> None:
    with pytest.raises(SystemExit):
        main(["run", "-n", "2", "--launcher", "mpiexec", "--options", "-ppn 1 -host 'a b'", "x.py"])
    assert calls == [(2, ("x.py",), "mpiexec", ["-ppn", "1", "-host", "a b"])]


def test_an_error_is_one_line_not_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["run", "-n", "2"])
    assert caught.value.code == 1
    assert capsys.readouterr().err == (
        "Error: nothing to run: name a script, as in `hpcpar run -n 4 train.py`\n"
    )


LOSES = """
import os
import hpcpar

world = hpcpar.init()
world.barrier()
if world.rank == 1:
    os._exit(0)
world.barrier()
"""


def job(*arguments: str) -> subprocess.CompletedProcess[str]:
    return command.run(sys.executable, "-m", "hpcpar", "run", *arguments, PYTHONPATH=str(REPOSITORY))


@pytest.mark.skipif(not HAS_MPIEXEC, reason="needs mpiexec")
def test_two_ranks_start_and_finish_and_the_command_is_said() -> None:
    done = job("-n", "2", "-c", "import hpcpar; w = hpcpar.init(); print(f'<{w.rank}/{w.size}>')")
    assert done.returncode == 0, done.stderr
    # Not by lines: the launcher may pass two ranks' texts on before their line ends.
    assert sorted(re.findall(r"<\d/\d>", done.stdout)) == ["<0/2>", "<1/2>"]
    assert "hpcpar run: " in done.stderr
    assert "-n 2" in done.stderr or "--ntasks=2" in done.stderr


@pytest.mark.skipif(not HAS_MPIEXEC, reason="needs mpiexec")
def test_a_rank_that_leaves_silently_with_status_0_fails_the_job_every_time(tmp_path: Path) -> None:
    script = tmp_path / "loses.py"
    script.write_text(LOSES)
    ends = [job("-n", "3", str(script)) for _ in range(2)]
    assert all(done.returncode != 0 for done in ends)
    assert all("hpcpar run: rank 1 (pid " in done.stderr for done in ends)


@pytest.mark.skipif(not HAS_MPIEXEC, reason="needs mpiexec")
def test_an_exception_on_one_rank_ends_the_job_with_its_traceback_and_nobody_is_called_lost() -> None:
    code = "import hpcpar; w = hpcpar.init(); w.barrier(); 1 / (w.rank - 1); w.barrier()"
    done = job("-n", "2", "-c", code)
    assert done.returncode != 0
    assert "ZeroDivisionError" in done.stderr
    assert "was lost" not in done.stderr
    assert "hpcpar run: rank 1 (on " in done.stderr


def call(*arguments: str) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["run", *arguments])
    assert caught.value.code == 4


@pytest.mark.parametrize("spelling", ["-n", "-np", "--ranks", "--num-proc"])
def test_the_number_of_ranks_may_be_spelled_as_mpis_or_as_horovods(spelling: str, calls: list[Call]) -> None:
    call(spelling, "3", "train.py", "-np", "9")
    assert calls == [(3, ("train.py", "-np", "9"), "auto", [])]


def test_hosts_say_where_and_without_a_number_how_many(calls: list[Call], asked: Asked) -> None:
    call("-np", "3", "-H", "a:2,b:2", "x.py")
    call("--hosts", "a:2,b:2", "x.py")
    assert [made[0] for made in calls] == [3, 4]
    assert asked == [LaunchOptions(hosts=(Host("a", 2), Host("b", 2)))] * 2


def test_hosts_may_be_in_a_file(tmp_path: Path, calls: list[Call], asked: Asked) -> None:
    (tmp_path / "hosts").write_text("a slots=2\nb:2\n")
    call("-hostfile", str(tmp_path / "hosts"), "x.py")
    assert calls[0][0] == 4
    assert asked == [LaunchOptions(hosts=(Host("a", 2), Host("b", 2)))]


def test_horovods_options_become_variables_of_the_ranks(
    calls: list[Call], asked: Asked, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (
        "-np 2 --verbose --fusion-threshold-mb 32 --cycle-time-ms 3.5 --timeline-filename t.json "
        "--timeline-mark-cycles --stall-check-warning-time-seconds 5 --stall-check-shutdown-time-seconds 9 "
        "--no-stall-check --hierarchical-allreduce --hierarchical-allgather --log-level DEBUG"
    )
    call(*words.split(), "python", "train.py")
    assert calls[0][1] == ("python", "train.py")
    assert asked[0].variables == variables(
        "HOROVOD_FUSION_THRESHOLD=33554432 HOROVOD_CYCLE_TIME=3.5 HOROVOD_TIMELINE=t.json "
        "HOROVOD_TIMELINE_MARK_CYCLES=1 HOROVOD_STALL_CHECK_TIME_SECONDS=5.0 "
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS=9.0 HOROVOD_STALL_CHECK_DISABLE=1 "
        "HOROVOD_HIERARCHICAL_ALLREDUCE=1 HOROVOD_HIERARCHICAL_ALLGATHER=1 HOROVOD_LOG_LEVEL=debug"
    )
    HorovodSettings.from_environ(asked[0].variables)
    assert "hpcpar run: HOROVOD_CYCLE_TIME=3.5\n" in capsys.readouterr().err


def test_no_fusion_and_no_shutdown_can_be_asked_for_with_0(calls: list[Call], asked: Asked) -> None:
    call("-np", "2", "--fusion-threshold-mb", "0", "--stall-check-shutdown-time-seconds", "0", "x.py")
    call("-np", "2", "x.py")
    assert asked[0].variables["HOROVOD_FUSION_THRESHOLD"] == "0"
    assert asked[0].variables["HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"] == "0.0"
    assert asked[1].variables == {}


def test_interfaces_output_and_the_time_for_starting_are_handed_on(calls: list[Call], asked: Asked) -> None:
    call(
        *("-np", "2", "--network-interfaces", "ib0,ib1", "--output-filename", "out"),
        *("--start-timeout", "30", "--mpi-args", "-x A", "x.py"),
    )
    assert asked == [LaunchOptions(interfaces=("ib0", "ib1"), output_directory="out", start_limit_s=30.0)]
    assert calls[0][3] == ["-x", "A"]


def test_options_that_ask_for_what_is_so_anyway_are_taken(calls: list[Call], asked: Asked) -> None:
    words = (
        "-np 2 --mpi --disable-cache --no-autotune --no-torus-allreduce --log-without-timestamp "
        "--log-hide-timestamp --autotune-log-file a --autotune-warmup-samples 3 "
        "--autotune-steps-per-sample 10 "
        "--autotune-bayes-opt-max-samples 20 --autotune-gaussian-process-noise 0.8 --slots-per-host 2 "
        "--elastic-timeout 600 --reset-limit 3 --blacklist-cooldown-range 60 300 --max-np 2"
    )
    call(*words.split(), "python", "train.py")
    assert (calls[0][0], calls[0][1]) == (2, ("python", "train.py"))
    assert asked[0] == LaunchOptions()


def test_what_is_switched_off_goes_before_the_environment(calls: list[Call], asked: Asked) -> None:
    names = (
        "hierarchical-allreduce",
        "hierarchical-allgather",
        "timeline-mark-cycles",
        "mpi-threads-disable",
    )
    call("-np", "2", *(f"--no-{name}" for name in names), "--stall-check", "x.py")
    assert asked[0].variables == variables(
        "HOROVOD_HIERARCHICAL_ALLREDUCE=0 HOROVOD_HIERARCHICAL_ALLGATHER=0 HOROVOD_TIMELINE_MARK_CYCLES=0 "
        "MPI4PY_RC_THREADS=1 HOROVOD_STALL_CHECK_DISABLE=0"
    )
    assert HorovodSettings.from_environ(asked[0].variables) == HorovodSettings()
    call("-np", "2", "--mpi-threads-disable", "x.py")
    assert asked[1].variables == {"MPI4PY_RC_THREADS": "0"}


def test_sizes_of_what_there_is_not_are_for_rank_0_to_name(calls: list[Call], asked: Asked) -> None:
    words = "--cache-capacity 1024 --num-nccl-streams 2 --thread-affinity 0 --gloo-timeout-seconds 30"
    call("-np", "2", *words.split(), "x.py")
    assert len(calls) == 1
    assert HorovodSettings.from_environ(asked[0].variables).ignored == (
        "HOROVOD_CACHE_CAPACITY",
        "HOROVOD_GLOO_TIMEOUT_SECONDS",
        "HOROVOD_NUM_NCCL_STREAMS",
        "HOROVOD_THREAD_AFFINITY",
    )


CANNOT = {
    "--autotune": "--fusion-threshold-mb",
    "--torus-allreduce": "--hierarchical-allreduce",
    "--gloo": "there is no Gloo here",
    "--jsrun": "--launcher",
    "--tcp": "UCX_TLS=tcp",
    "--log-with-timestamp": "%(asctime)s",
    "--prefix-output-with-timestamp": "--timestamp-output",
    "-prefix-timestamp": "--timestamp-output",
    "--min-np 1": "cannot be elastic",
    "--host-discovery-script ./hosts.sh": "cannot be elastic",
    "--max-np 1": "2 ranks were asked for",
}


@pytest.mark.parametrize("words", CANNOT)
def test_options_that_ask_for_what_cannot_be_done_say_why(words: str, output: Output) -> None:
    said = output("-np", "2", *words.split(), "x.py", status=1)
    assert said.startswith("Error: --")
    assert CANNOT[words] in said


def test_ssh_binding_and_several_interfaces_are_handed_on(calls: list[Call], asked: Asked) -> None:
    words = "-np 2 -p 2222 -i key --network-interface a --network-interface b,a --mpi-args=-l"
    call(*words.split(), "--binding-args", "-bind-to none", "x.py")
    assert asked[0].interfaces == ("a", "b")
    assert asked[0].variables["OMPI_MCA_plm_rsh_args"] == "-p 2222 -i key"
    assert calls[0][3] == ["-l", "-bind-to", "none"]


def test_the_time_for_starting_may_come_from_the_environment(
    calls: list[Call], asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOROVOD_START_TIMEOUT", "45")
    call("-np", "2", "x.py")
    call("-np", "2", "--start-timeout", "20", "x.py")
    assert [made.start_limit_s for made in asked] == [45.0, 20.0]
    assert len(calls) == 2


CONFIG = """
controller: mpi
params: {fusion_threshold_mb: 32, cycle_time_ms: 5, cache_capacity: 2048, hierarchical_allreduce: true}
autotune: {enabled: false, log_file: a.csv}
timeline: {filename: t.json, mark_cycles: false}
stall_check: {enabled: false, warning_time_seconds: 9}
library_options: {mpi_threads_disable: true, num_nccl_streams: 2}
logging: {level: INFO, with_timestamp: false}
"""


def test_a_config_file_is_read_and_the_command_line_goes_before_it(
    tmp_path: Path, calls: list[Call], asked: Asked
) -> None:
    pytest.importorskip("yaml")
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG)
    call("-np", "2", "--cycle-time-ms", "1", "--config-file", str(path), "--stall-check", "x.py", "-v")
    assert calls[0][1] == ("x.py", "-v")
    assert asked[0].variables == variables(
        "HOROVOD_FUSION_THRESHOLD=33554432 HOROVOD_CYCLE_TIME=1.0 HOROVOD_CACHE_CAPACITY=2048 "
        "HOROVOD_HIERARCHICAL_ALLREDUCE=1 HOROVOD_TIMELINE=t.json HOROVOD_TIMELINE_MARK_CYCLES=0 "
        "HOROVOD_STALL_CHECK_DISABLE=0 HOROVOD_STALL_CHECK_TIME_SECONDS=9.0 MPI4PY_RC_THREADS=0 "
        "HOROVOD_NUM_NCCL_STREAMS=2 HOROVOD_LOG_LEVEL=info"
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("autotune: {enabled: true}", "--autotune: nothing is tuned"),
        ("controller: gloo", "there is no Gloo here"),
        ("params: {fusion: 3}", "there is no setting for --fusion"),
        ("parameters: {cycle_time_ms: 3}", "'parameters' is no section of params"),
        ("[1, 2]", "is no list of sections"),
        ("a: {", "cannot be read"),
    ],
)
def test_a_config_file_that_cannot_be_followed_is_refused(
    text: str, said: str, tmp_path: Path, output: Output
) -> None:
    pytest.importorskip("yaml")
    path = tmp_path / "config.yaml"
    path.write_text(text)
    assert said in output("-np", "2", "--config-file", str(path), "x.py", status=1)


def test_a_config_file_without_a_yaml_package_is_refused(
    output: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    assert "`pip install pyyaml`" in output("-np", "2", "--config-file", "config.yaml", "x.py", status=1)


def test_the_version_is_ours_and_horovods(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["run", "-v"])
    assert caught.value.code == 0
    assert re.fullmatch(r"hpcpar \S+, in the place of Horovod 0\.28\.1\n", capsys.readouterr().out)


def test_a_horovod_script_is_run_as_one(calls: list[Call]) -> None:
    call("-np", "2", "--as-horovod", "python", "train.py", "--lr", "1")
    assert calls[0][1] == ["python", "-m", "hpcpar.horovod", "train.py", "--lr", "1"]


def test_a_horovod_script_that_fails_without_horovod_is_told_how_to_run(
    calls: list[Call], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "train.py"
    script.write_text("import os\nimport horovod.torch as hvd\n")
    monkeypatch.setattr("hpcpar.cli.run.find_spec", lambda name: None)
    said = []
    for words in ([str(script)], ["python", str(script)], ["--as-horovod", str(script)], ["other.py"]):
        call("-n", "2", *words)
        said.append("--as-horovod has hpcpar be it" in capsys.readouterr().err)
    monkeypatch.setattr("hpcpar.cli.run.find_spec", lambda name: name)  # it is installed
    call("-n", "2", str(script))
    assert [*said, "horovod" in capsys.readouterr().err] == [True, True, False, False, False]


def test_mistakes_are_one_line_that_says_what_to_do(output: Output) -> None:
    assert "say -n 4, or name hosts" in output("x.py", status=1)
    assert "there is no option --glue" in output("-np", "2", "--glue", "x.py", status=1)
    assert "there is no option -margs" in output("-n", "2", "-margs", "x", status=1)
    assert "`hpcpar run -n 2 -- -m hpcpar train a.toml`" in output("-n", "2", "a.toml", status=1)
    for words in (["none.py"], ["python", "none.py"]):
        assert "there is no file none.py in " in output("-n", "2", "--launcher", "mpiexec", *words, status=1)
    assert "both --hosts and --hostfile" in output("-H", "a", "--hostfile", "b", "x.py", status=1)
    assert '--options "-genv \'FOO" cannot be divided into words: No closing quotation' in output(
        "-n", "2", "--options", "-genv 'FOO", "x.py", status=1
    )
    assert "3 ranks were asked for, but the hosts have 2 slots" in output(
        "-np", "3", "-H", "localhost:2", "--launcher", "mpiexec", "-c", "pass", status=1
    )


@pytest.mark.skipif(not HAS_MPIEXEC, reason="needs mpiexec")
def test_an_output_directory_that_cannot_be_made_is_said_once_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = job("-n", "2", "--output-filename", str(tmp_path / "file" / "out"), "-c", "print('ran')")
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(r"Error: the directory .*out cannot be made \(Not a directory\): .*\n", done.stderr)


@pytest.mark.parametrize("spelling", ["-cb", "--check-build"])
def test_what_horovods_check_build_shows_is_shown_alone(
    spelling: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["run", spelling])
    said = capsys.readouterr().out
    assert caught.value.code == 0
    assert "    [X] PyTorch" in said
    assert "    [ ] TensorFlow" in said
    assert "    [X] MPI" in said
    assert "    [ ] NCCL" in said


@pytest.mark.skipif(not HAS_MPIEXEC, reason="needs mpiexec")
def test_ranks_on_this_host_by_name_write_into_files(tmp_path: Path) -> None:
    done = job(
        *("-H", "localhost:2", "--output-filename", str(tmp_path / "out"), "--cycle-time-ms", "2"),
        *(
            "--as-horovod",
            "-c",
            "import os, horovod.torch as h; h.init(); print(h.size(), os.environ['HOROVOD_CYCLE_TIME'])",
        ),
    )
    assert done.returncode == 0, done.stderr
    found = [(tmp_path / "out" / f"rank.{rank}" / "stdout").read_text() for rank in range(2)]
    assert found == ["2 2.0\n", "2 2.0\n"]


@pytest.mark.skipif(
    not Path(sys.executable).with_name("mpiexec.hydra").exists(), reason="needs the MPICH wheel's mpiexec"
)
def test_in_a_container_inside_a_slurm_job_ranks_start_on_its_node(tmp_path: Path) -> None:
    """Hydra finds a Slurm job in its environment, and would wait for ever for an srun that is not there."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "PMI", "MPI"))}
    told = {"SLURM_JOB_ID": "7", "SLURM_NODELIST": "nid7", "SLURM_NNODES": "1", "SLURM_TASKS_PER_NODE": "2"}
    process = subprocess.Popen(
        [sys.executable, "-m", "hpcpar", "run", "-n", "2", "-c", "print('ran')"],
        env={**kept, **told, "PATH": str(tmp_path), "PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.communicate(timeout=60)[0] == "ran\nran\n"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0
