"""File and line of a rank that does not answer, asked by a rank of its node.

    asking rank                        rank that computes, sleeps, or holds the interpreter
    signal ──────────────────────────> faulthandler's handler (C) writes the stack to a file in memory
    read /proc/PID/fd/NUMBER  <────────┘

No Python code runs in the rank that is asked, so that it works in a call of C, too. A process that is stopped
does not answer, nor does one of another node.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import re
import signal
import socket
import sys
import sysconfig
import time
from types import FrameType
from typing import NamedTuple, TextIO

import hpcpar

ANSWER_WITHIN_S = 2.0
QUIET_LOOKS = 5

_SIGNAL = signal.SIGRTMIN + 9 if sys.platform == "linux" else 0
_NAME = "hpcpar-whereabouts"
_LINE = re.compile(r'File "(.+)", line (\d+) in (\S+)')
_FOREIGN = tuple(
    os.path.join(path, "")
    for path in (*hpcpar.__path__, *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")))
)
"""Directories of files that are not the user's."""

_descriptor = -1
"""Of this process's file in memory; it belongs to the process, however often it calls init()."""


class Place(NamedTuple):
    """Process of a rank, and the descriptor to which its stack is written; -1: it cannot be asked."""

    host: str
    pid: int
    descriptor: int = -1

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.host}"


def announce() -> Place:
    """Let the other processes of this user on this node ask for the stack of this one."""
    global _descriptor
    if _descriptor < 0 and sys.platform == "linux" and _is_free():
        with contextlib.suppress(OSError, RuntimeError, ValueError):
            descriptor = os.memfd_create(_NAME)
            faulthandler.register(_SIGNAL, descriptor, all_threads=False)
            _descriptor = descriptor
    return Place(socket.gethostname(), os.getpid(), _descriptor)


def _is_free() -> bool:
    return signal.getsignal(_SIGNAL) in (signal.SIG_DFL, None)


def here() -> str:
    """File and line of the caller of hpcpar in this thread; "" where there is none."""
    lines = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        lines.append((frame.f_code.co_filename, str(frame.f_lineno), frame.f_code.co_name))
        frame = frame.f_back
    return _users(lines)


def locate(place: Place) -> str | None:
    """File and line of another process of this node; None where it does not answer."""
    if place.descriptor < 0 or place.host != socket.gethostname():
        return None
    path = f"/proc/{place.pid}/fd/{place.descriptor}"
    try:
        if _NAME not in os.readlink(path) or not _can_answer(place.pid):
            return None  # stopped, or another process has its number by now
        with open(path, encoding="utf-8", errors="replace") as file:
            file.seek(0, os.SEEK_END)
            _signal_main_thread(place.pid)
            return _users(_LINE.findall(_written(file))) or None
    except OSError:
        return None


def _signal_main_thread(pid: int) -> None:
    """Signal the thread that runs the program: one of an MPI library, which has no stack, may take a kill."""
    tgkill = getattr(ctypes.CDLL(None, use_errno=True), "tgkill", None)
    if tgkill is None:  # glibc before 2.30
        os.kill(pid, _SIGNAL)
    elif tgkill(pid, pid, int(_SIGNAL)):
        raise OSError(ctypes.get_errno(), f"tgkill of {pid}")


def _written(file: TextIO) -> str:
    """All that is written within the time limit, until there is a line and nothing more comes."""
    text, quiet, deadline_s = "", 0, time.monotonic() + ANSWER_WITHIN_S
    # It is written in pieces, between which the process may have to wait for a core.
    while time.monotonic() < deadline_s and (quiet < QUIET_LOOKS or not _LINE.search(text)):
        time.sleep(0.02)
        more = file.read()
        quiet = 0 if more else quiet + 1
        text += more
    return text


def _can_answer(pid: int) -> bool:
    """Return whether a process has a handler for the signal, and is not stopped."""
    with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as file:
        facts = dict(line.split(maxsplit=1) for line in file if line.startswith(("State:", "SigCgt:")))
    return facts["State:"][0] not in "Tt" and bool(int(facts["SigCgt:"], 16) >> (_SIGNAL - 1) & 1)


def _users(lines: list[tuple[str, str, str]]) -> str:
    """Format the innermost line of a file of the user's, or else the innermost one."""
    own = [line for line in lines if not line[0].startswith((*_FOREIGN, "<"))]
    found = next(iter(own or lines), None)
    return "" if found is None else "{}:{} in {}".format(*found)
