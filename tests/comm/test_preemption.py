"""All ranks stop after the same step, whichever of them is asked to, and when."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hpcpar.comm import Communicator, run_loopback
from hpcpar.comm.preemption import QUESTION_NBYTES, Preemption
from hpcpar.launch.signals import START_AGAIN

RunRanks = Callable[..., subprocess.CompletedProcess[str]]


def steps_until_agreed(
    comm: Communicator, requests: dict[int, int], signals: tuple[signal.Signals, ...] = (), most: int = 20
) -> int | None:
    """Steps done when this rank is told to stop; `requests`: rank -> steps after which it is asked to."""
    with Preemption(comm, signals) as preemption:
        for done in range(1, most + 1):
            comm.barrier()
            if requests.get(comm.rank) == done:
                if signals:
                    os.kill(os.getpid(), signals[0])
                    while preemption.requested is None:
                        time.sleep(0.001)
                else:
                    preemption.request()
            if preemption.is_agreed():
                return done
    return None


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("asked", [1, 2, 7])
def test_all_ranks_stop_one_step_after_any_was_asked(size: int, asked: int) -> None:
    for rank in range(size):
        found = run_loopback(size, lambda comm, rank=rank: steps_until_agreed(comm, {rank: asked}))
        assert found == [asked + 1] * size


def test_the_earliest_request_counts() -> None:
    assert run_loopback(3, lambda comm: steps_until_agreed(comm, {0: 9, 1: 6, 2: 4})) == [5, 5, 5]


def test_nobody_stops_whom_nobody_asked() -> None:
    assert run_loopback(3, lambda comm: steps_until_agreed(comm, {})) == [None] * 3


def test_once_agreed_it_stays_so_and_nothing_more_is_sent() -> None:
    def work(comm: Communicator) -> list[int]:
        with Preemption(comm, ()) as preemption:
            preemption.request()
            assert not preemption.is_agreed()
            calls = [int(preemption.is_agreed()) for _ in range(5)]
            return [*calls, preemption.comm.traffic.row("allreduce").calls]

    assert run_loopback(2, work) == [[1, 1, 1, 1, 1, 1]] * 2


@pytest.mark.parametrize(("why", "status"), [("SIGTERM", START_AGAIN), ("SIGINT", 130)])
def test_the_status_to_end_with_tells_on_every_rank_who_asked(why: str, status: int) -> None:
    def work(comm: Communicator) -> int:
        with Preemption(comm, ()) as preemption:
            if comm.rank == 1:
                preemption.request(why)
            assert not preemption.is_agreed()
            assert preemption.is_agreed()
            return preemption.exit_status

    assert run_loopback(3, work) == [status] * 3


def test_a_ctrl_c_that_comes_while_the_question_is_put_is_no_other_signal() -> None:
    heard = iter([None, *["SIGINT"] * 9])

    class Hearing(Preemption):
        """One that is signalled after the first look at what it has heard."""

        requested = property(lambda self: next(heard), lambda self, why: None)  # type: ignore[assignment]

    def work(comm: Communicator) -> int:
        with Hearing(comm, ()) as preemption:
            while not preemption.is_agreed():
                pass
            return preemption.exit_status

    assert run_loopback(1, work) == [128 + signal.SIGINT]


@pytest.mark.parametrize("size", [2, 4])
def test_a_question_is_one_byte_to_each_partner_on_a_communicator_of_its_own(size: int) -> None:
    def work(comm: Communicator) -> tuple[int, int, list[str]]:
        comm.traffic.reset()
        preemption = Preemption(comm, ())
        for _ in range(10):
            preemption.is_agreed()
        preemption.settle()
        row = preemption.comm.traffic.row("allreduce")
        others = [each.collective for each in comm.traffic.rows() if each.collective == "allreduce"]
        preemption.close()
        return row.calls, row.nbytes_sent, others

    rounds = {2: 1, 4: 2}[size]  # recursive doubling
    assert run_loopback(size, work) == [(10, 10 * rounds * QUESTION_NBYTES, [])] * size


def test_ranks_that_are_processes_must_be_in_their_main_thread_to_be_signalled() -> None:
    with pytest.raises(ValueError, match="in the main thread alone"):
        run_loopback(2, Preemption)


@pytest.mark.mpi
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_signal_to_one_rank_between_steps_stops_all_after_the_same_one(
    any_world: Communicator, number: signal.Signals
) -> None:
    before = signal.getsignal(number)
    for rank in range(any_world.size):
        found = steps_until_agreed(any_world, {rank: 3 + rank}, (number,))
        assert any_world.allgather_object(found) == [4 + rank] * any_world.size
    assert signal.getsignal(number) == before


@pytest.mark.mpi
def test_signals_at_different_times_stop_all_after_the_same_step(world: Communicator) -> None:
    found = steps_until_agreed(
        world, {rank: 5 + 2 * (world.size - rank) for rank in range(world.size)}, (signal.SIGUSR1,)
    )
    assert world.allgather_object(found) == [5 + 2 + 1] * world.size


PROGRAM = """
import os, sys, time
import numpy as np
import hpcpar
from hpcpar.launch.signals import SIGNALS, SignalListener

