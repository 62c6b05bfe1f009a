"""Ranks are killed for real; the sentinel must name the first of them, and never be in the way.

The ranks here are small processes that join a sentinel; the last tests are MPI jobs.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hpcpar.launch.sentinel import Guard, end_command_for, start
from hpcpar.launch.sentinel_process import ending_signal
from tests.command import run, until, write_script
from tests.launch.sentinel_nodes import FOR_MPIEXEC, Node, has_ended, paused

MPIEXEC = shutil.which(os.path.join(os.path.dirname(sys.executable), "mpiexec")) or shutil.which("mpiexec")

pytestmark = pytest.mark.skipif(not hasattr(socket, "AF_UNIX"), reason="needs Unix sockets")

OpenNode = Callable[..., Node]


@pytest.fixture
def open_node(tmp_path: Path) -> Iterator[OpenNode]:
    """Open a node of so many ranks, in a directory of its own where there are several."""
    opened: list[Node] = []

    def open_one(size: int, directory: str = ".", **options: object) -> Node:
        opened.append(Node(tmp_path / directory, size, **options))  # type: ignore[arg-type]
        return opened[-1]

    yield open_one
    for node in opened:
        node.close()


@pytest.fixture
def node(open_node: OpenNode) -> Node:
    return open_node(3, kill_grace_s=0.3, abort_grace_s=0.3)


def line_for(node: Node, rank: int) -> str:
    return (
        f"hpcpar: rank {rank} (pid {node.ranks[rank].pid} on node7) was lost: "
        f"killed or exited without finishing; ending the other ranks of this node"
    )


def test_a_killed_rank_is_named_and_the_others_are_ended(node: Node) -> None:
    node.join()
    node.kill(1)
    assert node.lines() == [line_for(node, 1)]
    assert [node.ranks[rank].wait(timeout=10) for rank in (0, 2)] == [-signal.SIGTERM] * 2
    assert (node.directory / "lost-node7-1").read_text().strip() == line_for(node, 1).removeprefix("hpcpar: ")


def test_a_rank_that_leaves_with_status_0_but_without_finishing_is_lost(node: Node) -> None:
    node.join()
    node.tell(2, "exit 0")
    assert node.lines() == [line_for(node, 2)]


def test_the_first_of_several_losses_is_named_even_if_the_sentinel_wakes_after_all_of_them(
    open_node: OpenNode,
) -> None:
    named = []
    for first in range(4):
        node = open_node(4, str(first))
        node.join()
        with paused(node.sentinel_pid):
            node.kill(first)
            for rank in range(4):
                node.kill(rank)
        pid = node.ranks[first].pid
        named += [
            line.startswith(f"hpcpar: rank {first} (pid {pid} on node7) was lost") for line in node.lines()
        ]
    assert named == [True] * 4


def test_ranks_that_finish_are_not_lost(node: Node) -> None:
    node.join()
    node.finish()
    assert node.lines() == []
    assert node.words() == []


def test_a_rank_that_is_lost_after_another_has_finished_is_still_named(node: Node) -> None:
    node.join()
    node.do(0, "done")
    node.kill(2)
    assert node.lines() == [line_for(node, 2)]
    assert node.ranks[0].wait(timeout=10) == -signal.SIGTERM


def test_a_rank_that_aborts_has_the_last_word_and_leftover_ranks_are_ended(node: Node) -> None:
    node.join()
    node.do(1, "abort")
    node.tell(1, "exit 1")
    assert node.lines() == []
    assert [node.ranks[rank].wait(timeout=10) for rank in (0, 2)] == [-signal.SIGTERM] * 2
    assert node.words() == ["aborted-node7-1"]
    word = (node.directory / "aborted-node7-1").read_text()
    assert word == "rank 1 (on node7) ended the job: ValueError: planted second line\n"


def test_of_ranks_that_all_abort_the_first_tells_why(node: Node) -> None:
    node.join()
    for rank in (2, 0, 1):
        node.do(rank, "abort")
        node.tell(rank, "exit 1")
    assert node.lines() == []
    assert node.words() == ["aborted-node7-2"]


def test_a_rank_that_does_not_heed_sigterm_is_killed(node: Node) -> None:
    node.join()
    node.do(0, "ignore")
    node.kill(1)
    assert node.ranks[0].wait(timeout=10) == -signal.SIGKILL
    assert node.lines() == [line_for(node, 1)]


def test_a_rank_may_join_late(node: Node) -> None:
    node.join(0, 1)
    time.sleep(0.7)
    node.join(2)
    node.kill(2)
    assert node.lines() == [line_for(node, 2)]


def test_a_rank_lost_before_all_have_joined_is_named(node: Node) -> None:
    node.join(0, 1)
    node.kill(0)
    assert node.lines() == [line_for(node, 0)]


def test_a_child_that_a_rank_forked_does_not_hide_its_loss(node: Node) -> None:
    node.join()
    node.tell(1, "fork")
    child = int(node.answer(1))
    node.kill(1)
    try:
        assert node.lines() == [line_for(node, 1)]
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_job_that_is_ended_from_outside_loses_nobody(node: Node) -> None:
    node.join()
    os.kill(node.sentinel_pid, signal.SIGTERM)
    for rank in range(3):
        node.kill(rank)
    assert node.lines() == []


def test_ranks_that_are_all_told_to_end_are_not_lost(node: Node) -> None:
    node.join()
    for rank in range(3):
        node.ranks[rank].terminate()
    assert node.lines() == []
    assert node.words() == []


def test_a_rank_that_is_told_to_end_while_others_work_on_is_lost(node: Node) -> None:
    node.join()
    node.ranks[1].terminate()
    assert node.lines() == [line_for(node, 1)]
    assert [node.ranks[rank].wait(timeout=10) for rank in (0, 2)] == [-signal.SIGTERM] * 2


def test_a_rank_that_is_told_to_end_is_the_first_loss_if_the_launcher_then_kills_all(node: Node) -> None:
    node.join()
    node.ranks[1].terminate()
    # Its status is known before its connection is closed: the other way about, rank 0 could be heard first.
    until(lambda: has_ended(node.ranks[1].pid), "rank 1 has ended")
    node.kill(0)
    node.kill(2)
    (line,) = node.lines()
    assert line.startswith(f"hpcpar: rank 1 (pid {node.ranks[1].pid} on node7) was lost")


def test_a_rank_that_crashes_over_the_others_end_before_it_is_told_to_is_not_lost(node: Node) -> None:
    node.join()
    # However long this takes here, the sentinel sees all of it within its second.
    with paused(node.sentinel_pid):
        for rank, number in ((0, signal.SIGTERM), (2, signal.SIGTERM), (1, signal.SIGSEGV)):
            node.ranks[rank].send_signal(number)
            until(lambda rank=rank: has_ended(node.ranks[rank].pid), f"rank {rank} has ended")
    assert node.lines() == []
    assert node.words() == []


def test_a_rank_lost_while_the_others_finish_after_the_jobs_end_was_called_is_named(node: Node) -> None:
    node.join()
    os.kill(node.sentinel_pid, signal.SIGTERM)
    node.kill(2)
    assert node.lines() == [line_for(node, 2)]


def test_the_signal_that_ended_a_process_is_known_until_it_is_reaped() -> None:
    found = []
    for number in (signal.SIGTERM, signal.SIGKILL, signal.SIGSEGV):
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        found.append(ending_signal(child.pid, -1))
        child.send_signal(number)
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        found.append(ending_signal(child.pid, -1))
        child.communicate()
        found.append(ending_signal(child.pid, -1))
    assert found == [0, signal.SIGTERM, 0, 0, signal.SIGKILL, 0, 0, signal.SIGSEGV, 0]


def test_a_sentinel_that_nobody_joins_leaves_at_the_time_limit(open_node: OpenNode) -> None:
    node = open_node(2, join_limit_s=0.3)
    assert node.lines() == []
    assert node.ranks[0].poll() is None


def test_a_sentinel_leaves_when_its_starter_dies_before_anyone_joined(node: Node) -> None:
    node.kill(0)
    started = time.monotonic()
    assert node.lines() == []
    assert time.monotonic() - started < 5


@pytest.mark.parametrize(
    ("nodes", "ending"), [(1, "no other rank of this node is left"), (2, "ending the job (at ")]
)
def test_a_rank_alone_on_its_node_is_named_and_of_several_nodes_with_the_time(
    open_node: OpenNode, nodes: int, ending: str
) -> None:
    node = open_node(1, nodes=nodes)
    node.join()
    node.kill(0)
    (line,) = node.lines()
    assert f"killed or exited without finishing; {ending}" in line


@pytest.mark.parametrize("how", ["killed", "aborted", "all told to end"])
def test_other_nodes_are_ended_by_the_given_command(tmp_path: Path, open_node: OpenNode, how: str) -> None:
    mark = tmp_path / "ended"
    node = open_node(2, nodes=2, end_command=("/bin/touch", str(mark)), abort_grace_s=0.3)
    node.join()
    if how == "killed":
        node.kill(0)
    elif how == "aborted":
        node.do(0, "abort")
    else:
        for process in node.ranks:
            process.terminate()
    assert (len(node.lines()) == 1) is (how == "killed")
    until(mark.exists, "the command has run")


def test_other_nodes_go_on_where_all_ranks_of_this_one_finish(tmp_path: Path, open_node: OpenNode) -> None:
    mark = tmp_path / "ended"
    node = open_node(2, nodes=2, end_command=("/bin/touch", str(mark)))
    node.join()
    node.finish()
    assert node.lines() == []
    time.sleep(0.3)
    assert not mark.exists()


def test_the_sentinel_is_small_and_no_child_of_the_rank(node: Node) -> None:
    node.join()
    pid = node.sentinel_pid
    status = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line
    )
    session = os.getsid(pid)
    node.finish()
    assert int(status["VmRSS"].split()[0]) < 20 * 1024
    assert int(status["PPid"]) != node.ranks[0].pid
    assert session != os.getsid(0)


def test_a_wrong_token_or_a_rank_twice_is_refused_with_a_warning(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    name, _ = json.loads(node.address)
    with caplog.at_level(logging.WARNING, "hpcpar.launch"):
        stranger = Guard.connect(json.dumps([name, "0" * 32]), rank=1)
        node.join()
        twin = Guard.connect(node.address, rank=1)
    assert not stranger.connected
    assert not twin.connected
    assert len(caplog.records) == 2
    node.kill(2)
    assert node.lines() == [line_for(node, 2)]


def test_a_stranger_who_connects_and_leaves_is_no_loss(node: Node) -> None:
    node.join(0, 1)
    name, _ = json.loads(node.address)
    for noise in (b"", b"\xff\xfe\n", b"[]\n", b'{"rank": 2}\n', b"x" * 100_000):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
            stranger.connect(name)
            try:
                stranger.sendall(noise)
            except OSError:
                assert len(noise) > 65536, "only the endless greeting is cut off"
    node.join(2)
    node.finish()
    assert node.lines() == []


def test_a_sentinel_that_cannot_start_is_a_warning_and_an_idle_guard(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    with caplog.at_level(logging.WARNING, "hpcpar.launch"):
        address = start(local_size=2)
    assert address == ""
    assert "no sentinel on this node" in caplog.text
    guard = Guard.connect(address, rank=0)
    guard.done()
    guard.aborting("nothing happens")
    guard.close()
    assert not guard.connected


def test_only_a_step_of_plain_srun_needs_a_command_to_end_it(tmp_path: Path) -> None:
    scancel = write_script(tmp_path / "scancel", "")
    environ = {"PATH": str(tmp_path), "SLURM_JOB_ID": "12", "SLURM_STEP_ID": "3"}
    assert end_command_for("slurm", environ) == (str(scancel), "12.3")
    assert end_command_for("hydra", environ) == ()
    assert end_command_for("slurm", {"PATH": "/nowhere", "SLURM_JOB_ID": "12", "SLURM_STEP_ID": "3"}) == ()
    assert end_command_for("slurm", {"PATH": str(tmp_path)}) == ()


JOB = """
import os, signal, sys, time
import numpy as np
import hpcpar

