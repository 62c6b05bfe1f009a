from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcpar.data.permutation import permute


@pytest.mark.parametrize("key", [0, 1, 2**63, -7])
def test_every_number_comes_once(key: int) -> None:
    for n in [*range(1, 70), 255, 256, 257, 1000, 4096, 4097]:
        assert sorted(permute(range(n), n, key=key)) == list(range(n))


@settings(max_examples=50, deadline=None)
@given(n=st.integers(1, 10**13), key=st.integers(0, 2**64 - 1), data=st.data())
def test_a_place_of_a_huge_permutation_is_worked_out_by_itself(n: int, key: int, data: st.DataObject) -> None:
    places = data.draw(st.lists(st.integers(0, n - 1), unique=True, max_size=20))
    whole = permute(places, n, key=key).tolist()
    assert whole == [int(permute([place], n, key=key)[0]) for place in places]
    assert len(set(whole)) == len(whole)
    assert all(0 <= number < n for number in whole)


def test_the_order_stays_what_it_is_across_versions() -> None:
    assert permute(range(10), 10, key=0).tolist() == [5, 8, 3, 1, 0, 7, 6, 2, 9, 4]
    assert permute([0, 1, 2], 10**12, key=5).tolist() == [643610833689, 739340807169, 876404965955]


def test_keys_give_orders_without_likeness() -> None:
    n = 10_000
    orders = [permute(range(n), n, key=key) for key in range(4)]
    for i, first in enumerate(orders):
        places = np.arange(n)
        assert abs(np.corrcoef(first, places)[0, 1]) < 0.05  # five standard deviations of 1/sqrt(n)
        for second in orders[:i]:
            assert abs(np.corrcoef(first, second)[0, 1]) < 0.05
            assert (first == second).sum() < 10  # one is to be expected


def test_small_permutations_all_occur() -> None:
    seen = {tuple(permute(range(3), 3, key=key).tolist()) for key in range(200)}
    assert len(seen) == 6


def test_a_place_outside_is_an_error() -> None:
    with pytest.raises(IndexError, match="place 5 is outside of a permutation of 5"):
        permute([5], 5, key=0)
