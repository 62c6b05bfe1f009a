"""Signals reach the listener while the main thread is in C, and are handled as before once it is closed."""

from __future__ import annotations

import faulthandler
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcpar.launch.signals import STOPS_ON_USR1, SignalListener, tell_launcher
from tests.command import until

USR1, USR2, TERM = signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM


class Heard:
    """Records what a listener tells, in order."""

    def __init__(self) -> None:
        self.firsts: list[signal.Signals] = []
        self.seconds: list[signal.Signals] = []


@pytest.fixture
def heard() -> Heard:
    return Heard()


@pytest.fixture
def listener(heard: Heard) -> Iterator[SignalListener]:
    """A listener for SIGUSR1 and SIGTERM."""
    with SignalListener((USR1, TERM), heard.firsts.append, heard.seconds.append) as listener:
        yield listener


def test_the_first_signal_is_told_once(listener: SignalListener, heard: Heard) -> None:
    os.kill(os.getpid(), USR1)
    until(lambda: heard.firsts)
    os.kill(os.getpid(), USR1)
    os.kill(os.getpid(), TERM)  # of the other kind, in time: the same
    time.sleep(0.1)
    assert (heard.firsts, heard.seconds) == ([USR1], [])


def test_a_later_one_of_either_kind_is_a_second_one(listener: SignalListener, heard: Heard) -> None:
    listener._same_within_s = 0.2
    os.kill(os.getpid(), USR1)
    until(lambda: heard.firsts)
    time.sleep(0.25)
    os.kill(os.getpid(), TERM)
    until(lambda: heard.seconds)
    assert (heard.firsts, heard.seconds) == ([USR1], [TERM])


def test_a_signal_is_told_while_the_main_thread_is_in_a_long_call_in_c(heard: Heard) -> None:
    one, other = socket.socketpair()
    # What `recv` waits for comes from who is told of the signal; from another one if nobody is.
    nobody = threading.Timer(20.0, other.send, (b"-",))
    nobody.start()
    with one, other, SignalListener((USR1,), lambda _: other.send(b"x"), heard.seconds.append):
        # By another process: it gets to this one's main thread, which waits in `recv` and goes on waiting.
        # It ends when `recv` is over: its end is a signal, too, which torch's DataLoader, used by an earlier
        # test of this process, has a handler for that interrupts system calls.
        kill = f"import os, sys, time; time.sleep(0.3); os.kill({os.getpid()}, {int(USR1)}); sys.stdin.read()"
        with subprocess.Popen([sys.executable, "-S", "-c", kill], stdin=subprocess.PIPE):
            import ctypes

            buffer = ctypes.create_string_buffer(1)
            ctypes.CDLL(None).recv(one.fileno(), buffer, 1, 0)
        nobody.cancel()
    assert buffer.value, "the call was interrupted by the signal"
    assert buffer.value == b"x", "it was told only when the call was over"


def test_handlers_and_the_wakeup_descriptor_are_as_before_afterwards(heard: Heard) -> None:
    def mine(number: int, frame: object) -> None: ...

    interrupt = signal.getsignal(signal.SIGINT)  # of a process in the background it is ignored
    before = signal.signal(USR1, mine), signal.signal(USR2, signal.SIG_IGN)
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    wakeup = signal.set_wakeup_fd(writer.fileno())
    try:
        with SignalListener((USR1, USR2, TERM), heard.firsts.append, heard.seconds.append):
            assert signal.getsignal(USR1) is not mine
            os.kill(os.getpid(), USR1)
            until(lambda: heard.firsts)
            assert select.select([reader], [], [], 5)[0], "who listened before hears no more"
            assert reader.recv(8)[:1] == bytes([USR1])
            assert signal.getsignal(signal.SIGINT) is interrupt
        assert [signal.getsignal(each) for each in (USR1, USR2, TERM)] == [
            mine,
            signal.SIG_IGN,
            signal.SIG_DFL,
        ]
        assert signal.set_wakeup_fd(wakeup) == writer.fileno()
    finally:
        signal.set_wakeup_fd(wakeup)
        signal.signal(USR1, before[0])
        signal.signal(USR2, before[1])
        reader.close()
        writer.close()


