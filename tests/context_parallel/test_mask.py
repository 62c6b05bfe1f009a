"""Masks as integers, compared with a drawing and with a count of every pair."""

from __future__ import annotations

import pytest

from hpcpar.context_parallel.mask import Mask, Span
from hpcpar.errors import LayoutError

MASKS = [
    Mask(length, causal, window, documents)
    for length, documents in ((0, None), (7, None), (7, (3, 4)), (12, (1, 5, 1, 5)))
    for causal in (True, False)
    for window in (None, 1, 3, 50)
]


def drawn(mask: Mask) -> str:
    rows = [["x" if key in range(*mask.keys(query)) else "." for key in range(7)] for query in range(7)]
    return " ".join("".join(row) for row in rows)


def test_masks_are_those_of_the_drawing() -> None:
    documents = (3, 4)
    assert drawn(Mask(7, documents=documents)) == "x...... xx..... xxx.... ...x... ...xx.. ...xxx. ...xxxx"
    assert drawn(Mask(7, window=2)) == "x...... xx..... .xx.... ..xx... ...xx.. ....xx. .....xx"
    assert drawn(Mask(7, causal=False, documents=documents)) == (
        "xxx.... xxx.... xxx.... ...xxxx ...xxxx ...xxxx ...xxxx"
    )


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_area_counts_the_pairs(mask: Mask) -> None:
    for start in range(mask.length):
        for stop in range(start, mask.length + 1):
            counted = sum(mask.keys(query).length for query in range(start, stop))
            assert mask.area((Span(start, stop),)) == counted


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"length": -1}, "length=-1"),
        ({"length": 4, "window": 0}, "window=0"),
        ({"length": 4, "documents": (4, 0)}, "at least one token"),
        ({"length": 4, "documents": (1, 2)}, "documents of 3 tokens together in a sequence of 4"),
    ],
)
def test_a_mask_that_there_cannot_be_is_refused(wrong: dict[str, int], said: str) -> None:
    with pytest.raises(LayoutError, match=said):
        Mask(**wrong)  # type: ignore[arg-type]
