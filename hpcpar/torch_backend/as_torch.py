"""Every backend that a program names means ours: so an unchanged program of torch.distributed runs."""

from __future__ import annotations

import os
from datetime import timedelta
from functools import wraps
from typing import Any

from hpcpar.launch import torch_variables
from hpcpar.torch_backend.registration import NAME, register

REPLACED = ("nccl", "gloo", "mpi", "ucc", "xccl", "undefined")
"""Backends that become ours, alone or by device ("cpu:gloo,cuda:nccl"); undefined: none was named."""


def install() -> None:
    """Set torchrun's variables where they are not set, and have torch make our process groups."""
    torch_variables.fill(os.environ)
    torch_variables.fill_master(os.environ)
    from torch.distributed import Backend

    register()
    by_torch: Any = Backend.__new__

    def named(cls: type[Backend], name: str) -> Any:
        asked = {part.rpartition(":")[2] for part in str(name).lower().split(",")}
        return by_torch(cls, NAME if asked <= {*REPLACED, NAME} else name)

    Backend.__new__ = named  # type: ignore[method-assign]
    _replace_monitored_barrier()


def _replace_monitored_barrier() -> None:
    """torch lets a group of gloo alone have it, by the name of its backend."""
    from torch import distributed

    by_torch = distributed.monitored_barrier

    @wraps(by_torch)
    def monitored_barrier(group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        found: Any = distributed.group.WORLD if group is None else group
        if getattr(found, "getBackendName", str)() != NAME:
            by_torch(group, timeout, wait_all_ranks)
            return
        limit = timedelta(seconds=timeout) if isinstance(timeout, float) else timeout
        found.monitored_barrier(limit, wait_all_ranks)

    distributed.monitored_barrier = monitored_barrier
    distributed.distributed_c10d.monitored_barrier = monitored_barrier
