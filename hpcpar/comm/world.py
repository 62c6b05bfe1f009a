"""`hpcpar.init()`: from environment variables and MPI to a communicator over all ranks."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from hpcpar.comm import whereabouts
from hpcpar.comm.communicator import Communicator
from hpcpar.comm.failure import FailureHooks
from hpcpar.comm.progress import LOOKS
from hpcpar.comm.runtime import Runtime
from hpcpar.comm.select import parse_overrides
from hpcpar.comm.tuning import Tuning, read_together
from hpcpar.comm.watch import Watch
from hpcpar.comm.whereabouts import Place
from hpcpar.errors import ConfigError, LaunchError, PeerFailedError
from hpcpar.launch import binding, crosscheck, cuda_aware, environment, lone, restart, sentinel, shared_space
from hpcpar.launch.bootstrap import pmi_selection
from hpcpar.launch.environment import RankInfo
from hpcpar.launch.rank_map import RankBinding, RankMap, gather_from_nodes, visible_gpus
from hpcpar.launch.settings import (
    Settings,
    mark_as_rank,
    own_tuning_file,
    parent_is_the_rank,
    require_common,
    take_asked_ranks,
)
from hpcpar.transport.gpu import cuda_driver

if TYPE_CHECKING:
    from hpcpar.transport.mpi import MpiTransport

log = logging.getLogger("hpcpar")

_hooks: FailureHooks | None = None
"""Exception hooks and the sentinel belong to the process, however often it calls init()."""

_bootstrap: pmi_selection.Bootstrap | None = None
"""MPI belongs to the process as well; None until hpcpar starts it."""


def init(
    *,
    timeout_s: float | None = None,
    check: bool | None = None,
    stall_warn_s: float | None = None,
    sets_threads: bool = False,
) -> Communicator:
    """Join the job: start MPI, see that it agrees with the launcher, guard against failures.

    timeout_s   how long a wait may last before it is a StallError (default: HPCPAR_TIMEOUT_S, or 600)
    check       agree on every collective before data moves (default: HPCPAR_CHECK, or off)
    stall_warn_s   how long a wait may last before the log says which ranks are missing, and where they are
                (default: HPCPAR_STALL_WARN_S, or 60)
    sets_threads   the program chooses its number of compute threads itself: an OMP_NUM_THREADS that is
                   not set is no reason for a warning
    returns     a communicator over all ranks; a new one at each call. Collective.
                Rank 0 logs where the ranks run (INFO), and warns of cores that ranks share needlessly
    errors      LaunchError when launcher and MPI disagree, when there is no MPI, and in a process that a rank
                has started or forked, for it has inherited who that is
                ConfigError for an HPCPAR_* variable that is not understood, for times of 0 or less, and on
                every rank for settings that differ between ranks
    """
    settings = _settings(timeout_s, check, stall_warn_s)
    overrides = parse_overrides(settings.algorithm)
    info = environment.detect()
    transport = _connect(info, settings.timeout_s)
    watch = Watch(transport, settings.timeout_s, settings.stall_warn_s)
    runtime = Runtime(transport, watch, check=settings.check)
    world = Communicator(transport, runtime, "world")
    info = _crosscheck(world, info)
    watch.places = _introduced(world, settings)
    runtime.overrides = overrides  # from here on, for all ranks have the same
    world.choose_by(_tuning(world, settings))
    with world.unchecked("start-up").split_by_node("node at start-up") as node:
        bindings = node.unchecked("start-up").allgather_object(RankBinding.here(world.rank))
        transport.yield_at_once = binding.oversubscribed(node.size, [each.cores for each in bindings])
        runtime.progress.looks = 1 if transport.yield_at_once else LOOKS
        if _hooks is None and world.size > 1:
            rank_map = gather_from_nodes(world.unchecked("start-up"), bindings, first=node.rank == 0)
            _report(rank_map, sets_threads=sets_threads)
        guard = _guard(world, node, settings, info)
    if world.rank == 0:
        restart.leave_word(restart.STARTED)
    if settings.shared_memory:
        world.share_memory()
    if settings.devices != "none":
        _share_devices(world, settings)
    _hook_failures(transport, watch, guard)
    if _hooks is not None:
        runtime.end_job = _hooks.end_job
    world.traffic.reset()
    runtime.forget("node at start-up")
    return world


def _settings(timeout_s: float | None, check: bool | None, stall_warn_s: float | None) -> Settings:
    """Read the environment's settings, and put the caller's in their place."""
    settings = Settings.from_environ()
    settings = replace(
        settings,
        timeout_s=settings.timeout_s if timeout_s is None else timeout_s,
        stall_warn_s=settings.stall_warn_s if stall_warn_s is None else stall_warn_s,
        check=settings.check if check is None else check,
    )
    for name in ("timeout_s", "stall_warn_s"):
        found = getattr(settings, name)
        if not found > 0:
            raise ConfigError(f"{name}={found!r} is no time to wait: give seconds, more than 0")
    return settings


def _introduced(world: Communicator, settings: Settings) -> Sequence[Place]:
    """Compare the settings of all ranks, and return their processes. Collective."""
    here = settings, whereabouts.announce()
    ranks = world.unchecked("start-up").allgather_object(here)
    require_common([found for found, _ in ranks])
    return [place for _, place in ranks]


def _share_devices(world: Communicator, settings: Settings) -> None:
    """Set up transfers between GPUs, where any rank sees one or the user asks for it. Collective."""
    sees_any = np.array([settings.devices != "auto" or bool(visible_gpus(os.environ))])
    if not world.unchecked("start-up").allreduce(sees_any, "or")[0]:
        return

    def mpi_takes_pointers() -> bool:
        from hpcpar.transport import mpi_library

        found = cuda_aware.find_awareness(
            mpi_library.library_version(),
            asked=settings.cuda_aware,
            driver=str(cuda_driver.driver().version),
            memory_kinds=mpi_library.memory_kinds(),
        )
        return found.point_to_point is True

    world.share_devices(settings.devices, mpi_takes_pointers)


def bootstrap() -> pmi_selection.Bootstrap | None:
    """Return how the ranks found each other; None where hpcpar has not started MPI."""
    return _bootstrap


def _connect(info: RankInfo, patience_s: float) -> MpiTransport:
    """Start MPI, with a server of our own where the launcher does not connect the ranks."""
    global _bootstrap  # MPI is the process's, and starts once
    try:
        from hpcpar.transport import mpi, mpi_library
    except (ImportError, RuntimeError) as error:
        raise LaunchError(
            f"no MPI library could be loaded ({error}). Load your site's MPI module, or `pip install "
            f"hpcpar[mpich]`; `hpcpar doctor` shows what is found{pmi_selection.name_hint(str(error))}"
        ) from error
    if info.size > 1 and mpi_library.is_the_parents():
        _refuse_forked(info)
    if not mpi_library.is_started():
        if info.size > 1 and parent_is_the_rank():
            _refuse_child(info)
        _bootstrap = pmi_selection.choose(info, mpi_library.library_version())
        pmi_selection.remove_variables(_bootstrap.stale)
        try:
            ranks_here = info.local_size or 1
            room_nbytes = shared_space.room_within_ranks(ranks_here)
            shared_space.require(ranks_here, mpi_library.library_version(), room_nbytes)
        except LaunchError:
            if info.local_rank:
                crosscheck.leave_it_to_another_rank()
            raise
        if _bootstrap.kind == "none":
            _refuse(info, mpi_library.library_version())
        elif _bootstrap.kind == "server":
            from hpcpar.launch.bootstrap import pmi_client  # brings asyncio, which others do not need

            with pmi_client.connected(info, timeout_s=patience_s):
                mpi_library.start()
        else:
            mpi_library.start()
            time.sleep(_bootstrap.settle_s)
    if info.size > 1:
        mark_as_rank()
    return mpi.MpiTransport.world()


def _refuse_child(info: RankInfo) -> NoReturn:
    """Raise in a process that a rank has started: MPI would fail in it, or wait for ever (Open MPI 5)."""
    names = {f"{name.partition('_')[0]}_" for name in os.environ if environment.is_of_a_job(name)}
    raise LaunchError(
        f"rank {info.rank} of {info.size} (pid {os.getppid()}) started this process (pid {os.getpid()}), "
        f"which has inherited the launcher's variables ({info.launcher}) and is taken for that rank, but no "
        f"second process can be it. Make the call in the rank itself, or leave variables that begin with "
        f"{', '.join(sorted(names))} out of this process's environment: it is then a job of its own"
    )


def _refuse_forked(info: RankInfo) -> NoReturn:
    """Raise in a process that has a rank's MPI by fork: what the two send would mix, or crash (Open MPI)."""
    raise LaunchError(
        f"rank {info.rank} of {info.size} forked this process (pid {os.getpid()}), which has that rank's MPI "
        f"in its memory but cannot use it: make the call in the rank itself, and return to it what is to be "
        f"communicated"
    )


