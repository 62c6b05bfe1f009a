"""Try on two ranks what MPI does with device pointers: `python -m hpcpar.transport.gpu.probe FILE names…`.

A program of its own, started by `hpcpar.launch.cuda_aware` as a throw-away job, for an MPI that cannot
touches device memory with the CPU, and crashes. Rank 0 writes into FILE, a line at a time:

    start point_to_point      about to try
    yes point_to_point        tried, and every byte was right (or: no point_to_point)
    cannot WHY                nothing could be tried
    segment PATH              memory that the ranks share by this name, which a crash leaves behind

A `start` without its answer was a crash or a hang. An alarm ends each rank by itself.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hpcpar.errors import HpcparError
from hpcpar.transport import mpi
from hpcpar.transport.gpu.runtime import CudaDriver, driver

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
        self._host: Octets = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(self._pinned))
        self.address = cuda.alloc(nbytes)

    def write(self, octets: Octets) -> None:
        self._host[: octets.size] = octets
        self._cuda.copy(self.address, self._pinned, octets.size, self._stream)
        self._cuda.synchronize(self._stream)

    def read(self, nbytes: int) -> Octets:
        self._host[:] = 0
        self._cuda.copy(self._pinned, self.address, nbytes, self._stream)
        self._cuda.synchronize(self._stream)
        return self._host[:nbytes].copy()

    def view(self, nbytes: int) -> MPI.buffer:
        return MPI.buffer.fromaddress(self.address, nbytes)


class Probe:
    """One rank's half of the trials; `source` and `target` are its memory on the device."""

    def __init__(self, comm: MPI.Intracomm, cuda: CudaDriver) -> None:
        self.comm = comm
        self.rank = comm.Get_rank()
        self.peer = 1 - self.rank
        self.source = Memory(cuda, SIZES_NBYTES[-1])
        self.target = Memory(cuda, 2 * SIZES_NBYTES[-1])

    def fill(self, nbytes: int) -> tuple[Octets, Octets]:
        """This rank's values, now in `source`, and the other's; `target` is cleared."""
        mine, others = (
            ((np.arange(nbytes) * 7 + 3 * rank + 1) % 251).astype(np.uint8) for rank in (self.rank, self.peer)
        )
        self.source.write(mine)
        self.target.write(np.zeros(2 * nbytes, np.uint8))
        return mine, others

    def point_to_point(self, nbytes: int) -> bool:
        """Exchange by single and by persistent requests, as the transport does."""
        _, others = self.fill(nbytes)
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

    def collectives(self, nbytes: int) -> bool:
        """Try the collectives that only move bytes."""
        mine, others = self.fill(nbytes)
        both = np.concatenate([mine, others] if self.rank == 0 else [others, mine])
        self.comm.Ibcast([self.source.view(nbytes), MPI.BYTE], 0).Wait()
        right = np.array_equal(self.source.read(nbytes), both[:nbytes])
        self.fill(nbytes)
        whole = self.target.view(2 * nbytes)
        self.comm.Iallgather([self.source.view(nbytes), MPI.BYTE], [whole, nbytes, MPI.BYTE]).Wait()
        right = right and np.array_equal(self.target.read(2 * nbytes), both)
        half = nbytes // 2
        self.fill(nbytes)
        pieces = [self.source.view(nbytes), half, MPI.BYTE], [self.target.view(nbytes), half, MPI.BYTE]
        self.comm.Ialltoall(*pieces).Wait()
        dealt = [values[self.rank * half :][:half] for values in (both[:nbytes], both[nbytes:])]
        return right and np.array_equal(self.target.read(2 * half), np.concatenate(dealt))

    def reductions(self, nbytes: int) -> bool:
        """Sums of integers, where they have to be exact."""
        mine, others = self.fill(nbytes)
        count = nbytes // 4
        total = mine.view(np.int32) + others.view(np.int32)
        send = [self.source.view(nbytes), count, MPI.INT32_T]
        self.comm.Iallreduce(send, [self.target.view(nbytes), count, MPI.INT32_T]).Wait()
        right = np.array_equal(self.target.read(nbytes).view(np.int32), total)
        self.fill(nbytes)
        half = count // 2
        self.comm.Ireduce_scatter_block(
            [self.source.view(8 * half), half, MPI.INT32_T],
            [self.target.view(4 * half), half, MPI.INT32_T],
        ).Wait()
        own = total[self.rank * half :][:half]
        return right and np.array_equal(self.target.read(4 * half).view(np.int32), own)

    def derived_types(self, nbytes: int) -> bool:
        """Every second 4 bytes; those between stay as they are."""
        _, others = self.fill(nbytes)
        count = nbytes // 8
        strided = MPI.INT32_T.Create_vector(count, 1, 2).Commit()
        requests = [
            self.comm.Irecv([self.target.view(nbytes), 1, strided], self.peer, 3),
            self.comm.Isend([self.source.view(nbytes), 1, strided], self.peer, 3),
        ]
        MPI.Request.Waitall(requests)
        strided.Free()
        expected = others[: 8 * count].reshape(count, 8).copy()
        expected[:, 4:] = 0
        return np.array_equal(self.target.read(8 * count), expected.ravel())

    def try_out(self, name: str) -> bool:
        """True if all sizes came out right on both ranks."""
        trial: Callable[[int], bool] = getattr(self, name)
        right = True
        for nbytes in SIZES_NBYTES:
            right = trial(nbytes) and right
        return bool(self.comm.allreduce(right, MPI.LAND))


def shared_segments() -> list[str]:
    """Files of /dev/shm that are mapped into this process."""
    lines = Path("/proc/self/maps").read_text(errors="replace").splitlines()
    return sorted({line.split(maxsplit=5)[5] for line in lines if " /dev/shm/" in line})


def main(words: Sequence[str]) -> None:
    file, *names = words
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
    for name in names:
        say(f"start {name}")
        say(f"{'yes' if probe.try_out(name) else 'no'} {name}")


if __name__ == "__main__":
    main(sys.argv[1:])
