"""Run a program with its output in files: `python -m hpcpar.launch.redirect DIRECTORY program …`.

Rank 3 of 12 writes DIRECTORY/rank.03/stdout and DIRECTORY/rank.03/stderr, whatever the launcher.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from hpcpar.launch.environment import detect


def rank_directory(directory: str, rank: int, size: int) -> Path:
    """Where a rank's output goes; the names sort by rank."""
    return Path(directory) / f"rank.{rank:0{len(str(size - 1))}d}"


def main(words: Sequence[str]) -> None:
    """Point standard output and error at this rank's files, then become the program."""
    directory, *program = words
    info = detect()
    own = rank_directory(directory, info.rank, info.size)
    own.mkdir(parents=True, exist_ok=True)
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        file = os.open(own / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(file, descriptor)
        os.close(file)
    os.execvp(program[0], program)


if __name__ == "__main__":
    main(sys.argv[1:])
