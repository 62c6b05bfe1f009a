"""Hierarchical collectives: drawn, proved for any placement, and what they send between nodes."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from hpcpar.algorithms.draw import draw
from hpcpar.algorithms.prove import prove
from hpcpar.algorithms.registry import Algorithm, find
from hpcpar.algorithms.simulate import simulate
from hpcpar.algorithms.step import Step
from hpcpar.algorithms.topology import MessageCost, Topology
from tests.algorithms.every import EVERY, name_of, words

HIERARCHICAL = [algorithm for algorithm in EVERY if algorithm.placed]

ALLREDUCE_ON_2_NODES = """\
allreduce hierarchical: 4 ranks, a vector S of 4 chunks

           rank 0          rank 1          rank 2          rank 3
           node 0          node 0          node 1          node 1
messages   4               4               4               4
sends      1.5 S           1.5 S           1.5 S           1.5 S
reduce-scatter:
step 0     2-3→1  +0-1←1   0-1→0  +2-3←0   2-3→3  +0-1←3   0-1→2  +2-3←2
step 1     1→2  +0←2       3→3  +2←3       0→0  +1←0       2→1  +3←1
all-gather:
step 2     0→2  1←2        2→3  3←3        1→0  0←0        3→1  2←1
step 3     0-1→1  2-3←1    2-3→0  0-1←0    0-1→3  2-3←3    2-3→2  0-1←2
"""

# Rank 2 is alone on its node and serves both lanes: two messages at once, or one where the peer is one.
ALLGATHER_ON_UNEVEN_NODES = """\
allgather hierarchical: 3 ranks, a vector S of 3 chunks

           rank 0      rank 1      rank 2
           node 0      node 0      node 1
messages   2           2           1
sends      1 S         0.667 S     0.333 S
step 0     0→2  2←2    1→2         2→0  0←0
                                   1←1
step 1     0,2→1  1←1  1→0  0,2←0
"""

LEADERS_ON_2_NODES = """\
allreduce leaders: 4 ranks, a vector S of 1 chunk

           rank 0      rank 1   rank 2      rank 3
           node 0      node 1   node 0      node 1
