"""FLOPs and bytes of Muon's step."""

from __future__ import annotations

from hpcpar.planner.muon import matrix_exchange_nbytes, orthogonalization_flops


def test_flops_count_three_matrix_products_an_iteration_whichever_side_is_longer() -> None:
    m, n = 4, 10
    products = 2 * m * n * m + 2 * m * m * m + 2 * m * m * n
    assert orthogonalization_flops(m, n) == orthogonalization_flops(n, m) == 5 * products


def test_what_the_owner_has_does_not_travel_and_the_rest_does_twice() -> None:
    assert matrix_exchange_nbytes(100, 25) == 2 * 75 * 2
    assert matrix_exchange_nbytes(100, 100) == 0
