"""Random programs, as in random_programs.py, in every stage of `DistributedOptimizer`."""

from __future__ import annotations

import pytest

from hpcpar.comm import Communicator, run_loopback
from tests.data_parallel.random_programs import World, assert_same, course_of, program_of

KINDS = ["0", "0 managed", "1", "1 overlapping", "2", "2 overlapping", "3"]
SEEDS_OF_EACH = 3


def compare(kind: str, size: int, seed: int) -> None:
    expected = course_of(World(Communicator.alone(), None, seed), seed)
    for rank, found in enumerate(run_loopback(size, lambda comm: course_of(World(comm, kind, seed), seed))):
        assert_same(found, expected, f"rank {rank} of {size}, seed {seed}: {program_of(seed)}")


@pytest.mark.parametrize("number", range(SEEDS_OF_EACH))
@pytest.mark.parametrize("kind", KINDS)
def test_a_random_program_computes_what_one_process_does(kind: str, number: int) -> None:
    compare(kind, 1 + number % 3, 1000 * KINDS.index(kind) + number)


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.timeout(900)
def test_a_hundred_random_programs_compute_what_one_process_does(kind: str) -> None:
    for number in range(100):
        compare(kind, 1 + number % 4, 10**6 + 1000 * KINDS.index(kind) + number)
