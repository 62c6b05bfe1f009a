from __future__ import annotations

import pytest

from hpcpar.algorithms.double_tree import allreduce, children_of, depth_of, exchanged, parent_of, restored
from hpcpar.algorithms.draw import draw
from hpcpar.algorithms.registry import find

#    node 0 ── 4 ─┬─ 2 ─┬─ 1
#                 │     └─ 3
#                 └─ 6 ─┬─ 5
#                       └─ 7
PARENTS_OF_8 = {1: 2, 2: 4, 3: 2, 4: 0, 5: 6, 6: 4, 7: 6}

ALLREDUCE_OF_4 = """\
allreduce double_binary: 4 ranks, a vector S of 2 chunks

           rank 0   rank 1      rank 2      rank 3
messages   2        4           4           2
sends      1 S      2 S         2 S         1 S
reduce:
step 0     1→1      0→2  +1←2   1→1  +0←3   0→2
                    +1←0        +0←1
step 1     +0←2     1→3         0→0         +1←1
broadcast:
step 2     0→2      1←3         0←0         1→1
step 3     1←1      1→2  0←2    0→3  1←1    0←2
                    1→0         0→1
"""


def test_a_double_tree_of_4_ranks_rises_and_sinks_in_both_trees_at_once() -> None:
    assert draw(find("allreduce", "double_binary"), 4) == ALLREDUCE_OF_4


def test_the_tree_of_8_nodes_is_the_one_drawn() -> None:
    assert {node: parent_of(node, 8) for node in range(1, 8)} == PARENTS_OF_8
    assert [children_of(node, 8) for node in range(8)] == [(4,), (), (1, 3), (), (2, 6), (), (5, 7), ()]
    assert [depth_of(node, 8) for node in range(8)] == [0, 3, 2, 3, 1, 3, 2, 3]


def test_every_node_hangs_from_the_root_and_from_nobody_else() -> None:
    for size in (*range(1, 34), 64, 100):
        below = {node: children_of(node, size) for node in range(size)}
        assert sorted(child for children in below.values() for child in children) == list(range(1, size))
        assert all(parent_of(child, size) == node for node, children in below.items() for child in children)
        assert all(len(children) <= 2 for children in below.values())
        assert max(depth_of(node, size) for node in range(size)) == (size - 1).bit_length()


def test_inner_ranks_of_one_tree_are_leaves_of_the_other() -> None:
    for size in (*range(1, 34), 64, 100):
        inner = [
            {rank for rank in range(size) if children_of(exchanged(rank, size, tree), size)}
            for tree in (0, 1)
        ]
        # An odd number of ranks has one leaf too few in each tree: rank 0 is inside twice.
        assert inner[0] & inner[1] == ({0} if size % 2 and size > 1 else set())


def test_a_rank_finds_its_node_and_back() -> None:
    for size in range(1, 18):
        for tree in (0, 1):
            nodes = [exchanged(rank, size, tree) for rank in range(size)]
            assert sorted(nodes) == list(range(size))
            assert [restored(node, size, tree) for node in nodes] == list(range(size))


@pytest.mark.parametrize("segments", [1, 2, 3, 10])
def test_segments_follow_each_other_one_slot_apart(segments: int) -> None:
    steps = [len(list(allreduce(rank, 16, segments=segments))) for rank in range(16)]
    assert max(steps) <= segments + 2 * 4 - 1
