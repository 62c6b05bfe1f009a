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


def get_version_mismatch_message(name: str, version: str, installed_version: str) -> str:
    """Say that a framework is installed in one version, and that Horovod was built for another."""
    return (
        f"{name} {version} is installed, but Horovod was built for {name} {installed_version}: install that "
        f"version, or build Horovod anew"
    )


class HorovodVersionMismatchError(HpcparError, ImportError):
    """An extension that was built for another version of its framework; ours has nothing to build."""

    def __init__(self, name: str, version: str, installed_version: str) -> None:
        super().__init__(get_version_mismatch_message(name, version, installed_version))
        self.name, self.version, self.installed_version = name, version, installed_version