def kill_in_a_while(after_s, numbers):
    if os.fork() == 0:
        for number in numbers:
            time.sleep(after_s)
            os.kill(os.getppid(), number)
        os._exit(0)

world = hpcpar.init()
listener = SignalListener(SIGNALS, same_within_s=0.5)
with hpcpar.Preemption(world, listener) as preemption:
    for step in range(5000):  # nobody comes to the end, however late a signal is
        world.allreduce(np.ones(1000))
        time.sleep(0.01)
        {what}
        if preemption.is_agreed():
            steps = world.gather_object(step)
            if world.rank == 0:
                print("stop after steps", *steps, flush=True)
            sys.exit(preemption.exit_status)
"""


def run(run_ranks: RunRanks, path: Path, what: str) -> tuple[subprocess.CompletedProcess[str], float]:
    path.write_text(PROGRAM.replace("{what}", what))
    started_s = time.monotonic()
    done = run_ranks(3, str(path))
    return done, time.monotonic() - started_s


def test_a_job_that_was_asked_to_stop_ends_with_status_75(tmp_path: Path, run_ranks: RunRanks) -> None:
    done, _ = run(
        run_ranks, tmp_path / "script.py", "if step == 20 and world.rank == 1: kill_in_a_while(0, [10])"
    )
    assert done.returncode == START_AGAIN, done.stderr
    steps = done.stdout.removeprefix("stop after steps").split()
    assert len(steps) == 3
    assert len(set(steps)) == 1
    assert "lost" not in done.stderr


def test_all_ranks_are_told_and_one_of_them_says_so(tmp_path: Path, run_ranks: RunRanks) -> None:
    done, _ = run(run_ranks, tmp_path / "script.py", "if step == 20: os.kill(os.getpid(), 10)")
    assert done.returncode == START_AGAIN, done.stderr
    assert done.stderr.count("the job will stop after this step or the next") == 1
    assert "SIGUSR1: the job will stop" in done.stderr


def test_a_second_signal_ends_a_job_whose_ranks_are_blocked_in_c(tmp_path: Path, run_ranks: RunRanks) -> None:
    # Rank 1 waits in C for what never comes; the others wait for it in a collective.
    stuck = "os.read(os.pipe()[0], 1)"
    done, seconds = run(
        run_ranks,
        tmp_path / "script.py",
        f"if step == 20 and world.rank == 1: kill_in_a_while(1, [10, 15]); {stuck}",
    )
    assert done.returncode == 128 + signal.SIGTERM, (done.returncode, done.stderr)
    assert seconds < 20
    why = "ends the job: SIGTERM, after it had been asked to stop already"
    assert "hpcpar: rank 1 of 3" in done.stderr
    assert why in done.stderr
    assert "hpcpar run: rank 1 (on " in done.stderr, "the sentinel was not told why"
    assert "lost" not in done.stderr


def test_sigterm_to_hpcpar_run_asks_ranks_that_listen_to_stop(tmp_path: Path) -> None:
    """srun and Open MPI's mpiexec would kill them."""
    script = tmp_path / "script.py"
    script.write_text(
        PROGRAM.replace("{what}", "if step == 5 and world.rank == 0: print('step 5', flush=True)")
    )
    outside = {name: value for name, value in os.environ.items() if not name.startswith("PMI_")}
    command = [sys.executable, "-m", "hpcpar", "run", "-n", "2", "--", str(script)]
    with subprocess.Popen(
        command, env=outside, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as job:
        assert job.stdout is not None
        assert job.stdout.readline() == "step 5\n"
        job.send_signal(signal.SIGTERM)
        said, errors = job.communicate(timeout=60)
    assert job.returncode == START_AGAIN, errors
    assert "stop after steps" in said
    assert "SIGUSR1: the job will stop" in errors
