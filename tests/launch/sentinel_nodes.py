"""Ranks of a node as small processes that do as they are told on standard input."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from hpcpar.launch.supervise import await_sentinels
from tests.command import until

REPOSITORY = Path(__file__).parents[2]

FOR_MPIEXEC = {
    "PYTHONPATH": str(REPOSITORY),
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}
"""Open MPI's, without `hpcpar run`, refuses root, and more ranks than cores."""


def has_ended(pid: int) -> bool:
    """Whoever has to reap it may not have done so."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


@contextmanager
def paused(pid: int) -> Iterator[None]:
    """Stop a process meanwhile: it sees all at once, afterwards."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


RANK = """
import os, signal, sys, time
from hpcpar.launch.sentinel import Guard, start
from tests.command import until

rank, size, address, options = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], eval(sys.argv[4])
if not address:
    address = start(local_size=size, **options)
    print(address, flush=True)
for line in sys.stdin:
    match line.split():
        case ["join"]:
            guard = Guard.connect(address, rank=rank)
            print(guard.connected, flush=True)
        case ["done"]:
            guard.done()
        case ["abort"]:
            guard.aborting("ValueError: planted\\nsecond line")
        case ["ignore"]:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        case ["fork"]:
            child = os.fork()
            if child == 0:
                os.close(1)
                time.sleep(60)
                os._exit(0)
            print(child, flush=True)
        case ["exit", status]:
            os._exit(int(status))
    print("ok", flush=True)
"""


class Node:
    """Stand-ins for the ranks of one node, their sentinel's standard error and its directory.

    options   for `sentinel.start`
    """

    def __init__(self, directory: Path, size: int, *, host: str = "node7", **options: object) -> None:
        self.directory = directory / "run"
        self.directory.mkdir(parents=True)
        self.error = (directory / "stderr").open("w+")
        self.size = size
        self.host = host
        self.options = {"run_directory": str(self.directory), "host": host, **options}
        self.ranks = [self.spawn(0, "")]
        self.address = self.answer(0)
        self.ranks += [self.spawn(rank, self.address) for rank in range(1, size)]

    def spawn(self, rank: int, address: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-S", "-c", RANK, str(rank), str(self.size), address, repr(self.options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.error,
            text=True,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        )

    def tell(self, rank: int, order: str) -> None:
        stdin = self.ranks[rank].stdin
        assert stdin is not None
        stdin.write(order + "\n")
        stdin.flush()

    def answer(self, rank: int) -> str:
        stdout = self.ranks[rank].stdout
        assert stdout is not None
        return stdout.readline().strip()

    def do(self, rank: int, order: str) -> None:
        self.tell(rank, order)
        assert self.answer(rank) == "ok"

    def finish(self) -> None:
        """Have all ranks end as they should."""
        for rank in range(self.size):
            self.do(rank, "done")
            self.tell(rank, "exit 0")

    def join(self, *ranks: int) -> None:
        for rank in ranks or range(self.size):
            self.tell(rank, "join")
        for rank in ranks or range(self.size):
            assert (self.answer(rank), self.answer(rank)) == ("True", "ok")

    def kill(self, rank: int) -> None:
        self.ranks[rank].kill()
        self.ranks[rank].wait(timeout=10)

    @property
    def sentinel_pid(self) -> int:
        until(lambda: [*self.directory.glob(f"watching-{self.host}-*")], "the sentinel watches")
        (file,) = self.directory.glob(f"watching-{self.host}-*")
        return int(file.name.rpartition("-")[2])

    def lines(self) -> list[str]:
        """Return the lines of the sentinel, once it has gone."""
        await_sentinels(self.directory, patience_s=15)
        assert not any(self.directory.glob("watching-*")), "the sentinel is still there"
        self.error.seek(0)
        return self.error.read().splitlines()

    def words(self) -> list[str]:
        return sorted(path.name for path in self.directory.iterdir())

    def close(self) -> None:
        for rank in self.ranks:
            if rank.poll() is None:
                rank.kill()
            rank.communicate(timeout=10)
        self.error.close()
