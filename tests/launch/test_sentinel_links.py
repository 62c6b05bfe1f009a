"""Whole nodes are killed; the linked sentinels of the others must name every rank that was lost, once.

The nodes here are groups of small processes on one machine, each with a sentinel and a directory of its
own; the last tests are MPI jobs whose ranks are made to believe that they are on two nodes.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from hpcpar.launch.sentinel import own_addresses
from hpcpar.launch.sentinel_links import connect, in_words, keep_alive, tell_batch_output
from tests.launch.sentinel_nodes import FOR_MPIEXEC, Node, await_that, paused

MPIEXEC = shutil.which(os.path.join(os.path.dirname(sys.executable), "mpiexec")) or shutil.which("mpiexec")

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux")


class Job:
    """Nodes with two ranks each: node 0 is the hub's.

    reach   what becomes of the hub's address on its way to the others
    """

    def __init__(
        self, directory: Path, nodes: int, reach: Callable[[str], str] = str, link_limit_s: float = 10.0
    ) -> None:
        self.nodes: list[Node] = []
        self.reach = reach
        ranks = [[2 * node, 2 * node + 1] for node in range(nodes)]
        try:
            for number in range(nodes):
                links: dict[str, object] = {
                    "node": number,
                    "ranks": ranks,
                    "address": reach(self.nodes[0].hub) if number else "",
                    "node_timeout_s": 20.0,
                    "link_limit_s": link_limit_s,
                }
                self.nodes.append(
                    Node(
                        directory / str(number),
                        2,
                        host=f"host{number}",
                        first=2 * number,
                        links=links,
                        kill_grace_s=0.5,
                        abort_grace_s=0.5,
                    )
                )
        except BaseException:
            self.close()
            raise

    def join(self) -> Job:
        for node in self.nodes:
            node.join()
        if self.reach is str:
            await_that(self.is_linked, "all sentinels are linked")
        return self

    def is_linked(self) -> bool:
        """The hub closes its door when it has heard from every spoke."""
        port = json.loads(self.nodes[0].hub)["port"]
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) != 0

    def lines(self) -> list[list[str]]:
        """What each node's sentinel has said, without the time of day, when all have gone."""
        return [
            [re.sub(r" \(at [\d:.]+\)$", "", line) for line in node.lines()]
            for node in self.nodes
            if not node.is_off
        ]

    def assert_all_ended(self, *nodes: int) -> None:
        for node in nodes:
            statuses = [rank.wait(timeout=10) for rank in self.nodes[node].ranks]
            assert set(statuses) <= {-signal.SIGTERM, -signal.SIGKILL}

    def pids(self, node: int) -> str:
        return ", ".join(str(rank.pid) for rank in self.nodes[node].ranks)

    def close(self) -> None:
        for node in self.nodes:
            node.close()


@contextmanager
def heard(node: Node) -> Iterator[None]:
    """A rank of this node ends inside; when this is left its sentinel has seen that, and told the hub."""
    files = Path(f"/proc/{node.sentinel_pid}/fd")
    before = len(os.listdir(files))
    yield
    await_that(lambda: len(os.listdir(files)) < before, f"the sentinel of {node.host} has let go of a rank")
    time.sleep(0.05)  # what it tells the hub comes some microseconds after that


@pytest.fixture
def jobs() -> Iterator[list[Job]]:
    opened: list[Job] = []
    yield opened
    for job in opened:
        job.close()


@pytest.fixture
def job(tmp_path: Path, jobs: list[Job]) -> Job:
    jobs.append(Job(tmp_path, 3))
    return jobs[0].join()


def test_a_killed_node_is_named_with_its_ranks_and_the_job_is_ended(job: Job) -> None:
    job.nodes[1].power_off()
    line = (
        f"host1 was lost with ranks 2-3 (pids {job.pids(1)}): all its processes ended at once; ending the job"
    )
    assert job.lines() == [[f"hpcpar: {line}"], []]
    job.assert_all_ended(0, 2)
    assert [node.words() for node in job.nodes[::2]] == [["lost-host1-2"], []]
    assert (job.nodes[0].directory / "lost-host1-2").read_text().startswith(line)