world = hpcpar.init()
lost, how = int(sys.argv[1]), sys.argv[2]
world.barrier()
if world.rank == lost:
    print("pid", os.getpid(), flush=True)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    os._exit(0)
world.allreduce(np.ones(8))
time.sleep(60)
"""


@pytest.mark.skipif(MPIEXEC is None, reason="needs mpiexec")
@pytest.mark.parametrize("how", ["kill", "exit"])
def test_under_mpiexec_the_lost_rank_is_named_every_time(tmp_path: Path, how: str) -> None:
    script = tmp_path / "job.py"
    script.write_text(JOB)
    verdicts = []
    for lost in (0, 3, 2):
        command = (str(MPIEXEC), "-n", "4", sys.executable, script, str(lost), how)
        done = run(*command, timeout_s=60, **FOR_MPIEXEC)
        said = [line for line in done.stderr.splitlines() if line.startswith("hpcpar: rank")]
        pid = done.stdout.split("pid ")[1].split()[0]
        verdicts.append(len(said) == 1 and said[0].startswith(f"hpcpar: rank {lost} (pid {pid} on "))
    assert verdicts == [True] * 3


TWO_NODES = """
import os, signal, sys
import numpy as np
import hpcpar
from hpcpar.comm import world as start_up
from hpcpar.transport import mpi

