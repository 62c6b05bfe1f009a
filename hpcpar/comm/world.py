"""`hpcpar.init()`: from environment variables and MPI to a communicator over all ranks."""

from __future__ import annotations

import logging
import socket
from typing import TYPE_CHECKING

from hpcpar.comm.caller import Family
from hpcpar.comm.communicator import Communicator
from hpcpar.comm.failure import FailureHooks
from hpcpar.comm.select import parse_overrides
from hpcpar.comm.tuning import Tuning, read_together
from hpcpar.comm.watch import Watch
from hpcpar.errors import LaunchError, PeerFailedError
from hpcpar.launch import binding, crosscheck, environment, sentinel
from hpcpar.launch.environment import RankInfo
from hpcpar.launch.settings import Settings, own_tuning_file

if TYPE_CHECKING:
    from hpcpar.transport.mpi import MpiTransport

log = logging.getLogger("hpcpar")

_hooks: FailureHooks | None = None
"""Exception hooks and the sentinel belong to the process, however often it calls init()."""


def init(*, timeout_s: float | None = None, check: bool | None = None) -> Communicator:
    """Join the job: start MPI, see that it agrees with the launcher, guard against failures.

    timeout_s   how long a wait may last before it is a StallError (default: HPCPAR_TIMEOUT_S, or 600)
    check       agree on every collective before data moves (default: HPCPAR_CHECK, or off)
    returns     a communicator over all ranks; a new one at each call. Collective.
    errors      LaunchError when launcher and MPI disagree, or when there is no MPI
                ConfigError for an HPCPAR_* variable that is not understood
    """
    settings = Settings.from_environ()
    info = environment.detect()
    transport = _connect(info)
    watch = Watch(transport, settings.timeout_s if timeout_s is None else timeout_s)
    family = Family(
        transport,
        watch,
        check=settings.check if check is None else check,
        overrides=parse_overrides(settings.algorithm),
    )
    world = Communicator(transport, family, "world")
    _crosscheck(world, info)
    world.choose_by(_tuning(world, settings))
    with world.unchecked("start-up").split_by_node("node at start-up") as node:
        masks = node.unchecked("start-up").allgather_object(binding.affinity())
        transport.yield_at_once = binding.oversubscribed(node.size, masks)
        guard = _guard(world, node, settings, info)
    if settings.shared_memory:
        world.share_memory()
    _hook_failures(transport, watch, guard)
    world.traffic.reset()
    family.forget("node at start-up")
    return world


def _connect(info: RankInfo) -> MpiTransport:
    """Start MPI."""
    try:
        from hpcpar.transport.mpi import MpiTransport
    except (ImportError, RuntimeError) as error:
        raise LaunchError(
            f"no MPI library could be loaded ({error}). Load your site's MPI module, or "
            f"`pip install hpcpar[mpich]`; `hpcpar doctor` shows what is found"
        ) from error
    return MpiTransport.world()


def _crosscheck(world: Communicator, info: RankInfo) -> None:
    """Raise LaunchError on every rank unless launcher and MPI agree on all of them."""
    from hpcpar.transport.mpi import library_facts

    here = [rank for rank, node in enumerate(world.nodes) if node == world.nodes[world.rank]]
    local_ranks = world.unchecked("start-up").allgather_object(info.local_rank)
    failure: LaunchError | None = None
    try:
        info = crosscheck.check_against_mpi(
            info,
            mpi_rank=world.rank,
            mpi_size=world.size,
            mpi_local_rank=here.index(world.rank),
            mpi_local_size=len(here),
            mpi_library=library_facts()["library"],
            host=socket.gethostname(),
            mpi_node=world.nodes[world.rank],
            neighbours=[local_ranks[rank] for rank in here],
        )
    except LaunchError as error:
        failure = error
    try:
        world.unchecked("start-up").agree(failure, "comparing the launcher's variables with MPI")
    except PeerFailedError as error:
        raise LaunchError(str(error)) from failure
    if info.hint and world.rank == 0:
        log.warning(info.hint)


def _tuning(world: Communicator, settings: Settings) -> Tuning:
    """The measured tables of this MPI library, as rank 0 finds them."""
    from hpcpar.transport.mpi import library_facts

    vendor = library_facts()["vendor"]
    return read_together(world.unchecked("start-up"), settings.tuning, own_tuning_file(), vendor)


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
