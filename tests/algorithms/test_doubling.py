from __future__ import annotations

from hpcpar.algorithms.doubling import allgather, doublings, fold_chunks, largest_power, reduce_scatter
from hpcpar.algorithms.draw import draw
from hpcpar.algorithms.registry import find
from tests.algorithms.every import words

RABENSEIFNER_OF_6 = """\
allreduce rabenseifner: 6 ranks, a vector S of 4 chunks

           rank 0   rank 1          rank 2   rank 3          rank 4          rank 5
messages   1        5               1        5               4               4
sends      1 S      2.5 S           1 S      2.5 S           1.5 S           1.5 S
reduce-scatter:
step 0     0-3→1    +0-3←0          0-3→3    +0-3←2
step 1              2-3→4  +0-1←4            2-3→5  +0-1←5   0-1→1  +2-3←1   0-1→3  +2-3←3
step 2              1→3  +0←3                0→1  +1←1       3→5  +2←5       2→4  +3←4
all-gather:
step 3              0→3  1←3                 1→1  0←1        2→5  3←5        3→4  2←4
step 4              0-1→4  2-3←4             0-1→5  2-3←5    2-3→1  0-1←1    2-3→3  0-1←3
step 5     0-3←1    0-3→0           0-3←3    0-3→2
"""

ALLGATHER_OF_4 = """\
allgather recursive_doubling: 4 ranks, a vector S of 4 chunks

           rank 0       rank 1       rank 2       rank 3
messages   2            2            2            2
sends      0.75 S       0.75 S       0.75 S       0.75 S
step 0     0→1  1←1     1→0  0←0     2→3  3←3     3→2  2←2
step 1     0-1→2  2-3←2 0-1→3  2-3←3 2-3→0  0-1←0 2-3→1  0-1←1
"""


def test_six_ranks_fold_into_four_members_halve_double_and_unfold() -> None:
    assert draw(find("allreduce", "rabenseifner"), 6) == RABENSEIFNER_OF_6


def test_four_ranks_double_what_they_have() -> None:
    assert words(draw(find("allgather", "recursive_doubling"), 4)) == words(ALLGATHER_OF_4)


def test_the_first_members_stand_for_two_ranks_each() -> None:
    assert fold_chunks(1) == (0, 1)
    assert fold_chunks(4) == (0, 1, 2, 3, 4)
    assert fold_chunks(6) == (0, 2, 4, 5, 6)
    assert fold_chunks(7) == (0, 2, 4, 6, 7)


def test_a_power_of_two_of_ranks_takes_its_logarithm_in_steps() -> None:
    for size, steps in ((1, 0), (2, 1), (4, 2), (8, 3), (64, 6)):
        for rank in range(size):
            assert len(list(reduce_scatter(rank, size))) == len(list(allgather(rank, size))) == steps


def test_the_even_rank_of_a_folded_pair_only_hands_over_and_takes_back() -> None:
    first, last = reduce_scatter(2, 7)
    assert first.sends[0].to == last.receives[0].source == 3
    assert first.sends[0].chunks == tuple(range(7))
    assert last.receives[0].chunks == (2,)


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


def test_doublings_are_the_powers_of_two_below_a_size() -> None:
    assert doublings(1) == ()
    assert doublings(2) == (1,)
    assert doublings(6) == doublings(8) == (1, 2, 4)
    assert doublings(9) == (1, 2, 4, 8)


def test_the_largest_power_of_two_does_not_exceed_its_size() -> None:
    assert [largest_power(size) for size in range(1, 10)] == [1, 2, 2, 4, 4, 4, 4, 8, 8]
