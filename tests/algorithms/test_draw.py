"""What the pictures of the other test files do not show about drawing itself."""

from __future__ import annotations

import pytest

from hpcpar.algorithms.draw import draw
from hpcpar.algorithms.registry import Algorithm, find
from hpcpar.errors import OperationError
from tests.algorithms.every import EVERY

REDUCE_TO_2 = """\
reduce binomial: 4 ranks, a vector S of 1 chunk, root 2

           rank 0   rank 1   rank 2   rank 3
messages   1        1        0        1
sends      1 S      1 S      0 S      1 S
step 0     +0←1     0→0      +0←3     0→2
step 1     0→2               +0←0
"""

ONE_RANK = """\
alltoall direct: 1 rank, a vector S of 1 chunk

           rank 0
messages   0
sends      0 S
step 0     i0⇒o0
"""


def test_a_rank_without_a_part_in_a_step_has_an_empty_cell() -> None:
    assert draw(find("reduce", "binomial"), 4, root=2) == REDUCE_TO_2


def test_one_rank_alone_can_be_drawn() -> None:
    assert draw(find("alltoall", "direct"), 1) == ONE_RANK


@pytest.mark.parametrize("size", [1, 2, 5])
def test_a_picture_shows_every_message_once_at_both_of_its_ends(size: int) -> None:
    for algorithm in EVERY:
        check_messages(algorithm, size)


def check_messages(algorithm: Algorithm, size: int) -> None:
    drawn = draw(algorithm, size, root=size - 1, segments=2)
    schedules = algorithm.schedules(size, root=size - 1, segments=2)
    messages = sum(len(step.sends) for steps in schedules for step in steps)
    assert drawn.count("→") == drawn.count("←") == messages
    assert all(line == line.rstrip() for line in drawn.splitlines())


def test_a_message_leaves_and_arrives_in_the_same_row_when_a_rank_does_one_thing_at_a_time() -> None:
    for algorithm in EVERY:
        schedules = algorithm.schedules(6)
        if all(len(step.sends) <= 1 and len(step.receives) <= 1 for steps in schedules for step in steps):
            check_rows(algorithm)


def check_rows(algorithm: Algorithm) -> None:
    row: list[str] = []
    for line in [*draw(algorithm, 6).splitlines()[5:], "step"]:
        if line.startswith("step"):
            assert "".join(row).count("→") == "".join(row).count("←")
            row = []
        row.append(line)


def test_no_ranks_at_all_cannot_be_drawn() -> None:
    with pytest.raises(OperationError, match="cannot draw 0 ranks; need at least one"):
        draw(find("allreduce", "ring"), 0)
