"""Bytes between hosts: what theory demands, and what the schedules send."""

from __future__ import annotations

from itertools import product

import pytest

from hpcpar.algorithms.registry import find
from hpcpar.bench.wire_bytes import least_nbytes, scheduled_nbytes
from hpcpar.errors import OperationError
from hpcpar.units import MiB

COLLECTIVES = ("allreduce", "reduce_scatter", "allgather")


def test_two_hosts_exchange_half_of_the_array_and_an_allreduce_does_it_twice() -> None:
    assert [least_nbytes(collective, 2, 16 * MiB) for collective in COLLECTIVES] == [
        16 * MiB,
        8 * MiB,
        8 * MiB,
    ]
    assert [least_nbytes(collective, 4, 16 * MiB) for collective in COLLECTIVES] == [
        24 * MiB,
        12 * MiB,
        12 * MiB,
    ]


def test_one_host_has_nobody_to_send_to() -> None:
    assert [least_nbytes(collective, 1, 16 * MiB) for collective in COLLECTIVES] == [0, 0, 0]


def test_a_collective_without_a_known_least_is_refused() -> None:
    with pytest.raises(OperationError, match="no least bytes are known for 'alltoall'"):
        least_nbytes("alltoall", 2, 8)


@pytest.mark.parametrize("name", ["hierarchical", "hierarchical_pipelined"])
def test_hierarchical_schedules_send_the_least_however_many_ranks_a_host_has(name: str) -> None:
    for collective, hosts, ranks in product(COLLECTIVES, (2, 4), (1, 2, 4)):
        sent = scheduled_nbytes(find(collective, name), hosts, ranks, 16 * MiB)
        assert sent == least_nbytes(collective, hosts, 16 * MiB)


def test_a_ring_sends_the_least_with_one_rank_for_each_host_and_more_with_several() -> None:
    ring = find("allreduce", "ring")
    assert scheduled_nbytes(ring, 2, 1, 16 * MiB) == 16 * MiB
    assert scheduled_nbytes(ring, 2, 2, 16 * MiB) == 24 * MiB
    assert scheduled_nbytes(ring, 4, 2, 16 * MiB) == 28 * MiB


def test_halving_sends_each_byte_once_for_each_rank() -> None:
    assert scheduled_nbytes(find("allreduce", "rabenseifner"), 2, 2, 16 * MiB) == 32 * MiB
