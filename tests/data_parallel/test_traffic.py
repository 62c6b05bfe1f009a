from __future__ import annotations

import numpy as np
import pytest

from hpcpar.algorithms.catalogue import ALGORITHMS
from hpcpar.comm import Communicator, run_loopback
from hpcpar.data_parallel.buckets import Bucket
from hpcpar.data_parallel.traffic import allreduce_nbytes, expected_nbytes, usage_map_nbytes
from hpcpar.errors import OperationError


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 8])
def test_the_theory_of_every_algorithm_is_what_is_counted(size: int) -> None:
    cases = [(name, count) for name in (None, *ALGORITHMS["allreduce"]) for count in (1, 11, 10_007)]

    def count_bytes(comm: Communicator) -> list[int]:
        sent = []
        for algorithm, count in cases:
            before = comm.traffic.nbytes_sent("allreduce")
            comm.allreduce(np.ones(count, dtype=np.float32), algorithm=algorithm)
            sent.append(comm.traffic.nbytes_sent("allreduce") - before)
        return sent

    counted = [sum(of_ranks) for of_ranks in zip(*run_loopback(size, count_bytes), strict=True)]
    assert counted == [allreduce_nbytes(4 * count, size, algorithm=name) for name, count in cases]


def test_a_synchronization_sends_every_bucket_and_one_bit_per_parameter() -> None:
    buckets = [Bucket((2, 1), (0, 5, 8), 4, "float32"), Bucket((0,), (0, 1), 8, "float64")]
    assert expected_nbytes(buckets, 3, synchronizations=5, algorithm="ring") == 5 * 4 * (32 + 8 + 1)
    assert expected_nbytes(buckets, 1) == 0
    assert expected_nbytes([], 3) == 0
    assert [usage_map_nbytes(n) for n in (0, 1, 8, 9)] == [0, 1, 1, 2]


def test_an_unknown_algorithm_has_no_theory() -> None:
    with pytest.raises(OperationError, match="no theory of the bytes of an allreduce by 'magic'"):
        allreduce_nbytes(8, 2, algorithm="magic")
