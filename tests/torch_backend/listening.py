"""Run a program, and say how many listening TCP sockets this process has when its process group ends.

listening.py script.py [argument ...]      before its destroy_process_group()
listening.py                               after hpcpar.init() alone: those that MPI opens
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from typing import Any

LISTEN = "0A"
"""The state of a socket, as /proc/net/tcp has it."""


def listening() -> int:
    """Count this process's own."""
    own = {os.readlink(each) for each in Path("/proc/self/fd").iterdir() if each.is_symlink()}
    lines = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path("/proc/self/net", table).read_text().splitlines()[1:]
    ]
    return sum(words[3] == LISTEN and f"socket:[{words[9]}]" in own for words in lines)


def say(rank: int) -> None:
    print(f"rank {rank} listens on {listening()} sockets\n", end="", flush=True)


def main() -> None:
    if not sys.argv[1:]:
        import hpcpar

        say(hpcpar.init().rank)
        return
    from torch import distributed

    end = distributed.destroy_process_group

    def say_and_end(group: Any = None) -> None:
        say(distributed.get_rank())
        end(group)

    distributed.destroy_process_group = say_and_end
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
