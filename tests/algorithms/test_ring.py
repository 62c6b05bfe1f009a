from __future__ import annotations

from hpcpar.algorithms import ring
from hpcpar.algorithms.draw import draw
from hpcpar.algorithms.registry import find
from hpcpar.algorithms.step import Receive, Send, Step
from tests.algorithms.every import words

ALLREDUCE_OF_4 = """\
allreduce ring: 4 ranks, a vector S of 4 chunks

           rank 0      rank 1      rank 2      rank 3
messages   6           6           6           6
sends      1.5 S       1.5 S       1.5 S       1.5 S
reduce-scatter:
step 0     3→1  +2←3   0→2  +3←0   1→3  +0←1   2→0  +1←2
step 1     2→1  +1←3   3→2  +2←0   0→3  +3←1   1→0  +0←2
step 2     1→1  +0←3   2→2  +1←0   3→3  +2←1   0→0  +3←2
all-gather:
step 3     0→1  3←3    1→2  0←0    2→3  1←1    3→0  2←2
step 4     3→1  2←3    0→2  3←0    1→3  0←1    2→0  1←2
step 5     2→1  1←3    3→2  2←0    0→3  3←1    1→0  0←2
"""

BROADCAST_OF_3_SEGMENTS = """\
broadcast ring: 4 ranks, a vector S of 3 chunks, root 1

           rank 0     rank 1   rank 2     rank 3
messages   0          3        3          3
sends      0 S        1 S      1 S        1 S
step 0                0→2      0←1
step 1                1→2      0→3  1←1   0←2
step 2     0←3        2→2      1→3  2←1   0→0  1←2
step 3     1←3                 2→3        1→0  2←2
step 4     2←3                            2→0
"""


def test_a_ring_passes_partial_sums_to_the_right_and_then_the_totals() -> None:
    assert draw(find("allreduce", "ring"), 4) == ALLREDUCE_OF_4


def test_a_chain_passes_a_segment_on_while_the_next_one_comes_in() -> None:
    drawn = draw(find("broadcast", "ring"), 4, root=1, segments=3)
    assert words(drawn) == words(BROADCAST_OF_3_SEGMENTS)


def test_two_ranks_swap_halves_and_then_totals() -> None:
    assert list(ring.allreduce(0, 2)) == [
        Step((Send(1, (1,)),), (Receive(1, (0,), combine=True),)),
        Step((Send(1, (0,)),), (Receive(1, (1,)),)),
    ]


def test_a_reduce_along_the_chain_ends_at_the_root() -> None:
    assert list(ring.reduce(2, 3, root=2)) == [Step((), (Receive(0, (0,), combine=True),))]
    assert list(ring.reduce(0, 3, root=2)) == [
        Step((), (Receive(1, (0,), combine=True),)),
        Step((Send(2, (0,)),)),
    ]
    assert list(ring.reduce(1, 3, root=2)) == [Step((Send(0, (0,)),))]
