"""Processes as /proc shows them: who started this one, and from which kind of shell.

Variables can be lost (`env -i`, containers with a clean environment) or stale; who descends from whom cannot.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class Process:
    """One process; `terminal` is 0 where it has no controlling terminal, `title` its command line."""

    pid: int
    name: str
    state: str
    parent: int
    group: int
    session: int
    terminal: int
    title: str


def process(pid: int | str, proc: Path = PROC) -> Process | None:
    """Read one process ("self" is this one); None where it has gone, or the system does not tell."""
    try:
        # pid (name, which may hold anything) state parent group session terminal …
        head, _, tail = (proc / str(pid) / "stat").read_text(errors="replace").rpartition(")")
        number, _, name = head.partition(" (")
        state, *rest = tail.split()[:5]
        parent, group, session, terminal = map(int, rest)
        title = (
            (proc / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        )
        return Process(int(number), name, state, parent, group, session, terminal, title)
    except (OSError, ValueError):
        return None


def ancestors(proc: Path = PROC) -> Iterator[Process]:
    """Yield this process's parent, that one's parent, and so on, as far as they are visible."""
    here = process("self", proc)
    while here is not None and here.parent > 0:
        here = process(here.parent, proc)
        if here is not None:
            yield here


def ask(
    command: Sequence[str], limit_s: float, environ: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str] | None:
    """Run a command for what it prints; None where it cannot be started or takes longer."""
    environ = None if environ is None else dict(environ)
    with suppress(OSError, subprocess.TimeoutExpired):
        return subprocess.run(
            command, capture_output=True, text=True, timeout=limit_s, check=False, env=environ
        )
    return None


def every_process(proc: Path = PROC) -> Iterator[Process]:
    """Yield the visible processes that have not ended."""
    for directory in proc.glob("[0-9]*"):
        found = process(directory.name, proc)
        if found is not None and found.state not in "ZX":
            yield found
