"""End the job when one rank fails: exception hooks, and an exit that waits for the other ranks.

Without them a rank that dies of an exception leaves the others waiting in their collective for
ever: the interpreter's exit calls MPI_Finalize, which waits for those who will never come.
"""

from __future__ import annotations

import atexit
import math
import os
import signal
import sys
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn

from hpcpar.comm.watch import Watch
from hpcpar.errors import HpcparError
from hpcpar.launch.sentinel import Guard
from hpcpar.launch.signals import START_AGAIN

if TYPE_CHECKING:
    from hpcpar.transport.mpi import MpiTransport

FAREWELL_POLL_S = 0.01

RELAY_S = 0.2
"""Time for the launcher to pass the traceback on, before MPI_Abort has it drop everything."""

EXIT_PATIENCE_S = 1.0
"""Time for all ranks to come to their end, too, after `sys.exit` with a status that says failure."""

STOPPED = (0, START_AGAIN, 128 + signal.SIGINT)
"""Statuses of ranks that have finished, or were asked to stop: others may still write a checkpoint."""

ABORT_LIMIT_S = 3.0
"""Limit after which a process ends by itself, should MPI_Abort hang while another thread is inside MPI."""


class FailureHooks:
    """Installed once per process by `hpcpar.init()`; a forked child is no rank, and is left alone.

    An uncaught exception, in any thread, prints its traceback under the rank's name, tells the
    node's sentinel why, and aborts the job with status 1 (130 after Ctrl-C). `sys.exit` with a status that
    says failure aborts it with that status, unless all ranks end soon.
    """

    def __init__(self, transport: MpiTransport, watch: Watch, guard: Guard) -> None:
        self._transport = transport
        self._watch = watch
        self._guard = guard
        self._pid = os.getpid()
        self._exit_status = 0

    def install(self) -> None:
        hooks = self

        class NotedExit(SystemExit):
            """Notes its status where it ends the program, and not where somebody catches it."""

            def __del__(self) -> None:
                if threading.current_thread() is threading.main_thread() and _is_outermost():
                    hooks._exit_status = _status_of(self.code)

            def __reduce__(self) -> tuple[type[SystemExit], tuple[object, ...]]:
                return SystemExit, self.args  # as what a process pool's worker sends

        def noted_exit(status: object = None, /) -> NoReturn:
            raise NotedExit(status) if status is not None else NotedExit

        sys.exit = noted_exit
        sys.excepthook = self._on_exception
        threading.excepthook = self._on_thread_exception
        atexit.register(self._on_exit)

    def _on_exception(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if os.getpid() != self._pid:
            sys.__excepthook__(kind, error, trace)
            return
        self._end_job(kind, error, trace)

    def _on_thread_exception(self, arguments: threading.ExceptHookArgs) -> None:
        if issubclass(arguments.exc_type, SystemExit) or os.getpid() != self._pid:
            threading.__excepthook__(arguments)
            return
        self._end_job(arguments.exc_type, arguments.exc_value, arguments.exc_traceback)

    def _end_job(
        self, kind: type[BaseException], error: BaseException | None, trace: TracebackType | None
    ) -> None:
        rank, size = self._transport.rank, self._transport.size
        lines = traceback.format_exception(kind, error, trace, limit=frames_shown(kind, trace))
        summary = traceback.format_exception_only(kind, error)[-1].strip()
        # torch.distributed's own hook calls the one before it with sys.stderr replaced, to print it later.
        stream = sys.__stderr__ or sys.stderr
        # One write, so that the lines of several ranks do not mix.
        text = f"hpcpar: rank {rank} of {size} (pid {os.getpid()}) failed and ends the job:\n{''.join(lines)}"
        with suppress(OSError, ValueError):  # closed, or nobody reads it: the job ends all the same
            stream.write(text)
            stream.flush()
        self._guard.aborting(summary)
        time.sleep(RELAY_S)
        self._transport.abort(130 if issubclass(kind, KeyboardInterrupt) else 1)

    def end_job(self, why: str, status: int) -> None:
        """End the whole job at once, without an exception, from any thread."""
        rank, size = self._transport.rank, self._transport.size
        with suppress(OSError):
            os.write(2, f"hpcpar: rank {rank} of {size} (pid {os.getpid()}) ends the job: {why}\n".encode())
        self._guard.aborting(why)
        last_resort = threading.Timer(ABORT_LIMIT_S, os._exit, (status,))
        last_resort.daemon = True
        last_resort.start()
        time.sleep(RELAY_S)
        self._transport.abort(status)

    def _on_exit(self) -> None:
        """At the end of the program: wait for the other ranks, and tell those who ask that we left.

        A rank that ends early is thereby found out by those who still wait for it (PeerLeftError),
        instead of all hanging in MPI_Finalize.
        """
        if os.getpid() != self._pid:
            return
        everybody_is_here = self._transport.farewell()
        give_up_at = math.inf if self._exit_status in STOPPED else time.monotonic() + EXIT_PATIENCE_S
        while not everybody_is_here.test():
            self._watch.leave()
            if time.monotonic() > give_up_at:
                why = f"it has left by sys.exit({self._exit_status}), and others have not come to their end"
                self.end_job(why, self._exit_status)
            time.sleep(FAREWELL_POLL_S)
        self._watch.settle()
        # All ranks are ending. Where their common status is not 0, a launcher that ends the job at the
        # first such one (srun --kill-on-bad-exit=1) sends SIGTERM to those that need a few milliseconds
        # more: it shall find them deaf, or the job's status would be that of the signal.
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self._guard.done()


def _is_outermost() -> bool:
    """Return whether the method that asks was called by the interpreter itself, below no other frame."""
    try:
        sys._getframe(2)
    except ValueError:
        return True
    return False


def frames_shown(kind: type[BaseException], trace: TracebackType | None) -> int | None:
    """Return how many frames of a traceback to show: up to the program's own call; None for all.

    Errors that hpcpar raises on purpose say what to do there; frames within hpcpar, and of torch where
    backward called it, help nobody. All are shown of `hpcpar train` and other commands.
    """
    if not issubclass(kind, HpcparError):
        return None
    inner = (str(Path(__file__).parents[1]), f"{os.sep}torch{os.sep}", "<frozen ")
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(trace)]
    of_program = [not any(part in name for part in inner) for name in files]
    if True not in of_program or any(f"{os.sep}click{os.sep}" in name for name in files):
        return None
    return len(files) - of_program[::-1].index(True)


def _status_of(code: object) -> int:
    """Return the exit status that the interpreter makes of a SystemExit's code."""
    if code is None:
        return 0
    return code & 0xFF if isinstance(code, int) else 1
