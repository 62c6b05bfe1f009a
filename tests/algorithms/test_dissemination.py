from __future__ import annotations

from hpcpar.algorithms.catalogue import find
from hpcpar.algorithms.draw import draw

BARRIER_OF_4 = """\
barrier dissemination: 4 ranks

           rank 0   rank 1   rank 2   rank 3
messages   2        2        2        2
sends      0 S      0 S      0 S      0 S
step 0     →1  ←3   →2  ←0   →3  ←1   →0  ←2
step 1     →2  ←2   →3  ←3   →0  ←0   →1  ←1
"""


def test_word_spreads_to_the_next_rank_and_then_to_the_one_after() -> None:
    assert draw(find("barrier", "dissemination"), 4) == BARRIER_OF_4


def test_a_barrier_of_n_ranks_takes_the_logarithm_rounded_up() -> None:
    for size, rounds in ((1, 0), (2, 1), (3, 2), (4, 2), (5, 3), (33, 6)):
        assert len(find("barrier", "dissemination").schedule(0, size)) == rounds
