"""Simulated seconds equal the closed forms, bytes equal the theory, and nodes are told apart."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import pairwise, product

import pytest

from hpcpar.algorithms.registry import ALGORITHMS, Algorithm, find
from hpcpar.algorithms.simulate import (
    analytic,
    best_segments,
    crossovers,
    estimate,
    estimates,
    fastest,
    simulate,
)
from hpcpar.algorithms.step import Receive, Send, Step, Steps
from hpcpar.algorithms.topology import MessageCost, Topology
from hpcpar.errors import OperationError, ScheduleError
from tests.algorithms.every import EVERY, name_of

SIZES = (*range(1, 10), 12, 15, 16, 17, 31)
ALPHA_S, BETA_S_PER_BYTE, GAMMA_S_PER_BYTE = 5e-6, 1e-9, 3e-10
UNIFORM = Topology.uniform(ALPHA_S, BETA_S_PER_BYTE, GAMMA_S_PER_BYTE)

# Floating-point sums of a few hundred terms, in two different orders.
ROUNDING = 1e-12


def divisible(size: int, segments: int) -> int:
    """Bytes that every algorithm can cut into equal chunks."""
    return 64 * size * segments


@pytest.mark.parametrize("algorithm", [one for one in EVERY if not one.estimated], ids=name_of)
def test_seconds_equal_the_closed_form(algorithm: Algorithm) -> None:
    for size, segments in product(SIZES, (1, 2, 5) if algorithm.segmented else (1,)):
        nbytes = divisible(size, segments)
        expected = analytic(algorithm, size, nbytes, UNIFORM, segments)
        for root in {0, size - 1} if algorithm.rooted else {0}:
            found = simulate(algorithm, size, nbytes, UNIFORM, root, segments).seconds
            assert found == pytest.approx(expected, rel=ROUNDING), f"{size} ranks, {segments} segments"


@pytest.mark.parametrize(
    ("size", "segments"), [(2, 1), (2, 2), (2, 8), (2, 32), (4, 1), (8, 1), (16, 1), (32, 1), (64, 1)]
)
def test_the_double_tree_costs_the_closed_form_where_it_says_so(size: int, segments: int) -> None:
    algorithm = find("allreduce", "double_binary")
    nbytes = divisible(size, segments)
    expected = analytic(algorithm, size, nbytes, UNIFORM, segments)
    assert simulate(algorithm, size, nbytes, UNIFORM, segments=segments).seconds == pytest.approx(
        expected, rel=ROUNDING
    )


def test_the_double_tree_costs_the_closed_form_within_a_third_elsewhere() -> None:
    algorithm = find("allreduce", "double_binary")
    for size, segments in product(SIZES[1:], (1, 2, 3, 5, 16)):
        nbytes = divisible(size, segments) * 1000
        expected = analytic(algorithm, size, nbytes, UNIFORM, segments)
        found = simulate(algorithm, size, nbytes, UNIFORM, segments=segments).seconds
        assert 2 / 3 <= found / expected <= 4 / 3, f"{size} ranks, {segments} segments"


@pytest.mark.parametrize("collective", ALGORITHMS)
def test_one_rank_alone_costs_nothing(collective: str) -> None:
    for algorithm in ALGORITHMS[collective].values():
        found = simulate(algorithm, 1, 1024, UNIFORM)
        assert (found.seconds, found.nbytes_sent, found.messages) == (0.0, (0,), (0,))


# Bytes that each rank sends, in units of the whole vector, where n ranks all send the same.
SENT = {
    ("allreduce", "ring"): lambda n: 2 * (n - 1) / n,
    ("allreduce", "direct"): lambda n: 2 * (n - 1) / n,
    ("reduce_scatter", "ring"): lambda n: (n - 1) / n,
    ("reduce_scatter", "direct"): lambda n: (n - 1) / n,
    ("allgather", "ring"): lambda n: (n - 1) / n,
    ("allgather", "bruck"): lambda n: (n - 1) / n,
    ("allgather", "direct"): lambda n: (n - 1) / n,
    ("alltoall", "pairwise"): lambda n: (n - 1) / n,
    ("alltoall", "direct"): lambda n: (n - 1) / n,
}
SENT_BY_POWERS_OF_TWO = {
    ("allreduce", "rabenseifner"): lambda n: 2 * (n - 1) / n,
    ("allreduce", "recursive_doubling"): lambda n: n.bit_length() - 1,
    ("reduce_scatter", "recursive_halving"): lambda n: (n - 1) / n,
    ("allgather", "recursive_doubling"): lambda n: (n - 1) / n,
    ("alltoall", "bruck"): lambda n: (n.bit_length() - 1) / 2,
}


@pytest.mark.parametrize(("collective", "name"), SENT | SENT_BY_POWERS_OF_TWO)
def test_every_rank_sends_the_bytes_of_the_theory(collective: str, name: str) -> None:
    vectors = (SENT | SENT_BY_POWERS_OF_TWO)[collective, name]
    for size in SIZES if (collective, name) in SENT else (1, 2, 4, 8, 16, 32):
        nbytes = divisible(size, 1)
        sent = simulate(find(collective, name), size, nbytes, UNIFORM).nbytes_sent
        assert sent == (round(vectors(size) * nbytes),) * size


def test_no_rank_of_a_double_tree_sends_more_than_twice_the_vector() -> None:
    for size, segments in product(SIZES[1:], (1, 4)):
        nbytes = divisible(size, segments)
        found = simulate(find("allreduce", "double_binary"), size, nbytes, UNIFORM, segments=segments)
        assert max(found.nbytes_sent) <= 2 * nbytes
        assert sum(found.nbytes_sent) == 2 * (size - 1) * nbytes, "one way up and one down every edge"


@pytest.mark.parametrize("name", ALGORITHMS["broadcast"])
def test_a_broadcast_moves_the_vector_once_to_every_other_rank(name: str) -> None:
    for size in SIZES:
        nbytes = divisible(size, 2)
        found = simulate(find("broadcast", name), size, nbytes, UNIFORM, root=size // 2, segments=2)
        assert sum(found.nbytes_sent) == (size - 1) * nbytes


def test_a_barrier_sends_messages_without_bytes() -> None:
    found = simulate(find("barrier", "dissemination"), 5, 0, UNIFORM)
    assert found.nbytes_sent == (0,) * 5
    assert found.messages == (3,) * 5
    assert found.seconds == pytest.approx(3 * ALPHA_S)


def test_bytes_that_do_not_divide_are_cut_as_partition_does() -> None:
    found = simulate(find("reduce_scatter", "direct"), 4, 10, UNIFORM)
    assert found.nbytes_sent == (10 - 3, 10 - 3, 10 - 2, 10 - 2)


TWO_NODES = Topology(
    ranks_per_node=4,
    intra=MessageCost(1e-6, 1e-10),
    inter=MessageCost(1e-5, 1e-9),
    gamma_s_per_byte=GAMMA_S_PER_BYTE,
)


def test_a_ring_over_two_nodes_crosses_between_them_on_two_of_its_edges() -> None:
    nbytes = 8000
    found = simulate(find("allreduce", "ring"), 8, nbytes, TWO_NODES)
    assert found.nbytes_between_nodes == 2 * (2 * 7 * nbytes // 8)


def test_a_ring_over_two_nodes_goes_at_the_pace_of_the_link_between_them() -> None:
    ring, nbytes = find("allreduce", "ring"), 80_000_000
    slow = analytic(ring, 8, nbytes, Topology.uniform(1e-5, 1e-9, GAMMA_S_PER_BYTE))
    fast = analytic(ring, 8, nbytes, Topology.uniform(1e-6, 1e-10, GAMMA_S_PER_BYTE))
    found = simulate(ring, 8, nbytes, TWO_NODES).seconds
    assert fast < found <= slow
    assert found == pytest.approx(slow, rel=0.05)


def test_ranks_of_one_node_do_not_feel_the_link_between_nodes() -> None:
    ring, nbytes = find("allreduce", "ring"), 8000
    inside = simulate(ring, 4, nbytes, TWO_NODES)
    assert inside.nbytes_between_nodes == 0
    fast = Topology.uniform(1e-6, 1e-10, GAMMA_S_PER_BYTE)
    assert inside.seconds == pytest.approx(analytic(ring, 4, nbytes, fast), rel=ROUNDING)


def test_recursive_doubling_leaves_the_node_in_one_round_only() -> None:
    nbytes = 1000
    found = simulate(find("allreduce", "recursive_doubling"), 8, nbytes, TWO_NODES)
    assert found.nbytes_between_nodes == 8 * nbytes
    near, far = 1e-6 + nbytes * 1e-10, 1e-5 + nbytes * 1e-9
    assert found.seconds == pytest.approx(2 * near + far + 3 * nbytes * GAMMA_S_PER_BYTE, rel=ROUNDING)


# Nodes, ranks per node.
POWERS = [(1, 4), (2, 2), (2, 4), (4, 2), (4, 4), (8, 2), (2, 8), (4, 1)]
OTHERS = [(3, 4), (2, 3), (3, 3), (5, 2), (5, 3), (1, 5), (6, 4)]
# The algorithms that walk through powers of two.
BY_POWERS = {"binomial", "recursive_doubling", "recursive_halving", "rabenseifner"}


def on_nodes(algorithm: Algorithm, nodes: int, per_node: int) -> Iterator[tuple[float, float, str]]:
    """What the closed form says, what the simulation finds, and where."""
    topology = Topology(per_node, TWO_NODES.intra, TWO_NODES.inter, GAMMA_S_PER_BYTE)
    size = nodes * per_node
    for segments, scale in product((1, 5) if algorithm.segmented else (1,), (1, 10_000)):
        nbytes = divisible(size, segments) * 15 * scale
        found = simulate(algorithm, size, nbytes, topology, segments=segments).seconds
        expected = analytic(algorithm, size, nbytes, topology, segments)
        yield expected, found, f"{nodes} nodes of {per_node}, {segments} segments, {nbytes} bytes"


def exchanges_directly(algorithm: Algorithm) -> bool:
    """True where every rank sends to all others at once."""
    return algorithm.name == "one_shot" or (algorithm.name == "direct" and not algorithm.rooted)


@pytest.mark.parametrize(
    "algorithm", [one for one in EVERY if not (one.estimated or exchanges_directly(one))], ids=name_of
)
def test_seconds_on_nodes_equal_the_closed_form_on_two_levels(algorithm: Algorithm) -> None:
    for nodes, per_node in POWERS if algorithm.name in BY_POWERS else (*POWERS, *OTHERS):
        for expected, found, where in on_nodes(algorithm, nodes, per_node):
            assert found == pytest.approx(expected, rel=ROUNDING), where


@pytest.mark.parametrize(
    "algorithm",
    [one for one in EVERY if one.name in BY_POWERS | {"double_binary"} or exchanges_directly(one)],
    ids=name_of,
)
def test_elsewhere_the_closed_form_is_an_estimate_within_bounds(algorithm: Algorithm) -> None:
    least, most, places = 1 / 2.25, 2.25, OTHERS
    if exchanges_directly(algorithm):  # ports wait for each other
        least, most, places = 0.75, 1 + ROUNDING, [*POWERS, *OTHERS]
    elif algorithm.name == "double_binary":
        least, most, places = 1 / 1.67, 1.67, [*POWERS, *OTHERS]
    for nodes, per_node in places:
        for expected, found, where in on_nodes(algorithm, nodes, per_node):
            assert least <= expected / found <= most, where


def test_the_closed_form_prices_16384_ranks_as_it_does_few() -> None:
    topology = Topology(8, MessageCost(1e-6, 1e-11), MessageCost(5e-6, 1e-9), 1e-12)
    nbytes, nodes, per_node = 2**30, 2048, 8
    found = analytic(find("allreduce", "hierarchical"), 16384, nbytes, topology)
    inside = 2 * (7 * 1e-6 + 7 / 8 * nbytes * 1e-11)
    between = 2 * (nodes - 1) * (5e-6 + nbytes / per_node / nodes * 1e-9)
    summed = (7 / 8 + (nodes - 1) / nodes / per_node) * nbytes * 1e-12
    assert found == pytest.approx(inside + between + summed, rel=ROUNDING)


def test_one_rank_alone_has_a_closed_form_of_nothing() -> None:
    for algorithm in EVERY:
        assert analytic(algorithm, 1, 1024, TWO_NODES, 4) == 0.0


def test_a_double_tree_beats_a_ring_for_small_vectors_on_many_ranks_and_not_for_large_ones() -> None:
    ring, tree = find("allreduce", "ring"), find("allreduce", "double_binary")
    small, large = 1024, 64 * 1024 * 1024
    assert simulate(tree, 64, small, UNIFORM).seconds < simulate(ring, 64, small, UNIFORM).seconds / 4
    assert (
        simulate(ring, 64, large, UNIFORM).seconds < simulate(tree, 64, large, UNIFORM, segments=32).seconds
    )


def planted(*steps_of_ranks: tuple[Step, ...]) -> Algorithm:
    """A reduce whose schedules are given."""

    def steps(rank: int, size: int) -> Steps:
        yield from steps_of_ranks[rank]

    return Algorithm("planted", steps, "1", find("reduce", "binomial").cost, collective="reduce")


def test_a_message_waits_for_the_later_end() -> None:
    receive_late = planted(
        (Step((Send(2, (0,)),)),),
        (Step((Send(2, (0,)),)),),
        (Step((), (Receive(0, (0,), combine=True),)), Step((), (Receive(1, (0,), combine=True),))),
    )
    one = ALPHA_S + 100 * BETA_S_PER_BYTE + 100 * GAMMA_S_PER_BYTE
    assert simulate(receive_late, 3, 100, UNIFORM).seconds == pytest.approx(2 * one)


def test_a_port_takes_one_message_each_way_at_a_time() -> None:
    exchange = planted(
        (Step((Send(1, (0,)),), (Receive(1, (0,), combine=True),)),),
        (Step((Send(0, (0,)),), (Receive(0, (0,), combine=True),)),),
    )
    one = ALPHA_S + 100 * BETA_S_PER_BYTE
    assert simulate(exchange, 2, 100, UNIFORM).seconds == pytest.approx(one + 100 * GAMMA_S_PER_BYTE)
    both_to_one = simulate(find("gather", "direct"), 3, 300, UNIFORM)
    assert both_to_one.seconds == pytest.approx(2 * one)


def test_a_schedule_that_never_ends_is_refused() -> None:
    with pytest.raises(ScheduleError, match="rank 0 never ends its step 0; `prove` says why"):
        simulate(planted((Step((Send(1, (0,)),)),), ()), 2, 100, UNIFORM)


GPUS = Topology(8, MessageCost(1e-6, 1e-11), MessageCost(5e-6, 4e-11), 2e-12)
RISING = tuple(8 * 4**power for power in range(14))


def test_few_ranks_are_simulated_and_many_priced_by_the_closed_form() -> None:
    ring = find("allreduce", "ring")
    few, many = estimate(ring, 16, 2**20, GPUS), estimate(ring, 16384, 2**20, GPUS)
    assert few.simulated
    assert few.seconds == simulate(ring, 16, 2**20, GPUS).seconds
    assert not many.simulated
    assert many.seconds == analytic(ring, 16384, 2**20, GPUS)


def test_every_algorithm_is_estimated_in_the_registrys_order() -> None:
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
    found = crossovers("allreduce", 1024, RISING, GPUS)
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


def test_16384_ranks_are_compared_in_seconds() -> None:
    start = time.process_time()
    for collective in ALGORITHMS:
        crossovers(collective, 16384, RISING, GPUS)
    assert time.process_time() - start < 10


def test_an_unknown_collective_is_answered_with_the_known_ones() -> None:
    with pytest.raises(OperationError, match="no collective 'gossip'; there are allreduce"):
        estimates("gossip", 4, 8, GPUS)
