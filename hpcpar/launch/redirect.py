"""Run a program with its output in files: `python -m hpcpar.launch.redirect [--append] DIRECTORY program …`.

Rank 3 of 12 writes DIRECTORY/rank.03/stdout and DIRECTORY/rank.03/stderr, whatever the launcher.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from hpcpar.errors import LaunchError
from hpcpar.launch.environment import detect


def rank_directory(directory: str, rank: int, size: int) -> Path:
    """Return the directory of a rank's output; the names sort by rank."""
    return Path(directory) / f"rank.{rank:0{len(str(size - 1))}d}"


def make_directory(directory: str | Path) -> None:
    try:
        Path(directory).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LaunchError(
            f"the directory {directory} cannot be made ({error.strerror}): name another with "
            "--output-filename"
        ) from error


def main(words: Sequence[str]) -> None:
    """Point standard output and error at this rank's files, then become the program."""
    appends = words[0] == "--append"
    directory, *program = words[appends:]
    info = detect()
    own = rank_directory(directory, info.rank, info.size)
    try:
        make_directory(own)
        files = [_opened(own / name, os.O_APPEND if appends else os.O_TRUNC) for name in ("stdout", "stderr")]
    except LaunchError as error:
        sys.exit(f"hpcpar run: rank {info.rank}: {error}")
    launchers = os.dup(sys.stderr.fileno())  # closed by the program's start
    for descriptor, file in enumerate(files, 1):
        os.dup2(file, descriptor)
        os.close(file)
    try:
        os.execvp(program[0], program)
    except OSError as error:
        os.dup2(launchers, sys.stderr.fileno())
        sys.exit(f"hpcpar run: rank {info.rank}: {program[0]} cannot be started ({error.strerror})")


def _opened(path: Path, how: int) -> int:
    try:
        return os.open(path, os.O_WRONLY | os.O_CREAT | how, 0o644)
    except OSError as error:
        raise LaunchError(
            f"{path} cannot be written ({error.strerror}): name another directory with --output-filename"
        ) from error


if __name__ == "__main__":
    main(sys.argv[1:])
