"""Start a job and see it to its end: the work of `hpcpar run`.

The launcher's exit status is not believed alone: MPICH's mpiexec often says 0 after a rank has called
`os._exit(0)` and the others were killed. The sentinels leave word of every lost rank in a directory made
for this run.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

from hpcpar.launch import ray_task, redirect
from hpcpar.launch.allocation import has_several_hosts
from hpcpar.launch.launch_command import (
    NO_OPTIONS,
    LaunchOptions,
    Say,
    Which,
    cuda_aware,
    environ_for,
    prepare,
    require_script,
)
from hpcpar.launch.restart import Restarts
from hpcpar.launch.signals import START_AGAIN, STOPS_ON_USR1

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
SENTINEL_PATIENCE_S = 3.0

LOOK_S = 0.2
"""Longest time until an interrupt is heard that is no real signal: see `wait`."""

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
KILLED = (*ENDING, *(128 + number for number in ENDING), 1, 255)
"""Launchers' statuses for ranks that a signal has ended: its number, or 128 and more as a shell has it; Open
MPI 1; Hydra 255 where its own daemons went first."""


@dataclass(frozen=True, slots=True)
class StopSignal:
    """Signal by which somebody has ended the job, and the time when it came."""

    number: signal.Signals
    at: float


def run(
    n: int,
    argv: Sequence[str],
    options: LaunchOptions = NO_OPTIONS,
    *,
    restarts: int = 0,
    say: Say,
    environ: Mapping[str, str] = os.environ,
    which: Which = shutil.which,
) -> int:
    """Start n ranks of argv, wait for them, and return the job's exit status: 0 only if none was lost.

    restarts   times that a job that fails is started again, as `hpcpar.launch.restart` says
    """
    if n > 0 and ray_task.stays_here(options.hosts, environ):
        environ = ray_task.job_environ(n, environ)
    options = replace(options, variables={**cuda_aware(options, environ, say), **options.variables})
    is_here = len(options.hosts) <= 1 and not has_several_hosts(environ)
    if options.output_directory is not None and is_here:
        redirect.make_directory(options.output_directory)  # one sentence here, where else every rank says it
    if is_here and not options.words:  # which may name another directory
        require_script(argv)
    again = Restarts(restarts, say, is_here=is_here)
    while True:
        variables = {**options.variables, **again.variables}
        attempt = replace(options, variables=variables, appends=again.done > 0)
        status = _run_once(n, argv, attempt, again, say=say, environ=environ, which=which)
        if status is not None:
            return status


def _run_once(
    n: int,
    argv: Sequence[str],
    options: LaunchOptions,
    again: Restarts,
    *,
    say: Say,
    environ: Mapping[str, str],
    which: Which,
) -> int | None:
    """Run a job to its end; return its status, or None where it is to be started again."""
    with tempfile.TemporaryDirectory(prefix="hpcpar-run-", ignore_cleanup_errors=True) as name:
        directory = Path(name)
        command, prepared = prepare(n, argv, options, name, say=say, environ=environ, which=which)
        say(f"hpcpar run: {shlex.join(command)}")
        columns = shutil.get_terminal_size().columns if os.isatty(1) else None
        job_environ = environ_for(prepared, name, is_root=os.geteuid() == 0, terminal_columns=columns)
        process = subprocess.Popen(command, env=job_environ)
        with forwarding(process, directory) as ended_by:
            status = wait(process)
        status = status if status >= 0 else 128 - status
        await_sentinels(directory)
        launcher = os.path.basename(command[0])
        status = verdict(status, directory, launcher, say, ended_by[0] if ended_by else None)
        return None if again.again(status, directory, ended=bool(ended_by)) else status


def wait(process: subprocess.Popen[bytes]) -> int:
    """Wait for the launcher's end, and hear every signal meanwhile; return its status.

    `ray.cancel` and `_thread.interrupt_main` interrupt no system call: the main thread hears of it after one.
    So another thread waits in the long call, and this one wakes up every LOOK_S.
    """
    waiting = threading.Thread(target=process.wait, name="hpcpar run", daemon=True)
    waiting.start()
    while waiting.is_alive():
        waiting.join(LOOK_S)
    return process.wait()


def verdict(
    status: int, run_directory: Path, launcher: str, say: Say, ended_by: StopSignal | None = None
) -> int:
    """Return the job's exit status, given the launcher's and the sentinels' files in the run's directory.

    ended_by   a signal to us that was to end the job: ranks that are lost after it are no news
    """
    found = [*run_directory.glob("aborted-*"), *run_directory.glob("lost-*")]
    files = sorted(found, key=lambda path: path.stat().st_mtime_ns)
    for path in files:
        if ended_by is None or path.name.startswith("aborted-") or path.stat().st_mtime < ended_by.at:
            say(f"hpcpar run: {path.read_text('utf-8').strip()}")
    if ended_by is not None and status != START_AGAIN and (status or files):
        if status in (0, *KILLED):
            status = 128 + ended_by.number
        say(f"hpcpar run: {ended_by.number.name} ended the job, with status {status}")
        return status
    if files and status == 0:
        say(f"hpcpar run: {launcher} returned 0, but the job did not finish: the status is 1")
        return 1
    if status == START_AGAIN:
        say(f"hpcpar run: the job stopped as it was asked to, with status {status}: start it again")
    elif status:
        say(f"hpcpar run: the job failed with status {status}")
    return status


def await_sentinels(run_directory: Path, patience_s: float = SENTINEL_PATIENCE_S) -> None:
    """Wait until no sentinel can leave word any more: each holds a `watching-*` file as long as it lives."""
    deadline = time.monotonic() + patience_s
    while any(run_directory.glob("watching-*")) and time.monotonic() < deadline:
        time.sleep(0.02)


@contextmanager
def forwarding(process: subprocess.Popen[bytes], run_directory: Path) -> Iterator[list[StopSignal]]:
    """Hand INT, TERM and USR1 on to the launcher while it runs, and HUP as TERM: the terminal has gone.

    Yields the list of signals that were to end the job, which grows as they come.
    HUP stays ignored where it is already, as `nohup` has it.
    Ranks that stop in good order on SIGUSR1 get that in SIGTERM's place: srun and Open MPI's mpiexec do
    not pass SIGTERM on, but kill the ranks within 0.3 s.
    INT goes as TERM where this process blocks INT, as Ray's workers do: the launcher has inherited that.
    """
    ended_by: list[StopSignal] = []
    is_deaf = signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ())

    def forward(number: int, frame: FrameType | None) -> None:
        stops = number in (signal.SIGTERM, signal.SIGHUP) and (run_directory / STOPS_ON_USR1).exists()
        if number != signal.SIGUSR1 and not stops:
            ended_by.append(StopSignal(signal.Signals(number), time.time()))
        if number == signal.SIGINT and _terminal_interrupts_us():
            return  # the terminal has sent it to the launcher as well
        if number == signal.SIGHUP or (number == signal.SIGINT and is_deaf):
            number = signal.SIGTERM
        process.send_signal(signal.SIGUSR1 if stops else number)

    # Only the main thread is told of signals; a job started in another one is left to the launcher.
    is_told = threading.current_thread() is threading.main_thread()
    keeps_hangup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    ours = [each for each in FORWARDED if is_told and not (each == signal.SIGHUP and keeps_hangup)]
    before = {number: signal.signal(number, forward) for number in ours}
    try:
        yield ended_by
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _terminal_interrupts_us() -> bool:
    """Return whether Ctrl-C at a terminal reaches this process group, the launcher included."""
    try:
        return os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        return False
