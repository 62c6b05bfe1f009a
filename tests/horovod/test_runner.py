"""`horovod.run`: a function on ranks that are started for it."""

from __future__ import annotations

import inspect
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from hpcpar.errors import ConfigError, PeerFailedError
from hpcpar.horovod.runner import run
from hpcpar.launch import supervise
from hpcpar.launch.launch_command import LaunchOptions
from tests.command import until, variables

pytest.importorskip("cloudpickle")
pytestmark = pytest.mark.skipif(
    not (shutil.which(os.path.join(os.path.dirname(sys.executable), "mpiexec")) or shutil.which("mpiexec")),
    reason="needs mpiexec",
)


@pytest.fixture(autouse=True)
def _outside_of_any_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("PMI", "MPI_LOCAL", "OMPI_COMM")):
            monkeypatch.delenv(name)


def test_results_come_back_by_rank() -> None:
    def work(factor: int, *, offset: int = 0) -> tuple[int, int]:
        import hpcpar

        world = hpcpar.init()
        return world.rank * factor + offset, world.size

    assert run(work, args=(10,), kwargs={"offset": 1}, num_proc=3) == [(1, 3), (11, 3), (21, 3)]


def test_the_older_spelling_of_the_number_works_and_ranks_see_horovods_variables() -> None:
    def told() -> list[str]:
        import hpcpar.horovod.torch as hvd

        hvd.init()
        return [os.environ[f"HOROVOD_{name}"] for name in ("RANK", "SIZE", "LOCAL_RANK")] + [
            str("HPCPAR_RUN_TOKEN" in os.environ)
        ]

    with pytest.warns(DeprecationWarning, match="num_proc"):
        results = run(told, np=2, hosts="localhost:2")
    assert results == [["0", "2", "0", "False"], ["1", "2", "1", "False"]]


def test_large_results_and_functions_of_this_module_travel(tmp_path: Path) -> None:
    hostfile = tmp_path / "hosts"
    hostfile.write_text("localhost slots=2\n")
    results = run(_octets, args=(5_000_000,), num_proc=2, hostfile=str(hostfile))
    assert [len(result) for result in results] == [5_000_000, 5_000_000]


def _octets(number: int) -> bytes:
    return bytes(number)


def test_an_error_of_a_rank_names_the_rank_and_carries_its_traceback_and_the_exception() -> None:
    def fails() -> None:
        import hpcpar

        world = hpcpar.init()
        if world.rank == 1:
            raise KeyError("learning_rate")
        world.barrier()

    with pytest.raises(PeerFailedError, match=r"rank 1 of 2 .* raised KeyError: 'learning_rate'") as caught:
        run(fails, num_proc=2)
    assert isinstance(caught.value.__cause__, KeyError)
    assert "in fails" in str(caught.value)


def test_a_rank_that_leaves_without_a_word_is_named() -> None:
    def leaves() -> None:
        from hpcpar.launch.environment import detect

        if detect().rank == 1:
            os._exit(3)

    with pytest.raises(PeerFailedError, match=r"did not return: .*1"):
        run(leaves, num_proc=2)


def test_a_result_that_cannot_be_pickled_is_an_error_of_its_rank() -> None:
    def locks() -> Any:
        return threading.Lock()

    with pytest.raises(PeerFailedError, match=r"rank 0 of 1 .* raised TypeError"):
        run(locks)


def test_ranks_end_with_a_caller_that_is_killed_and_leave_no_files(tmp_path: Path) -> None:
    code = """
import os, sys, time
from hpcpar.horovod.runner import run

def work():
    import hpcpar
    world = hpcpar.init()
    open(f"pid-{os.getpid()}", "w").close()
    time.sleep(60)

run(work, num_proc=2)
"""
    (tmp_path / "tmp").mkdir()
    with (tmp_path / "output").open("w") as output:
        caller = subprocess.Popen(
            [sys.executable, "-c", code],
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=tmp_path,
            env={**os.environ, "TMPDIR": str(tmp_path / "tmp")},
        )
    until(lambda: len(list(tmp_path.glob("pid-*"))) == 2)
    caller.kill()
    caller.wait()
    ranks = [Path("/proc", file.name.partition("-")[2]) for file in tmp_path.glob("pid-*")]
    until(lambda: not any(rank.exists() for rank in ranks))
    assert "the process that called horovod.run has gone" in (tmp_path / "output").read_text()
    assert not list((tmp_path / "tmp").glob("hpcpar-*"))


