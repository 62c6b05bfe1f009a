"""Horovod's process-wide state: init, shutdown, who this process is, and what is built in.

Horovod's API demands such state; the torch.distributed backend is the only other package with it.
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
from hpcpar.errors import OperationError
from hpcpar.horovod import process_sets as sets
from hpcpar.horovod.chrome_timeline import ChromeTimeline
from hpcpar.horovod.engine import Engine, EngineGroup
from hpcpar.horovod.init_arguments import InitArguments, agreed, fail_together
from hpcpar.horovod.process_sets import ProcessSet, global_process_set
from hpcpar.launch.horovod_settings import HorovodSettings
from hpcpar.launch.settings import Settings, announce_rank

__all__ = ["init", "is_initialized", "shutdown", "start_timeline", "stop_timeline"]
__all__ += ["cross_rank", "cross_size", "is_homogeneous", "local_rank", "local_size", "rank", "size"]
__all__ += ["ccl_built", "cuda_built", "ddl_built", "gloo_built", "gloo_enabled", "mpi_built", "mpi_enabled"]
__all__ += ["mpi_threads_supported", "nccl_built", "rocm_built"]

log = logging.getLogger("hpcpar")

DYNAMIC = "DYNAMIC"


class Context:
    """State of one initialization: communicator, settings, engines and process sets.

    base           communicator of all ranks, for what all of them do together outside of the engines
    process_sets   by their number; 0 is all ranks
    """

    def __init__(self, base: Communicator, knobs: HorovodSettings, *, dynamic: bool) -> None:
        self.base = base.unchecked("horovod")
        self.knobs = knobs
        self.rank, self.size = base.rank, base.size
        self.dynamic = dynamic or knobs.dynamic_process_sets
        self.engine_group = EngineGroup(base.poke)
        self.timeline: ChromeTimeline | None = None
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
        """Make the engine of these ranks; None on others. Collective over all ranks."""
        color = 0 if self.rank in ranks else None
        comm = self.base.split(color, self.rank, name)
        control = self.base.split(color, self.rank, f"{name}, rounds")
        if comm is None or control is None:
            return None
        return Engine(comm.unchecked(name), control.unchecked("rounds"), self.engine_group, self.knobs)

    def start_timeline(self, path: str, mark_cycles: bool) -> None:
        """Begin a timeline, which rank 0 writes, and end an earlier one."""
        self.stop_timeline()
        if self.rank == 0:
            self.timeline = ChromeTimeline(Path(path), mark_cycles)
        self._show_timeline()

    def stop_timeline(self) -> None:
        """Close the file."""
        if self.timeline is not None:
            self.timeline.close()
            self.timeline = None
        self._show_timeline()

    def _show_timeline(self) -> None:
        for engine in self.engine_group.engines:
            engine.observer.timeline = self.timeline

    def _engine_over_all(self) -> Engine:
        engine = self.make_engine(range(self.size), "process set 0")
        assert engine is not None, "every rank belongs to all ranks"
        return engine


_context: Context | None = None
_is_exit_registered = False


def init(comm: Any = None, process_sets: str | Sequence[Any] | None = None) -> None:
    """Start. Collective over all ranks of the job; it fails on all of them, and leaves nothing started.

    Sets HOROVOD_RANK, HOROVOD_SIZE and their LOCAL_ and CROSS_ relatives, by which other libraries tell that
    Horovod is there. A second call only adds process sets that are not there yet, or makes them dynamic.

    comm           None: all ranks; a list of ranks: those, in that order, and every other process is alone;
                   an mpi4py communicator: its ranks
    process_sets   sets to register at once (ProcessSet, or lists of ranks), or "dynamic": they may come
                   and go later
    errors         LaunchError when launcher and MPI disagree, ConfigError for a HOROVOD_* or HPCPAR_*
                   variable that is not understood, ValueError for impossible ranks or process sets, and in a
                   second call for other ranks than there are
    """
    global _context, _is_exit_registered  # that is what init is for
    if _context is not None:
        _init_again(_context, comm, process_sets)
        return
    asked, knobs = InitArguments(), HorovodSettings()
    failure: Exception | None = None
    try:
        asked, knobs = InitArguments.of(comm, process_sets), HorovodSettings.from_environ()
    except Exception as error:  # raised once the other ranks know of it
        failure = error
    log.setLevel(_LEVELS[knobs.log_level])
    # Unlike elsewhere a wait may last for ever, as in Horovod: the stall inspector tells of it.
    patience_s = Settings.from_environ(patience_s=math.inf).timeout_s
    world = hpcpar.init(timeout_s=patience_s, check=False)
    fail_together(world, failure)
    base, dynamic = agreed(world, asked)
    context = Context(base, knobs, dynamic=dynamic)
    try:
        _begin(context, world, asked)
    except BaseException:
        _end(context, "hvd.init() could not do what it was asked for")
        raise
    _context = context
    _remember_communicator(comm)
    local, cross = (context.local_rank, context.local_size), (context.cross_rank, context.cross_size)
    announce_rank(context.rank, context.size, local, cross)
    if knobs.ignored and context.rank == 0:
        log.warning("of no meaning here, and ignored: %s", ", ".join(knobs.ignored))
    if not _is_exit_registered:
        _is_exit_registered = True
        atexit.register(shutdown)
        os.register_at_fork(after_in_child=_leave_ranks_to_parent)


def _begin(context: Context, world: Communicator, asked: InitArguments) -> None:
    """Open the timeline and make the process sets; what fails in one part of the job fails in all."""
    failure: Exception | None = None
    try:
        if context.knobs.timeline and context.knobs.timeline != DYNAMIC:
            with context.base.together("opening the timeline"):
                context.start_timeline(context.knobs.timeline, context.knobs.timeline_mark_cycles)
        sets.register(context, asked.process_sets)
    except Exception as error:  # of whatever kind: the other ranks must hear of it
        failure = error
    fail_together(world, failure)


def _init_again(context: Context, comm: Any, process_sets: Any) -> None:
    """Do what a second call of `init` asks for, or refuse it. Collective where it names new process sets."""
    asked = InitArguments.of(comm, process_sets)
    here = context.base.world_ranks
    if asked.part_of(here[context.rank]) not in (None, here):
        raise OperationError(
            f"init(comm={list(asked.ranks or ())}), but Horovod has been initialized on ranks {list(here)} "
            f"of the job; call hvd.shutdown() first, on all of them"
        )
    context.dynamic = context.dynamic or asked.dynamic
    known = list(context.process_sets.values())
    new = [one for one in asked.process_sets if not any(one is other for other in known)]
    if asked.process_sets:  # also where all are there: on another rank some may not be
        sets.register(context, new)
    _remember_communicator(comm)


def _remember_communicator(comm: Any) -> None:
    if hasattr(comm, "Get_rank"):
        global_process_set.mpi_comm = comm


def _leave_ranks_to_parent() -> None:
    """Let a forked process ask for its parent's rank, as loaders' workers do, and refuse collectives."""
    atexit.unregister(shutdown)
    if _context is not None:
        _context.engine_group.abandon(
            "this process was forked from a rank and is none itself: collectives are for the ranks; return "
            "what is to be communicated to the process that it was forked from"
        )


def shutdown() -> None:
    """End: what is under way fails with HorovodInternalError. `init` may be called again, on all ranks."""
    global _context
    if _context is None:
        return
    context, _context = _context, None
    _end(context, "Horovod has been shut down: by shutdown(), or at the program's end")


def _end(context: Context, reason: str) -> None:
    """Let go of everything: what is under way fails for this reason."""
    context.stop_timeline()
    for engine in context.engine_group.engines:
        engine.close(reason)
    for process_set in context.process_sets.values():
        process_set._detach()
    global_process_set.mpi_comm = None
    context.base.depart()


def is_initialized() -> bool:
    """Return True between `init` and `shutdown`."""
    return _context is not None


def the_context() -> Context:
    """Return what `init` has set up; ValueError before it."""
    if _context is None:
        raise ValueError("Horovod has not been initialized; call hvd.init() first.")
    return _context


def rank() -> int:
    """Return this process's position among all ranks."""
    return the_context().rank