messages   2           2        1           1
sends      2 S         2 S      1 S         1 S
reduce:
step 0     +0←2        +0←3     0→0         0→1
step 1     0→1  +0←1   0→0  +0←0
broadcast:
step 2     0→2         0→3      0←0         0←1
"""


def is_pipelined(algorithm: Algorithm) -> bool:
    return algorithm.name == "hierarchical_pipelined"


PIPELINED = [algorithm for algorithm in HIERARCHICAL if is_pipelined(algorithm)]


def test_two_nodes_scatter_inside_go_around_in_lanes_and_gather_inside() -> None:
    assert draw(find("allreduce", "hierarchical"), 4, nodes=(0, 0, 1, 1)) == ALLREDUCE_ON_2_NODES


def test_a_rank_alone_on_its_node_serves_all_lanes() -> None:
    drawn = draw(find("allgather", "hierarchical"), 3, nodes=(0, 0, 1))
    assert words(drawn) == words(ALLGATHER_ON_UNEVEN_NODES)


def test_the_first_rank_of_each_node_leads_it() -> None:
    drawn = draw(find("allreduce", "leaders"), 4, nodes=(0, 1, 0, 1))
    assert words(drawn) == words(LEADERS_ON_2_NODES)


@pytest.mark.parametrize("algorithm", HIERARCHICAL, ids=name_of)
@hypothesis_settings(max_examples=40, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_ranks_may_share_a_node(algorithm: Algorithm, data: st.DataObject) -> None:
    nodes = tuple(data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=16), label="nodes"))
    root = data.draw(st.integers(0, len(nodes) - 1), label="root")
    prove(algorithm, len(nodes), root, data.draw(st.integers(1, 4), label="segments"), nodes)


FLAT = {
    ("allreduce", "hierarchical"): "ring",
    ("allreduce", "hierarchical_halving"): "rabenseifner",
    ("allreduce", "leaders"): "recursive_doubling",
    ("reduce_scatter", "hierarchical"): "ring",
    ("reduce_scatter", "hierarchical_halving"): "recursive_halving",
    ("allgather", "hierarchical"): "ring",
    ("allgather", "hierarchical_doubling"): "recursive_doubling",
    ("broadcast", "hierarchical"): "ring",
    ("broadcast", "hierarchical_binomial"): "binomial",
    ("broadcast", "leaders"): "binomial",
}


@pytest.mark.parametrize("algorithm", [one for one in HIERARCHICAL if not is_pipelined(one)], ids=name_of)
def test_where_every_rank_has_a_node_of_its_own_only_the_flat_algorithm_is_left(algorithm: Algorithm) -> None:
    flat = find(algorithm.collective, FLAT[algorithm.collective, algorithm.name])
    for size in (1, 2, 5, 8):
        expected = flat.schedules(size, root=size - 1, segments=3)
        for nodes in (None, tuple(range(100, 100 + size))):
            assert algorithm.schedules(size, root=size - 1, segments=3, nodes=nodes) == expected


@pytest.mark.parametrize("algorithm", PIPELINED, ids=name_of)
@pytest.mark.parametrize("nodes", [(0, 0, 1, 1), (0, 1, 2, 2, 1), (0, 1, 2), (0, 0, 0)])
def test_one_segment_is_no_pipeline(algorithm: Algorithm, nodes: tuple[int, ...]) -> None:
    plain = find(algorithm.collective, "hierarchical")
    assert algorithm.schedules(len(nodes), nodes=nodes) == plain.schedules(len(nodes), nodes=nodes)


# Of three segments on two nodes of two: the first one's walk of 4 steps, and one more step for each other.
PIPELINE_OF_RANK_0 = """\
step 0     2-3→1  +0-1←1
step 1     1→2  6-7→1  +0←2  +4-5←1
step 2     0→2  5→2  10-11→1  1←2  +4←2  +8-9←1
step 3     0-1→1  4→2  9→2  2-3←1  5←2  +8←2
step 4     4-5→1  8→2  6-7←1  9←2
step 5     8-9→1  10-11←1
"""


def test_each_segment_is_a_step_behind_the_one_before() -> None:
    algorithm = find("allreduce", "hierarchical_pipelined")
    schedule = algorithm.generate(0, 4, segments=3, nodes=(0, 0, 1, 1))
    told = "".join(f"step {at}     {said(step)}\n" for at, step in enumerate(schedule))
    assert told == PIPELINE_OF_RANK_0


def said(step: Step) -> str:
    """As `draw` has it, on one line."""

    def span(chunks: tuple[int, ...]) -> str:
        return f"{chunks[0]}-{chunks[-1]}" if len(chunks) > 1 else f"{chunks[0]}"

    sent = [f"{span(send.chunks)}→{send.to}" for send in step.sends]
    return "  ".join([*sent, *(f"{'+' * r.combine}{span(r.chunks)}←{r.source}" for r in step.receives)])


def crossing(
    algorithm: Algorithm, nodes: tuple[int, ...], root: int = 0, segments: int = 1
) -> dict[int, float]:
    """For each rank the vectors, of equal chunks, that it sends to other nodes."""
    schedules = algorithm.schedules(len(nodes), root=root, segments=segments, nodes=nodes)
    chunks = algorithm.chunks(len(nodes), segments, nodes)
    return {
        rank: sum(len(s.chunks) for step in steps for s in step.sends if nodes[s.to] != nodes[rank]) / chunks
        for rank, steps in enumerate(schedules)
    }


@pytest.mark.parametrize(("nodes", "per_node"), [(2, 2), (3, 4), (4, 2), (8, 8), (5, 3)])
@pytest.mark.parametrize(("collective", "ways"), [("allreduce", 2), ("reduce_scatter", 1), ("allgather", 1)])
def test_a_lane_sends_between_nodes_only_its_part(
    collective: str, ways: int, nodes: int, per_node: int
) -> None:
    placed = tuple(rank // per_node for rank in range(nodes * per_node))
    for name, segments in (("hierarchical", 1), ("hierarchical_pipelined", 5)):
        sent = crossing(find(collective, name), placed, segments=segments)
        for rank in range(nodes * per_node):
            assert sent[rank] == pytest.approx(ways * (nodes - 1) / nodes / per_node)


@pytest.mark.parametrize("nodes", [(0, 0, 0, 1), (0, 1, 1, 2, 2, 2, 2), (0, 0, 1, 1, 1, 2, 2, 2)])
def test_a_node_sends_the_least_that_an_allreduce_allows_however_many_ranks_it_has(
    nodes: tuple[int, ...],
) -> None:
    sent = crossing(find("allreduce", "hierarchical"), nodes)
    count = len(set(nodes))
    for node in set(nodes):
        whole = sum(vectors for rank, vectors in sent.items() if nodes[rank] == node)
        assert whole == pytest.approx(2 * (count - 1) / count)


@pytest.mark.parametrize("name", ["hierarchical", "hierarchical_binomial", "leaders"])
def test_a_broadcast_crosses_once_to_every_other_node_and_reaches_every_other_rank_once(name: str) -> None:
    algorithm = find("broadcast", name)
    for nodes, root in product([(0, 0, 0, 1, 1, 1), (0, 1, 2, 0, 1, 0), (0, 0, 0, 0), (0, 1, 1)], (0, 2)):
        assert sum(crossing(algorithm, nodes, root).values()) == pytest.approx(len(set(nodes)) - 1)
        schedules = algorithm.schedules(len(nodes), root=root, nodes=nodes)
        received = sum(len(r.chunks) for steps in schedules for step in steps for r in step.receives)
        assert received == (len(nodes) - 1) * algorithm.chunks(len(nodes), nodes=nodes)


def test_a_flat_ring_sends_as_much_over_each_node_border_as_all_lanes_together() -> None:
    """Bytes per node are the same; the hierarchical ring has g links for them, and fewer steps."""
    topology = Topology(4, MessageCost(1e-6, 1e-11), MessageCost(5e-6, 1e-9), 1e-12)
    flat = simulate(find("allreduce", "ring"), 16, 2**20, topology)
    lanes = simulate(find("allreduce", "hierarchical"), 16, 2**20, topology)
    assert lanes.nbytes_between_nodes == 4 * 2 * 3 * 2**20 // 4
    assert flat.nbytes_between_nodes == 4 * 2 * 15 * 2**20 // 16
    assert lanes.seconds < flat.seconds / 3


def test_leaders_are_faster_than_lanes_for_small_vectors_and_slower_for_large_ones() -> None:
    topology = Topology(8, MessageCost(1e-6, 1e-11), MessageCost(5e-6, 1e-9), 1e-12)
    leaders, lanes = find("allreduce", "leaders"), find("allreduce", "hierarchical")
    assert simulate(leaders, 64, 8, topology).seconds < simulate(lanes, 64, 8, topology).seconds / 3
    assert simulate(leaders, 64, 2**24, topology).seconds > 3 * simulate(lanes, 64, 2**24, topology).seconds
