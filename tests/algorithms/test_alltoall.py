from __future__ import annotations

from hpcpar.algorithms.alltoall import bruck, bruck_allgather, pairwise
from hpcpar.algorithms.draw import draw
from hpcpar.algorithms.registry import find

BRUCK_OF_4 = """\
alltoall bruck: 4 ranks, a vector S of 4 chunks

           rank 0           rank 1           rank 2           rank 3
messages   2                2                2                2
sends      1 S              1 S              1 S              1 S
step 0     i0-3⇒w0-3        i1-3,0⇒w0-3      i2-3,0-1⇒w0-3    i3,0-2⇒w0-3
step 1     w1,3⇒w4-5        w1,3⇒w4-5        w1,3⇒w4-5        w1,3⇒w4-5
           w4-5→1  w1,3←3   w4-5→2  w1,3←0   w4-5→3  w1,3←1   w4-5→0  w1,3←2
step 2     w2-3⇒w4-5        w2-3⇒w4-5        w2-3⇒w4-5        w2-3⇒w4-5
           w4-5→2  w2-3←2   w4-5→3  w2-3←3   w4-5→0  w2-3←0   w4-5→1  w2-3←1
step 3     w0-3⇒o0,3,2,1    w0-3⇒o1,0,3,2    w0-3⇒o2,1,0,3    w0-3⇒o3,2,1,0
"""

PAIRWISE_OF_3 = """\
alltoall pairwise: 3 ranks, a vector S of 3 chunks

           rank 0       rank 1       rank 2
messages   2            2            2
sends      0.667 S      0.667 S      0.667 S
step 0     i0⇒o0        i1⇒o1        i2⇒o2
step 1     i1→1  o2←2   i2→2  o0←0   i0→0  o1←1
step 2     i2→2  o1←1   i0→0  o2←2   i1→1  o0←0
"""

BRUCK_ALLGATHER_OF_3 = """\
allgather bruck: 3 ranks, a vector S of 3 chunks

           rank 0     rank 1     rank 2
messages   2          2          2
sends      0.667 S    0.667 S    0.667 S
step 0     0→2  1←1   1→0  2←2   2→1  0←0
step 1     0→1  2←2   1→2  0←0   2→0  1←1
"""


def test_chunks_hop_along_the_bits_of_the_way_they_have_to_go() -> None:
    assert draw(find("alltoall", "bruck"), 4) == BRUCK_OF_4


def test_pairwise_meets_one_rank_after_the_other() -> None:
    assert draw(find("alltoall", "pairwise"), 3) == PAIRWISE_OF_3


def test_a_gathered_run_doubles_and_the_last_round_fills_what_is_missing() -> None:
    assert draw(find("allgather", "bruck"), 3) == BRUCK_ALLGATHER_OF_3


def test_bruck_takes_the_logarithm_in_messages_and_pairwise_one_for_each_other_rank() -> None:
    for size in range(1, 34):
        for steps, messages in ((bruck, (size - 1).bit_length()), (pairwise, size - 1)):
            assert sum(len(step.sends) for step in steps(0, size)) == messages
        assert sum(len(step.sends) for step in bruck_allgather(0, size)) == (size - 1).bit_length()


def test_what_bruck_packs_fits_into_the_work_space() -> None:
    for size in range(1, 34):
        named = {chunk for step in bruck(0, size) for copy in step.copies for chunk in copy.into}
        assert max(named) < find("alltoall", "bruck").work_chunks(size)
