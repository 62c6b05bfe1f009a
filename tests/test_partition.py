"""How pieces are cut, and cut again."""

from __future__ import annotations

import pytest

from hpcpar.partition import bounds, offsets, refined


@pytest.mark.parametrize(
    ("edges", "parts", "expected"),
    [
        ((0, 4, 10), 2, (0, 2, 4, 7, 10)),
        ((0, 4, 10), 1, (0, 4, 10)),
        ((5, 6, 6, 9), 2, (5, 6, 6, 6, 6, 8, 9)),
        ((0, 0), 3, (0, 0, 0, 0)),
    ],
)
def test_pieces_are_cut_again_as_equally_as_can_be(
    edges: tuple[int, ...], parts: int, expected: tuple[int, ...]
) -> None:
    assert refined(edges, parts) == expected


def test_every_piece_keeps_its_edges() -> None:
    edges = offsets((3, 0, 7, 1))
    for parts in (1, 2, 5):
        assert refined(edges, parts)[::parts] == edges
        assert len(refined(edges, parts)) == 4 * parts + 1
    assert refined((0, 10), 4) == (0, *(stop for _, stop in bounds(10, 4)))