def test_in_a_ray_task_ranks_share_its_threads_and_are_not_bound_nor_of_the_step_that_started_ray(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def told() -> tuple[int, set[int], str, str | None]:
        import hpcpar

        world = hpcpar.init()
        threads = os.environ["OMP_NUM_THREADS"]
        return world.size, os.sched_getaffinity(0), threads, os.environ.get("SLURM_PROCID")

    step = "RAY_RAYLET_PID=1 OMP_NUM_THREADS=4 SLURM_JOB_ID=7 SLURM_JOB_NUM_NODES=3 SLURM_STEP_ID=1 "
    for name, value in variables(step + "SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=2").items():
        monkeypatch.setenv(name, value)
    assert run(told, num_proc=2) == [(2, os.sched_getaffinity(0), "2", None)] * 2


def test_output_goes_to_files_where_asked(tmp_path: Path) -> None:
    run(lambda: print("here"), num_proc=2, output_filename=str(tmp_path))
    found = [(tmp_path / f"rank.{rank}" / "stdout").read_text() for rank in range(2)]
    assert found == ["here\n", "here\n"]


def test_under_the_alias_the_ranks_have_it_too() -> None:
    code = """
from hpcpar.horovod import alias
alias.install()
import horovod

def work():
    import horovod
    return horovod.__version__

print(horovod.run(work, num_proc=2))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "['0.28.1', '0.28.1']\n", done.stderr


def test_arguments_that_make_no_sense_are_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(supervise, "run", lambda *_, **__: pytest.fail("started"))
    with pytest.raises(TypeError, match="nodes"):
        run(_octets, nodes=3)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match=r"min_num_proc: .* fixed number of ranks"):
        run(_octets, min_num_proc=2)
    with pytest.raises(ConfigError, match=r"host_discovery_script: .* fixed number of ranks"):
        run(_octets, host_discovery_script="./hosts.sh")
    with pytest.raises(ConfigError, match="max_num_proc=2, but num_proc=3"):
        run(_octets, num_proc=3, max_num_proc=2)
    with pytest.raises(ConfigError, match="both use_gloo and use_mpi"):
        run(_octets, use_gloo=True, use_mpi=True)
    with (
        pytest.warns(DeprecationWarning, match="num_proc"),
        pytest.raises(ConfigError, match="both num_proc=2 and np=3"),
    ):
        run(_octets, num_proc=2, np=3)
    with pytest.raises(ConfigError, match="both hosts and hostfile"):
        run(_octets, hosts="a:1", hostfile="b")
    with pytest.raises(ConfigError, match="is not like host"):
        run(_octets, hosts="a:one")


HOROVODS = (
    "func args=() kwargs=None num_proc=1 min_num_proc=None max_num_proc=None slots=None reset_limit=None "
    "cooldown_range=None hosts=None hostfile=None host_discovery_script=None start_timeout=None "
    "ssh_port=None ssh_identity_file=None disable_cache=None output_filename=None verbose=None use_gloo=None "
    "use_mpi=None mpi_args=None network_interface=None network_interfaces=None executable=None np=None "
    "min_np=None max_np=None"
)


def test_the_arguments_are_named_and_ordered_as_in_horovod() -> None:
    found = [
        name if parameter.default is inspect.Parameter.empty else f"{name}={parameter.default}"
        for name, parameter in inspect.signature(run).parameters.items()
    ]
    assert " ".join(found) == HOROVODS


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Callable[..., LaunchOptions]:
    """Call `run` with options, whose job ends at once; returns what was wished for."""
    found: list[LaunchOptions] = []

    def start(n: int, argv: Sequence[str], options: LaunchOptions, **_: Any) -> int:
        found.append(options)
        return 1

    monkeypatch.setattr(supervise, "run", start)

    def call(**options: Any) -> LaunchOptions:
        with pytest.raises(PeerFailedError):
            run(_octets, (1,), **options)
        return found[-1]

    return call


def test_interfaces_are_a_list_or_have_the_older_spelling(started: Callable[..., LaunchOptions]) -> None:
    assert started(network_interfaces=["eth0", "eth1", "eth0"]).interfaces == ("eth0", "eth1")
    assert started(network_interfaces="eth0,eth1").interfaces == ("eth0", "eth1")
    assert started().interfaces == ()
    with pytest.warns(DeprecationWarning, match="network_interfaces"):
        assert started(network_interface="eth0,eth1").interfaces == ("eth0", "eth1")


def test_what_a_job_of_fixed_size_has_anyway_may_be_asked_for(started: Callable[..., LaunchOptions]) -> None:
    started(num_proc=2, max_num_proc=3, use_mpi=True, disable_cache=True, slots=2, reset_limit=3)


def test_the_time_for_starting_may_come_from_the_environment(
    started: Callable[..., LaunchOptions], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOROVOD_START_TIMEOUT", "45")
    assert started().start_limit_s == 45.0
    assert started(start_timeout=20).start_limit_s == 20
    monkeypatch.setenv("HOROVOD_START_TIMEOUT", "soon")
    with pytest.raises(ConfigError, match="HOROVOD_START_TIMEOUT='soon'"):
        run(_octets)


def test_ssh_is_told_its_port_and_key(started: Callable[..., LaunchOptions]) -> None:
    options = started(ssh_port=2222, ssh_identity_file="/keys/own")
    assert options.variables["HYDRA_LAUNCHER_EXTRA_ARGS"] == "-p 2222 -i /keys/own"
    assert "HYDRA_LAUNCHER_EXTRA_ARGS" not in started().variables
