"""Where all ranks run, gathered on rank 0: see `hpcpar.launch.placement`."""

from __future__ import annotations

import socket
from collections.abc import Sequence

from hpcpar.comm.communicator import Communicator
from hpcpar.launch.environment import detect
from hpcpar.launch.placement import NodePlace, Placement, RankPlace


def gather_placement(comm: Communicator) -> Placement | None:
    """Of all ranks of `comm` on its rank 0, None elsewhere. Collective.

    steps    within each node first, so that between nodes one object for each node travels
    """
    with comm.split_by_node() as node:
        places = node.allgather_object(RankPlace.here(comm.rank))
        return gather_from_nodes(comm, places, first=node.rank == 0)


def gather_from_nodes(comm: Communicator, places: Sequence[RankPlace], *, first: bool) -> Placement | None:
    """The same, where every rank knows those of its node already; `first` is true on one rank of each."""
    own = NodePlace(comm.nodes[comm.rank], socket.gethostname(), tuple(places)) if first else None
    gathered = comm.gather_object(own)
    if gathered is None:
        return None
    return Placement(tuple(node for node in gathered if node is not None), detect().launcher)
