"""Ways in which ranks reach each other's device memory: found out together, once.

pull     ranks of one node of which each can open the other's memory (CUDA IPC), as a trial has shown
mpi      the rest, where MPI takes device pointers, as a probe or the user says
staged   the rest, through pinned host memory
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from functools import cache
from typing import TYPE_CHECKING, Literal

from hpcpar.errors import CudaError, HpcparError
from hpcpar.launch.binding import gpu_for, gpu_sharing_warning
from hpcpar.transport.buffers import octets_at
from hpcpar.transport.gpu import cuda_driver
from hpcpar.transport.gpu import kernels as gpu_kernels
from hpcpar.transport.gpu.cuda_driver import CudaDriver
from hpcpar.transport.gpu.device_buffer import DeviceBuffer
from hpcpar.transport.gpu.ipc import EventExports, EventImports, Exports, Imports
from hpcpar.transport.gpu.queue import Queue, queue_of_thread, queues_of_thread
from hpcpar.transport.gpu.staged_messages import PinnedPool

if TYPE_CHECKING:
    from hpcpar.comm.communicator import Communicator

log = logging.getLogger("hpcpar")

Reach = Literal["pull", "mpi", "staged"]

QUEUES = 4
"""Calls and messages take turns among so many: one that waits for its input does not hold up the next."""

TRIAL_NBYTES = 4096


class Devices:
    """A rank's access to GPUs, and its ways to the other ranks' memory.

    ordinal   the GPU of this rank's place on its node
    reaches   the way to each world rank
    """

    def __init__(self, cuda: CudaDriver, ordinal: int, reaches: Sequence[Reach]) -> None:
        self.cuda = cuda
        self.ordinal = ordinal
        self.reaches = tuple(reaches)
        self.exports, self.imports = Exports(cuda), _imports(cuda)
        self.event_exports, self.event_imports = EventExports(cuda), _event_imports(cuda)
        self.pinned = PinnedPool(cuda)
        self._used: set[Queue] = set()
        self._turns = itertools.count()

    def reach(self, world_rank: int) -> Reach:
        """Way of messages between this rank and another one; the same as seen from there."""
        return self.reaches[world_rank]

    def queue(self, ordinal: int | None) -> Queue:
        """Queue of the next call, or message, on a device; None: for an array that lies on none."""
        if ordinal is None:
            ordinal = self.ordinal
        self.cuda.use(ordinal)
        for queue in queues_of_thread().values():
            queue.look()  # arrays of earlier calls are kept till then
        turn = next(self._turns) % QUEUES
        queue = queue_of_thread(turn, self.cuda, ordinal, gpu_kernels.kernels)
        self._used.add(queue)
        return queue

    def open(self, descriptor: bytes) -> int:
        """The address here of what a peer shows; to be released."""
        # Those of other threads, too: autograd has its own, and makes calls while the one that waits for it
        # makes none.
        return _open_shown(self.imports, descriptor, self._used.union(queues_of_thread().values()))


@cache
def _imports(cuda: CudaDriver) -> Imports:
    """Memory opened by this process: one registry, since the driver maps an owner once."""
    return Imports(cuda)


@cache
def _event_imports(cuda: CudaDriver) -> EventImports:
    return EventImports(cuda)


def _open_shown(imports: Imports, descriptor: bytes, queues: Collection[Queue]) -> int:
    """Open what a peer shows; what these queues have done with, but not released yet, must not hinder it."""
    if not imports.is_open(descriptor):
        for queue in queues:
            queue.look()
    try:
        return imports.open(descriptor)
    except CudaError:
        # Perhaps its owner has other memory now where something lay that is still open here.
        for queue in queues:
            queue.synchronize()
            queue.look()
        return imports.open(descriptor)


def lead_caller(buffer: DeviceBuffer) -> None:
    """Make the caller's current stream wait for the buffer's queue."""
    buffer.queue.use()
    buffer.queue.lead(buffer.stream())


def open_devices(comm: Communicator, asked: str, mpi_takes_pointers: Callable[[], bool]) -> Devices | None:
    """Find out how ranks reach each other. Collective; None where not every rank has a GPU to use.

    asked                auto; or one way alone, for trying out: staged, mpi, pull
    mpi_takes_pointers   asked on rank 0, and only if it matters
    errors               CudaError on every rank when what is asked for cannot be had
    """
    quiet = comm.unchecked("devices")
    here = [rank for rank, node in enumerate(comm.nodes) if node == comm.nodes[comm.rank]]
    cuda, ordinal, problem, identity = _open(here.index(comm.rank), len(here))
    found = quiet.allgather_object((problem, identity))
    problems = [problem for problem, _ in found]
    if any(problems):
        _tell(comm, problems, asked)
        return None
    assert cuda is not None, "there is no problem on any rank"
    _warn_of_sharing(comm, [identity for _, identity in found])
    can_pull = asked in ("auto", "pull") and _try_pulling(comm, cuda, here)
    pulled = quiet.allgather_object(can_pull)
    is_wide = len(here) < comm.size
    rest: Reach = "staged"
    if asked in ("auto", "mpi") and any(quiet.allgather_object(is_wide or not can_pull)):
        taken = asked == "mpi"
        with quiet.together("finding out what MPI does with GPUs' memory"):
            if comm.rank == 0 and not taken:
                taken = mpi_takes_pointers()
        rest = "mpi" if quiet.broadcast_object(taken) else "staged"
    if asked == "pull" and not all(pulled):
        raise CudaError(
            "HPCPAR_DEVICES=pull, but not all ranks of a node can open each other's device memory (CUDA "
            "IPC): use HPCPAR_DEVICES=auto, or give them one container with common PID and IPC namespaces"
        )
    nodes, own = comm.nodes, comm.nodes[comm.rank]
    reaches: list[Reach] = [
        "pull" if nodes[rank] == own and all(pulled[peer] for peer in here) else rest
        for rank in range(comm.size)
    ]
    return Devices(cuda, ordinal, reaches)


def _open(local_rank: int, local_size: int) -> tuple[CudaDriver | None, int, str, str]:
    """The driver, with this rank's GPU in use, and its number; what stands against it; what tells it from
    others."""
    try:
        cuda = cuda_driver.driver()
        ordinal = gpu_for(local_rank, cuda.device_count(), local_size)
        if ordinal is None:
            return None, 0, "no GPU is visible", ""
        cuda.use(ordinal)
        gpu_kernels.kernels(ordinal)
        return cuda, ordinal, "", cuda.identity(ordinal)
    except HpcparError as error:
        return None, 0, str(error), ""


def _warn_of_sharing(comm: Communicator, identities: Sequence[str]) -> None:
    """On rank 0, of the first node on which ranks share a GPU."""
    if comm.rank:
        return
    for node in dict.fromkeys(comm.nodes):
        taken = [identity for identity, its in zip(identities, comm.nodes, strict=True) if its == node]
        warning = gpu_sharing_warning(len(set(taken)), len(taken), taken)
        if warning is not None:
            log.warning("node %d: %s", node, warning)
            return


def _tell(comm: Communicator, problems: Sequence[str], asked: str) -> None:
    """Some ranks cannot use a GPU, so none moves device memory by itself."""
    found = [(rank, problem) for rank, problem in enumerate(problems) if problem]
    text = f"rank {found[0][0]}: {found[0][1]}"
    if asked != "auto":
        raise CudaError(f"HPCPAR_DEVICES={asked}, but {text}")
    if comm.rank == 0:
        log.warning(
            "arrays on GPUs are copied to host memory for every collective: %s (%d of %d ranks)",
            text,
            len(found),
            comm.size,
        )


def _try_pulling(comm: Communicator, cuda: CudaDriver, here: Sequence[int]) -> bool:
    """True if this rank can read what each rank of its node shows it. Collective.

    Every rank fills a small allocation with its own number, and reads everybody's.
    """
    quiet = comm.unchecked("devices")
    imports, event_imports = _imports(cuda), _event_imports(cuda)
    shown: tuple[bytes, bytes] | None = None
    with ExitStack() as made:
        try:
            stream = _made(made, cuda.stream(), cuda.destroy_stream)
            event = _made(made, cuda.event(interprocess=True), cuda.destroy_event)
            pinned = _made(made, cuda.alloc_pinned(TRIAL_NBYTES), cuda.free_pinned)
            address = _made(made, cuda.alloc(TRIAL_NBYTES), cuda.free)
            host = octets_at(pinned, TRIAL_NBYTES)
            host[:] = comm.rank % 251
            cuda.copy(address, pinned, TRIAL_NBYTES, stream)
            cuda.record(event, stream)
            cuda.synchronize(stream)
            shown = Exports(cuda).export(address, TRIAL_NBYTES), EventExports(cuda).export(event)
        except CudaError as error:
            log.debug("device memory cannot be shown to other processes: %s", error)
        told = quiet.allgather_object(shown)
        good = shown is not None
        try:
            for peer in here:
                other = told[peer]
                if other is None or not good:
                    good = False
                    break
                cuda.wait(stream, event_imports.open(other[1]))
                event_imports.release(other[1])
                shown_here = _open_shown(imports, other[0], queues_of_thread().values())
                cuda.copy(pinned, shown_here, TRIAL_NBYTES, stream)
                cuda.synchronize(stream)
                imports.release(other[0])
                good = bool((host == peer % 251).all())
        except CudaError as error:
            log.debug("device memory of other processes cannot be opened: %s", error)
            good = False
        quiet.barrier()  # nobody reads any more
    return good


def _made(stack: ExitStack, value: int, give_back: Callable[[int], None]) -> int:
    """The value, to be given back with the stack."""
    stack.callback(give_back, value)
    return value
