from __future__ import annotations

import pytest

from hpcpar.algorithms.draw import draw
from hpcpar.algorithms.registry import ALGORITHMS, find

ALLREDUCE_OF_3 = """\
allreduce direct: 3 ranks, a vector S of 3 chunks

           rank 0      rank 1      rank 2
messages   4           4           4
sends      1.33 S      1.33 S      1.33 S
reduce-scatter:
step 0     1→1  +0←2   2→2  +1←0   0→0  +2←1
           2→2  +0←1   0→0  +1←2   1→1  +2←0
all-gather:
step 1     0→1  2←2    1→2  0←0    2→0  1←1
           0→2  1←1    1→0  2←2    2→1  0←0
"""


def test_two_shots_sum_each_chunk_in_one_place_and_then_show_it_to_all() -> None:
    assert draw(find("allreduce", "direct"), 3) == ALLREDUCE_OF_3


@pytest.mark.parametrize("collective", [name for name in ALGORITHMS if "direct" in ALGORITHMS[name]])
@pytest.mark.parametrize("size", [2, 3, 8])
def test_direct_takes_one_step_or_two_for_an_allreduce(collective: str, size: int) -> None:
    for rank in range(size):
        steps = find(collective, "direct").schedule(rank, size, root=1)
        assert len(steps) == (2 if collective == "allreduce" else 1)


def test_at_no_distance_do_two_ranks_send_to_the_same_third() -> None:
    schedules = [only for (only,) in find("alltoall", "direct").schedules(7)]
    for distance in range(6):
        assert sorted(step.sends[distance].to for step in schedules) == list(range(7))
        for rank, step in enumerate(schedules):
            assert schedules[step.receives[distance].source].sends[distance].to == rank
