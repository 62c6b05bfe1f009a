"""Try on two ranks whether MPI exchanges device pointers: `python -m hpcpar.transport.gpu.probe FILE`.

A program of its own, started by `hpcpar.launch.cuda_aware` as a throw-away job, for an MPI that cannot
touches device memory with the CPU, and crashes. Rank 0 writes into FILE, a line at a time:

    start            about to try
    yes              tried, and every byte was right (or: no)
    cannot WHY       nothing could be tried
    segment PATH     memory that the ranks share by this name, which a crash leaves behind

A `start` without its answer was a crash or a hang. An alarm ends each rank by itself.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hpcpar.errors import HpcparError
from hpcpar.transport import mpi_library as mpi
from hpcpar.transport.buffers import octets_at
from hpcpar.transport.gpu.cuda_driver import CudaDriver, driver

# isort: split
# Only now: hpcpar.transport.mpi has seen to the libraries that this loads.
from mpi4py import MPI

LIMIT_S = 90
"""After it the kernel ends the rank, whatever it is doing."""

SIZES_NBYTES = (8, 1000, 65536, 4 << 20)
"""Message sizes below and above the eager limit of MPI libraries."""

Octets = NDArray[np.uint8]


class Memory:
    """Device memory that is written and read through pinned host memory."""

    def __init__(self, cuda: CudaDriver, nbytes: int) -> None:
        self._cuda = cuda
        self._stream = cuda.stream()
        self._pinned = cuda.alloc_pinned(nbytes)
        self._host: Octets = octets_at(self._pinned, nbytes)
        self.address = cuda.alloc(nbytes)

    def write(self, octets: Octets) -> None:
        self._host[: octets.size] = octets
        self._cuda.copy(self.address, self._pinned, octets.size, self._stream)
        self._cuda.synchronize(self._stream)

    def read(self, nbytes: int) -> Octets:
        self._host[:] = 0
        self._cuda.copy(self._pinned, self.address, nbytes, self._stream)
        self._cuda.synchronize(self._stream)
        octets: Octets = self._host[:nbytes].copy()
        return octets

    def view(self, nbytes: int) -> MPI.buffer:
        return MPI.buffer.fromaddress(self.address, nbytes)


class Probe:
    """One rank's half of the trials; `source` and `target` are its memory on the device."""

    def __init__(self, comm: MPI.Intracomm, cuda: CudaDriver) -> None:
        self.comm = comm
        self.rank = comm.Get_rank()
        self.peer = 1 - self.rank
        self.source = Memory(cuda, SIZES_NBYTES[-1])
        self.target = Memory(cuda, SIZES_NBYTES[-1])

    def fill(self, nbytes: int) -> Octets:
        """Write this rank's values into `source`, clear `target`, and return the other rank's values."""
        mine, others = (
            ((np.arange(nbytes) * 7 + 3 * rank + 1) % 251).astype(np.uint8) for rank in (self.rank, self.peer)
        )
        self.source.write(mine)
        self.target.write(np.zeros(nbytes, np.uint8))
        return others

    def exchange(self, nbytes: int) -> bool:
        """Exchange by single and by persistent requests, as the transport does."""
        others = self.fill(nbytes)
        send, receive = [self.source.view(nbytes), MPI.BYTE], [self.target.view(nbytes), MPI.BYTE]
        requests = [self.comm.Irecv(receive, self.peer, 1), self.comm.Isend(send, self.peer, 1)]
        MPI.Request.Waitall(requests)
        right = np.array_equal(self.target.read(nbytes), others)
        self.fill(nbytes)
        prepared = [self.comm.Recv_init(receive, self.peer, 2), self.comm.Send_init(send, self.peer, 2)]
        MPI.Prequest.Startall(prepared)
        MPI.Request.Waitall(prepared)
        for request in prepared:
            request.Free()
        return right and np.array_equal(self.target.read(nbytes), others)

    def try_out(self) -> bool:
        """Exchange every size; True if all came out right on both ranks."""
        right = [self.exchange(nbytes) for nbytes in SIZES_NBYTES]
        return bool(self.comm.allreduce(all(right), MPI.LAND))


def shared_segments() -> list[str]:
    """Files of /dev/shm that are mapped into this process."""
    lines = Path("/proc/self/maps").read_text(errors="replace").splitlines()
    return sorted({line.split(maxsplit=5)[5] for line in lines if " /dev/shm/" in line})


def main(words: Sequence[str]) -> None:
    (file,) = words
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(LIMIT_S)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash here is an answer, and not to be kept
    mpi.start()
    comm = MPI.COMM_WORLD
    report = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def say(line: str) -> None:
        if comm.Get_rank() == 0:
            os.write(report, f"{line}\n".encode())

    for path in shared_segments():
        say(f"segment {path}")
    if comm.Get_size() != 2:
        say(f"cannot mpiexec started worlds of {comm.Get_size()}: it is not this library's")
        return
    problem = ""
    try:
        cuda = driver()
        cuda.use(comm.Get_rank() % cuda.device_count())
        probe = Probe(comm, cuda)
    except HpcparError as error:
        problem = str(error)
    problems = [text for text in comm.allgather(problem) if text]
    if problems:
        say(f"cannot {' '.join(problems[0].split())}")
        return
    say("start")
    say("yes" if probe.try_out() else "no")


if __name__ == "__main__":
    main(sys.argv[1:])
