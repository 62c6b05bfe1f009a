from __future__ import annotations

from hpcpar.algorithms.powers import doublings, largest_power


def test_doublings_are_the_powers_of_two_below_a_size() -> None:
    assert doublings(1) == ()
    assert doublings(2) == (1,)
    assert doublings(6) == doublings(8) == (1, 2, 4)
    assert doublings(9) == (1, 2, 4, 8)


def test_the_largest_power_of_two_does_not_exceed_its_size() -> None:
    assert [largest_power(size) for size in range(1, 10)] == [1, 2, 2, 4, 4, 4, 4, 8, 8]
