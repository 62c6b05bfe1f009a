"""The test cluster: up within 30 s, like machines of their own, and gone whatever happens."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.slurm.cluster import PORTS, Cluster, wait_until

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(120)]

HERE = Path(__file__).parent
ROOT = HERE.parents[1]

# Prints the state directory, then has a job run until it is killed.
OWNER = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore it
sys.path.insert(0, sys.argv[1])
from tests.slurm.cluster import Cluster
with Cluster.start(nodes=2) as cluster:
    job = cluster.submit("-N2", "--wrap", "srun sleep 300")
    cluster.wait_for(job, "RUNNING")
    print(cluster.state, flush=True)
    if sys.argv[2:] == ["raise"]:
        raise RuntimeError("a test failed")
    cluster.run("srun", "-N2", "--overlap", f"--jobid={job.id}", "sleep", "300", timeout_s=300)
"""


def leftovers(state: Path) -> list[str]:
    """The command lines of all processes that know the cluster's directory, from words or environment."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words, environ = (process / "cmdline").read_bytes(), (process / "environ").read_bytes()
        except OSError:
            continue  # it has just ended
        if str(state).encode() in words + environ and int(process.name) != os.getpid():
            found.append(words.rstrip(b"\0").replace(b"\0", b" ").decode(errors="replace"))
    return found


def sleepers(state: Path, seconds: int) -> int:
    """How many tasks of the cluster run `sleep seconds`."""
    return leftovers(state).count(f"/usr/bin/sleep {seconds}")


def assert_nothing_is_left(state: Path) -> None:
    wait_until(lambda: not leftovers(state) and not state.exists(), 30, lambda: f"left: {leftovers(state)}")


def listening(state: Path) -> set[str]:
    """Addresses, in the kernel's hexadecimal, where something listens on one of the cluster's ports."""
    first = int(re.findall(r"SlurmctldPort=(\d+)", (state / "slurm.conf").read_text())[0])
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            _, local, _, socket_state = line.split()[:4]
            address, _, port = local.partition(":")
            if socket_state == "0A" and first <= int(port, 16) < first + PORTS.step:
                found.add(address)
    return found


@pytest.mark.parametrize("nodes", [2, 4])
def test_a_cluster_is_idle_within_30_seconds_and_leaves_nothing_behind(cluster: Cluster, nodes: int) -> None:
    began = time.monotonic()
    with Cluster.start(nodes=nodes) as own:
        assert time.monotonic() - began < 30
        shown = own.run("sinfo", "--noheader", "--format=%D %T").stdout
        assert shown == f"{nodes} idle\n"
        assert leftovers(own.state)  # or else the look for them below proves nothing
        assert listening(own.state) == {"0100007F"}  # 127.0.0.1
    assert_nothing_is_left(own.state)
    assert cluster.run("srun", "hostname").stdout == "node1\n"  # the other cluster has not noticed


@pytest.mark.parametrize(
    "end",
    [
        lambda owner: owner.send_signal(signal.SIGKILL),
        lambda owner: os.killpg(owner.pid, signal.SIGINT),
        lambda owner: owner.send_signal(signal.SIGTERM),
    ],
    ids=["SIGKILL", "Ctrl-C", "SIGTERM"],
)
def test_a_test_process_that_is_ended_leaves_nothing_behind(
    cluster: Cluster, end: Callable[[subprocess.Popen[str]], None]
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, str(ROOT)], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as owner:
        try:
            assert owner.stdout is not None
            state = Path(owner.stdout.readline().strip())
            # 2 of the job's step, and 2 of the command that runs
            wait_until(lambda: sleepers(state, 300) == 4, 40, lambda: f"{leftovers(state)}")
            end(owner)
            assert_nothing_is_left(state)
        finally:
            owner.kill()


def test_an_exception_takes_the_cluster_down_before_it_is_shown(cluster: Cluster) -> None:
    done = subprocess.run(
        [sys.executable, "-c", OWNER, str(ROOT), "raise"], capture_output=True, text=True, timeout=30
    )
    state = Path(done.stdout.strip())
    assert "a test failed" in done.stderr
    assert state.name.startswith("slurm-")
    assert not state.exists()
    assert leftovers(state) == []


def test_every_node_has_its_own_name_processes_memory_segments_boot_and_disk(cluster: Cluster) -> None:
    script = """
        echo $(hostname) > /dev/shm/mine; echo $(hostname) > %s/disk/mine
        cat /proc/sys/kernel/random/boot_id; readlink /proc/self/ns/ipc; readlink /proc/self/ns/pid
    """
    many = cluster.run("srun", "-N4", "--label", "sh", "-c", script % cluster.state)
    assert many.returncode == 0, many.stderr
    told = [line.partition(": ")[2] for line in many.stdout.splitlines()]
    assert len(told) == len(set(told)) == 3 * 4
    again = cluster.run("srun", "-N4", "sh", "-c", f"cat /dev/shm/mine {cluster.state}/disk/mine")
    assert sorted(again.stdout.split()) == sorted(2 * cluster.node_names)


def test_nodes_know_each_other_by_name(cluster: Cluster) -> None:
    ask = "getent hosts head node1 node4 | tr -s ' '"
    done = cluster.run("srun", "-N2", "sh", "-c", ask)
    assert done.stdout == 2 * "127.0.0.1 head\n127.0.0.1 node1\n127.0.0.1 node4\n"


def test_tasks_get_the_gpus_of_their_node(cluster: Cluster) -> None:
    done = cluster.run(
        "srun", "-N2", "--ntasks-per-node=2", "--gpus-per-task=1", "printenv", "SLURM_STEP_GPUS"
    )
    assert sorted(done.stdout.split()) == ["0", "0", "1", "1"]


@pytest.mark.parametrize(("plugin", "variable"), [("pmix", "PMIX_RANK"), ("pmi2", "PMI_RANK")])
def test_the_process_management_plugins_number_their_ranks(
    cluster: Cluster, plugin: str, variable: str
) -> None:
    done = cluster.run("srun", f"--mpi={plugin}", "-N2", "-n4", "printenv", variable)
    assert sorted(done.stdout.split()) == ["0", "1", "2", "3"], done.stderr


def test_a_batch_job_runs_in_its_directory_and_its_output_is_read(cluster: Cluster, tmp_path: Path) -> None:
    job = cluster.sbatch(
        "-N2", "--wrap", "pwd; srun hostname; echo $COLOUR", directory=tmp_path, COLOUR="blue"
    )
    assert (job.state(), job.field("ExitCode")) == ("COMPLETED", "0:0")
    assert sorted(job.output.split()) == sorted([str(tmp_path), "node1", "node2", "blue"])


def test_a_failing_job_says_so(cluster: Cluster) -> None:
    job = cluster.sbatch("--wrap", "echo bad; exit 3")
    assert (job.state(), job.field("ExitCode"), job.output) == ("FAILED", "3:0", "bad\n")


def test_an_array_has_the_state_of_its_worst_job_and_the_output_of_all(cluster: Cluster) -> None:
    job = cluster.sbatch("--array=1-3", "--wrap", "echo $SLURM_ARRAY_TASK_ID; test $SLURM_ARRAY_TASK_ID != 2")
    assert job.state() == "FAILED"
    assert sorted(job.output.split()) == ["1", "2", "3"]


def test_a_heterogeneous_job_runs_one_step_over_its_components(cluster: Cluster) -> None:
    script = "srun --label -n1 hostname : -n2 hostname"
    job = cluster.sbatch("-N1", "-n1", ":", "-N2", "-n2", "--wrap", script)
    assert job.state() == "COMPLETED", job.output
    assert len(set(re.findall(r"\d: (node\d)", job.output))) == 3


def test_a_requeued_job_starts_again_within_seconds(cluster: Cluster) -> None:
    job = cluster.submit("--requeue", "--open-mode=append", "--wrap", "echo $SLURM_RESTART_COUNT.; sleep 60")
    cluster.wait_for(job, "RUNNING")
    cluster.run("scontrol", "requeue", job.id)
    wait_until(lambda: job.field("Restarts") == "1" and job.state() == "RUNNING", 20, job.state)


@pytest.mark.parametrize("name", ["USR1", "TERM"])
def test_a_signal_reaches_the_tasks_of_a_job(cluster: Cluster, name: str) -> None:
    script = f"trap 'echo {name} here; exit 5' {name}; echo ready; while :; do sleep 0.05; done"
    job = cluster.submit("-N2", "--wrap", f'srun sh -c "{script}"')
    wait_until(lambda: job.output.count("ready") == 2, 20, lambda: job.output)
    cluster.run("scancel", f"--signal={name}", job.id)
    assert job.wait(20).output.count(f"{name} here") == 2


def test_a_command_that_takes_too_long_is_ended_with_its_step(cluster: Cluster) -> None:
    command = subprocess.Popen(cluster.command("srun", "sleep", "301"), env=cluster.environ)
    wait_until(lambda: sleepers(cluster.state, 301) == 1, 20, cluster.logs)
    with pytest.raises(subprocess.TimeoutExpired):
        cluster.run("srun", "sleep", "302", timeout_s=2)
    command.kill()
    command.wait()
    wait_until(
        lambda: sleepers(cluster.state, 301) == sleepers(cluster.state, 302) == 0,
        10,
        lambda: f"{leftovers(cluster.state)}",
    )


def test_a_killed_node_loses_all_its_processes_and_comes_back_empty(cluster: Cluster) -> None:
    job = cluster.submit("-w", "node2,node3", "-N2", "--wrap", "srun sleep 303")
    wait_until(lambda: sleepers(cluster.state, 303) == 2, 20, job.state)
    cluster.kill_node("node3")
    assert sleepers(cluster.state, 303) == 1
    cluster.run("scancel", job.id)
    cluster.revive_node("node3")
    assert cluster.run("srun", "-w", "node3", "hostname").stdout == "node3\n"


def test_a_cluster_can_be_had_by_hand_for_one_command(cluster: Cluster) -> None:
    words = [sys.executable, "-m", "tests.slurm.cluster", "sh", "-c", "srun -N4 hostname; pwd; exit 7"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=50)
    assert sorted(done.stdout.split()) == sorted([str(ROOT), *cluster.node_names])
    assert done.returncode == 7


@pytest.mark.parametrize(("required", "outcome"), [("0", "1 skipped"), ("1", "1 error")])
def test_without_slurm_the_tests_are_skipped_with_the_reason_and_fail_if_it_is_required(
    cluster: Cluster, required: str, outcome: str
) -> None:
    one = f"{HERE}/test_cluster.py::test_nodes_know_each_other_by_name"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", f"--confcutdir={HERE}", one],
        # No `srun` in an empty PATH.
        env={**os.environ, "PATH": "", "HPCPAR_REQUIRE_SLURM": required},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert outcome in done.stdout
    assert re.search(r"no Slurm cluster can be brought up: .*srun, .* not installed \(apt-get", done.stdout)