def _refuse(info: RankInfo, library: str) -> NoReturn:
    """Raise on every rank what rank 0 says alone: launcher and library cannot meet."""
    if info.rank > 0:
        crosscheck.leave_it_to_another_rank()
    offered = pmi_selection.srun_plugins() if info.rank == 0 else None
    raise LaunchError(crosscheck.refusal(info, library, offered))


def _crosscheck(world: Communicator, info: RankInfo) -> RankInfo:
    """Return the position that MPI confirms; LaunchError on every rank unless all agree with the launcher."""
    from hpcpar.transport.mpi_library import library_facts

    here = [rank for rank, node in enumerate(world.nodes) if node == world.nodes[world.rank]]
    claims = environment.sound_claims()
    info = crosscheck.believed(info, claims, world.rank, world.size)
    local_ranks = world.unchecked("start-up").allgather_object(info.local_rank)
    failure: LaunchError | None = None
    try:
        crosscheck.refuse_separate_worlds(info, claims)
        lone.refuse_nested()
        crosscheck.require_asked_size(take_asked_ranks(), world.size)
        if world.size == info.size == 1:
            lone.require_alone(info)
        mpi_view = crosscheck.MpiView(
            rank=world.rank,
            size=world.size,
            library=library_facts()["library"],
            local_rank=here.index(world.rank),
            local_size=len(here),
            node=world.nodes[world.rank],
            neighbours=[local_ranks[rank] for rank in here],
            started_before=_bootstrap is None,
        )
        info = crosscheck.check_against_mpi(info, mpi_view, socket.gethostname())
    except LaunchError as error:
        failure = error
        if world.size == 1 and info.rank > 0:
            crosscheck.leave_it_to_another_rank()
    try:
        world.unchecked("start-up").agree(failure, "comparing the launcher's variables with MPI")
    except PeerFailedError as error:
        raise LaunchError(str(error)) from failure
    if info.hint and world.rank == 0:
        log.warning(info.hint)
    return info


