"""Horovod's process-wide state: init, shutdown, who this process is, and what is built in.

One of the two rooms with such state (the other is the torch.distributed backend): Horovod's API demands it.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hpcpar
from hpcpar.comm import Communicator
from hpcpar.errors import LaunchError
from hpcpar.horovod import process_sets as sets
from hpcpar.horovod.engine import Crew, Engine
from hpcpar.horovod.process_sets import ProcessSet, global_process_set
from hpcpar.horovod.timeline import Timeline
from hpcpar.launch.knobs import Knobs
from hpcpar.launch.settings import Settings
from hpcpar.launch.variables import announce_rank

log = logging.getLogger("hpcpar")

DYNAMIC = "DYNAMIC"


class Context:
    """Everything that `init` sets up.

    base           communicator of all ranks, for what all of them do together outside of the engines
    process_sets   by their number; 0 is all ranks
    """

    def __init__(self, base: Communicator, knobs: Knobs, *, dynamic: bool) -> None:
        self.base = base.unchecked("horovod")
        self.knobs = knobs
        self.rank, self.size = base.rank, base.size
        self.dynamic = dynamic or knobs.dynamic_process_sets
        self.crew = Crew(base.poke)
        self.timeline: Timeline | None = None
        self.process_sets: dict[int, ProcessSet] = {}
        self._sets_made = 0
        here = [rank for rank, node in enumerate(base.nodes) if node == base.nodes[base.rank]]
        self.local_rank, self.local_size = here.index(base.rank), len(here)
        nodes = [node for node in sorted(set(base.nodes)) if base.nodes.count(node) > self.local_rank]
        self.cross_rank, self.cross_size = nodes.index(base.nodes[base.rank]), len(nodes)
        sizes = {base.nodes.count(node) for node in base.nodes}
        self.is_homogeneous = len(sizes) == 1
        self.engine = self._engine_over_all()
        global_process_set._attach(self, 0, range(self.size), self.engine)
        self.process_sets[0] = global_process_set

    def next_process_set_id(self) -> int:
        """Numbers are never used again, so that an old one cannot be taken for a new one."""
        self._sets_made += 1
        return self._sets_made

    def make_engine(self, ranks: Sequence[int], name: str) -> Engine | None:
        """The engine of these ranks; None on others. Collective over all ranks."""
        color = 0 if self.rank in ranks else None
        comm = self.base.split(color, self.rank, name)
        control = self.base.split(color, self.rank, f"{name}, rounds")
        if comm is None or control is None:
            return None
        return Engine(comm.unchecked(name), control.unchecked("rounds"), self.crew, self.knobs)

    def start_timeline(self, path: str, mark_cycles: bool) -> None:
        """Rank 0 writes it; one that is being written ends."""
        self.stop_timeline()
        if self.rank == 0:
            self.timeline = Timeline(Path(path), mark_cycles)
        self._show_timeline()

    def stop_timeline(self) -> None:
        """Close the file."""
        if self.timeline is not None:
            self.timeline.close()
            self.timeline = None
        self._show_timeline()

    def _show_timeline(self) -> None:
        for engine in self.crew.engines:
            engine.timeline = self.timeline

    def _engine_over_all(self) -> Engine:
        engine = self.make_engine(range(self.size), "process set 0")
        assert engine is not None, "every rank belongs to all ranks"
        return engine


_context: Context | None = None
_is_exit_registered = False


def init(comm: Any = None, process_sets: str | Sequence[Any] | None = None) -> None:
    """Start. Collective over all ranks of the job; a second call does nothing.

    Sets HOROVOD_RANK, HOROVOD_SIZE and their LOCAL_ and CROSS_ relatives, by which other libraries tell that
    Horovod is there.

    comm           None: all ranks; a list of ranks: those, in that order, and every other process is alone;
                   an mpi4py communicator: its ranks
    process_sets   sets to register at once (ProcessSet, or lists of ranks), or "dynamic": they may come
                   and go later
    errors         LaunchError when launcher and MPI disagree, ConfigError for a HOROVOD_* or HPCPAR_*
                   variable that is not understood, ValueError for impossible process sets
    """
    global _context, _is_exit_registered  # that is what init is for
    if _context is not None:
        return
    knobs = Knobs.from_environ()
    log.setLevel(_LEVELS[knobs.log_level])
    # Unlike elsewhere a wait may last for ever, as in Horovod: the stall inspector tells of it.
    patience_s = Settings.from_environ(patience_s=math.inf).timeout_s
    world = hpcpar.init(timeout_s=patience_s, check=False)
    context = Context(_chosen(world, comm), knobs, dynamic=process_sets == "dynamic")
    _context = context
    local, cross = (context.local_rank, context.local_size), (context.cross_rank, context.cross_size)
    announce_rank(context.rank, context.size, local, cross)
    if knobs.timeline and knobs.timeline != DYNAMIC:
        with context.base.together("opening the timeline"):
            context.start_timeline(knobs.timeline, knobs.timeline_mark_cycles)
    if knobs.ignored and context.rank == 0:
        log.warning("of no meaning here, and ignored: %s", ", ".join(knobs.ignored))
    if process_sets is not None and process_sets != "dynamic":
        sets.register(context, process_sets)
    if not _is_exit_registered:
        _is_exit_registered = True
        atexit.register(shutdown)
        os.register_at_fork(after_in_child=_leave_ranks_to_parent)


def _leave_ranks_to_parent() -> None:
    """A forked process may ask whose rank it has, as loaders' workers do, but not take its part."""
    atexit.unregister(shutdown)
    if _context is not None:
        _context.crew.abandon(
            "this process was forked from a rank and is none itself: collectives are for the ranks; return "
            "what is to be communicated to the process that it was forked from"
        )


