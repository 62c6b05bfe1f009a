"""Signals noticed at once, also while the main thread is inside a long call in C.

Python runs a signal's handler in the main thread between two of its instructions: a rank that is blocked
in a collective would hear of Slurm's warning only afterwards. But at the signal's arrival the interpreter
writes the signal's number to a wake-up descriptor (`signal.set_wakeup_fd`), which a thread reads:

    kernel ── SIGUSR1 ──> main thread, in C: writes 10 ──> socket ──> thread: first(10)

What is heard within `SAME_WITHIN_S` of the first one is the same one: Slurm signals every process of a
step, and srun and `hpcpar run`, which may be among them, hand it on once more.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGUSR1, signal.SIGTERM)
"""By which Slurm, and people, ask a job to stop."""

SAME_WITHIN_S = 5.0

START_AGAIN = 75
"""Exit status of a job that stopped because it was asked to: EX_TEMPFAIL of sysexits.h, "try again"."""

Act = Callable[[signal.Signals], None]

_SIGACTION_NBYTES = 1024
"""More than any system's `struct sigaction` has."""


def _wait_to_be_told(number: signal.Signals) -> None:
    """Do nothing: the listener keeps the signal for `tell`."""


def _end_process(number: signal.Signals) -> None:
    os._exit(128 + number)


class SignalListener:
    """Reports the first of some signals, and the next one that is not the same still.

    signals   that are listened for; all others, SIGINT among them, stay as they are
    first     called in the listener's thread with the first of them
    second    called there with each that comes later than `same_within_s` after the first; ends the process
              where nobody has said otherwise

    Without `first` and `second` it keeps a signal for whom `tell` names later: for while Python's packages
    and MPI start, which may take minutes on many nodes.

    Only the main thread may make one, and close it. What handled these signals before is put aside
    meanwhile, not called; a wake-up descriptor that was set before (asyncio's) still gets every number.
    In a forked child, such as a data loader's worker, nothing is listened for: it handles signals as
    before, but SIGUSR1 and SIGUSR2, which Slurm sends to it as well, do not end it.
    errors   ValueError outside the main thread
    """

    def __init__(
        self,
        signals: Sequence[signal.Signals],
        first: Act = _wait_to_be_told,
        second: Act = _end_process,
        *,
        same_within_s: float = SAME_WITHIN_S,
    ) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise ValueError(
                f"{', '.join(each.name for each in signals)}: signals can be listened for in the main thread "
                f"alone, and this is {threading.current_thread().name}"
            )
        self._first, self._second = first, second
        self._same_within_s = same_within_s
        self._lock = threading.Lock()
        self.heard: signal.Signals | None = None
        self._heard_s = 0.0
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._before = {number: _Disposition(number) for number in signals}
        self._pid = os.getpid()
        self._wakeup_before = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for number in signals:
            signal.signal(number, self._handle)
            # System calls of C libraries go on after it, as if nothing had happened.
            signal.siginterrupt(number, False)
        self._thread = threading.Thread(target=self._listen, name="hpcpar signals", daemon=True)
        self._thread.start()
        _close_in_children(self)

    def tell(self, first: Act = _wait_to_be_told, second: Act = _end_process) -> None:
        """Call these from now on; `first` at once with the signal that was heard already, if one was."""
        with self._lock:
            self._first, self._second = first, second
            if self.heard is not None:
                first(self.heard)

    def close(self, *, ignore: bool = False) -> None:
        """Signals are handled as before, or ignored from now on; the thread has ended when this returns."""
        if self._reader.fileno() < 0 or os.getpid() != self._pid:
            return
        self._restore(ignore)
        self._writer.close()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self._reader.close()

    def __enter__(self) -> SignalListener:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _restore(self, ignore: bool = False) -> None:
        # Whoever has set another descriptor since then keeps it.
        current = signal.set_wakeup_fd(-1)
        wanted = self._wakeup_before if current == self._writer.fileno() else current
        with suppress(OSError, ValueError):  # its owner has closed it without a word
            signal.set_wakeup_fd(wanted, warn_on_full_buffer=False)
        for number, disposition in self._before.items():
            if ignore:
                signal.signal(number, signal.SIG_IGN)
            else:
                disposition.restore()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Handle the signal in the main thread, for a wake-up descriptor that is another's now."""
        if self.heard is None:
            with suppress(OSError):
                self._writer.send(bytes([number]))

    def _listen(self) -> None:
        while numbers := self._reader.recv(64):
            for number in numbers:
                if self._wakeup_before >= 0:
                    with suppress(OSError):
                        os.write(self._wakeup_before, bytes([number]))
                if number in self._before:
                    self._hear(signal.Signals(number))

    def _hear(self, number: signal.Signals) -> None:
        now_s = time.monotonic()
        with self._lock:
            if self.heard is None:
                self.heard, self._heard_s = number, now_s
                self._first(number)
            elif now_s - self._heard_s > self._same_within_s:
                self._second(number)

    def _let_go(self) -> None:
        """In a forked child, which has copies of the descriptors and no thread."""
        self._restore()
        for number in {signal.SIGUSR1, signal.SIGUSR2} & self._before.keys():
            if signal.getsignal(number) == signal.SIG_DFL:
                signal.signal(number, signal.SIG_IGN)
        self._writer.close()
        self._reader.close()


class _Disposition:
    def __init__(self, number: signal.Signals) -> None:
        self._number = number
        self._handler: Any = signal.getsignal(number)
        self._action = ctypes.create_string_buffer(_SIGACTION_NBYTES)
        self._libc = ctypes.CDLL(None)
        self._libc.sigaction(int(number), None, self._action)

    def restore(self) -> None:
        signal.signal(self._number, signal.SIG_DFL if self._handler is None else self._handler)
        # A handler in C (faulthandler's, an MPI library's), and its flags, Python cannot put back.
        self._libc.sigaction(int(self._number), self._action, None)


def _close_in_children(listener: SignalListener) -> None:
    reference = weakref.ref(listener)
    pid = os.getpid()

    def let_go() -> None:
        found = reference()
        if found is not None and found._pid == pid and found._reader.fileno() >= 0:
            found._let_go()

    os.register_at_fork(after_in_child=let_go)


STOPS_ON_USR1 = "stops-on-SIGUSR1"
"""A file in the run's directory, by which `hpcpar run` knows what its ranks make of SIGUSR1."""


def tell_launcher(environ: Mapping[str, str] = os.environ) -> None:
    """Let `hpcpar run` know, if it started us here, that SIGUSR1 asks these ranks to stop in good order."""
    directory = environ.get("HPCPAR_RUN_DIRECTORY", "")
    if directory and os.path.isdir(directory):
        with suppress(OSError):  # it then hands SIGTERM on as it is
            Path(directory, STOPS_ON_USR1).touch()