def test_when_the_hubs_node_is_killed_the_lowest_of_the_others_says_so(job: Job) -> None:
    job.nodes[0].power_off()
    line = "host0 was lost with ranks 0-1: all its processes ended at once; ending the job"
    assert job.lines() == [[f"hpcpar: {line}"], []]
    job.assert_all_ended(1, 2)
    assert [node.words() for node in job.nodes[1:]] == [["lost-host0-0"], []]


def test_of_two_nodes_killed_at_once_both_are_named(job: Job) -> None:
    # The hub might have ended the job before the second one is killed.
    with paused(job.nodes[0].sentinel_pid):
        job.nodes[1].power_off()
        job.nodes[2].power_off()
    (lines,) = job.lines()
    # Sorted: a busy kernel may deliver the ends of two connections in either order.
    assert sorted(line.split(" (")[0] for line in lines) == [
        "hpcpar: host1 was lost with ranks 2-3",
        "hpcpar: host2 was lost with ranks 4-5",
    ]


def test_a_node_whose_sentinel_still_saw_its_first_rank_go_is_named_as_a_whole(job: Job) -> None:
    # Within 0.3 s for the hub, however long it takes here: what it is told of both it reads at once.
    with paused(job.nodes[0].sentinel_pid):
        with heard(job.nodes[2]):
            job.nodes[2].kill(1)
        job.nodes[2].power_off()
    hub, _ = job.lines()
    assert [line.split(" (")[0] for line in hub] == ["hpcpar: host2 was lost with ranks 4-5"]


@pytest.mark.parametrize("node", [0, 2])
def test_a_lost_rank_is_named_by_its_own_node_and_all_nodes_are_ended(job: Job, node: int) -> None:
    job.nodes[node].kill(1)
    rank, pid = 2 * node + 1, job.nodes[node].ranks[1].pid
    said = (
        f"hpcpar: rank {rank} (pid {pid} on host{node}) was lost: killed or exited without finishing; "
        f"ending the job"
    )
    assert job.lines() == [[said] if number == node else [] for number in range(3)]
    job.assert_all_ended(0, 1, 2)
    assert job.nodes[0].words() == [f"lost-host{node}-{rank}"], "hpcpar run looks where the hub is"


def test_ranks_that_a_launcher_kills_after_the_first_loss_are_not_named(job: Job) -> None:
    job.nodes[1].kill(0)
    await_that(lambda: "lost-host1-2" in job.nodes[0].words(), "the hub has heard of rank 2")
    for node in job.nodes:
        for rank in range(2):
            node.kill(rank)
    assert [len(lines) for lines in job.lines()] == [0, 1, 0]


def test_nodes_that_finish_at_different_times_are_not_lost(job: Job) -> None:
    for number in (1, 0, 2):
        for rank in range(2):
            job.nodes[number].do(rank, "done")
            job.nodes[number].tell(rank, "exit 0")
        for process in job.nodes[number].ranks:
            process.wait(timeout=10)
    assert job.lines() == [[], [], []]
    assert [node.words() for node in job.nodes] == [[], [], []]


@pytest.mark.parametrize("first", [0, 1])
def test_a_sentinel_that_is_taken_away_after_its_ranks_have_finished_is_no_loss(job: Job, first: int) -> None:
    for rank in range(2):
        job.nodes[first].do(rank, "done")
    job.nodes[first].power_off()
    for node in job.nodes:
        if not node.is_off:
            for rank in range(2):
                node.do(rank, "done")
                node.tell(rank, "exit 0")
    assert job.lines() == [[], []]


def test_a_rank_lost_after_the_hub_has_gone_in_peace_is_named_by_its_own_node(job: Job) -> None:
    for rank in range(2):
        job.nodes[0].do(rank, "done")
    job.nodes[0].power_off()
    job.nodes[2].kill(0)
    (line,) = job.nodes[2].lines()
    assert line.startswith(f"hpcpar: rank 4 (pid {job.nodes[2].ranks[0].pid} on host2) was lost")


