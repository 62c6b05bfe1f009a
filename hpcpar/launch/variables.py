"""What is put into the environment of this process and its children, as Horovod's programs expect it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager

from hpcpar.errors import LaunchError
from hpcpar.launch import slurm
from hpcpar.launch.environment import RankInfo, detect

TOKEN = "HPCPAR_RUN_TOKEN"
"""By this the ranks of a `horovod.run` show that they are its own."""


def horovod_variables(info: RankInfo) -> dict[str, str]:
    """The variables by which Horovod's launcher tells a process who it is.

    HOROVOD_CROSS_RANK and HOROVOD_CROSS_SIZE are the node's number and the number of nodes. What the
    launcher leaves open before MPI has started is not among them, unless all ranks are on one node.
    """
    on_one_node = info.local_size == info.size
    found = {
        "HOROVOD_RANK": info.rank,
        "HOROVOD_SIZE": info.size,
        "HOROVOD_LOCAL_RANK": info.local_rank,
        "HOROVOD_LOCAL_SIZE": info.local_size,
        "HOROVOD_CROSS_RANK": 0 if on_one_node else info.node,
        "HOROVOD_CROSS_SIZE": 1 if on_one_node else info.nodes and len(info.nodes),
    }
    return {name: str(value) for name, value in found.items() if value is not None}


def announce_rank(environ: MutableMapping[str, str] = os.environ) -> None:
    """Set Horovod's variables for this rank, over what another job may have left."""
    for name in [*horovod_variables(RankInfo(0, 1, 0, 1, 0, None, "single", "none"))]:
        environ.pop(name, None)
    environ.update(horovod_variables(detect(environ)))


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


def has_several_hosts(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether a job that is started from here may get ranks on other hosts by itself."""
    return ("SLURM_JOB_ID" in environ and slurm.job_nodes(environ) > 1) or "PBS_NODEFILE" in environ
