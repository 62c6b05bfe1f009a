from __future__ import annotations

import numpy as np
import pytest
import torch

from hpcpar.algorithms.registry import ALGORITHMS
from hpcpar.comm import Communicator, run_loopback
from hpcpar.data_parallel.buckets import Bucket, Extent, assign
from hpcpar.errors import OperationError
from hpcpar.planner.traffic import (
    allreduce_nbytes,
    broadcast_nbytes,
    expected_nbytes,
    is_on_gpu,
    usage_map_nbytes,
)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 8])
def test_the_theory_of_every_algorithm_is_what_is_counted(size: int) -> None:
    cases = [(name, count) for name in (None, *ALGORITHMS["allreduce"]) for count in (1, 11, 10_007)]

    def count_bytes(comm: Communicator) -> list[tuple[int, int]]:
        counted = []
        for algorithm, count in cases:
            before = comm.traffic.nbytes_sent("allreduce")
            comm.allreduce(np.ones(count, dtype=np.float32), algorithm=algorithm)
            sent = comm.traffic.nbytes_sent("allreduce") - before
            counted.append((sent, allreduce_nbytes(comm, 4 * count, algorithm=algorithm)))
        return counted

    for of_ranks in zip(*run_loopback(size, count_bytes), strict=True):
        assert sum(sent for sent, _ in of_ranks) == of_ranks[0][1]


def test_a_synchronization_sends_every_bucket_one_bit_per_parameter_and_two_digests() -> None:
    buckets = [Bucket((2, 1), (0, 5, 8), 4, "float32"), Bucket((0,), (0, 1), 8, "float64")]

    def expected(comm: Communicator) -> tuple[int, int]:
        return expected_nbytes(comm, buckets, synchronizations=5, algorithm="ring"), expected_nbytes(comm, [])

    assert run_loopback(3, expected) == [(5 * 4 * (32 + 8 + 1 + 16), 0)] * 3
    assert run_loopback(1, expected) == [(0, 0)]
    assert [usage_map_nbytes(n) for n in (0, 1, 8, 9)] == [16, 17, 17, 18]


@pytest.mark.mpi
def test_what_is_left_to_mpi_has_a_theory_of_no_bytes(world: Communicator) -> None:
    comm = Communicator.over(type(world._transport).world())
    comm._runtime.overrides = {"allreduce": "native", "broadcast": "native"}
    counted, theory = [], []
    for dtype in (torch.float32, torch.bfloat16):
        buckets = [Bucket((0,), (0, 10), dtype.itemsize, (dtype, torch.device("cpu")))]
        comm.traffic.reset()
        comm.allreduce(torch.ones(10, dtype=dtype), "average")
        comm.allreduce(torch.ones(1, dtype=torch.uint8), "or")
        counted.append(comm.traffic.nbytes_sent())
        theory.append(expected_nbytes(comm, buckets))
        comm.broadcast(torch.ones(10, dtype=dtype))
        assert broadcast_nbytes(comm, buckets) == comm.traffic.nbytes_sent("broadcast") == 0
    totals = comm.allreduce(np.array(counted), algorithm="ring").tolist()
    comm.free()
    assert totals == theory
    assert theory[0] == 0
    assert theory[1] > 0 or world.size == 1


def test_a_broadcast_sends_every_value_to_every_other_rank_once() -> None:
    buckets = [Bucket((0,), (0, 10), 4, "float32"), Bucket((1,), (0, 3), 8, "float64")]
    assert run_loopback(3, lambda comm: broadcast_nbytes(comm, buckets)) == [2 * 64] * 3


def test_an_unknown_algorithm_has_no_theory() -> None:
    with pytest.raises(OperationError, match="no algorithm 'magic' for allreduce"):
        allreduce_nbytes(Communicator.alone(), 8, algorithm="magic")


def test_a_bucket_tells_whether_it_is_on_a_gpu() -> None:
    gpu, host = torch.device("cuda", 0), torch.device("cpu")
    for kind, expected in (((torch.float32, gpu), True), ((torch.float32, host), False), ("float32", False)):
        (bucket,) = assign([Extent(4, 4, kind)], bucket_bytes=100, first_bucket_bytes=100)
        assert is_on_gpu(bucket) == expected