def test_a_rank_that_aborts_silences_all_nodes_and_ends_them(job: Job) -> None:
    job.nodes[1].do(0, "abort")
    job.nodes[1].tell(0, "exit 1")
    assert job.lines() == [[], [], []]
    job.assert_all_ended(0, 2)
    word = (job.nodes[0].directory / "aborted-host1-2").read_text()
    assert word == "rank 2 (on host1) ended the job: ValueError: planted second line\n"


def test_a_job_whose_ranks_are_all_told_to_end_has_lost_nobody(job: Job) -> None:
    for node in job.nodes:
        for process in node.ranks:
            process.terminate()
    assert job.lines() == [[], [], []]


@pytest.mark.parametrize("slow", [0, 2])
def test_ranks_that_crash_over_the_others_end_before_they_are_told_to_are_not_lost(
    job: Job, slow: int
) -> None:
    first, *others = (node for number, node in enumerate(job.nodes) if number != slow)
    with heard(first):
        first.ranks[0].terminate()
    for process in (first.ranks[1], *others[0].ranks):
        process.terminate()
    job.nodes[slow].ranks[0].send_signal(signal.SIGSEGV)
    job.nodes[slow].tell(1, "exit 1")
    assert job.lines() == [[], [], []]
    assert [node.words() for node in job.nodes] == [[], [], []]


def test_a_rank_that_is_told_to_end_is_the_first_loss_if_most_others_crash_over_it(job: Job) -> None:
    with heard(job.nodes[1]):
        job.nodes[1].ranks[0].terminate()
    for node in job.nodes:
        for process in node.ranks:
            process.send_signal(signal.SIGSEGV)
    (line,) = (line for lines in job.lines() for line in lines)
    assert line.startswith(f"hpcpar: rank 2 (pid {job.nodes[1].ranks[0].pid} on host1) was lost")


def test_a_job_that_is_ended_from_outside_with_its_sentinels_has_lost_nobody(job: Job) -> None:
    for node in job.nodes:
        os.kill(node.sentinel_pid, signal.SIGTERM)
    for node in job.nodes:
        for process in node.ranks:
            process.kill()
    assert job.lines() == [[], [], []]


def test_a_node_whose_ranks_alone_are_told_to_end_is_lost(job: Job) -> None:
    for process in job.nodes[1].ranks:
        process.terminate()
    said = [line for lines in job.lines() for line in lines]
    assert len(said) == 1
    assert re.match(r"hpcpar: rank [23] \(pid \d+ on host1\) was lost", said[0])
    job.assert_all_ended(0, 2)


def test_a_rank_lost_while_a_preempted_job_saves_its_state_is_named(job: Job) -> None:
    for node in job.nodes:
        os.kill(node.sentinel_pid, signal.SIGTERM)
    job.nodes[2].kill(0)
    said = [line for lines in job.lines() for line in lines]
    assert len(said) == 1
    assert said[0].startswith(f"hpcpar: rank 4 (pid {job.nodes[2].ranks[0].pid} on host2) was lost")


def changed(**fields: object) -> Callable[[str], str]:
    return lambda hub: json.dumps({**json.loads(hub), **fields})


