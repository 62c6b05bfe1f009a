"""The variables by which torchrun tells a process who it is, for programs that read them."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping

from hpcpar.launch import environment
from hpcpar.launch.environment import RankInfo
from hpcpar.launch.settings import was_started_by_a_rank

NO_PORT = "0"
"""MASTER_PORT where there is no master: torch's own rendezvous never gets to see it."""


def of(info: RankInfo) -> dict[str, str]:
    """Variables of a rank, as torchrun sets them; LOCAL_RANK is 0 where the launcher does not tell."""
    local_rank = info.local_rank or 0
    local_size = info.local_size or 1
    return {
        "RANK": str(info.rank),
        "WORLD_SIZE": str(info.size),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(local_size),
        "GROUP_RANK": str(info.node or 0),
    }


def fill(environ: MutableMapping[str, str]) -> None:
    """Set those that are not set, and those that a rank has left to a process that it started."""
    is_inherited = was_started_by_a_rank(environ)
    for name, value in of(environment.detect(environ)).items():
        if is_inherited or name not in environ:
            environ[name] = value


def fill_master(environ: MutableMapping[str, str]) -> None:
    """Name a master for programs that ask for one, where nobody has: `names_a_master` stays False."""
    if "MASTER_ADDR" not in environ:
        environ.update(MASTER_ADDR="localhost", MASTER_PORT=NO_PORT)


def names_a_master(environ: Mapping[str, str]) -> bool:
    """Return whether torch is to meet at MASTER_ADDR, at the user's wish or torchrun's."""
    return bool(environ.get("MASTER_ADDR")) and environ.get("MASTER_PORT") != NO_PORT
