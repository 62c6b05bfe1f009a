"""A /proc of our own making: who started whom, from which terminal, with which environment."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def add_process(
    proc: Path,
    pid: int | str,
    name: str = "python",
    *,
    parent: int = 1,
    group: int = 1,
    session: int = 1,
    terminal: int = 0,
    title: str = "",
    environ: Mapping[str, str] | None = None,
) -> None:
    """Add one process; "self" is the one that looks."""
    directory = proc / str(pid)
    directory.mkdir(parents=True, exist_ok=True)
    number = 99 if pid == "self" else pid
    (directory / "stat").write_text(
        f"{number} ({name}) S {parent} {group} {session} {terminal} -1 4194560 0\n"
    )
    (directory / "cmdline").write_bytes((title or name).replace(" ", "\0").encode() + b"\0")
    lines = (f"{name}={value}\0" for name, value in (environ or {}).items())
    (directory / "environ").write_text("".join(lines))
