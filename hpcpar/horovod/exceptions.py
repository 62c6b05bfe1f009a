"""Horovod's exception types, as scripts written for it catch them."""

from __future__ import annotations

from hpcpar.errors import HpcparError


class HorovodInternalError(HpcparError, RuntimeError):
    """A collective that failed: ranks that disagree, a lost peer, a stall, or a shutdown under way."""


class HostsUpdatedInterrupt(HpcparError, RuntimeError):
    """The set of hosts has changed; elastic training goes on after a new start.

    skip_sync   whether the state is the same on all ranks already
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("the set of hosts has changed")
        self.skip_sync = skip_sync


class HorovodVersionMismatchError(HpcparError, ImportError):
    """An extension that was built for another version of its framework; ours has nothing to build."""