@pytest.mark.parametrize("obstacle", ["another port", "another token", "another host"])
def test_where_the_hub_cannot_be_reached_there_is_one_warning_and_each_node_is_watched_alone(
    tmp_path: Path, jobs: list[Job], obstacle: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        reach = {
            "another port": changed(port=silent.getsockname()[1]),
            "another token": changed(token="0" * 32),
            "another host": changed(addresses=["no-such-host.invalid", "127.0.0.1"], port=1),
        }[obstacle]
        jobs.append(Job(tmp_path, 3, reach, link_limit_s=0.7))
        job = jobs[0].join()
        await_that(job.nodes[0].has_said_something, "the hub has warned")
        job.nodes[1].kill(0)
        alone = job.nodes[1].lines()
        assert len(alone) == 1
        assert alone[0].startswith(f"hpcpar: rank 2 (pid {job.nodes[1].ranks[0].pid} on host1) was lost")
        for node in job.nodes[::2]:
            for rank in range(2):
                node.do(rank, "done")
                node.tell(rank, "exit 0")
    (warning,), _, quiet = job.lines()
    assert "the sentinels of 2 of 3 nodes (those of ranks 2-5) could not connect to host0" in warning
    assert quiet == []


def test_a_stranger_at_the_hubs_door_does_no_harm(tmp_path: Path, jobs: list[Job]) -> None:
    jobs.append(Job(tmp_path, 2, changed(port=1)))
    job = jobs[0].join()
    hub = json.loads(job.nodes[0].hub)
    for noise in (b"", b"\n", b"\xff\xfe \n", b"1 2 3\n", b"1 2\n", b"0 0 0\n", b"99 0 0\n", b"x" * 100_000):
        with socket.create_connection(("127.0.0.1", hub["port"]), timeout=10) as stranger:
            with suppress(OSError):
                stranger.sendall(noise)
                stranger.shutdown(socket.SHUT_WR)
            with suppress(ConnectionError):
                while stranger.recv(100):
                    pass
    # The one who knows the token is let in, once.
    order = {**hub, "node": 1}
    connection, about = connect(order, "127.0.0.1", 10.0)
    assert about == {"host": "host0", "ranks": [0, 1]}
    with pytest.raises(OSError, match=r"refused|reset|token"):
        connect(order, "127.0.0.1", 10.0)
    connection.close()
    for node in job.nodes:
        for rank in range(2):
            node.do(rank, "done")
            node.tell(rank, "exit 0")
    assert job.lines() == [[], []]


def test_a_hub_of_512_nodes_raises_its_limit_of_descriptors_and_names_the_one_that_is_lost(
    tmp_path: Path, jobs: list[Job], record_property: Callable[[str, object], None]
) -> None:
    count = 512
    ranks = [[2 * node, 2 * node + 1] for node in range(count)]
    links: dict[str, object] = {
        "node": 0,
        "ranks": ranks,
        "address": "",
        "node_timeout_s": 20.0,
        "link_limit_s": 60.0,
    }
    node = Node(tmp_path, 2, host="host0", links=links, descriptors=64)
    jobs.append(Job.__new__(Job))
    jobs[0].nodes = [node]
    node.join()
    hub = json.loads(node.hub)
    started = time.monotonic()

    def link(number: int) -> socket.socket:
        connection, _ = connect({**hub, "node": number}, "127.0.0.1", 30.0)
        connection.sendall(f"host host{number}\njoined {2 * number} 100\n".encode())
        return connection

    with ThreadPoolExecutor(16) as pool:
        spokes = list(pool.map(link, range(1, count)))
    record_property("seconds to link 511 nodes", round(time.monotonic() - started, 2))
    try:
        spokes[410].close()
        (line,) = node.lines()
        assert line.startswith("hpcpar: host411 was lost with ranks 822-823")
        spokes[0].settimeout(10)
        with spokes[0].makefile() as heard:
            assert "end" in heard.read().splitlines()
    finally:
        for spoke in spokes:
            spoke.close()


@pytest.mark.parametrize(
    ("node_timeout_s", "probes_at_all", "pause_s", "probes", "unanswered_ms"),
    [
        (20.0, 1, 5, 3, 20_000),
        (0.5, 1, 1, 3, 500),
        (7 * 86400.0, 1, 32767, 17, 604_800_000),
        (40 * 86400.0, 1, 32767, 104, 2**31 - 1),
        (90 * 86400.0, 0, 32767, 127, 2**31 - 1),
        (1e300, 0, 32767, 127, 2**31 - 1),
        (float("inf"), 0, 32767, 127, 2**31 - 1),
    ],
)
def test_a_machine_that_does_not_answer_is_found_by_the_kernel_in_any_time_that_is_asked_for(
    node_timeout_s: float, probes_at_all: int, pause_s: int, probes: int, unanswered_ms: int
) -> None:
    options = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT, socket.TCP_USER_TIMEOUT)
    with socket.socket() as link:
        keep_alive(link, node_timeout_s)
        found = [link.getsockopt(socket.IPPROTO_TCP, option) for option in options]
        assert link.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == probes_at_all
    assert found == [pause_s, pause_s, probes, unanswered_ms]


