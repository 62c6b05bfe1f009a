"""Make process groups: the default one over all ranks, others by their members alone."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any
from zlib import crc32

from torch import distributed
from torch.distributed.constants import default_pg_timeout

import hpcpar
from hpcpar.comm import Communicator
from hpcpar.errors import OperationError
from hpcpar.torch_backend.process_group import ProcessGroup
from hpcpar.torch_backend.registration import NAME
from hpcpar.torch_backend.work import seconds_of


def create(options: Any, backend_options: Any) -> ProcessGroup:
    """Make the process group of torch's options: the default one, or one of its ranks by those alone.

    errors   OperationError for other options, for several backends in one group, and for subgroups of a
             default group of another backend
    """
    if backend_options is not None:
        raise OperationError(f"pg_options={backend_options!r} was given, but {NAME} has none: leave it out")
    _refuse_several_backends()
    ranks, default = list(options.global_ranks_in_group), default_group()
    given = None if options.timeout == default_pg_timeout else seconds_of(options.timeout)
    if not ranks:
        comm = hpcpar.init(timeout_s=given)
        if (options.group_rank, options.group_size) != (comm.rank, comm.size):
            raise OperationError(
                f"init_process_group({NAME!r}) was told rank={options.group_rank} and "
                f"world_size={options.group_size}, but this is rank {comm.rank} of {comm.size} by MPI: leave "
                f"both out, and RANK and WORLD_SIZE unset"
            )
    elif _given is not None:
        comm = _given
    elif default is None:
        raise OperationError(
            f"a group of backend {NAME!r} was asked for, but the default group is of another: call "
            f"init_process_group({NAME!r}) first"
        )
    else:
        # Its members alone are here. What torch calls it may differ between them, its ranks do not.
        comm = default.comm.group(ranks, name=str(options.group_id), tag=crc32(repr(ranks).encode()))
    group = ProcessGroup(comm, timeout_s=given if ranks else None)
    group.owns_comm = comm is not _given
    return group


_given: Communicator | None = None


def create_over(comm: Communicator, make: Callable[[], Any]) -> Any:
    """Call `make`, which has torch create a subgroup, with this communicator for it."""
    global _given
    _given = comm
    try:
        return make()
    finally:
        _given = None


def default_group() -> ProcessGroup | None:
    """The default group, if it is ours."""
    group = distributed.group.WORLD if distributed.is_initialized() else None
    return group if isinstance(group, ProcessGroup) else None


def _refuse_several_backends() -> None:
    """torch would take this group for all devices, whatever backends were named for the others."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "_new_process_group_helper":
        frame = frame.f_back  # type: ignore[assignment]
    named = None if frame is None else frame.f_locals.get("backend_config")
    found = {} if named is None else named.get_device_backend_map()
    if set(found.values()) - {NAME}:
        words = ",".join(f"{device}:{backend}" for device, backend in found.items())
        raise OperationError(
            f"backend {words!r} was asked for, but a group of {NAME} does the calls of all devices: name "
            f"{NAME!r} alone, or make a second group by new_group(backend=...)"
        )
