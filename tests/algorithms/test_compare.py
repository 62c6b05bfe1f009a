from __future__ import annotations

import time
from itertools import pairwise

import pytest

from hpcpar.algorithms.catalogue import ALGORITHMS, find
from hpcpar.algorithms.compare import best_segments, crossovers, estimate, estimates, fastest
from hpcpar.algorithms.price import Link, Topology, analytic, price
from hpcpar.errors import OperationError

GPUS = Topology(8, Link(1e-6, 1e-11), Link(5e-6, 4e-11), 2e-12)
SIZES = tuple(8 * 4**power for power in range(14))


def test_few_ranks_are_simulated_and_many_priced_by_the_closed_form() -> None:
    ring = find("allreduce", "ring")
    few, many = estimate(ring, 16, 2**20, GPUS), estimate(ring, 16384, 2**20, GPUS)
    assert few.simulated
    assert few.seconds == price(ring, 16, 2**20, GPUS).seconds
    assert not many.simulated
    assert many.seconds == analytic(ring, 16384, 2**20, GPUS)


def test_both_ways_agree_where_both_can_be_gone() -> None:
    for collective in ("allreduce", "reduce_scatter", "allgather", "broadcast"):
        for algorithm in ALGORITHMS[collective].values():
            if algorithm.estimated or algorithm.name in ("direct", "one_shot"):
                continue
            closed = estimate(algorithm, 32, 2**20, GPUS, simulated_messages=0)
            run = estimate(algorithm, 32, 2**20, GPUS, simulated_messages=10**9)
            assert (closed.simulated, run.simulated) == (False, True)
            assert closed.seconds == pytest.approx(run.seconds, rel=1e-3), algorithm.name


def test_every_algorithm_is_estimated_in_the_catalogues_order() -> None:
    found = estimates("broadcast", 64, 4096, GPUS)
    assert [one.algorithm for one in found] == list(ALGORITHMS["broadcast"])
    assert fastest(found).seconds == min(one.seconds for one in found)


def test_a_long_vector_goes_down_a_chain_in_more_segments_than_a_short_one() -> None:
    chain = find("broadcast", "ring")
    segments = [best_segments(chain, 64, nbytes, GPUS) for nbytes in (1, 2**10, 2**20, 2**30)]
    assert segments == sorted(segments)
    assert segments[0] == 1
    assert segments[-1] > 64
    assert best_segments(find("broadcast", "binomial"), 64, 2**30, GPUS) == 1


def test_the_fastest_changes_at_a_crossover_and_nowhere_else() -> None:
    found = crossovers("allreduce", 1024, SIZES, GPUS)
    assert found
    assert [change.nbytes for change in found] == sorted(change.nbytes for change in found)
    for one, next_one in pairwise(found):
        assert one.after == next_one.before
    for change in found:
        before, after = (
            fastest(estimates("allreduce", 1024, nbytes, GPUS)).algorithm
            for nbytes in (change.nbytes - change.nbytes // 100 - 1, change.nbytes)
        )
        assert (before, after) == (change.before, change.after)


def test_at_scale_lanes_win_for_large_vectors_and_few_rounds_for_small_ones() -> None:
    assert fastest(estimates("allreduce", 16384, 8, GPUS)).algorithm == "recursive_doubling"
    assert fastest(estimates("allreduce", 16384, 2**30, GPUS)).algorithm == "hierarchical_halving"
    assert fastest(estimates("allreduce", 16, 2**30, GPUS)).algorithm.startswith("hierarchical")


def test_16384_ranks_are_priced_in_seconds() -> None:
    start = time.process_time()
    for collective in ALGORITHMS:
        crossovers(collective, 16384, SIZES, GPUS)
    assert time.process_time() - start < 10


def test_an_unknown_collective_is_answered_with_the_known_ones() -> None:
    with pytest.raises(OperationError, match="no collective 'gossip'; there are allreduce"):
        estimates("gossip", 4, 8, GPUS)
