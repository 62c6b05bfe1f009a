"""State that all communicators of a job share on one rank."""

from __future__ import annotations

import os
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from zlib import crc32

from hpcpar.comm.accounting import Trace, Traffic
from hpcpar.comm.devices import Devices
from hpcpar.comm.progress import Progress
from hpcpar.comm.spaces import ScratchPool
from hpcpar.comm.tuning import Tuning
from hpcpar.comm.watch import Watch
from hpcpar.transport.interface import Transport

if TYPE_CHECKING:
    from hpcpar.comm.calls import Calls


RECENT = 64
"""Calls of a communicator that a rank can tell others of."""


class RecentCalls(list[tuple[int, str]]):
    """The latest calls of a communicator: (number, request in words) at place `number % RECENT`."""


@dataclass(eq=False)
class Runtime:
    """Shared by a world and all communicators that are split from it.

    check          ranks agree on every call before data moves
    overrides      algorithm by collective, from HPCPAR_ALGORITHM
    tuning         measured tables, from which each communicator takes its own
    trace          records what moved when; None: nobody asks
    shares_memory, post_nbytes   as `Communicator.share_memory` was asked for
    devices        GPUs, after `Communicator.share_devices`
    end_job        as `Communicator.end_job`, for ranks that are processes
    recent         what communicators have called lately, by their number
    made           communicators of the same world ranks and tag that there have been
    is_forked      this process is a fork of the rank that made it, and must not communicate
    """

    transport: Transport
    watch: Watch
    check: bool = False
    overrides: Mapping[str, str] = field(default_factory=dict)
    tuning: Tuning = field(default_factory=Tuning)
    trace: Trace | None = None
    shares_memory: bool = False
    post_nbytes: int | None = None
    devices: Devices | None = None
    traffics: dict[str, Traffic] = field(default_factory=dict)
    scratch: ScratchPool = field(default_factory=ScratchPool)
    end_job: Callable[[str, int], None] | None = None
    calls: weakref.WeakSet[Calls] = field(default_factory=weakref.WeakSet)
    recent: weakref.WeakValueDictionary[int, RecentCalls] = field(default_factory=weakref.WeakValueDictionary)
    made: Counter[tuple[tuple[int, ...], int | None]] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.progress = Progress(self.transport, self.watch)
        self.watch.recent = self._recent
        _RUNTIMES.add(self)

    def register(self, name: str) -> tuple[str, Traffic]:
        """Give a new communicator a name of its own, and an empty account."""
        unique, number = name, 1
        while unique in self.traffics:
            number += 1
            unique = f"{name}#{number}"
        return unique, self.traffics.setdefault(unique, Traffic())

    def identify(self, world_ranks: tuple[int, ...], tag: int | None) -> tuple[int, RecentCalls]:
        """A number of a new communicator, the same on all of its ranks; and what it will have called.

        Two communicators of the same ranks and tag are made in the same order on all of these ranks.
        """
        self.made[world_ranks, tag] += 1
        comm_id = crc32(repr((world_ranks, tag, self.made[world_ranks, tag])).encode())
        return comm_id, self.recent.setdefault(comm_id, RecentCalls([(-1, "")] * RECENT))

    def _recent(self, comm_id: int, number: int) -> str | None:
        recent = self.recent.get(comm_id)
        found, described = (-1, "") if recent is None else recent[number % RECENT]
        return described if found == number else None

    def forget(self, name: str) -> None:
        """Drop an account, and so free its name."""
        self.traffics.pop(name, None)


_RUNTIMES: weakref.WeakSet[Runtime] = weakref.WeakSet()


def _mark_forked() -> None:
    for runtime in _RUNTIMES:
        runtime.progress.leave_to_parent()
        for calls in runtime.calls:
            calls.cache.clear()  # so that every call is validated, and refused


os.register_at_fork(after_in_child=_mark_forked)