def size() -> int:
    """Return the number of ranks."""
    return the_context().size


def local_rank() -> int:
    """Return this process's position on its node."""
    return the_context().local_rank


def local_size() -> int:
    """Return the number of ranks on this node."""
    return the_context().local_size


def cross_rank() -> int:
    """Return this node's position among the nodes that have a process of this local rank."""
    return the_context().cross_rank


def cross_size() -> int:
    """Return the number of nodes that have a process of this local rank."""
    return the_context().cross_size


def is_homogeneous() -> bool:
    """Return True if all nodes have the same number of ranks."""
    return the_context().is_homogeneous


def mpi_threads_supported() -> bool:
    """Return True if MPI may be called from several threads."""
    the_context()
    from hpcpar.transport.mpi_library import library_facts

    return "MULTIPLE" in str(library_facts()["thread_level"]).upper()


def mpi_built() -> bool:
    """Return True if an MPI library can be loaded."""
    try:
        import hpcpar.transport.mpi  # noqa: F401
    except (ImportError, RuntimeError):
        return False
    return True


def mpi_enabled() -> bool:
    """Return True if MPI carries the collectives: where there is an MPI library, always."""
    return mpi_built()


def nccl_built() -> int:
    """Return 0 for the version of NCCL: collectives here are hpcpar's own."""
    return 0


def _not_here() -> bool:
    """Return False: collectives here are hpcpar's own, over MPI."""
    return False


gloo_built = gloo_enabled = ddl_built = ccl_built = rocm_built = _not_here


def cuda_built() -> bool:
    """Return True if CUDA tensors can be communicated: where torch has CUDA."""
    import torch

    return bool(torch.version.cuda)


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Begin to write a timeline; rank 0 does.

    errors   ValueError unless HOROVOD_TIMELINE=DYNAMIC was set before `init`
    """
    _require_dynamic_timeline().start_timeline(file_path, mark_cycles)


def stop_timeline() -> None:
    """End the timeline, so that the file is whole; ValueError as for `start_timeline`."""
    _require_dynamic_timeline().stop_timeline()


def _require_dynamic_timeline() -> Context:
    context = the_context()
    if context.knobs.timeline != DYNAMIC:
        raise ValueError(
            "a timeline can be started and stopped only if HOROVOD_TIMELINE=DYNAMIC was set before hvd.init()"
        )
    return context


class HorovodBasics:
    """The calls of this module as methods, and the operations by name, as `horovod.common.basics` has them.

    Its arguments, by which Horovod finds its library, mean nothing here.
    """

    Average, Sum, Adasum, Min, Max, Product = range(6)

    def __init__(self, pkg_path: str = "", *args: str) -> None:
        """Nothing is loaded."""


for _name in __all__:
    setattr(HorovodBasics, _name, staticmethod(globals()[_name]))

_LEVELS = {
    "trace": logging.DEBUG,
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "fatal": logging.CRITICAL,
}