def _tuning(world: Communicator, settings: Settings) -> Tuning:
    """Read the measured tables of this MPI library, as rank 0 finds them."""
    from hpcpar.transport.mpi_library import library_facts

    vendor = library_facts()["vendor"]
    return read_together(world.unchecked("start-up"), settings.tuning, own_tuning_file(), vendor)


def _report(rank_map: RankMap | None, *, sets_threads: bool) -> None:
    """Log the rank map and its flaws on rank 0, which alone has one."""
    if rank_map is not None:
        for line in rank_map.lines():
            log.info(line)
        for flaw in rank_map.flaws(sets_threads=sets_threads):
            log.warning(flaw)


def _guard(world: Communicator, node: Communicator, settings: Settings, info: RankInfo) -> sentinel.Guard:
    """Join the node's sentinel, which the node's first rank starts; a rank alone has nobody to lose."""
    if _hooks is not None or world.size == 1:
        return sentinel.Guard()
    address = ""
    if node.rank == 0:
        address = sentinel.start(
            local_size=node.size,
            nodes=len(set(world.nodes)),
            run_directory=settings.run_directory,
            end_command=sentinel.end_command_for(info.launcher),
        )
    address = node.unchecked("start-up").broadcast_object(address)
    return sentinel.Guard.connect(address, rank=world.rank)


def _hook_failures(transport: MpiTransport, watch: Watch, guard: sentinel.Guard) -> None:
    global _hooks  # exception hooks are the process's, whatever we would like
    if _hooks is None and transport.size > 1:
        _hooks = FailureHooks(transport, watch, guard)
        _hooks.install()
