"""Variables that are set for this process and its children, some as Horovod's programs expect them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager

from hpcpar.errors import LaunchError

TOKEN = "HPCPAR_RUN_TOKEN"
"""By this the ranks of a `horovod.run` show that they are its own."""

ASKED_RANKS = "HPCPAR_RUN_RANKS"
"""The number of ranks that `hpcpar run` was asked for, which `hpcpar.init()` compares with what there is."""

RANK_PID = "HPCPAR_RANK_PID"
"""The process that is a rank already, for those that it starts."""


def mark_as_rank(environ: MutableMapping[str, str] = os.environ) -> None:
    """Let processes that are started from here know that this one is the rank which their variables name."""
    environ[RANK_PID] = str(os.getpid())


def parent_is_the_rank(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether a rank started this process: the launcher's variables are about that rank then.

    A launcher that a rank starts is between it and the ranks of the new job.
    """
    return environ.get(RANK_PID) == str(os.getppid())


def was_started_by_a_rank(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether this process descends from a rank, whatever became of the launcher's variables."""
    return environ.get(RANK_PID) not in (None, str(os.getpid()))


def announce_rank(
    rank: int,
    size: int,
    local: tuple[int, int],
    cross: tuple[int, int],
    environ: MutableMapping[str, str] = os.environ,
) -> None:
    """Set the variables by which Horovod's launcher tells a process who it is, over what another job left.

    local, cross   (rank, size) on the node, and among the processes of this local rank
    """
    found = {"": (rank, size), "LOCAL_": local, "CROSS_": cross}
    for prefix, (position, count) in found.items():
        environ[f"HOROVOD_{prefix}RANK"] = str(position)
        environ[f"HOROVOD_{prefix}SIZE"] = str(count)


@contextmanager
def env(**variables: str | None) -> Iterator[None]:
    """Set environment variables for a while; None leaves one as it is. They are as before afterwards."""
    asked = {name: value for name, value in variables.items() if value is not None}
    before = {name: os.environ.get(name) for name in asked}
    os.environ.update(asked)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def take_token(environ: MutableMapping[str, str] = os.environ) -> str:
    """The token that the starter of this job has set; programs started from here do not see it."""
    token = environ.pop(TOKEN, "")
    if not token:
        raise LaunchError(f"{TOKEN} is not set: this program is started by hpcpar.horovod.run alone")
    return token


def take_asked_ranks(environ: MutableMapping[str, str] = os.environ) -> int | None:
    """The number of ranks that `hpcpar run` was asked for; programs started from here do not see it."""
    text = environ.pop(ASKED_RANKS, "")
    return int(text) if text.isdigit() else None
