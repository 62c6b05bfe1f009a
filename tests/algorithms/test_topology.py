from __future__ import annotations

import pytest

from hpcpar.algorithms.topology import map_nodes
from hpcpar.errors import OperationError


def test_nodes_are_numbered_in_order_of_first_appearance_and_their_ranks_rise() -> None:
    node_map = map_nodes(5, (7, 3, 7, 3, 3))
    assert node_map.members == ((0, 2), (1, 3, 4))
    assert node_map.node_of == (0, 1, 0, 1, 1)
    assert [node_map.local_rank(rank) for rank in range(5)] == [0, 0, 1, 1, 2]
    assert node_map.neighbours(4) == (1, 3, 4)


def test_equal_nodes_have_a_lane_for_each_local_rank() -> None:
    node_map = map_nodes(6, (0, 0, 0, 1, 1, 1))
    assert [node_map.lane(lane) for lane in range(node_map.lanes)] == [(0, 3), (1, 4), (2, 5)]
    assert [list(node_map.lanes_of(rank)) for rank in range(6)] == [[0], [1], [2], [0], [1], [2]]


def test_a_rank_of_a_smaller_node_serves_several_lanes() -> None:
    node_map = map_nodes(6, (0, 0, 0, 1, 2, 2))
    assert [node_map.lane(lane) for lane in range(node_map.lanes)] == [(0, 3, 4), (1, 3, 5), (2, 3, 4)]
    assert [list(node_map.lanes_of(rank)) for rank in range(6)] == [[0], [1], [2], [0, 1, 2], [0, 2], [1]]


def test_every_rank_has_a_node_of_its_own_when_nothing_is_known() -> None:
    assert map_nodes(3, None).members == ((0,), (1,), (2,))
    assert map_nodes(3, None).lanes == 1


def test_a_number_of_nodes_that_does_not_fit_the_ranks_is_refused() -> None:
    with pytest.raises(OperationError, match=r"place 3 ranks, but nodes names the node of 2: \[0, 1\]"):
        map_nodes(3, (0, 1))