def shutdown() -> None:
    """End: what is under way fails with HorovodInternalError. `init` may be called again, on all ranks."""
    global _context
    if _context is None:
        return
    context, _context = _context, None
    context.stop_timeline()
    for engine in context.crew.engines:
        engine.close("Horovod has been shut down: by shutdown(), or at the program's end")
    for process_set in context.process_sets.values():
        process_set._detach()
    context.base.depart()


def is_initialized() -> bool:
    """Whether `init` has been called, and `shutdown` not since."""
    return _context is not None


def the_context() -> Context:
    """What `init` has set up; ValueError before it."""
    if _context is None:
        raise ValueError("Horovod has not been initialized; call hvd.init() first.")
    return _context


def rank() -> int:
    """This process's position among all ranks."""
    return the_context().rank


def size() -> int:
    """How many ranks there are."""
    return the_context().size


def local_rank() -> int:
    """This process's position on its node."""
    return the_context().local_rank


def local_size() -> int:
    """How many ranks there are on this node."""
    return the_context().local_size


def cross_rank() -> int:
    """The position of this process's node among the nodes that have a process of this local rank."""
    return the_context().cross_rank


def cross_size() -> int:
    """How many nodes have a process of this local rank."""
    return the_context().cross_size


def is_homogeneous() -> bool:
    """Whether every node has as many ranks."""
    return the_context().is_homogeneous


def mpi_threads_supported() -> bool:
    """Whether MPI may be called from several threads."""
    the_context()
    from hpcpar.transport.mpi import library_facts

    return "MULTIPLE" in str(library_facts()["thread_level"]).upper()


def mpi_built() -> bool:
    """Whether an MPI library can be loaded."""
    try:
        import hpcpar.transport.mpi  # noqa: F401
    except (ImportError, RuntimeError):
        return False
    return True


def mpi_enabled() -> bool:
    """Whether MPI carries the collectives: where there is one, always."""
    return mpi_built()


def nccl_built() -> int:
    """The version of NCCL: 0, because collectives here are hpcpar's own."""
    return 0


def _not_here() -> bool:
    """False: collectives here are hpcpar's own, over MPI."""
    return False


gloo_built = gloo_enabled = ddl_built = ccl_built = rocm_built = _not_here


def cuda_built() -> bool:
    """Whether CUDA tensors can be communicated: where torch has CUDA."""
    import torch

    return bool(torch.version.cuda)


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Register a process set. Collective over all ranks, members or not.

    errors   ValueError unless HOROVOD_DYNAMIC_PROCESS_SETS=1 or init(process_sets="dynamic"), and for a
             set that exists already or of ranks that do not
    """
    context = the_context()
    _require_dynamic(context)
    return sets.register(context, [process_set])[0]


def remove_process_set(process_set: ProcessSet) -> bool:
    """Unregister a process set. Collective over all ranks; False for that of all ranks and unknown ones.

    errors   ValueError unless process sets are dynamic, see `add_process_set`
    """
    context = the_context()
    _require_dynamic(context)
    return sets.remove(context, process_set)


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Begin to write a timeline; rank 0 does.

    errors   ValueError unless HOROVOD_TIMELINE=DYNAMIC was set before `init`
    """
    _require_dynamic_timeline().start_timeline(file_path, mark_cycles)


def stop_timeline() -> None:
    """End the timeline, so that the file is whole; ValueError as for `start_timeline`."""
    _require_dynamic_timeline().stop_timeline()


def _require_dynamic(context: Context) -> None:
    if not context.dynamic:
        raise ValueError(
            "process sets can be added and removed only with HOROVOD_DYNAMIC_PROCESS_SETS=1 in the "
            'environment, or after hvd.init(process_sets="dynamic")'
        )


def _require_dynamic_timeline() -> Context:
    context = the_context()
    if context.knobs.timeline != DYNAMIC:
        raise ValueError(
            "a timeline can be started and stopped only if HOROVOD_TIMELINE=DYNAMIC was set before hvd.init()"
        )
    return context


def _chosen(world: Communicator, comm: Any) -> Communicator:
    """The communicator of the ranks that are meant. Collective over the world."""
    if comm is None or comm == []:
        return world
    if hasattr(comm, "Get_rank"):
        ranks = comm.allgather(world.rank)
    else:
        ranks = list(comm)
        missing = [rank for rank in ranks if not 0 <= rank < world.size]
        if missing:
            raise LaunchError(f"init(comm={ranks}): there are ranks 0 to {world.size - 1} only")
    if world.rank in ranks:
        color, key = min(ranks), ranks.index(world.rank)
    else:
        color, key = world.size + world.rank, 0
    part = world.split(color, key, "horovod")
    assert part is not None
    return part


_LEVELS = {
    "trace": logging.DEBUG,
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "fatal": logging.CRITICAL,
}
