from __future__ import annotations

import pytest

from hpcpar.algorithms import tree
from hpcpar.algorithms.draw import draw
from hpcpar.algorithms.registry import find
from hpcpar.algorithms.step import Receive, Send, Step, Steps

BROADCAST_OF_8 = """\
broadcast binomial: 8 ranks, a vector S of 1 chunk, root 0

           rank 0   rank 1   rank 2   rank 3   rank 4   rank 5   rank 6   rank 7
messages   3        0        1        0        2        0        1        0
sends      3 S      0 S      1 S      0 S      2 S      0 S      1 S      0 S
step 0     0→4                                 0←0
step 1     0→2               0←0               0→6               0←4
step 2     0→1      0←0      0→3      0←2      0→5      0←4      0→7      0←6
"""

GATHER_OF_5 = """\
gather binomial: 5 ranks, a vector S of 5 chunks, root 0

           rank 0   rank 1   rank 2   rank 3   rank 4
messages   0        1        1        1        1
sends      0 S      0.2 S    0.4 S    0.2 S    0.2 S
step 0     1←1      1→0      3←3      3→2
step 1     2-3←2             2-3→0
step 2     4←4                                 4→0
"""


def test_a_broadcast_doubles_the_ranks_that_have_the_vector() -> None:
    assert draw(find("broadcast", "binomial"), 8) == BROADCAST_OF_8


def test_a_gather_passes_whole_subtrees_on() -> None:
    assert draw(find("gather", "binomial"), 5) == GATHER_OF_5


def backwards(steps: Steps, *, combine: bool) -> list[Step]:
    """The steps from last to first, with sends for receives and receives for sends."""
    return [
        Step(
            tuple(Send(receive.source, receive.chunks) for receive in step.receives),
            tuple(Receive(send.to, send.chunks, combine=combine) for send in step.sends),
        )
        for step in reversed(list(steps))
    ]


def test_a_reduce_is_a_broadcast_walked_backwards_and_a_scatter_a_gather() -> None:
    for size in range(1, 18):
        for root in {0, size // 2, size - 1}:
            for rank in range(size):
                down = tree.broadcast(rank, size, root=root)
                assert list(tree.reduce(rank, size, root=root)) == backwards(down, combine=True)
                up = tree.gather(rank, size, root=root)
                assert list(tree.scatter(rank, size, root=root)) == backwards(up, combine=False)


@pytest.mark.parametrize("root", range(6))
def test_every_rank_is_reached_from_any_root_in_three_rounds_of_six_ranks(root: int) -> None:
    received = [sum(len(step.receives) for step in tree.broadcast(rank, 6, root=root)) for rank in range(6)]
    assert received == [int(rank != root) for rank in range(6)]
    assert max(len(list(tree.broadcast(rank, 6, root=root))) for rank in range(6)) == 3