def test_a_handler_in_c_is_put_back(tmp_path: Path, heard: Heard) -> None:
    with (tmp_path / "stacks").open("w+") as stacks:
        faulthandler.register(USR1, file=stacks)
        try:
            with SignalListener((USR1,), heard.firsts.append, heard.seconds.append):
                os.kill(os.getpid(), USR1)
                until(lambda: heard.firsts)
            assert (tmp_path / "stacks").read_text() == ""
            os.kill(os.getpid(), USR1)
            assert "test_a_handler_in_c_is_put_back" in (tmp_path / "stacks").read_text()
        finally:
            faulthandler.unregister(USR1)


def test_who_takes_the_wakeup_descriptor_meanwhile_keeps_it_and_signals_are_heard_still(heard: Heard) -> None:
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    with reader, writer:
        with SignalListener((USR1,), heard.firsts.append, heard.seconds.append):
            signal.set_wakeup_fd(writer.fileno())
            os.kill(os.getpid(), USR1)
            until(lambda: heard.firsts)
        assert signal.set_wakeup_fd(-1) == writer.fileno()


def test_outside_the_main_thread_none_can_be_made(heard: Heard) -> None:
    errors: list[Exception] = []

    def make() -> None:
        try:
            SignalListener((USR1,), heard.firsts.append, heard.seconds.append)
        except ValueError as error:
            errors.append(error)

    thread = threading.Thread(target=make, name="a worker")
    thread.start()
    thread.join(10)
    assert "SIGUSR1: signals can be listened for in the main thread alone, and this is a worker" in str(
        errors[0]
    )
    assert signal.getsignal(USR1) is signal.SIG_DFL


def test_a_forked_child_ends_of_sigterm_lives_on_after_sigusr1_and_tells_its_parent_nothing(
    listener: SignalListener, heard: Heard
) -> None:
    ready, child_is_ready = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(child_is_ready, b"x")
            time.sleep(30)
        finally:
            os._exit(1)
    os.read(ready, 1)
    os.kill(child, USR1)
    time.sleep(0.1)
    assert os.waitpid(child, os.WNOHANG) == (0, 0), "it ended of SIGUSR1"
    os.kill(child, TERM)
    _, status = os.waitpid(child, 0)
    os.close(ready)
    os.close(child_is_ready)
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == TERM
    assert (heard.firsts, heard.seconds) == ([], [])
    os.kill(os.getpid(), USR1)
    until(lambda: heard.firsts)


def test_a_listener_that_is_closed_leaves_no_thread_and_may_be_closed_again(heard: Heard) -> None:
    listener = SignalListener((USR1,), heard.firsts.append, heard.seconds.append)
    listener.close()
    listener.close()
    assert "hpcpar signals" not in {thread.name for thread in threading.enumerate()}


def test_a_signal_that_comes_early_is_kept_for_whom_is_to_be_told(heard: Heard) -> None:
    with SignalListener((USR1, TERM)) as listener:
        os.kill(os.getpid(), TERM)
        until(lambda: listener.heard)
        listener.tell(heard.firsts.append, heard.seconds.append)
        os.kill(os.getpid(), USR1)  # the same still
        time.sleep(0.1)
        assert (heard.firsts, heard.seconds) == ([TERM], [])
        listener._same_within_s = 0.1
        os.kill(os.getpid(), USR1)
        until(lambda: heard.seconds)
    assert (heard.firsts, heard.seconds) == ([TERM], [USR1])
    assert signal.getsignal(TERM) is signal.SIG_DFL


@pytest.mark.parametrize("number", [USR1, TERM])
def test_a_process_that_is_done_may_ignore_what_comes_then(number: signal.Signals) -> None:
    program = (
        "import os, signal, sys\n"
        "from hpcpar.launch.signals import SignalListener\n"
        f"listener = SignalListener(({int(number)},))\n"
        "listener.close(ignore=True)\n"
        f"os.kill(os.getpid(), {int(number)})\n"
        "sys.exit(3)\n"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 3


def test_the_launcher_is_told_in_the_runs_directory_if_there_is_one(tmp_path: Path) -> None:
    tell_launcher({})
    tell_launcher({"HPCPAR_RUN_DIRECTORY": str(tmp_path / "gone")})
    assert not list(tmp_path.iterdir())
    tell_launcher({"HPCPAR_RUN_DIRECTORY": str(tmp_path)})
    assert (tmp_path / STOPS_ON_USR1).exists()
