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
    """Count tasks of the cluster that run `sleep seconds`."""
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


def test_a_cluster_is_idle_within_30_seconds_and_leaves_nothing_behind(cluster: Cluster) -> None:
    began = time.monotonic()
    with Cluster.start(nodes=2) as own:
        assert time.monotonic() - began < 30
        shown = own.run("sinfo", "--noheader", "--format=%D %T").stdout
        assert shown == "2 idle\n"
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


def test_a_cluster_can_be_had_by_hand_for_one_command(cluster: Cluster) -> None:
    words = [sys.executable, "-m", "tests.slurm.cluster", "sh", "-c", "srun -N4 hostname; pwd; exit 7"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=50)
    assert sorted(done.stdout.split()) == sorted([str(ROOT), *cluster.node_names])
    assert done.returncode == 7


@pytest.mark.parametrize(("required", "outcome"), [("0", "1 skipped"), ("1", "1 error")])
def test_without_slurm_the_tests_are_skipped_with_the_reason_and_fail_if_it_is_required(
    cluster: Cluster, required: str, outcome: str
) -> None:
    one = f"{HERE}/test_cluster.py::test_every_node_has_its_own_name_processes_memory_segments_boot_and_disk"
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