@pytest.mark.parametrize(
    ("if_on", "told"), [("", True), ("node1", True), ("node1.cluster.example", True), ("node2", False)]
)
def test_what_nobody_hears_goes_to_the_batch_jobs_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, if_on: str, told: bool
) -> None:
    output = tmp_path / "slurm 12.out"
    output.write_text("epoch 1\n")
    scontrol = tmp_path / "scontrol"
    shown = f"JobId=12 JobName=x\n   BatchHost=node1\n   StdErr={output}"
    scontrol.write_text(f"#!/bin/sh\necho '{shown}'\n")
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    tell_batch_output("node1 was lost", if_on=if_on)
    assert output.read_text() == ("epoch 1\nhpcpar: node1 was lost\n" if told else "epoch 1\n")


def test_ranks_are_named_in_ranges() -> None:
    assert [in_words(ranks) for ranks in ([3], [2, 3], [4, 0, 1, 2, 8], [1, 3])] == [
        "rank 3",
        "ranks 2-3",
        "ranks 0-2, 4, 8",
        "ranks 1, 3",
    ]


def test_a_hosts_addresses_are_those_that_others_may_reach(tmp_path: Path) -> None:
    (tmp_path / "fib_trie").write_text(
        "Main:\n  +-- 0.0.0.0/0 3 0 5\n     |-- 0.0.0.0\n        /0 universe UNICAST\n"
        "     +-- 10.0.0.0/24 2 0 2\n        |-- 10.0.0.7\n           /32 host LOCAL\n"
        "        |-- 10.0.0.255\n           /32 link BROADCAST\n"
        "     |-- 127.0.0.1\n        /32 host LOCAL\n     |-- 10.0.0.7\n        /32 host LOCAL\n"
    )
    (tmp_path / "if_inet6").write_text(
        "00000000000000000000000000000001 01 80 10 80       lo\n"
        "fe800000000000000000000000000001 02 40 20 80     eth0\n"
        "20010db8000000000000000000000007 02 40 00 80     eth0\n"
    )
    assert own_addresses(tmp_path) == ["10.0.0.7", "2001:db8::7"]
    assert own_addresses(tmp_path / "nothing") == []


TWO_NODES = """
import os, signal, sys
import numpy as np
import hpcpar
from hpcpar.comm import world as start_up
from hpcpar.transport import mpi

# Ranks of one machine that believe to be on two; the launcher's variables would say otherwise.
mpi._world_nodes = lambda: (0, 0, 1, 1)
start_up._crosscheck = lambda world, info: info
world = hpcpar.init()
assert set(world.nodes) == {0, 1}
world.allreduce(np.ones(8))
if sys.argv[1:] == [str(world.rank)]:
    print("pid", os.getpid(), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[1:]:
    world.allreduce(np.ones(8))
"""


def mpi_job(directory: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """A job of four ranks, with a daemon of the launcher for each node's two where it can have that.

    One daemon would kill all four before a sentinel on a busy machine has told another anything.
    """
    script = directory / "job.py"
    script.write_text(TWO_NODES)
    version = subprocess.run([str(MPIEXEC), "--version"], capture_output=True, text=True, check=True).stdout
    daemons = "-launcher fork -hosts 127.0.0.1,localhost -ppn 2" if "HYDRA" in version else ""
    return subprocess.run(
        [str(MPIEXEC), *daemons.split(), "-n", "4", sys.executable, str(script), *words],
        env={**os.environ, **FOR_MPIEXEC},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.skipif(MPIEXEC is None, reason="needs mpiexec")
def test_short_jobs_on_two_nodes_end_in_silence(tmp_path: Path) -> None:
    done = [mpi_job(tmp_path) for _ in range(5)]
    assert [(job.returncode, job.stderr) for job in done] == [(0, "")] * 5


@pytest.mark.skipif(MPIEXEC is None, reason="needs mpiexec")
def test_a_lost_rank_of_two_nodes_is_named_once(tmp_path: Path) -> None:
    for lost in (3, 0):
        done = mpi_job(tmp_path, str(lost))
        said = [line for line in done.stderr.splitlines() if line.startswith("hpcpar:")]
        assert len(said) == 1, done.stderr
        pid = done.stdout.split("pid ")[1].split()[0]
        assert said[0].startswith(f"hpcpar: rank {lost} (pid {pid} on ")