# Ranks of one machine that believe to be on two; the launcher's variables would say otherwise.
mpi.world_nodes = lambda: (0, 0, 1, 1)
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


def job_on_two_nodes(directory: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run four ranks, with a daemon of the launcher for each node's two where it can have that."""
    script = directory / "job.py"
    script.write_text(TWO_NODES)
    version = run(str(MPIEXEC), "--version").stdout
    daemons = "-launcher fork -hosts 127.0.0.1,localhost -ppn 2" if "HYDRA" in version else ""
    command = (str(MPIEXEC), *daemons.split(), "-n", "4", sys.executable, script, *words)
    return run(*command, timeout_s=60, **FOR_MPIEXEC)


@pytest.mark.skipif(MPIEXEC is None, reason="needs mpiexec")
def test_short_jobs_on_two_nodes_end_in_silence(tmp_path: Path) -> None:
    done = [job_on_two_nodes(tmp_path) for _ in range(2)]
    assert [(job.returncode, job.stderr) for job in done] == [(0, "")] * 2


@pytest.mark.skipif(MPIEXEC is None, reason="needs mpiexec")
def test_a_rank_lost_on_one_of_two_nodes_ends_the_job_and_the_earliest_line_names_it(tmp_path: Path) -> None:
    for lost in (3, 0):
        done = job_on_two_nodes(tmp_path, str(lost))
        said = [line for line in done.stderr.splitlines() if line.startswith("hpcpar: rank")]
        pid = done.stdout.split("pid ")[1].split()[0]
        first = min(said, key=lambda line: line.rpartition("(at ")[2])
        assert first.startswith(f"hpcpar: rank {lost} (pid {pid} on "), done.stderr
