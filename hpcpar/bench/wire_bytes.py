"""How many bytes a collective has to bring from host to host: what theory demands, what a schedule sends."""

from __future__ import annotations

from hpcpar.algorithms.registry import Algorithm
from hpcpar.algorithms.simulate import simulate
from hpcpar.algorithms.topology import Link, Topology
from hpcpar.comm.select import segments_for
from hpcpar.errors import OperationError

FREE = Link(0.0, 0.0)


def least_nbytes(collective: str, hosts: int, nbytes: int) -> float:
    """Bytes that each of `hosts` hosts must send to others, however many ranks it has.

    nbytes   of the whole array
    source   Patarasuk, Yuan 2009, with a host for a process
    """
    part = (hosts - 1) / hosts * nbytes
    match collective:
        case "allreduce":
            return 2 * part
        case "reduce_scatter" | "allgather":
            return part
    raise OperationError(
        f"no least bytes are known for {collective!r}; for allreduce, reduce_scatter, allgather"
    )


def scheduled_nbytes(algorithm: Algorithm, hosts: int, ranks_per_host: int, nbytes: int) -> float:
    """Bytes that each host sends to others by the algorithm's steps; the mean of the hosts."""
    topology = Topology(ranks_per_host, FREE, FREE)
    segments = segments_for(algorithm, nbytes)
    cost = simulate(algorithm, hosts * ranks_per_host, nbytes, topology, segments=segments)
    return cost.nbytes_between_nodes / hosts
