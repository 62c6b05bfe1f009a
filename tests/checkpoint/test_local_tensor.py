from __future__ import annotations

from itertools import product

import pytest

from hpcpar.checkpoint.local_tensor import Region, first_gap

RANGES = {
    "all": [(0, 6)],
    "first": [(0, 3)],
    "fused": [(0, 2), (4, 5)],
    "backwards": [(3, 6), (0, 2)],
    "in pieces that touch": [(1, 2), (2, 2), (2, 5)],
    "nothing": [(3, 3)],
}


def elements(part: Region) -> list[tuple[int, ...]]:
    """List a part's elements of the whole, in its order."""
    along = [[n for start, stop in ranges for n in range(start, stop)] for ranges in part.ranges]
    return list(product(*along))


def chosen(part: Region, box: tuple[slice, ...]) -> list[tuple[int, ...]]:
    """The whole's elements that a slice of a part takes."""
    along = [[n for start, stop in ranges for n in range(start, stop)] for ranges in part.ranges]
    return list(product(*(places[each] for places, each in zip(along, box, strict=True))))


def test_a_part_is_drawn_by_its_ranges() -> None:
    part = Region.of([[(2, 4), (5, 6)], [(0, 2), (2, 4)]])
    assert str(part) == "[2:4 5:6, 0:4]"
    assert (part.shape, part.numel) == ((3, 4), 12)


def test_the_same_elements_in_the_same_order_are_the_same_part() -> None:
    assert Region.of([[(0, 2), (2, 2), (2, 5)]]) == Region.whole((5,))
    assert Region.of([[(0, 2), (3, 5)]]) != Region.of([[(3, 5), (0, 2)]])
    assert Region.of([[(4, 4)], [(0, 3)]]) == Region.whole((0, 3))
    assert Region.whole(()).shape == ()


@pytest.mark.parametrize("one", RANGES)
@pytest.mark.parametrize("other", RANGES)
def test_overlaps_are_all_that_both_have_and_the_same_in_both(one: str, other: str) -> None:
    for across in ([(0, 3)], [(1, 2)], [(2, 3), (0, 1)]):
        mine, theirs = Region.of([RANGES[one], [(0, 3)]]), Region.of([RANGES[other], across])
        found = []
        for here, there in mine.overlaps(theirs):
            assert chosen(mine, here) == chosen(theirs, there)
            found += chosen(mine, here)
        assert sorted(found) == sorted(set(elements(mine)) & set(elements(theirs)))


def test_a_number_overlaps_itself() -> None:
    assert list(Region.whole(()).overlaps(Region.whole(()))) == [((), ())]


def rows(*ranges: tuple[int, int]) -> Region:
    return Region.of([ranges, [(0, 2)]])


@pytest.mark.parametrize(
    ("parts", "gap"),
    [
        ([rows((0, 5))], None),
        ([rows((0, 3)), rows((3, 5))], None),
        ([rows((0, 1), (3, 5)), rows((1, 4))], None),
        ([rows((3, 5)), rows((0, 3)), rows((1, 1))], None),
        ([], (0, 0)),
        ([rows((1, 5))], (0, 0)),
        ([rows((0, 2)), rows((3, 5))], (0, 2)),
        ([rows((0, 2)), rows((2, 4))], (0, 4)),
        ([Region.of([[(0, 5)], [(0, 1)]])], (1, 1)),
        # Quarters are no parts of ranks: of two of them not even a row is whole.
        ([Region.of([[(0, 3)], [(0, 1)]]), Region.of([[(3, 5)], [(1, 2)]])], (0, 0)),
    ],
)
def test_the_first_element_that_nobody_has_is_found(parts: list[Region], gap: tuple[int, int] | None) -> None:
    assert first_gap(parts, (5, 2)) == gap


def test_what_has_no_elements_lacks_none() -> None:
    assert first_gap([], (0, 3)) is None
    assert first_gap([Region.whole(())], ()) is None
    assert first_gap([], ()) == (0, 0)
